"""The pictures of the documentation, docs/images/*.svg, from benchmarks/results and the figures of the quick start.

    python -m benchmarks.plots [OUT/conversion_report.json]

`quick_start` has nats per token by position: it reads docs/images/quick_start.json, or takes the figures of a
conversion's report and keeps them there first. `real_decoder` has what a real model loses by position: it reads
docs/images/real_decoder.json, rows of `benchmarks.real --output`, where shorter texts have fewer ranges. `recall_bytes`
and `steps` (a token's time against the context) show the results of these benchmarks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import ROOT
from benchmarks.papers.recall_bytes import KEPT_LAYER, fraction


IMAGES, RESULTS = ROOT / "docs" / "images", ROOT / "benchmarks" / "results"
KEPT = IMAGES / "quick_start.json"
# What of the report's figures of quality is kept.
QUALITY = ("teacher", "student", "agreement", "kl", "window_alone", "same_bytes", "control", "targets", "positions")
POSITIONS = {
    "teacher": ("original (softmax)", "#d95f02", "-"),
    "same_bytes": ("untrained window, same bytes", "#888888", "--"),
    "student": ("converted (linear)", "#1f4e9c", "-"),
}
# Sizes of states in tokens, in the order of the results.
STATES = {2048: "#1f4e9c", 512: "#2a9d5c"}
TOP = 2.0  # nats; what lies above is written as a number
# By the names of the figures in the results.
PANELS = {
    "mqar": "32 pairs, percent right",
    "copying": "24 symbols copied, percent right",
}
FORMS = {
    "sinks, window, exact keys": "#1f4e9c",
    "window": "#888888",
    "linear exp": "#2a9d5c",
    "gated_delta": "#d95f02",
    "window, features": "#7fb2e5",
}
METHODS = {"softmax": "#888888", "default": "#1f4e9c", "linear elu1": "#2a9d5c", "linear exp": "#d95f02"}


def keep(report: dict) -> None:
    """Write what the picture and the text of the documentation quote."""
    quality = {name: report["quality"][name] for name in (*QUALITY, "recall")}
    about = {name: report[name] for name in ("versions", "settings", "state_bytes")}
    KEPT.write_text(json.dumps({**about, "quality": quality}, indent=1) + "\n", encoding="utf-8")


def new_figure(name: str, width: float, height: float, panels: int = 1):
    """A white figure for `save`, and its axes: one, or an array of so many side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 11})
    figure, axes = plt.subplots(ncols=panels, figsize=(width, height), layout="constrained")
    figure.patch.set_facecolor("white")
    return figure, axes


def save(figure, name: str) -> None:
    """Write docs/images/NAME.svg, which is the same file for the same figures."""
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


def quick_start(positions: dict):
    """The figure: a step per range of positions, on a logarithmic axis."""
    buckets = [bucket for bucket in positions["buckets"] if bucket["from"] >= 64]
    edges = [*(bucket["from"] for bucket in buckets), buckets[-1]["to"]]
    figure, axes = new_figure("quick_start", 7.5, 3.6)
    for name, (label, color, style) in POSITIONS.items():
        values = [bucket[name] for bucket in buckets]
        axes.stairs(values, edges, baseline=None, label=label, color=color, linewidth=2.2, linestyle=style)
        for bucket in (bucket for bucket in buckets if bucket[name] > TOP):
            axes.text(bucket["from"] * 1.05, TOP - 0.05, f"{bucket[name]:.1f} ↑", color=color)
    axes.set_ylim(1.2, TOP)
    axes.axvline(positions["trained_length"], color="#444444", linestyle=":", linewidth=1)
    axes.text(positions["trained_length"] * 0.96, 1.9, "the original was trained to here", fontsize=9, ha="right")
    axes.set_xscale("log", base=2)
    axes.set_xticks(edges, [f"{edge:,}" for edge in edges])
    axes.set(xlabel="position of the token", ylabel="nats per token (lower is better)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left")
    return figure


