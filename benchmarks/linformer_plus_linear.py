"""Linformer inside linear attention: the formula often written down, the valid one, and what either is worth.

    python benchmarks/linformer_plus_linear.py --output_dir outputs/benchmarks

    slides   Phi(Q) [(E Phi(K))^T (F V)] / Phi(Q) sum Phi(K)                  any E, F
    valid    Phi(Q) [(E Phi(K))^T (F V)] / Phi(Q) [(E Phi(K))^T (F 1)]        E, F >= 0    (`linformer_linear`)
    linear   Phi(Q) [Phi(K)^T V] / Phi(Q) sum Phi(K)                          no E, F

On the queries, keys and values of every head of the real MiniLM with Phi = elu + 1: the sums of the weights of a query,
the share of negative weights, the relative error to softmax attention, and times relative to linear attention. Under a
minute on two cores.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # the oracles

import reference
import torch

from benchmarks.common import argument_parser, interleaved_times, median_ratio, save_results, table, write
from benchmarks.real_attention import (
    Heads,
    add_text_argument,
    build_mechanism,
    minilm_heads,
    read_text,
    relative_errors,
)
from hf_linear_attention.features import elu_plus_one
from hf_linear_attention.mechanism_linformer import mean_pool_matrix


SIZES = (32, 64, 128, 256)
TIMED_LENGTHS = (512, 2048, 8192)
TIMED_SIZE = 128
LINES = (("slides", "mean-pool"), ("slides", "gaussian"), ("valid", "mean-pool"), ("valid", "|gaussian|"))


def projections(kind: str, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E and F `[size, length]`: segment means, or Gaussian of variance 1 / size as in Linformer's proof."""
    if kind == "mean-pool":
        pool = mean_pool_matrix(size, length).double()
        return pool, pool
    generator = torch.Generator().manual_seed(size)
    first, second = (torch.randn(size, length, generator=generator, dtype=torch.float64) for _ in range(2))
    return first / size**0.5, second / size**0.5


def slides_weights(heads: Heads, compress, gather) -> torch.Tensor:
    query, key, *_ = heads
    identity = torch.eye(key.shape[2], dtype=key.dtype).expand(*key.shape[:3], -1)
    return reference.linformer_linear_slides(elu_plus_one(query), elu_plus_one(key), identity, compress, gather)


@torch.no_grad()
def valid_weights(heads: Heads, compress, gather) -> torch.Tensor:
    """Of the mechanism itself, whose E and F are the absolute values of these."""
    options = {"feature_map": "elu1", "projection_size": compress.shape[0]}
    mechanism = build_mechanism("linformer_linear", heads.shape(), **options).double()
    mechanism.key_projection.copy_(compress)
    mechanism.value_projection.copy_(gather)
    return mechanism.attention_weights(heads.query, heads.key, attention_mask=None, scaling=1.0, is_causal=False)


def linear_weights(heads: Heads, *_) -> torch.Tensor:
    weights = elu_plus_one(heads.query) @ elu_plus_one(heads.key).transpose(-1, -2)
    return weights / weights.sum(dim=-1, keepdim=True)


FORMS: dict[str, Callable[..., torch.Tensor]] = {"slides": slides_weights, "valid": valid_weights}


