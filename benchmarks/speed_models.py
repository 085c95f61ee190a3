"""Whole models with random weights: prefill, encoding and training steps in time and memory (one thread).

    python benchmarks/speed_models.py --output_dir outputs/benchmarks

Tokens a CPU second of the forward pass and of a training step (forward and backward), the models of a line taking turns
in every round, ratios as medians over rounds; and the peak of the memory that one such call takes beside weights and
gradients. From the peaks at two lengths follows the longest sequence whose training step fits into 20 GB with the
weights, their gradients and Adam's two moments. About five minutes.

`--long` measures only prefills of 8,192 and 32,768 tokens, once each (six minutes or more, half of it softmax).
`--compiled` measures only torch.compile (fullgraph) of Llama 125M: the CPU seconds of compilers and first call, which
other processes spend too, and of later calls: prefill, and a step behind a prompt in a static cache.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, StaticCache

from benchmarks.common import argument_parser, median_ratio, save_results, table, write
from benchmarks.speed_kernels import cpu_times, resident_bytes
from hf_linear_attention import convert
from hf_linear_attention.default_settings import DEFAULTS
from hf_linear_attention.training.presets import load_preset


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
    "hybrid 64 + 1": DEFAULTS["bidirectional"],
    "window 64 + 1": {**DEFAULTS["bidirectional"], "mechanism": "window"},
    "linformer 128": {"mechanism": "linformer", "projection_size": 128, "projection": "mean-pool"},
    "nystrom 64": {"mechanism": "nystrom", "num_landmarks": 64},
}
READING = {("MiniLM", 512): ENCODERS, ("MiniLM", 2048): ENCODERS, ("MiniLM", 8192): ENCODERS} | {
    ("Llama 125M", 2048): LINEAR | HYBRID,
}
LONG_READING = {("Llama 125M", 8192): LINEAR | HYBRID, ("Llama 125M", 32768): LINEAR | HYBRID}
TRAINING = {("MiniLM", 512): LINEAR, ("MiniLM", 2048): LINEAR} | {
    ("Llama 125M", 512): HYBRID,
    ("Llama 125M", 1024): HYBRID,
}
COMPILED = [(512, True), (512, False), (2048, False)]  # tokens, and whether a step behind them is measured
LONGEST_WARMED = 2048  # longer calls take seconds, in which a first call is like any other
MEMORY = 20e9
# Weights, gradients and Adam's two moments, in float32.
BYTES_PER_PARAMETER = 16


def variants(name: str, settings: dict[str, dict[str, Any]], dtype=torch.float32) -> dict[str, Any]:
    torch.manual_seed(0)
    base = MODELS[name]().to(dtype).eval()
    return {SOFTMAX: base} | {key: convert(copy.deepcopy(base), **values) for key, values in settings.items()}


def forward_pass(model, length: int) -> Callable[[], Any]:
    tokens = torch.randint(0, 256, (1, length))
    arguments = {} if isinstance(model, BertModel) else {"logits_to_keep": 1, "use_cache": False}
    return torch.inference_mode()(lambda: model(tokens, **arguments))


def training_step(model, length: int) -> Callable[[], Any]:
    """Forward and backward of a language model's loss, or of a sum for an encoder."""
    tokens = torch.randint(0, 256, (1, length))

    def step():
        if isinstance(model, BertModel):
            loss = model(tokens).last_hidden_state.square().mean()
        else:
            loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()

    return step


