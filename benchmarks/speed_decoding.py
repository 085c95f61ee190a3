"""Decoding of whole models with random weights against the length of the context (one thread, CPU time).

    python benchmarks/speed_decoding.py --output_dir outputs/benchmarks

CPU milliseconds and torch operations a token, of stock softmax with transformers' DynamicCache, filled with random keys
and values to the given context, and of the same weights with a state; the largest model in bfloat16 too. Then a step
beside the matrix-vector products of which it consists, and beside the stock model without any context; and the smallest
model under torch.compile with transformers' static cache. The models of a line take turns in every round; ratios are
medians over rounds. About two minutes.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

from benchmarks.common import argument_parser, median_ratio, save_results, table, write
from benchmarks.speed_kernels import cpu_times
from benchmarks.speed_models import HYBRID, LINEAR, SOFTMAX, variants


SMALL, LARGE = "Llama 15M", "Llama 125M"
DECODING = {"GPT-2, 8 layers of 256": [512, 3072], SMALL: [512, 4096, 32768], LARGE: [512, 4096, 32768]}
CONVERTED = LINEAR | HYBRID
PRODUCTS = "its matrix-vector products"


class CountOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def random_cache(model, length: int) -> DynamicCache:
    """Keys and values of `length` tokens in every layer."""
    config = model.config
    cache, heads = DynamicCache(config=config), config.num_attention_heads
    shape = (1, heads, length, config.hidden_size // heads)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape, dtype=model.dtype), torch.randn(shape, dtype=model.dtype), layer)
    return cache


def decoder(model, cache) -> Callable[[], Any]:
    token = torch.zeros(1, 1, dtype=torch.long)
    return lambda: model(token, past_key_values=cache, use_cache=True)


def steps_of(models: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """One step of each converted model, after as many tokens as fill a window: how many more does not matter."""
    tokens = torch.zeros(1, 128, dtype=torch.long)
    return {
        key: decoder(model, model(tokens, use_cache=True).past_key_values)
        for key, model in models.items()
        if key != SOFTMAX
    }


@torch.inference_mode()
def measure_decoding(name: str, contexts: list[int], rounds: int, dtype=torch.float32) -> dict[str, Any]:
    models, results = variants(name, CONVERTED, dtype), {}
    steps = steps_of(models)
    for context in contexts:
        steps[SOFTMAX] = decoder(models[SOFTMAX], random_cache(models[SOFTMAX], context))
        times = cpu_times(steps, rounds)
        operations = {}
        for key, step in steps.items():
            with CountOperations() as counter:
                step()
            operations[key] = counter.count
        results[str(context)] = summary(times, SOFTMAX) | {"operations": operations}
    return results


@torch.inference_mode()
def measure_products(name: str, rounds: int) -> dict[str, Any]:
    """A step against the products of one token with all of its weights, and against softmax with nothing to look at."""
    models = variants(name, CONVERTED)
    layers = [module.weight for module in models["linear elu1"].modules() if isinstance(module, nn.Linear)]
    inputs = {width: torch.randn(1, 1, width) for width in {weight.shape[1] for weight in layers}}

    def products():
        for weight in layers:
            F.linear(inputs[weight.shape[1]], weight)

    token = torch.zeros(1, 1, dtype=torch.long)
    alone = {f"{SOFTMAX}, no context": lambda: models[SOFTMAX](token, use_cache=False)}
    return summary(cpu_times({PRODUCTS: products, **alone, **steps_of(models)}, rounds), PRODUCTS)


@torch.inference_mode()
def measure_compiled(name: str, context: int, rounds: int) -> dict[str, Any]:
    """Eager and compiled, each with a static cache of `context` tokens."""
    steps = {}
    for key, model in variants(name, {"linear elu1": LINEAR["linear elu1"]}).items():
        for form, forward in (("eager", model), ("compiled", torch.compile(model, fullgraph=True))):
            cache = StaticCache(config=model.config, max_cache_len=context)
            model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)  # which makes its tensors
            steps[f"{key}, {form}"] = decoder(forward, cache)
    return summary(cpu_times(steps, min(rounds, context - 3)), "linear elu1, eager")


def summary(times: dict[str, list[float]], base: str) -> dict[str, Any]:
    """Medians, and `base` over each and each over `base`, as medians over rounds."""
    return {
        "seconds": {key: statistics.median(values) for key, values in times.items()},
        f"{base} over it": {key: median_ratio(times[base], values) for key, values in times.items()},
        f"over {base}": {key: median_ratio(values, times[base]) for key, values in times.items()},
    }


def report(figures: dict[str, Any]) -> str:
    keys = (SOFTMAX, *CONVERTED)
    rows = [
        [
            f"{name}, at {int(context):,}",
            *(f"{1000 * result['seconds'][key]:.2f}" for key in keys),
            *(f"{result[f'{SOFTMAX} over it'][key]:.2f}x" for key in CONVERTED),
            *(result["operations"][key] for key in keys),
        ]
        for name, results in figures["decoding"].items()
        for context, result in results.items()
    ]
    counted = [f"operations: {SOFTMAX}", *CONVERTED]
    parts = [table(["decoding, CPU ms a token", *keys, *(f"/ {key}" for key in CONVERTED), *counted], rows)]
    for title, base in (("products", PRODUCTS), ("compiled", "linear elu1, eager")):
        result = figures[title]
        rows = [
            [key, f"{1000 * seconds:.2f}", f"{result[f'over {base}'][key]:.2f}x"]
            for key, seconds in result["seconds"].items()
        ]
        parts.append(table([figures["of"][title], "CPU ms a token", f"/ {base}"], rows))
    return "\n\n".join(parts)


def plot(plt, figures):
    drawn = {name: results for name, results in figures["decoding"].items() if len(results) > 1}
    figure, axes = plt.subplots(1, len(drawn), figsize=(3.6 * len(drawn), 4.2), layout="constrained", squeeze=False)
    for axis, (name, results) in zip(axes[0], drawn.items()):
        for key in (SOFTMAX, *CONVERTED):
            values = [1000 * result["seconds"][key] for result in results.values()]
            axis.plot([int(context) for context in results], values, marker="o", markersize=3, label=key)
        axis.set(xscale="log", yscale="log", xlabel="tokens of context", title=name)
    axes[0][0].set_ylabel("CPU ms a token, one thread")
    axes[0][-1].legend(fontsize=8)
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    decoding, half, large, compiled = DECODING, {LARGE: [32768]}, LARGE, 512
    if arguments.quick:
        decoding, half, large, compiled, arguments.rounds = {SMALL: [64, 128]}, {SMALL: [64]}, SMALL, 16, 2
    rounds = arguments.rounds
    figures = {
        "decoding": {name: measure_decoding(name, contexts, rounds) for name, contexts in decoding.items()}
        | {
            f"{name} in bfloat16": measure_decoding(name, contexts, rounds, torch.bfloat16)
            for name, contexts in half.items()
        },
        "products": measure_products(large, rounds),
        "compiled": measure_compiled(SMALL, compiled, rounds),
        "of": {"products": large, "compiled": f"{SMALL}, static cache of {compiled} tokens"},
    }
    write(report(figures))
    save_results(arguments, "speed_decoding", figures, plot)


if __name__ == "__main__":
    main()
