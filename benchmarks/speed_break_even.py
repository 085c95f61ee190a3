"""From which length on each mechanism is faster than torch's fused softmax attention (one thread, CPU time).

    python benchmarks/speed_break_even.py --output_dir outputs/benchmarks

B = 1, 12 heads of 64, float32, forward, all that a layer does between its projections. Mechanism and softmax take
turns, and a cell is the median over rounds of softmax's time over the mechanism's. About three minutes.
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


# Settings, by what the row is called; whether causal.
BIDIRECTIONAL: dict[str, dict[str, Any]] = {
    "linear elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "linear exp 128": {"mechanism": "linear"},
    "linear hedgehog": {"mechanism": "linear", "feature_map": "hedgehog"},
    "performer 256": {"mechanism": "performer", "num_features": 256},
    "linformer 128": {"mechanism": "linformer", "projection_size": 128},
    "nystrom 64": {"mechanism": "nystrom", "num_landmarks": 64},
    "latent 64": {"mechanism": "latent", "num_latents": 64},
    "aft simple": {"mechanism": "aft"},
    "hybrid 64 + 4": {"mechanism": "hybrid"},
}
CAUSAL = {name: BIDIRECTIONAL[name] for name in ("linear elu1", "linear exp 128", "performer 256", "hybrid 64 + 4")}


def break_even(lengths: list[int], ratios: list[float]) -> str:
    """The first length from which softmax is slower at every longer one too."""
    from_here = [n for place, n in enumerate(lengths) if min(ratios[place:]) >= 1]
    return f"{from_here[0]:,}" if from_here else f"> {lengths[-1]:,}"


def measure(settings: dict[str, Any], is_causal: bool, lengths: list[int], rounds: int) -> list[float]:
    call = mechanism_call(is_causal=is_causal, max_length=max(lengths), **settings)
    ratios = []
    for length in lengths:
        # In memory the heads of a token lie side by side, as models have them.
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(length)]
        with torch.no_grad():
            times = cpu_times(
                {
                    "mechanism": lambda tensors=tensors: call(*tensors),
                    "softmax": lambda tensors=tensors: F.scaled_dot_product_attention(*tensors, is_causal=is_causal),
                },
                rounds,
            )
        ratios.append(median_ratio(times["softmax"], times["mechanism"]))
    return ratios


def report(figures: dict[str, Any]) -> str:
    lengths = figures["lengths"]
    parts = []
    for mode in ("bidirectional", "causal"):
        rows = [
            [name, *(f"{ratio:.2f}x" for ratio in ratios), break_even(lengths, ratios)]
            for name, ratios in figures[mode].items()
        ]
        parts.append(f"softmax / mechanism, {mode}\n\n" + table(["", *lengths, "faster from"], rows))
    return "\n\n".join(parts)


def plot(plt, figures):
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained", sharey=True)
    for axis, mode in zip(axes, ("bidirectional", "causal")):
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
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    if arguments.quick:
        arguments.lengths, arguments.rounds = [64, 128], 1
    figures: dict[str, Any] = {"lengths": arguments.lengths, "head_dim": DIM}
    for mode, rows in (("bidirectional", BIDIRECTIONAL), ("causal", CAUSAL)):
        figures[mode] = {
            name: measure(settings, mode == "causal", arguments.lengths, arguments.rounds)
            for name, settings in rows.items()
        }
    write(report(figures))
    save_results(arguments, "speed_break_even", figures, plot)


if __name__ == "__main__":
    main()
