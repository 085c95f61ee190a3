"""The tasks of `recall_bytes.py`, their softmax teachers, and the files that training needs.

| task     | document of L tokens, after BOS                       | the tokens that count              |
| mqar     | k v k v ..., and the same (L - 1) / 4 pairs shuffled  | the values of the second half      |
| copying  | noise, GO w_1 .. w_n, noise, GO w_1 .. w_n            | w_1 .. w_n of the second half      |

The pairs of `mqar` grow with the length, those to copy (24 at most) do not: there the gap grows. No key, and no symbol
to copy, is twice in a document, except where it is asked for. MQAR is that of "Zoology" (arXiv 2312.04927), except that
the answers stand in the text, so that every document is ordinary text for a language model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast


KEYS, VALUES, NOISE = 256, 64, 16
MOST_COPIED = 24
WORDS = ["BOS", "GO", *(f"{kind}{n}" for kind, count in zip("kvn", (KEYS, VALUES, NOISE)) for n in range(count))]
FIRST_KEY, FIRST_VALUE, FIRST_NOISE = (WORDS.index(word) for word in ("k0", "v0", "n0"))
# Documents `[size, length]`, and where the tokens are that count.
Documents = tuple[Tensor, Tensor]


def distinct(size: int, count: int, choices: int, generator: torch.Generator) -> Tensor:
    """`[size, count]` numbers below `choices`, no two of a row alike."""
    return torch.rand(size, choices, generator=generator).argsort(-1)[:, :count]


def noise(size: int, length: int, generator: torch.Generator) -> Tensor:
    """Documents of noise after BOS."""
    tokens = FIRST_NOISE + torch.randint(NOISE, (size, length), generator=generator)
    tokens[:, 0] = 0
    return tokens


def mqar(size: int, length: int, generator: torch.Generator) -> Documents:
    """Pairs, and the same pairs asked for in another order."""
    pairs = (length - 1) // 4
    keys = FIRST_KEY + distinct(size, pairs, KEYS, generator)
    values = FIRST_VALUE + torch.randint(VALUES, (size, pairs), generator=generator)
    order = distinct(size, pairs, pairs, generator)
    stored = torch.stack((keys, values), -1).flatten(1)
    asked = torch.stack((keys.gather(1, order), values.gather(1, order)), -1).flatten(1)
    tokens = torch.cat((torch.zeros(size, 1, dtype=torch.long), stored, asked), 1)
    counts = torch.zeros_like(tokens, dtype=torch.bool)
    counts[:, 2 * pairs + 2 :: 2] = True
    return tokens, counts


def copying(size: int, length: int, generator: torch.Generator) -> Documents:
    """Symbols, and the same after a gap."""
    copied = min(MOST_COPIED, (length - 3) // 3)
    symbols = FIRST_VALUE + distinct(size, copied, VALUES, generator)
    first = torch.cat((torch.ones(size, 1, dtype=torch.long), symbols), 1)
    tokens = noise(size, length, generator)
    place = torch.randint(1, length - 2 * copied - 1, (size, 1), generator=generator)
    tokens.scatter_(1, place + torch.arange(copied + 1), first)
    tokens[:, -copied - 1 :] = first
    counts = torch.zeros_like(tokens, dtype=torch.bool)
    counts[:, -copied:] = True
    return tokens, counts


Maker = Callable[[int, int, torch.Generator], Documents]
TASKS: dict[str, Maker] = {"mqar": mqar, "copying": copying}
# The rotary base of the teachers: with 1e4 they recall half as much at four times the trained length.
ROPE_THETA = 1e6
# Tokens of a training step at every length of the curriculum, and the weight of the loss over all tokens.
STEP_TOKENS, ALL_TOKENS = 4096, 0.1
# Right answers over CHECK steps for the next length, and to stop at the last.
CHECK, NEXT, ENOUGH = 50, 0.95, 0.995


def is_right(model: Any, documents: Documents, tokens_at_once: int = 16_384) -> Tensor:
    """Of the tokens that count, whether the model predicts them, `[size, answers of a document]`."""
    right, size = [], max(1, tokens_at_once // documents[0].shape[1])
    model.eval()
    with torch.no_grad():
        for tokens, counts in zip(documents[0].split(size), documents[1].split(size)):
            found = model(tokens[:, :-1], use_cache=False).logits.argmax(-1)
            right.append((found == tokens[:, 1:])[counts[:, 1:]])
    return torch.cat(right).view(len(documents[0]), -1)


def curriculum(length: int) -> list[int]:
    """9, 17, 33 ... and `length`."""
    lengths = [9]
    while lengths[-1] < length:
        lengths.append(min(length, 2 * lengths[-1] - 1))
    return lengths


def new_teacher(model_type: str, length: int, width: int, layers: int, heads: int) -> PreTrainedModel:
    """A decoder with random weights; `llama`, or a model type with the same settings."""
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "max_position_embeddings": length}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA}}
    tokens = {"vocab_size": len(WORDS), "bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
    sizes |= {"head_dim": width // heads}
    config = AutoConfig.for_model(model_type, **sizes, **rotary, **tokens, tie_word_embeddings=False)
    return AutoModelForCausalLM.from_config(config)


def train_teacher(model: Any, task: str, seed: int, most_steps: int, learning_rate: float = 2e-3) -> dict[str, Any]:
    """Train until ENOUGH answers at the trained length are right, on new documents at every step.

    Short documents first, as many tokens a step: with the full length from the start, rotary models stay at chance.
    """
    generator, start = torch.Generator().manual_seed(seed), time.process_time()
    lengths = curriculum(model.config.max_position_embeddings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 100))
    level, recent = 0, []
    model.train()
    for step in range(1, most_steps + 1):
        tokens, counts = TASKS[task](STEP_TOKENS // lengths[level], lengths[level], generator)
        target, is_answer = tokens[:, 1:], counts[:, 1:]
        logits = model(tokens[:, :-1], use_cache=False).logits
        every = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss = F.cross_entropy(logits[is_answer], target[is_answer]) + ALL_TOKENS * every
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append((logits.argmax(-1) == target)[is_answer].float().mean().item())
        if step % CHECK == 0:
            right = sum(recent) / len(recent)
            recent = []
            if level < len(lengths) - 1:
                level += right > NEXT
            elif right > ENOUGH:
                break
    return {"steps": step, "minutes": (time.process_time() - start) / 60}


def tokenizer() -> PreTrainedTokenizerFast:
    """Words between spaces are the tokens; BOS begins a document."""
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="BOS"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="BOS")


def write_documents(path: Path, maker: Maker, length: int, tokens: int, seed: int) -> None:
    """A .jsonl of documents of `length` tokens, `tokens` together; joined, they fill blocks of this length."""
    size = math.ceil(tokens / length)
    documents, _ = maker(size, length, torch.Generator().manual_seed(seed))
    lines = (" ".join(WORDS[token] for token in document[1:]) for document in documents.tolist())
    path.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines), encoding="utf-8")
