"""How near is each mechanism to the softmax that it replaces, before any training?

    python benchmarks/training_free_swap.py --output_dir outputs/benchmarks

Relative error of the head outputs (mean over the layers and heads of the real MiniLM, 512 tokens of Python's
documentation) for every mechanism that serves encoders and every first choice it offers, at 32 to 1024 features, slots,
landmarks, latents, or tokens of a window to each side. Beside them the best matrix of that rank (truncated SVD), the
mean of the values, and the float64 formulas of Nystromformer and Linformer, which ours must equal. Another text
(`--text_file`) gives other errors. Five minutes on one core.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # the oracles

import reference
import torch
import torch.nn.functional as F

from benchmarks.common import argument_parser, save_results, table, write
from benchmarks.real_attention import (
    Heads,
    add_text_argument,
    build_mechanism,
    mechanism_output,
    minilm_heads,
    read_text,
    relative_errors,
)
from hf_linear_attention.mechanisms import MECHANISMS


SIZES = (32, 64, 128, 256, 512, 1024)
# The option that says how much a mechanism may store; one without any of them has a single figure. `hybrid` has a
# window besides its features, and untrained features hardly move it.
SIZE_OPTIONS = ("num_features", "num_landmarks", "num_latents", "projection_size")
SIZE_OPTION_OF = {"hybrid": "window_size"}
PLOTTED = (
    "nystrom",
    "hybrid exp",
    "linformer mean-pool",
    "latent",
    "performer exp",
    "performer favor++",
    "performer relu",
    "linear exp",
)


def variants() -> Iterator[tuple[str, str, dict[str, Any], str | None]]:
    """`(row, mechanism, settings, size option)` for all that the registry has for encoders."""
    for name, mechanism in MECHANISMS.items():
        if not mechanism.supports_bidirectional:
            continue
        sizes = (option for option in SIZE_OPTIONS if option in mechanism.options)
        size = SIZE_OPTION_OF.get(name) or next(sizes, None)
        defaults = {key: option.default for key, option in mechanism.options.items()}
        usable = {
            key: [x for x in option.choices if mechanism.supports("bidirectional", {**defaults, key: x})]
            for key, option in mechanism.options.items()
        }
        choosing = next((key for key, choices in usable.items() if len(choices) > 1), None)
        if choosing is None:
            yield name, name, {}, size
            continue
        for choice in usable[choosing]:
            yield f"{name} {choice}", name, {choosing: choice}, size


def sized(name: str, settings: dict[str, Any], size: str | None, sizes, shape) -> dict[int | None, dict[str, Any]]:
    """`{size: settings}`; a mechanism, or feature map, without a choice of size has one entry, None."""
    result: dict[int | None, dict[str, Any]] = {}
    for number in sizes if size else ():
        try:
            build_mechanism(name, shape, **settings, **{size: number})
        except ValueError:  # this feature map, or this length, does not take that number
            continue
        result[number] = {**settings, size: number}
    return result or {None: settings}


def error_of(layers: list[Heads], exact: list[torch.Tensor], fitting: list[Heads], name: str, settings) -> float:
    """Mean over layers and heads. `fitting` is another text, for mechanisms that calibrate constants."""
    errors = []
    for number, (heads, target, other) in enumerate(zip(layers, exact, fitting)):
        mechanism = build_mechanism(name, heads.shape(number), **settings)
        mechanism.calibrate(other.query, other.key, attention_mask=None, scaling=other.scaling)
        errors.append(relative_errors(mechanism_output(mechanism, heads), target))
    return torch.cat(errors).mean().item()


def low_rank(heads: Heads, size: int, factors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The output of the best matrix of rank `size`."""
    left, values, right = factors
    return (left[..., :size] * values[..., None, :size]) @ (right[..., :size, :] @ heads.value)


def textbook_nystrom(heads: Heads, size: int) -> torch.Tensor:
    query, key, value, scaling = heads
    return reference.nystrom(query, key, value, size, 6, scaling)


def textbook_linformer(heads: Heads, size: int) -> torch.Tensor:
    query, key, value, scaling = heads
    segment = torch.arange(key.shape[2]) * size // key.shape[2]
    pool = F.one_hot(segment, size).T[None].double()
    pool = pool / pool.sum(dim=-1, keepdim=True)
    return reference.linformer(query, key, value, pool, pool, scaling)


