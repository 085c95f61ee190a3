"""The picture of recall against bytes, from the figures of `papers/recall_bytes.py`.

    python -m benchmarks.plot_recall_bytes [outputs/benchmarks/recall_bytes.json]

It reads docs/images/recall_bytes.json, or takes the figures of a result and keeps them there first, and writes
docs/images/recall_bytes.svg.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.plot_quick_start import IMAGES, new_figure, save


NAME = "recall_bytes"
KEPT = IMAGES / f"{NAME}.json"
PANELS = {
    "mqar": "32 pairs, percent right",
    "copying": "24 symbols copied, percent right",
    "recall": "text: nats of rare words seen 128 to 255 tokens before",
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
LOWEST, TOP = 1.8, 2.6  # nats


def keep(result: dict) -> None:
    """Write what the picture shows."""
    kept = {
        key: {
            "teacher": found["teacher"][key],
            "rows": [
                [row["form"], row["share"], row["figures"][key]["own"], row["figures"][key]["off"]]
                for row in found["rows"]
            ],
        }
        for found in result["tasks"].values()
        for key in PANELS.keys() & found["teacher"].keys()
    }
    KEPT.write_text(json.dumps({key: kept[key] for key in PANELS if key in kept}, indent=1) + "\n", encoding="utf-8")


def plot(kept: dict):
    """The figure: a panel per task, a line per form, dotted with its memory off, and a mark per mixture."""
    figure, panels = new_figure(NAME, 13, 4.4, len(kept))
    for axes, (key, found) in zip(panels, kept.items(), strict=True):
        for form, color in LINES.items():
            for number, style in ((2, "-"), (3, ":")):
                points = sorted((row[1], row[number]) for row in found["rows"] if row[0] == form)
                label = form if style == "-" else None
                axes.plot(*zip(*points), style, color=color, label=label, marker="." if label else None)
        for form, (mark, color) in MARKS.items():
            points = [(row[1], row[2]) for row in found["rows"] if row[0] == form]
            if points:
                axes.plot(*zip(*points), mark, color=color, label=form, markerfacecolor="white", markersize=8)
        axes.axhline(found["teacher"], color="black", linewidth=1, label="softmax teacher")
        shares = sorted({row[1] for row in found["rows"]})
        axes.set_xscale("log", base=2)
        axes.set_xticks(shares, [f"{share:.3g}" for share in shares], minor=False)
        if key == "recall":
            axes.set_ylim(LOWEST, TOP)
        axes.set_title(PANELS[key], fontsize=10)
        axes.set_xlabel("share of the bytes of all keys and values")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def main() -> None:
    """Keep the figures of a result, if one is given, and draw the picture."""
    if len(sys.argv) > 1:
        keep(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    save(plot(json.loads(KEPT.read_text(encoding="utf-8"))), NAME)


if __name__ == "__main__":
    main()
