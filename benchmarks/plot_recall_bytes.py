"""The picture of recall against bytes: docs/images/recall_bytes.svg, from benchmarks/results/recall_bytes.json.

python -m benchmarks.plot_recall_bytes
"""

from __future__ import annotations

import json

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


def points(task: dict, form: str, key: str, which: str = "own") -> list:
    """The coordinates of a form's points: shares, and figures."""
    found = {row["share"]: row["figures"][key][which] for row in task["rows"] if row["form"] == form}
    return [sorted(found), [found[share] for share in sorted(found)]]


def plot(tasks: dict):
    """The figure: a panel per task, a line per form, dotted with its memory off, and a mark per mixture."""
    found = {key: task for task in tasks.values() for key in task["teacher"] if key in PANELS}
    figure, panels = new_figure(NAME, 10, 4.6, len(found))
    for axes, (key, task) in zip(panels, found.items(), strict=True):
        for form, color in LINES.items():
            axes.plot(*points(task, form, key), ".-", color=color, label=form)
            axes.plot(*points(task, form, key, "off"), ":", color=color)
        for form, (mark, color) in MARKS.items():
            axes.plot(*points(task, form, key), mark, color=color, label=form, markerfacecolor="white", markersize=8)
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