def peak_bytes(call: Callable[[], Any]) -> int:
    """New memory of a call at its peak; what only its first one takes must have been taken."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what earlier calls have freed would be taken again unseen
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak so far is forgotten
    before = resident_bytes("VmRSS")
    call()
    return resident_bytes("VmHWM") - before


def measure(call_of, name: str, length: int, settings: dict[str, dict[str, Any]], rounds: int) -> dict[str, Any]:
    models = variants(name, settings)
    calls = {key: call_of(model, length) for key, model in models.items()}
    is_once = rounds == 1 or length > LONGEST_WARMED
    times: dict[str, list[float]] = {key: [] for key in calls} if is_once else cpu_times(calls, rounds - 1)
    peaks = {}
    for key, call in calls.items():
        start = time.process_time()
        peaks[key] = peak_bytes(call)
        times[key].append(time.process_time() - start)
    return {
        "model": name,
        "tokens": length,
        "parameters": models[SOFTMAX].num_parameters(),
        "tokens/s": {key: length / statistics.median(values) for key, values in times.items()},
        "softmax over it": {key: median_ratio(times[SOFTMAX], values) for key, values in times.items()},
        "peak": peaks,
    }


def compiled_step(model: Any, forward: Any, context: int) -> Callable[[], Any]:
    """A step behind `context` tokens, with room for 64 of them in a static cache."""
    cache, token = StaticCache(config=model.config, max_cache_len=context + 64), torch.zeros(1, 1, dtype=torch.long)
    with torch.inference_mode():
        model(torch.randint(0, 256, (1, context)), past_key_values=cache, logits_to_keep=1)
    return torch.inference_mode()(lambda: forward(token, past_key_values=cache))


def compiled_prefill(model: Any, forward: Any, length: int) -> Callable[[], Any]:
    """A prompt with a static cache, as `generate` reads it; without one, a graph has to allow for packed documents."""
    cache, tokens = StaticCache(config=model.config, max_cache_len=length), torch.randint(0, 256, (1, length))

    def prefill():
        cache.reset()
        return forward(tokens, past_key_values=cache, logits_to_keep=1)

    with torch.inference_mode():
        model(tokens, past_key_values=cache, logits_to_keep=1)  # which makes its tensors
    return torch.inference_mode()(prefill)


def measure_compiled(name: str, length: int, is_step: bool, rounds: int) -> dict[str, Any]:
    """Softmax and the settings of the preset `default`, each compiled without caches in one process of its compiler."""
    compilers: Any = torch._inductor.config
    compilers.compile_threads, compilers.force_disable_caches = 1, True
    settings = {key: value for key, value in load_preset("default").settings["causal"].items() if key != "state_bytes"}
    models, calls, eager, seconds = variants(name, {"default": settings}), {}, {}, {}
    for key, model in models.items():
        torch._dynamo.reset()
        forward = torch.compile(model, fullgraph=True, dynamic=False)
        for found, used in ((eager, model), (calls, forward)):
            found[key] = (compiled_step if is_step else compiled_prefill)(model, used, length)
        start = sum(os.times()[:4])
        calls[key]()
        seconds[key] = sum(os.times()[:4]) - start
    times = cpu_times({**calls, **{f"{key}, eager": call for key, call in eager.items()}}, rounds)
    return {
        "model": name,
        "call": f"a step at {length}" if is_step else f"prefill of {length}",
        "layers": models[SOFTMAX].config.num_hidden_layers,
        "first call, s": seconds,
        "ms": {key: 1000 * statistics.median(values) for key, values in times.items()},
        "softmax over it": median_ratio(times[SOFTMAX], times["default"]),
        "compiling, it over softmax": seconds["default"] / seconds[SOFTMAX],
    }


def longest_sequences(results: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Per model the tokens that fit into `MEMORY`, from the line through the peaks at its two lengths."""
    found: dict[str, dict[str, int]] = {}
    for short, long in itertools.pairwise(results):
        if short["model"] != long["model"]:
            continue
        room = MEMORY - BYTES_PER_PARAMETER * short["parameters"]
        found[short["model"]] = {}
        for key, peak in long["peak"].items():
            slope = (peak - short["peak"][key]) / (long["tokens"] - short["tokens"])
            found[short["model"]][key] = round(long["tokens"] + (room - peak) / slope)
    return found


def report(figures: dict[str, Any]) -> str:
    parts = []
    for title in ("forward", "training step"):
        keys = _keys(result["tokens/s"] for result in figures[title])
        rows = [
            [f"{result['model']}, {result['tokens']:,}", *(_speed(result, key) for key in keys)]
            for result in figures[title]
        ]
        if rows:
            parts.append(table([f"{title}, tokens/s (over softmax, MB at the peak)", *keys], rows))
    longest = figures["longest"]
    header = _keys(longest.values())
    rows = [[name, *(f"{found[key]:,}" if key in found else None for key in header)] for name, found in longest.items()]
    if rows:
        parts.append(table(["tokens that train in 20 GB", *header], rows))
    return "\n\n".join(parts)


