"""The picture of recall against bytes: docs/images/recall_bytes.svg, from benchmarks/results/recall_bytes.json.

python -m benchmarks.plot_recall_bytes
"""

from __future__ import annotations

import json
from statistics import fmean

from benchmarks.common import ROOT
from benchmarks.papers.recall_bytes import fraction
from benchmarks.plot_quick_start import new_figure, save


NAME = "recall_bytes"
# By the names of the figures in the results.
PANELS = {
    "mqar": "32 pairs, percent right",
    "copying": "24 symbols copied, percent right",
}
LINES = {
    "sinks, window, exact keys": "#1f4e9c",
    "window": "#888888",
    "linear exp": "#2a9d5c",
    "gated_delta": "#d95f02",
    "window, features": "#7fb2e5",
}
MARKS = {
    "kept head, linear exp": ("^", "#2a9d5c"),
    "2 kept heads, linear exp": ("s", "#2a9d5c"),
    "kept layer, linear exp": ("D", "#2a9d5c"),
    "kept head, gated_delta": ("^", "#d95f02"),
    "kept head, window, exact keys": ("^", "#1f4e9c"),
}


def points(task: dict, form: str, key: str, which: str = "own") -> tuple[list[float], list[list[float]]]:
    """The shares of a form, and the figures of all its seeds at each."""
    found: dict[float, list[float]] = {}
    for row in task["rows"]:
        if row["form"] == form:
            found.setdefault(row["share"], []).append(row["figures"][key][which])
    return sorted(found), [found[share] for share in sorted(found)]


def plot(tasks: dict):
    """The figure: a panel per task, a line per form, dotted with its memory off, and a mark per mixture.

    Lines are means over the seeds, and shades reach from the lowest to the highest.
    """
    found = {key: task for task in tasks.values() for key in task["teacher"] if key in PANELS}
    figure, panels = new_figure(NAME, 10, 4.6, len(found))
    for axes, (key, task) in zip(panels, found.items(), strict=True):
        there = {row["form"] for row in task["rows"]}
        for form, color in ((form, color) for form, color in LINES.items() if form in there):
            shares, own = points(task, form, key)
            axes.plot(shares, list(map(fmean, own)), ".-", color=color, label=form)
            axes.fill_between(shares, list(map(min, own)), list(map(max, own)), color=color, alpha=0.15, linewidth=0)
            axes.plot(shares, list(map(fmean, points(task, form, key, "off")[1])), ":", color=color)
        for form, (mark, color) in ((form, look) for form, look in MARKS.items() if form in there):
            shares, own = points(task, form, key)
            axes.plot(
                shares, list(map(fmean, own)), mark, color=color, label=form, markerfacecolor="white", markersize=8
            )
        axes.axhline(task["teacher"][key], color="black", linewidth=1, label="softmax teacher")
        shares = sorted({row["share"] for row in task["rows"]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(shares, list(map(fraction, shares)))
        axes.set(title=PANELS[key], xlabel="share of the bytes of all keys and values")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def main() -> None:
    """Draw the picture."""
    result = json.loads((ROOT / "benchmarks" / "results" / f"{NAME}.json").read_text(encoding="utf-8"))
    save(plot(result["tasks"]), NAME)


if __name__ == "__main__":
    main()
