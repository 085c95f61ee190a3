"""What a checkpoint takes where only torch and transformers are installed: no C kernels, against softmax (one thread).

    python benchmarks/speed_without_kernels.py --output_dir outputs/benchmarks

Ratios of sdpa's CPU time over ours, medians over rounds in which all take turns: the causal kernel forward and with
backward (12 heads of 64, feature map included), the prefill of a Llama of 15M parameters with random weights, and its
decoding of one token after a context. Above 1 we are faster. About two minutes.
"""

from __future__ import annotations

import sys
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.common import argument_parser, median_ratio, save_results, table, write
from benchmarks.speed_break_even import break_even
from benchmarks.speed_decoding import SMALL, decoder, random_cache, steps_of
from benchmarks.speed_kernels import DIM, SDPA, cpu_times, measure, mechanism_call, sdpa
from benchmarks.speed_models import SOFTMAX, forward_pass, variants
from hf_linear_attention import kernels_cpu


FORMS: dict[str, dict[str, Any]] = {
    "linear elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "linear exp": {"mechanism": "linear", "feature_map": "exp", "num_features": DIM},
    "hybrid": {"mechanism": "hybrid", "num_features": DIM},
}
LENGTHS = [512, 1024, 2048, 4096, 8192]


def kernel_ratios(length: int, with_backward: bool, rounds: int) -> dict[str, float]:
    calls = {name: mechanism_call(**settings) for name, settings in FORMS.items()}
    seconds = measure(length, with_backward, rounds, {**calls, SDPA: sdpa})["seconds"]
    # With backward, sdpa is not timed beyond 4,096 tokens.
    return {name: seconds[SDPA] / seconds[name] for name in FORMS if SDPA in seconds}


@torch.inference_mode()
def model_ratios(length: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Softmax's time over ours: prefill of `length` tokens, and a token after as many."""
    models = variants(SMALL, FORMS)
    prefill = cpu_times({name: forward_pass(model, length) for name, model in models.items()}, rounds)
    steps = steps_of(models) | {SOFTMAX: decoder(models[SOFTMAX], random_cache(models[SOFTMAX], length))}
    decoding = cpu_times(steps, 5 * rounds)
    found = [{name: median_ratio(times[SOFTMAX], times[name]) for name in FORMS} for times in (prefill, decoding)]
    return found[0], found[1]


def _ratio(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}x"


def report(figures: dict[str, Any]) -> str:
    lengths = figures["lengths"]
    rows = [
        [f"{mode}: {name}", *(_ratio(found[str(n)].get(name)) for n in lengths)]
        for mode, found in figures["ratios"].items()
        for name in FORMS
    ]
    text = table([f"{SDPA} / ours, computed in torch", *(f"{n:,}" for n in lengths)], rows)
    least = [min(min(found[str(n)].values(), default=inf) for found in figures["ratios"].values()) for n in lengths]
    faster = break_even(lengths, least)
    return text if faster is None else f"{text}\n\nEvery row is faster from {faster:,} tokens."


def plot(plt, figures):
    figure, axes = plt.subplots(1, len(figures["ratios"]), figsize=(13, 3.8), layout="constrained", sharey=True)
    for axis, (mode, rows) in zip(axes, figures["ratios"].items()):
        for name in FORMS:
            points = [(n, rows[str(n)][name]) for n in figures["lengths"] if name in rows[str(n)]]
            axis.plot(*zip(*points), marker="o", label=name)
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=mode)
    axes[0].set_ylabel("time of sdpa / ours, in torch")
    axes[0].legend()
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.quick:
        arguments.lengths, arguments.rounds = [64, 128], 1
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    with mock.patch.object(kernels_cpu, "library", return_value=None):
        for n in arguments.lengths:
            prefill, decoding = model_ratios(n, arguments.rounds)
            modes = {
                "kernel, forward": kernel_ratios(n, False, arguments.rounds),
                "kernel, forward and backward": kernel_ratios(n, True, arguments.rounds),
                f"{SMALL}, prefill": prefill,
                f"{SMALL}, one token": decoding,
            }
            for mode, found in modes.items():
                ratios.setdefault(mode, {})[str(n)] = found
    figures = {"lengths": arguments.lengths, "ratios": ratios}
    write(report(figures))
    save_results(arguments, "speed_without_kernels", figures, plot)


if __name__ == "__main__":
    main()
