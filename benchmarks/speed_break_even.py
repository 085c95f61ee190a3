"""From which length on each mechanism is faster than torch's fused softmax attention (one thread, CPU time).

    python benchmarks/speed_break_even.py --output_dir outputs/benchmarks

It times the forward pass of the attention alone, without the projections of a layer: a batch of 1, 12 heads of 64,
float32. The mechanism and softmax take turns, and a cell is the median over rounds of softmax's time over the
mechanism's. About three minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from benchmarks.common import argument_parser, median_ratio, save_results, table, write
from benchmarks.speed_kernels import DIM, cpu_times, inputs, mechanism_call
from hf_linear_attention.mechanisms import MECHANISMS


# Settings, by what the row is called.
ROWS: dict[str, dict[str, Any]] = {
    "linear elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "linear relu": {"mechanism": "linear", "feature_map": "relu"},
    "linear squared_relu": {"mechanism": "linear", "feature_map": "squared_relu"},
    "linear taylor": {"mechanism": "linear", "feature_map": "taylor"},
    "linear exp 128": {"mechanism": "linear", "feature_map": "exp", "num_features": 128},
    "linear hedgehog 128": {"mechanism": "linear", "feature_map": "hedgehog", "num_features": 128},
    "linear t2r 64": {"mechanism": "linear", "feature_map": "t2r", "num_features": 64},
    "linear exp 128 gated": {
        "mechanism": "linear",
        "feature_map": "exp",
        "num_features": 128,
        "decay": "gated",
        "input_gate": True,
    },
    "gated_delta": {"mechanism": "gated_delta"},
    "performer 256": {"mechanism": "performer", "num_features": 256},
    "linformer 128": {"mechanism": "linformer", "projection_size": 128},
    "linformer_linear exp 128": {"mechanism": "linformer_linear", "feature_map": "exp", "projection_size": 128},
    "nystrom 64": {"mechanism": "nystrom", "num_landmarks": 64},
    "latent 64": {"mechanism": "latent", "num_latents": 64},
    "aft simple": {"mechanism": "aft", "variant": "simple"},
    "aft local 32": {"mechanism": "aft", "variant": "local", "window_size": 32},
    "aft conv 32": {"mechanism": "aft", "variant": "conv", "window_size": 32},
    "aft full": {"mechanism": "aft", "variant": "full"},
    "hybrid 64 + 4": {"mechanism": "hybrid", "window_size": 64, "num_sinks": 4},
    "window 64 + 4": {"mechanism": "window", "window_size": 64, "num_sinks": 4},
}
MODES = ("bidirectional", "causal")
# Where softmax is four times as fast, one round will do at the next length.
CLEAR = 0.25


def rows_of(mode: str) -> dict[str, dict[str, Any]]:
    def takes(mechanism, settings: dict[str, Any]) -> bool:
        return mechanism.supports(mode, mechanism.filled(settings))

    return {name: row for name, row in ROWS.items() if takes(MECHANISMS[row["mechanism"]], row)}


def break_even(lengths: list[int], ratios: list[float]) -> int | None:
    """The first length from which softmax is slower at every longer one too, None if at the longest it is not."""
    return next((n for place, n in enumerate(lengths) if min(ratios[place:]) >= 1), None)


def _rounds(rounds: int, length: int, ratios: list[float]) -> int:
    """Fewer rounds where they take long: at long lengths, and where softmax was several times as fast before."""
    if length > 2048 or (ratios and ratios[-1] < CLEAR):
        return 1
    return min(rounds, 2) if length > 1024 else rounds


def measure(settings: dict[str, Any], is_causal: bool, lengths: list[int], rounds: int) -> list[float]:
    call = mechanism_call(is_causal=is_causal, max_length=max(lengths), **settings)
    ratios = []
    for length in lengths:
        tensors = inputs(length)
        with torch.no_grad():
            times = cpu_times(
                {
                    "mechanism": lambda tensors=tensors: call(*tensors),
                    "softmax": lambda tensors=tensors: F.scaled_dot_product_attention(*tensors, is_causal=is_causal),
                },
                _rounds(rounds, length, ratios),
            )
        ratios.append(median_ratio(times["softmax"], times["mechanism"]))
    return ratios


def report(figures: dict[str, Any]) -> str:
    lengths = figures["lengths"]
    parts = []
    for mode in MODES:
        rows = [
            [name, *(f"{ratio:.2f}" for ratio in ratios), _length(break_even(lengths, ratios), lengths[-1])]
            for name, ratios in figures[mode].items()
        ]
        parts.append(table([f"{mode}, softmax / mechanism", *(f"{n:,}" for n in lengths), "faster from"], rows))
    return "\n\n".join(parts)


def _length(found: int | None, longest: int) -> str:
    return f"> {longest:,}" if found is None else f"{found:,}"


def plot(plt, figures):
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained", sharey=True)
    for axis, mode in zip(axes, MODES):
        for name, ratios in figures[mode].items():
            axis.plot(figures["lengths"], ratios, marker="o", markersize=3, label=name)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=mode)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("time of softmax / time of the mechanism")
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.quick:
        arguments.lengths, arguments.rounds = [64, 128], 1
    figures: dict[str, Any] = {"lengths": arguments.lengths, "head_dim": DIM}
    for mode in MODES:
        figures[mode] = {
            name: measure(settings, mode == "causal", arguments.lengths, arguments.rounds)
            for name, settings in rows_of(mode).items()
        }
    write(report(figures))
    save_results(arguments, "speed_break_even", figures, plot)


if __name__ == "__main__":
    main()
