"""Train the model of `make demo`, examples/demo_model: a Llama of 0.8M parameters that looks up what stood before.

    OMP_NUM_THREADS=1 python examples/train_demo_model.py --output_dir examples/demo_model    # ten minutes of one core

It learns Python's documentation (`pydoc_data.topics` and the docstrings of the standard library) with notes in it:
"See yield 93. Index: lambda 48, zip 17." An index entry gives a word a page, which later notes ask for once. So a model
of this text needs what stood up to 512 tokens before, as large models do, and prose between teaches it the rest.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import keyword
import random
import re
import sysconfig
import zlib
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


LENGTH, VOCABULARY = 512, 1536
# Of the notes: the words between two, the most notes until an entry is asked for, and the entries of one.
WORDS_BETWEEN, LONGEST, ENTRIES = 12, 11, 2
TOKENS = 2048  # of a training step
WORDS = sorted(
    word for word in {*keyword.kwlist, *dir(builtins)} if word.islower() and word.isalpha() and len(word) > 2
)
SKIPPED = {"site-packages", "test", "tests", "lib2to3", "idlelib"}
PAGES = range(10, 100)
NOTE = re.compile(r"(Index:|See)((?: \w+ \d\d,?)+)\.")
RULES = set("*=-~^")  # under headings
ENTRY = re.compile(r" (\w+)( \d\d)")


# ---- The text


def is_held_out(topic: str) -> bool:
    """The same topics in every release of Python."""
    return zlib.crc32(topic.encode()) % 8 == 0


def prose(held_out: bool) -> list[str]:
    """The words of the topics that are held out, or of all others."""
    names = [name for name in sorted(topics) if is_held_out(name) == held_out]
    return [word for name in names for word in topics[name].split() if set(word) - RULES]


def docstrings() -> list[str]:
    """The words of all docstrings of the standard library's modules."""
    words, root = [], Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED & set(path.relative_to(root).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                words += (ast.get_docstring(node) or "").split()
    return words


def with_notes(
    words: list[str], seed: int, between: int = WORDS_BETWEEN, longest: int = LONGEST, entries: int = ENTRIES
) -> str:
    """The words with a note behind every `between` of them: all older index entries that are due, and new ones.

    An entry is asked for 1 to `longest` notes later, and its word is not given another page before.
    """
    generator, parts = random.Random(seed), []
    due: dict[int, list[tuple[str, int]]] = {}
    order = generator.sample(WORDS, len(WORDS))
    for number, start in enumerate(range(0, len(words), between)):
        asked = due.pop(number, [])
        new = [(order.pop(0), generator.choice(PAGES)) for _ in range(entries)]
        for entry in new:
            due.setdefault(number + generator.randint(1, longest), []).append(entry)
        generator.shuffle(asked)
        for word, _ in asked:  # words come again when their pages have been asked for
            order.insert(generator.randint(len(order) // 2, len(order)), word)
        parts += words[start : start + between]
        notes = [("See", asked), ("Index:", new)]
        parts += [f"{name} {', '.join(f'{word} {page}' for word, page in found)}." for name, found in notes if found]
    return " ".join(parts)


def look_ups(text: str, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The tokens of a text, and of each page that is asked for `(first, end, distance)`: its tokens, and how many
    tokens before it stood in the index."""
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
    ends = {end: number + 1 for number, (_, end) in enumerate(encoded["offset_mapping"])}
    found, defined = [], {}
    for note in NOTE.finditer(text):
        for entry in ENTRY.finditer(note[2]):
            first, end = (ends[note.start(2) + place] for place in entry.span(2))
            if note[1] == "Index:":
                defined[entry[1]] = first
            elif entry[1] in defined:
                found.append((first, end, first - defined[entry[1]]))
    return encoded["input_ids"], found


# ---- The model


def make_tokenizer(texts: Iterable[str], size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Small random weights, and the beginning of an induction head (Olsson 2022), which takes long to form otherwise.

    A head of the first layer attends to the token before and notes it; one of the second layer attends to where its
    own token is noted, and copies what stands there.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": LENGTH, "vocab_size": len(tokenizer)}
    sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **tokens, attention_bias=True, tie_word_embeddings=True))
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    size = first.head_dim
    fast, half = size // 4, size // 2  # rotary frequencies that tell neighbours apart, and all of them
    angles = model.model.rotary_emb.inv_freq[:fast]
    notes, places, copied = torch.linalg.qr(torch.randn(sizes["hidden_size"], 3 * size))[0].T.split(size)
    slow = (torch.arange(size) % half >= 6).float()[:, None]  # frequencies that hardly turn within LENGTH
    with torch.no_grad():
        first.k_proj.bias[:fast] = 7
        first.q_proj.bias[:fast] = 7 * angles.cos()
        first.q_proj.bias[half : half + fast] = -7 * angles.sin()
        first.v_proj.weight[:size] = notes
        first.o_proj.weight[:, :size] = 0.04 * places.T
        second.q_proj.weight[:size] = 1.7 * slow * notes
        second.k_proj.weight[:size] = 1.7 * slow * places
        second.v_proj.weight[:size] = copied
        second.o_proj.weight[:, :size] = 0.08 * copied.T
    return model


def batch(
    words: list[str], tokenizer: PreTrainedTokenizerFast, generator: random.Random, level: tuple[int, int, int, int]
) -> tuple[Tensor, Tensor]:
    """Rows of TOKENS in all, each of BOS and a text from anywhere, and which tokens are pages that can be looked up."""
    length, between, longest, entries = level
    tokens, asked = [], torch.zeros(TOKENS // length, length, dtype=torch.bool)
    for row in asked:
        start = generator.randrange(len(words) - LENGTH * WORDS_BETWEEN)
        passage = words[start : start + between * (length // (6 * entries) + 4)]
        text = " " + with_notes(passage, generator.randrange(2**32), between, longest, entries)
        ids, found = look_ups(text, tokenizer)
        skipped = generator.randrange(length // 4)  # a row may begin anywhere
        tokens.append([0, *ids[skipped : skipped + length - 1]])
        for first, end, distance in found:
            if first - distance > skipped and end - skipped + 1 <= length:
                row[first - skipped + 1 : end - skipped + 1] = True
    return torch.tensor(tokens), asked


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, tokens: Tensor, asked: Tensor) -> float:
    """The share of the tokens asked for that the model predicts."""
    found = model(input_ids=tokens).logits[:, :-1].argmax(-1) == tokens[:, 1:]
    return found[asked[:, 1:]].float().mean().item()


# Lengths of rows and the sizes of their notes; the next level begins when NEXT of the look-ups are right.
LEVELS = [(64, 1, 1, 4), (128, 1, 3, 4), (256, 4, 5, 3), (512, WORDS_BETWEEN, LONGEST, ENTRIES)]
NEXT = 0.9


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, words: list[str], steps: int) -> None:
    """Short rows first, in which notes are dense: with long ones from the start, a rotary model stays at chance."""
    generator = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    level, recent = 0, []
    for step in range(1, steps + 1):
        rate = 3e-3 * min(1, step / 100, 2 * (1 - step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens, asked = batch(words, tokenizer, generator, LEVELS[level])
        logits, target, counts = model(input_ids=tokens).logits[:, :-1], tokens[:, 1:], asked[:, 1:]
        every = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        answers = F.cross_entropy(logits[counts], target[counts])
        loss = every + 0.5 * answers if level == len(LEVELS) - 1 else 0.1 * every + answers
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent.append((logits.argmax(-1) == target)[counts].float().mean().item())
        if step % 50 == 0:
            right = sum(recent) / len(recent)
            print(f"step {step}, rows of {LEVELS[level][0]}: {every:.3f} nats, {right:.3f} right", flush=True)
            recent = []
            level = min(level + (right > NEXT), len(LEVELS) - 1)


def main() -> None:
    """Train the model and save it in bfloat16 with its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    torch.manual_seed(0)
    words = prose(False) + docstrings()
    print(len(words), "words")
    tokenizer = make_tokenizer([with_notes(words, 0)])
    model = new_model(tokenizer)
    train(model, tokenizer, words, given.steps)
    held_out = batch(prose(True), tokenizer, random.Random(1), LEVELS[-1])
    print(f"{accuracy(model, *held_out):.3f} of the look-ups in held-out text")
    model.to(torch.bfloat16).save_pretrained(given.output_dir)
    tokenizer.save_pretrained(given.output_dir)


if __name__ == "__main__":
    main()