def comparisons(layers: list[Heads], exact: list[torch.Tensor], sizes) -> dict[tuple[str, int | None], float]:
    """What no matrix of rank k can beat, what needs no attention at all, and the float64 formulas of two papers."""
    errors: dict[tuple[str, int | None], list[torch.Tensor]] = {}

    def compare(row: str, size: int | None, output: torch.Tensor, target: torch.Tensor) -> None:
        errors.setdefault((row, size), []).append(relative_errors(output.float(), target))

    for heads, target in zip(layers, exact):
        factors = torch.linalg.svd(heads.weights())
        for size in (size for size in sizes if size < heads.key.shape[2]):
            compare("truncated SVD", size, low_rank(heads, size, factors), target)
            compare("textbook Nystromformer", size, textbook_nystrom(heads, size), target)
            compare("textbook Linformer, mean-pool", size, textbook_linformer(heads, size), target)
        compare("mean of the values", None, heads.value.mean(dim=2, keepdim=True), target)
    return {key: torch.cat(found).mean().item() for key, found in errors.items()}


def run(text: str, num_texts: int, length: int, sizes) -> dict[str, Any]:
    fitting, *texts = minilm_heads(text, length, num_texts + 1)
    shape = fitting[0].shape()
    configurations = [
        (row, name, size, settings)
        for row, name, base, option in variants()
        for size, settings in sized(name, base, option, sizes, shape).items()
    ]
    errors: dict[tuple[str, int | None], list[float]] = {}
    for layers in texts:
        exact = [heads.softmax_output() for heads in layers]
        for key, error in comparisons(layers, exact, sizes).items():
            errors.setdefault(key, []).append(error)
        for row, name, size, settings in configurations:
            errors.setdefault((row, size), []).append(error_of(layers, exact, fitting, name, settings))
    rows = [
        {
            "row": row,
            "size": size,
            "error": statistics.mean(values),
            "lowest": min(values),
            "highest": max(values),
        }
        for (row, size), values in errors.items()
    ]
    return {"length": length, "texts": num_texts, "rows": rows}


def report(figures: dict[str, Any]) -> str:
    rows = figures["rows"]
    sizes = sorted({row["size"] for row in rows if row["size"]})
    lines = []
    for name in dict.fromkeys(row["row"] for row in rows):
        found = {row["size"]: row for row in rows if row["row"] == name}
        lines.append([name, *(found[size]["error"] if size in found else None for size in (*sizes, None))])
        if figures["texts"] > 1:
            ranges = {size: f"{row['lowest']:.2f}-{row['highest']:.2f}" for size, row in found.items()}
            lines.append(["    texts", *(ranges.get(size) for size in (*sizes, None))])
    return (
        f"Relative error of head outputs, MiniLM, n = {figures['length']}, mean of {figures['texts']} texts "
        "(`texts`: lowest to highest)\n\n" + table(["", *(str(size) for size in sizes), "one size"], lines)
    )


def plot(plt, figures):
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    rows = figures["rows"]
    for name in ("truncated SVD", *PLOTTED):
        found = [row for row in rows if row["row"] == name and row["size"] and row["error"] > 1e-5]  # else: exact
        if not found:
            continue
        style = {"color": "black", "linestyle": ":", "label": "best possible at this rank"}
        (line,) = axis.plot(
            [row["size"] for row in found],
            [row["error"] for row in found],
            marker="o",
            **(style if name == "truncated SVD" else {"label": f"{name} (window)" if "hybrid" in name else name}),
        )
        bounds = ([row[key] for row in found] for key in ("lowest", "highest"))
        axis.fill_between([row["size"] for row in found], *bounds, alpha=0.15, color=line.get_color())
    mean = next(row["error"] for row in rows if row["row"] == "mean of the values")
    axis.axhline(mean, color="grey", linestyle="--", linewidth=1, label="mean of the values: no attention at all")
    sizes = sorted({row["size"] for row in rows if row["size"]})
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    xlabel = "features, slots, landmarks, latents or window (to each side)"
    axis.set(xlabel=xlabel, ylabel="relative error of head outputs", ylim=(0, 1.1))
    axis.set_title(f"Softmax swapped without training: MiniLM, {figures['length']} tokens")
    axis.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def main(argv: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    add_text_argument(parser)
    parser.add_argument("--texts", type=int, default=5, help="stretches of text to average over")
    parser.add_argument("--length", type=int, default=512, help="tokens, at most the 512 that MiniLM takes")
    arguments = parser.parse_args(argv)
    sizes = SIZES
    if arguments.quick:
        arguments.texts, arguments.length, sizes = 1, 160, (16, 64)
    figures = run(read_text(arguments), arguments.texts, arguments.length, sizes)
    write(report(figures))
    save_results(arguments, "training_free_swap", figures, plot)


if __name__ == "__main__":
    main()
