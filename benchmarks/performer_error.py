"""The error of random features against their number, at several norms (Performer 2020, figure 4).

    python benchmarks/performer_error.py --output_dir outputs/benchmarks

Attention output on queries and keys of `length` 4,096 and dimension 16, 15 draws of data and projections, for every
estimator of exp(q·k) that the package has, with orthogonal and with iid rows. The norm of a query decides: |x| is that
of sqrt(scaling) q, 2 for plain N(0, 1) input. The fourth panel has the real queries, keys and values of MiniLM, 512
tokens. Errors are mean squares over a draw and medians over draws; beside them stands the relative error of the
attention matrix (256 tokens). The line `of 0` is the error of the answer 0: an estimator above it is useless. Features
count, not rows of the projection: cosh and trig make two of a row. Two minutes on one core.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.common import argument_parser, save_results, table, write
from benchmarks.real_attention import Heads, build_mechanism, documentation, mechanism_output, minilm_heads
from hf_linear_attention.features_random import RANDOM_FEATURES


SIZES = (16, 32, 64, 128, 256, 512)
NORMS = (0.5, 1.0, 2.0)
DIM = 16
# The features that estimate the softmax kernel; what else the package has (generalised attention) does not.
ESTIMATORS = tuple(name for name, features in RANDOM_FEATURES.items() if features.estimates_softmax)
MATRIX_TOKENS = 256


def random_heads(norm: float, length: int, draw: int) -> Heads:
    """One head of N(0, 1) values, and of queries and keys whose norm is `norm` on average after scaling."""
    generator = torch.Generator().manual_seed(1000 + draw)
    query, key, value = (torch.randn(1, 1, length, DIM, generator=generator) for _ in range(3))
    return Heads(query * (norm / 2), key * (norm / 2), value, DIM**-0.5)


def settings_of(orthogonal: bool) -> str:
    return "orthogonal" if orthogonal else "iid"


@torch.no_grad()
def errors(
    heads: Heads, exact: torch.Tensor, matrix: torch.Tensor, features: str, orthogonal: bool, size: int, seed: int
):
    """`(mean square error of the output, relative error of the matrix of the first tokens)`."""
    mechanism = build_mechanism(
        "performer", heads.shape(), features=features, num_features=size, orthogonal=orthogonal, seed=seed
    )
    mechanism.calibrate(heads.query, heads.key, attention_mask=None, scaling=heads.scaling)
    output = mechanism_output(mechanism, heads)
    first = slice(matrix.shape[-1])
    weights = mechanism.attention_weights(
        heads.query[:, :, first], heads.key[:, :, first], attention_mask=None, scaling=heads.scaling, is_causal=False
    )
    return (output - exact).square().mean().item(), ((weights - matrix).norm() / matrix.norm()).item()


def exact_of(heads: Heads) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the attention matrix among the first tokens alone."""
    first = heads._replace(query=heads.query[:, :, :MATRIX_TOKENS], key=heads.key[:, :, :MATRIX_TOKENS])
    return heads.softmax_output(), first.weights()


def panel(draws: list[list[Heads]], sizes) -> dict[str, Any]:
    """`draws` are lists of layers to average over; each draw has its own projections."""
    exact = [[exact_of(heads) for heads in layers] for layers in draws]
    rows = []
    for features in ESTIMATORS:
        for orthogonal in (True, False):
            for size in sizes:
                output, matrix = [], []
                for seed, (layers, targets) in enumerate(zip(draws, exact)):
                    found = [
                        errors(heads, *target, features, orthogonal, size, seed)
                        for heads, target in zip(layers, targets)
                    ]
                    output.append(statistics.mean(first for first, _ in found))
                    matrix.append(statistics.mean(second for _, second in found))
                low, _, high = statistics.quantiles(output, n=4) if len(output) > 1 else output * 3
                rows.append(
                    {
                        "features": features,
                        "rows": settings_of(orthogonal),
                        "size": size,
                        "mse": statistics.median(output),
                        "mse_mean": statistics.mean(output),
                        "mse_25%": low,
                        "mse_75%": high,
                        "matrix_error": statistics.median(matrix),
                    }
                )
    target = statistics.mean(output.square().mean().item() for layers in exact for output, _ in layers)
    return {"target_mean_square": target, "rows": rows}