def real_decoder(rows: list[dict]):
    """The figure: nats above the original by range of positions, a color for each size of state."""
    names = [name for name in rows[0] if "-" in name and int(name.partition("-")[0]) >= 256]
    edges = [int(name.partition("-")[0]) for name in names] + [1 + int(names[-1].partition("-")[2])]
    figure, axes = new_figure("real_decoder", 7.5, 3.6)
    pairs = zip(rows[1::2], rows[2::2], STATES.items(), strict=True)
    for window, student, (tokens, color) in pairs:
        for row, label, style in ((window, "untrained window", "--"), (student, "converted", "-")):
            lost = [row[name] - rows[0][name] for name in names if name in row]
            look = {"label": f"{label}, {tokens:,} tokens", "color": color, "linestyle": style, "linewidth": 2.2}
            axes.stairs(lost, edges[: len(lost) + 1], baseline=None, **look)
    axes.axhline(0, color=POSITIONS["teacher"][1], linewidth=1.5, label="original")
    axes.set_xscale("log", base=2)
    axes.set_xticks(edges, [f"{edge:,}" for edge in edges])
    axes.set(xlabel="position of the token", ylabel="nats per token above the original")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    return figure


def points(task: dict, form: str, key: str, which: str = "own") -> tuple[list[float], list[list[float]]]:
    """The shares of a form, and the figures of all its seeds at each."""
    found: dict[float, list[float]] = {}
    for row in task["rows"]:
        if row["form"] == form:
            found.setdefault(row["share"], []).append(row["figures"][key][which])
    return sorted(found), [found[share] for share in sorted(found)]


def recall_bytes(tasks: dict):
    """The figure: a panel per task, a line per form, dotted with its memory off, and marks for a kept layer.

    Lines are means over the seeds, and shades reach from the lowest to the highest.
    """
    found = {key: task for task in tasks.values() for key in task["teacher"] if key in PANELS}
    figure, panels = new_figure("recall_bytes", 10, 4.6, len(found))
    for axes, (key, task) in zip(panels, found.items(), strict=True):
        there = {row["form"] for row in task["rows"]}
        for form, color in ((form, color) for form, color in FORMS.items() if form in there):
            shares, own = points(task, form, key)
            axes.plot(shares, list(map(fmean, own)), ".-", color=color, label=form)
            axes.fill_between(shares, list(map(min, own)), list(map(max, own)), color=color, alpha=0.15, linewidth=0)
            axes.plot(shares, list(map(fmean, points(task, form, key, "off")[1])), ":", color=color)
        shares, own = points(task, KEPT_LAYER, key)
        look = {"color": FORMS["linear exp"], "markerfacecolor": "white", "markersize": 8}
        axes.plot(shares, list(map(fmean, own)), "D", label=KEPT_LAYER, **look)
        axes.axhline(task["teacher"][key], color="black", linewidth=1, label="softmax teacher")
        shares = sorted({row["share"] for row in task["rows"]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(shares, list(map(fraction, shares)))
        axes.set(title=PANELS[key], xlabel="share of the bytes of all keys and values")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def steps(times: dict[str, dict[str, float]]):
    """The figure: a panel per model, a line per method, from the milliseconds by `MODEL, CONTEXT` and method."""
    panels: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for column, found in times.items():
        model, _, context = column.partition(", ")
        panels.setdefault(model, []).append((int(context.replace(",", "")), found))
    figure, drawn = new_figure("steps", 8, 4.2, len(panels))
    for axes, (model, points) in zip(drawn, panels.items(), strict=True):
        for method, color in METHODS.items():
            axes.plot(*zip(*((context, found[method]) for context, found in points)), ".-", color=color, label=method)
        axes.set(xscale="log", yscale="log", title=model, xlabel="tokens of context", ylabel="CPU ms a token")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*drawn[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    """Keep the figures of a report, if one is given, and draw the pictures."""
    if len(sys.argv) > 1:
        keep(read(Path(sys.argv[1])))
    save(quick_start(read(KEPT)["quality"]["positions"]), "quick_start")
    save(real_decoder(read(IMAGES / "real_decoder.json")["rows"]), "real_decoder")
    save(recall_bytes(read(RESULTS / "recall_bytes.json")["tasks"]), "recall_bytes")
    save(steps(read(RESULTS / "speed.json")["milliseconds"]["steps"]), "steps")


if __name__ == "__main__":
    main()
