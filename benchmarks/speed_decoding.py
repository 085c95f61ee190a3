"""Decoding of whole models with random weights against the length of the context (one thread, CPU time).

    python -m benchmarks.speed_decoding

CPU milliseconds a token of stock softmax with transformers' DynamicCache, filled with random keys and values to the
given context, and of the same weights with a state; the largest model in bfloat16 too. Then the smallest model under
torch.compile with transformers' static cache. The models of a line take turns in every round; ratios are medians over
rounds. About two minutes. `--plot` draws the picture of docs/figures.md from the times of its result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from benchmarks.common import ROOT, medians, parse, save, table, times_as_fast, times_in_turns
from benchmarks.speed_models import HYBRID, LINEAR, SOFTMAX, variants


SMALL, LARGE = "Llama 15M", "Llama 125M"
DECODING = {"GPT-2, 8 layers of 256": [512, 3072], SMALL: [512, 4096, 32768], LARGE: [512, 4096, 32768]}
CONVERTED = LINEAR | HYBRID


def random_cache(model: Any, length: int) -> DynamicCache:
    """Keys and values of `length` tokens in every layer."""
    config = model.config
    cache, heads = DynamicCache(config=config), config.num_attention_heads
    shape = (1, heads, length, config.hidden_size // heads)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape, dtype=model.dtype), torch.randn(shape, dtype=model.dtype), layer)
    return cache


def decoder(model: Any, cache: Any) -> Callable[[], Any]:
    """One step behind what the cache has read."""
    token = torch.zeros(1, 1, dtype=torch.long)
    return lambda: model(token, past_key_values=cache, use_cache=True)


def steps_of(models: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """One step of each converted model, after as many tokens as fill a window: how many more does not matter."""
    tokens = torch.zeros(1, 128, dtype=torch.long)
    converted = {key: model for key, model in models.items() if key != SOFTMAX}
    return {key: decoder(model, model(tokens, use_cache=True).past_key_values) for key, model in converted.items()}


@torch.inference_mode()
def measure_decoding(name: str, contexts: list[int], rounds: int, dtype: torch.dtype) -> list[list[Any]]:
    """A row for each context: milliseconds, and softmax over each."""
    models = variants(name, CONVERTED, dtype)
    steps, rows = steps_of(models), []
    for context in contexts:
        steps[SOFTMAX] = decoder(models[SOFTMAX], random_cache(models[SOFTMAX], context))
        times = times_in_turns(steps, rounds)
        found, faster = medians(times, 1e-3), times_as_fast(times, SOFTMAX)
        precision = " in bfloat16" if dtype == torch.bfloat16 else ""
        row = [*(found[key] for key in (SOFTMAX, *CONVERTED)), *(faster[key] for key in CONVERTED)]
        rows.append([f"{name}{precision}, at {context:,}", *row])
    return rows


@torch.inference_mode()
def measure_compiled(name: str, context: int, rounds: int) -> list[list[Any]]:
    """Eager and compiled, each with a static cache of `context` tokens: milliseconds and times as fast as eager."""
    steps = {}
    for key, model in variants(name, {"linear elu1": LINEAR["linear elu1"]}).items():
        for form, forward in (("eager", model), ("compiled", torch.compile(model, fullgraph=True))):
            cache = StaticCache(config=model.config, max_cache_len=context)
            model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)  # which makes its tensors
            steps[f"{key}, {form}"] = decoder(forward, cache)
    times = times_in_turns(steps, min(rounds, context - 3))
    faster = times_as_fast(times, f"{SOFTMAX}, eager")
    return [[key, milliseconds, faster[key]] for key, milliseconds in medians(times, 1e-3).items()]


def draw(result: Path) -> None:
    """Time a token against the context, a panel for each model, into benchmarks/figures/."""
    import matplotlib.pyplot as plt

    rows = json.loads(result.read_text(encoding="utf-8"))["tables"][0]["rows"]
    figure, axes = plt.subplots(1, len(DECODING), figsize=(3.6 * len(DECODING), 4.2), layout="constrained")
    for axis, name in zip(axes, DECODING):
        points = [(int(row[0].split(" at ")[1].replace(",", "")), row) for row in rows if row[0].startswith(f"{name},")]
        for place, key in enumerate((SOFTMAX, *CONVERTED), 1):
            axis.plot(*zip(*((context, row[place]) for context, row in points)), "o-", markersize=3, label=key)
        axis.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="CPU ms a token", title=name)
    axes[-1].legend(fontsize=8)
    figure.savefig(ROOT / "benchmarks" / "figures" / "speed_decoding.png", dpi=150)


def main(argv: list[str] | None = None) -> None:
    """Time the steps of every model."""
    arguments = parse(__doc__, argv, {"rounds": 2}, rounds=9, plot=False)
    if arguments.plot:
        draw(arguments.output_dir / "speed_decoding.json")
        return
    decoding, half, context = DECODING, {LARGE: [32768]}, 512
    if arguments.quick:
        decoding, half, context = {SMALL: [64, 128]}, {SMALL: [64]}, 16
    rows = []
    for cases, dtype in ((decoding, torch.float32), (half, torch.bfloat16)):
        for name, contexts in cases.items():
            rows += measure_decoding(name, contexts, arguments.rounds, dtype)
    header = ["decoding, CPU ms a token", SOFTMAX, *CONVERTED, *(f"{SOFTMAX} / {key}" for key in CONVERTED)]
    compiled = [f"{SMALL}, static cache of {context} tokens", "CPU ms a token", "times as fast as softmax, eager"]
    tables = [table(header, rows), table(compiled, measure_compiled(SMALL, context, arguments.rounds))]
    save(arguments, "speed_decoding", tables)


if __name__ == "__main__":
    main()