def run(length: int, num_draws: int, minilm_length: int, minilm_draws: int, sizes) -> dict[str, Any]:
    panels = {
        f"|x| = {norm}": panel([[random_heads(norm, length, draw)] for draw in range(num_draws)], sizes)
        for norm in NORMS
    }
    panels["MiniLM"] = panel(minilm_heads(documentation(), minilm_length, 1) * minilm_draws, sizes)
    return {
        "length": length,
        "dim": DIM,
        "draws": num_draws,
        "minilm": {"length": minilm_length, "draws": minilm_draws},
        "sizes": list(sizes),
        "panels": panels,
    }


def report(figures: dict[str, Any]) -> str:
    parts = []
    for name, content in figures["panels"].items():
        lines = []
        for features in ESTIMATORS:
            for kind in ("orthogonal", "iid"):
                found = [r for r in content["rows"] if (r["features"], r["rows"]) == (features, kind)]
                cells = [f"{row['mse']:.1e}" for row in found]
                matrix = found[-1]["matrix_error"]
                lines.append([f"{features} {kind}", *cells, matrix])
        lines.append(["of 0", *[f"{content['target_mean_square']:.1e}"] * len(figures["sizes"]), 1.0])
        header = [name, *map(str, figures["sizes"]), f"matrix, {figures['sizes'][-1]}"]
        parts.append(table(header, lines))
    return (
        f"Mean square error of the attention output by number of features (L = {figures['length']}, d = {DIM}, median "
        f"of {figures['draws']} draws);\nlast column: relative error of the matrix"
        + "".join("\n\n" + part for part in parts)
    )


def plot(plt, figures):
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for axis, (name, content) in zip(axes.flat, figures["panels"].items()):
        for number, features in enumerate(ESTIMATORS):
            for kind, style in (("orthogonal", "-"), ("iid", ":")):
                found = [r for r in content["rows"] if (r["features"], r["rows"]) == (features, kind)]
                axis.plot(figures["sizes"], _relative(found, "mse", content), style, marker=".", color=f"C{number}")
                if kind == "orthogonal":
                    bounds = (_relative(found, key, content) for key in ("mse_25%", "mse_75%"))
                    axis.fill_between(figures["sizes"], *bounds, color=f"C{number}", alpha=0.12)
        axis.axhline(1, color="black", linestyle="--", linewidth=1)
        _cut_off(axis, content, figures["sizes"])
        axis.set(xscale="log", xlabel="features", title=name if "=" in name else f"real q, k, v of {name}")
        axis.set_xticks(figures["sizes"], [str(size) for size in figures["sizes"]])
        axis.minorticks_off()
    figure.supylabel("mean square error, relative to the answer 0")
    lines = [plt.Line2D([], [], color=f"C{number}") for number in range(len(ESTIMATORS))]
    lines += [plt.Line2D([], [], color="grey", linestyle=style) for style in ("-", ":")]
    lines.append(plt.Line2D([], [], color="black", linestyle="--"))
    figure.legend(lines, [*ESTIMATORS, "orthogonal", "iid", "answer 0"], loc="outside lower center", ncols=4)
    lengths = f"L = {figures['length']:,}, d = {DIM}; MiniLM: L = {figures['minilm']['length']}, d = 32"
    figure.suptitle(f"Random features of softmax attention: {lengths}")
    return figure


def _relative(rows, key: str, content) -> list[float]:
    return [row[key] / content["target_mean_square"] for row in rows]


def _cut_off(axis, content, sizes) -> None:
    """Limits in which the usable estimators can be told apart; what lies far above is named."""
    axis.set_yscale("log")
    limit = 10 * content["target_mean_square"]
    beyond = {row["features"] for row in content["rows"] if row["mse"] > limit and row["size"] == sizes[-1]}
    axis.set_ylim(min(_relative(content["rows"], "mse_25%", content)) / 2, 10 if beyond else 3)
    if beyond:
        axis.text(0.5, 0.94, f"{', '.join(sorted(beyond))}: off the chart", ha="center", transform=axis.transAxes)


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--length", type=int, default=4096, help="tokens of the synthetic panels")
    parser.add_argument("--draws", type=int, default=15, help="draws of data and projections")
    parser.add_argument("--minilm_draws", type=int, default=3, help="draws of projections on MiniLM")
    arguments = parser.parse_args(argv)
    sizes, minilm_length = SIZES, 512
    if arguments.quick:
        arguments.length, arguments.draws, arguments.minilm_draws = 256, 3, 1
        sizes, minilm_length = (16, 128), 64
    figures = run(arguments.length, arguments.draws, minilm_length, arguments.minilm_draws, sizes)
    write(report(figures))
    save_results(arguments, "performer_error", figures, plot)


if __name__ == "__main__":
    main()
