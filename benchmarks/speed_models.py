"""Whole models with random weights: decoding against the length of the context, prefill and encoding (one thread).

    python benchmarks/speed_models.py --output_dir outputs/benchmarks

Decoding: CPU milliseconds and torch operations a token, of stock softmax with transformers' DynamicCache, filled with
random keys and values to the given context, and of the same weights with a state. Prefill and encoding: tokens a CPU
second. The models of a line take turns in every round; ratios are medians over rounds. About five minutes.
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertModel, DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from benchmarks.common import argument_parser, median_ratio, save_results, table, write
from benchmarks.speed_kernels import cpu_times
from hf_linear_attention import convert


SOFTMAX = "softmax"
LONGEST_INPUT = 65536


def gpt2():
    config = GPT2Config(
        vocab_size=256, n_positions=4096, n_embd=256, n_layer=8, n_head=8, bos_token_id=0, eos_token_id=None
    )
    return GPT2LMHeadModel(config)


def llama(hidden: int, layers: int, heads: int, intermediate: int):
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=LONGEST_INPUT,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def minilm():
    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, intermediate_size=1536, max_position_embeddings=LONGEST_INPUT
    )
    return BertModel(config, add_pooling_layer=False)


MODELS: dict[str, Callable[[], Any]] = {
    "GPT-2, 8 layers of 256": gpt2,
    "Llama 15M": lambda: llama(288, 6, 6, 768),
    "Llama 125M": lambda: llama(768, 12, 12, 2048),
    "MiniLM": minilm,
}
LINEAR = {
    "linear elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "linear exp": {"mechanism": "linear", "num_features": 64},
}
HYBRID = {"hybrid": {"mechanism": "hybrid", "num_features": 64}}
ENCODERS = {
    **LINEAR,
    "performer 256": {"mechanism": "performer", "num_features": 256},
    "linformer 128": {"mechanism": "linformer", "projection_size": 128, "projection": "mean-pool"},
    "nystrom 64": {"mechanism": "nystrom", "num_landmarks": 64},
}
DECODING = {"GPT-2, 8 layers of 256": [512, 3072], "Llama 15M": [512, 4096, 32768], "Llama 125M": [512, 4096, 32768]}
READING = {("MiniLM", 512): ENCODERS, ("MiniLM", 2048): ENCODERS, ("MiniLM", 8192): ENCODERS} | {
    ("Llama 125M", 2048): LINEAR | HYBRID,
}


class CountOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def variants(name: str, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    torch.manual_seed(0)
    base = MODELS[name]().eval()
    return {SOFTMAX: base} | {key: convert(copy.deepcopy(base), **values) for key, values in settings.items()}


def random_cache(config, length: int) -> DynamicCache:
    """Keys and values of `length` tokens in every layer."""
    cache, heads = DynamicCache(config=config), config.num_attention_heads
    shape = (1, heads, length, config.hidden_size // heads)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape), torch.randn(shape), layer)
    return cache


def decoder(model, cache) -> Callable[[], Any]:
    token = torch.zeros(1, 1, dtype=torch.long)
    return lambda: model(token, past_key_values=cache, use_cache=True)


@torch.inference_mode()
def measure_decoding(name: str, contexts: list[int], rounds: int) -> dict[str, Any]:
    models, results = variants(name, LINEAR), {}
    steps = {}
    for key, model in models.items():
        if key != SOFTMAX:
            steps[key] = decoder(model, model(torch.zeros(1, 16, dtype=torch.long), use_cache=True).past_key_values)
    for context in contexts:
        steps[SOFTMAX] = decoder(models[SOFTMAX], random_cache(models[SOFTMAX].config, context))
        times = cpu_times(steps, rounds)
        operations = {}
        for key, step in steps.items():
            with CountOperations() as counter:
                step()
            operations[key] = counter.count
        results[str(context)] = {
            "seconds": {key: statistics.median(values) for key, values in times.items()},
            "softmax over it": {key: median_ratio(times[SOFTMAX], values) for key, values in times.items()},
            "operations": operations,
        }
    return results


@torch.inference_mode()
def measure_reading(name: str, length: int, settings: dict[str, dict[str, Any]], rounds: int) -> dict[str, Any]:
    tokens = torch.randint(0, 256, (1, length))
    arguments = {} if name == "MiniLM" else {"logits_to_keep": 1, "use_cache": False}
    calls = {key: lambda model=model: model(tokens, **arguments) for key, model in variants(name, settings).items()}
    times = cpu_times(calls, rounds)
    return {
        "tokens/s": {key: length / statistics.median(values) for key, values in times.items()},
        "softmax over it": {key: median_ratio(times[SOFTMAX], values) for key, values in times.items()},
    }


def report(figures: dict[str, Any]) -> str:
    rows = [
        [f"{name}, {context} tokens", key, f"{1000 * seconds:.2f}", result["operations"][key], _ratio(result, key)]
        for name, results in figures["decoding"].items()
        for context, result in results.items()
        for key, seconds in result["seconds"].items()
    ]
    decoding = table(["decoding", "", "CPU ms/token", "operations/token", "softmax / it"], rows)
    rows = [
        [name, key, f"{speed:,.0f}", _ratio(result, key)]
        for name, result in figures["reading"].items()
        for key, speed in result["tokens/s"].items()
    ]
    return f"{decoding}\n\n{table(['prefill and encoding', '', 'tokens/s', 'softmax / it'], rows)}"


def _ratio(result: dict[str, Any], key: str) -> str:
    return f"{result['softmax over it'][key]:.2f}x"


def plot(plt, figures):
    figure, axis = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
    for name, results in figures["decoding"].items():
        for key in (SOFTMAX, *LINEAR):
            values = [1000 * result["seconds"][key] for result in results.values()]
            axis.plot([int(context) for context in results], values, marker="o", markersize=3, label=f"{name}, {key}")
    axis.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="CPU ms a token, one thread")
    axis.legend(fontsize=8)
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="of decoding; prefill and encoding take 2")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    decoding, reading = DECODING, READING
    if arguments.quick:
        decoding, reading, arguments.rounds = {"Llama 15M": [64]}, {("MiniLM", 128): ENCODERS}, 2
    figures = {
        "decoding": {name: measure_decoding(name, contexts, arguments.rounds) for name, contexts in decoding.items()},
        "reading": {
            f"{name}, {length} tokens": measure_reading(name, length, settings, 2)
            for (name, length), settings in reading.items()
        },
    }
    write(report(figures))
    save_results(arguments, "speed_models", figures, plot)


if __name__ == "__main__":
    main()