def _keys(rows: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _speed(result: dict[str, Any], key: str) -> str | None:
    if key not in result["tokens/s"]:
        return None
    ratio, megabytes = result["softmax over it"][key], result["peak"][key] / 1e6
    return f"{result['tokens/s'][key]:,.0f} ({ratio:.2f}x, {megabytes:,.0f})"


def report_compiled(results: list[dict[str, Any]]) -> str:
    keys = list(results[0]["ms"])
    rows = [
        [
            f"{row['model']}, {row['layers']} layers, {row['call']}",
            *(f"{row['ms'][key]:.1f}" for key in keys),
            f"{row['softmax over it']:.2f}x",
            *(f"{value:.1f}" for value in row["first call, s"].values()),
            f"{row['compiling, it over softmax']:.2f}x",
        ]
        for row in results
    ]
    first = [f"first call of {key}, s" for key in results[0]["first call, s"]]
    return table(["compiled, ms", *keys, "softmax / it", *first, "it / softmax"], rows)


def plot(plt, figures):
    """Time a token and peak memory against the length, a panel for each model and pass."""
    panels = [
        (title, name, [result for result in figures[title] if result["model"] == name])
        for title in ("forward", "training step")
        for name in dict.fromkeys(result["model"] for result in figures[title])
    ]
    figure, axes = plt.subplots(2, len(panels), figsize=(3.1 * len(panels), 5.6), layout="constrained", squeeze=False)
    for (title, name, results), (time_axis, memory_axis) in zip(panels, axes.T):
        lengths = [result["tokens"] for result in results]
        for key in results[0]["peak"]:
            time_axis.plot(lengths, [1000 / result["tokens/s"][key] for result in results], marker="o", markersize=3)
            memory_axis.plot(
                lengths, [result["peak"][key] / 1e6 for result in results], marker="o", markersize=3, label=key
            )
        time_axis.set(xscale="log", ylim=(0, None), title=f"{name}, {title}")
        memory_axis.set(xscale="log", ylim=(0, None), xlabel="tokens")
        for axis in (time_axis, memory_axis):
            axis.minorticks_off()
            axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
        memory_axis.legend(fontsize=7)
    axes[0, 0].set_ylabel("CPU ms a token")
    axes[1, 0].set_ylabel("MB at the peak")
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        help="the last one also measures memory; longer inputs than 2,048 tokens have only that one",
    )
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--parts", nargs="+", choices=("forward", "training"), default=["forward", "training"])
    alone.add_argument("--long", action="store_true", help="prefills of 8,192 and 32,768 tokens alone")
    alone.add_argument("--compiled", action="store_true", help="torch.compile alone")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.compiled:
        cases = COMPILED[:1] if arguments.quick else COMPILED
        results = []
        for case in cases:
            results.append(measure_compiled("Llama 15M" if arguments.quick else "Llama 125M", *case, arguments.rounds))
            write(report_compiled(results))
        return
    reading, training, long_reading = READING, TRAINING, LONG_READING
    if arguments.quick:
        reading, arguments.rounds = {("MiniLM", 128): ENCODERS}, 1
        training = {("MiniLM", 64): LINEAR, ("MiniLM", 128): LINEAR}
        long_reading = {("Llama 15M", 64): LINEAR | HYBRID}
    if arguments.long:
        reading, training = long_reading, {}
    cases = {"forward": (forward_pass, reading), "training step": (training_step, training)}
    chosen = {title: case for title, case in cases.items() if title.split()[0] in arguments.parts}
    figures: dict[str, Any] = {title: [] for title in cases}
    for title, (call_of, rows) in chosen.items():
        figures[title] = [measure(call_of, *case, settings, arguments.rounds) for case, settings in rows.items()]
    figures["longest"] = longest_sequences(figures["training step"])
    write(report(figures))
    save_results(arguments, "speed_models_long" if arguments.long else "speed_models", figures, plot)


if __name__ == "__main__":
    main()