def measure(layers: list[Heads], form: Callable[..., torch.Tensor], *matrices) -> dict[str, float]:
    """Means over all heads; quantiles over all queries."""
    sums, negative, errors = [], [], []
    for heads in layers:
        weights = form(heads, *matrices)
        sums.append(weights.sum(dim=-1).flatten())
        negative.append((weights < 0).double().mean())
        errors.append(relative_errors(weights @ heads.value, heads.softmax_output()))
    low, median, high = torch.cat(sums).quantile(torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
    return {
        "row_sum_5%": low,
        "row_sum_median": median,
        "row_sum_95%": high,
        "negative_share": torch.stack(negative).mean().item(),
        "error": torch.cat(errors).mean().item(),
    }


def forms_to_time(length: int, size: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The same plain products in float32 for each form, 12 heads of 32."""
    query, key, value = (torch.randn(1, 12, length, 32) for _ in range(3))
    compress, gather = (matrix.float() for matrix in projections("mean-pool", size, length))
    ones = torch.ones(*value.shape[:3], 1)

    def normalized(keys, values):
        sums = elu_plus_one(query) @ (keys.transpose(-1, -2) @ values)
        return sums[..., :-1] / sums[..., -1:]

    def linear():
        return normalized(elu_plus_one(key), torch.cat((value, ones), dim=-1))

    def slides():
        queries, keys = elu_plus_one(query), elu_plus_one(key)
        numerator = queries @ ((compress @ keys).transpose(-1, -2) @ (gather @ value))
        return numerator / (queries @ keys.sum(dim=2).unsqueeze(-1))

    def valid():
        return normalized(compress @ elu_plus_one(key), gather @ torch.cat((value, ones), dim=-1))

    return {"linear": linear, "slides": slides, "valid": valid}


def timed(length: int, size: int) -> dict[str, dict[str, float]]:
    """Milliseconds, and the ratio to linear attention, of each form."""
    times = interleaved_times(forms_to_time(length, size))
    return {
        name: {"ms": 1000 * statistics.median(values), "over_linear": median_ratio(values, times["linear"])}
        for name, values in times.items()
    }


def run(text: str, length: int, sizes, timed_lengths) -> dict[str, Any]:
    layers = [heads.double() for heads in minilm_heads(text, length, 1)[0]]
    rows = [{"form": "linear", "projection": None, "k": None, **measure(layers, linear_weights)}]
    for kind in ("mean-pool", "gaussian"):
        for size in sizes:
            matrices = projections(kind, size, length)
            for name, form in FORMS.items():
                label = "|gaussian|" if (kind, name) == ("gaussian", "valid") else kind
                rows.append({"form": name, "projection": label, "k": size, **measure(layers, form, *matrices)})
    times = {str(number): timed(number, TIMED_SIZE) for number in timed_lengths}
    return {"length": length, "sizes": list(sizes), "rows": rows, "times": times}


def conclusion(figures: dict[str, Any]) -> str:
    """One paragraph, from the figures."""
    rows, sizes, times = figures["rows"], figures["sizes"], figures["times"]
    size, longest = sizes[len(sizes) // 2], list(times)[-1]
    pooled = next(row for row in rows if (row["form"], row["projection"], row["k"]) == ("slides", "mean-pool", size))
    negative = max(row["negative_share"] for row in rows if row["form"] == "slides")
    best = min((row for row in rows if row["form"] == "valid"), key=lambda row: row["error"])
    linear, ratio = rows[0]["error"], times[longest]["valid"]["over_linear"]
    worth = "a gain" if best["error"] < 0.99 * linear and ratio < 1 else "no gain"
    return (
        f"The slides' weights sum to {pooled['row_sum_median']:.2f} instead of 1 (mean-pool, k = {size}, n = "
        f"{figures['length']}) and up to {100 * negative:.0f} % of them are negative; the valid form's sum to 1 and "
        f"none is. Its best error is {best['error']:.3f} (k = {best['k']}) against {linear:.3f} of linear attention "
        f"alone, in {ratio:.1f}x its time at n = {longest}: {worth}."
    )


def report(figures: dict[str, Any]) -> str:
    header = ["", "E, F", "k", "row sums 5 %", "median", "95 %", "negative", "error"]
    rows = [
        [
            row["form"],
            row["projection"],
            row["k"],
            *(row[f"row_sum_{part}"] for part in ("5%", "median", "95%")),
            f"{100 * row['negative_share']:.1f} %",
            row["error"],
        ]
        for row in figures["rows"]
    ]
    times = [
        [f"n = {length}", *(f"{found[name]['over_linear']:.2f}x" for name in FORMS), found["linear"]["ms"]]
        for length, found in figures["times"].items()
    ]
    return (
        f"Heads of MiniLM, n = {figures['length']}\n\n{table(header, rows)}\n\n"
        f"Time relative to linear attention, k = {TIMED_SIZE}, 12 heads of 32\n\n"
        f"{table(['', *FORMS, 'linear, ms'], times)}\n\n{conclusion(figures)}"
    )


def plot(plt, figures):
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    rows, sizes = figures["rows"], figures["sizes"]
    lines = []
    for number, (form, kind) in enumerate(LINES):
        found = [row for row in rows if (row["form"], row["projection"]) == (form, kind)]
        marks = {"marker": "o", "markersize": 8} if kind == "mean-pool" else {"marker": "s", "markersize": 4}
        style = {"linestyle": "--" if form == "slides" else "-", "color": f"C{number}", **marks}
        left.plot(sizes, [row["row_sum_median"] for row in found], label=f"{form}: {kind} E and F", **style)
        around = ([row[f"row_sum_{part}"] for row in found] for part in ("5%", "95%"))
        left.fill_between(sizes, *around, alpha=0.15, color=f"C{number}")
        lines += right.plot(sizes, [row["error"] for row in found], label=f"{form}: {kind} E and F", **style)
    lines.append(right.axhline(rows[0]["error"], color="black", linestyle=":", label="linear attention alone"))
    lines.append(right.axhline(1, color="grey", linewidth=1, label="the answer 0"))
    left.set(title="Sum of a query's weights: median, 5 to 95 %", ylabel="sum (1 for an average)")
    right.set(title="Relative error to softmax attention", ylim=(0, None))
    for axis in (left, right):
        axis.set(xlabel="k (rows of E and F)", xscale="log")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
    figure.legend(handles=lines, loc="outside lower center", ncols=3)
    figure.suptitle(f"Linformer inside linear attention: heads of MiniLM, {figures['length']} tokens")
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    add_text_argument(parser)
    parser.add_argument("--length", type=int, default=512, help="tokens, at most the 512 that MiniLM takes")
    arguments = parser.parse_args(argv)
    sizes, timed_lengths = SIZES, TIMED_LENGTHS
    if arguments.quick:
        arguments.length, sizes, timed_lengths = 96, (16, 64), (256,)
    figures = run(read_text(arguments), arguments.length, sizes, timed_lengths)
    figures["conclusion"] = conclusion(figures)
    write(report(figures))
    save_results(arguments, "linformer_plus_linear", figures, plot)


if __name__ == "__main__":
    main()
