"""The picture of the README: nats per token by position, from the figures of the quick start.

    python benchmarks/plot_quick_start.py [OUT/conversion_report.json]

It reads docs/images/quick_start.json, or takes the figures of a conversion's report and keeps them there first, and
writes docs/images/quick_start.svg.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
KEPT = IMAGES / "quick_start.json"
# What of the report's figures of quality is kept.
QUALITY = ("teacher", "student", "agreement", "kl", "window_alone", "same_bytes", "control", "targets", "positions")
LINES = {
    "teacher": ("original (softmax)", "#d95f02", "-"),
    "same_bytes": ("untrained window, same bytes", "#888888", "--"),
    "student": ("converted (linear)", "#1f4e9c", "-"),
}
TOP = 2.0  # nats; what lies above is written as a number


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


def plot(positions: dict):
    """The figure: a step per range of positions, on a logarithmic axis."""
    buckets = [bucket for bucket in positions["buckets"] if bucket["from"] >= 64]
    edges = [*(bucket["from"] for bucket in buckets), buckets[-1]["to"]]
    figure, axes = new_figure("quick_start", 7.5, 3.6)
    for name, (label, color, style) in LINES.items():
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


def main() -> None:
    """Keep the figures of a report, if one is given, and draw the picture."""
    if len(sys.argv) > 1:
        keep(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    positions = json.loads(KEPT.read_text(encoding="utf-8"))["quality"]["positions"]
    save(plot(positions), "quick_start")


if __name__ == "__main__":
    main()
