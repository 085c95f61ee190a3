"""The picture of a token's time against the context: docs/images/steps.svg, from benchmarks/results/speed.json.

python -m benchmarks.plot_steps
"""

from __future__ import annotations

import json

from benchmarks.common import ROOT
from benchmarks.plot_quick_start import new_figure, save


NAME = "steps"
LINES = {"softmax": "#888888", "default": "#1f4e9c", "linear elu1": "#2a9d5c", "linear exp": "#d95f02"}


def plot(steps: dict[str, dict[str, float]]):
    """The figure: a panel per model, a line per method, from the milliseconds by `MODEL, CONTEXT` and method."""
    panels: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for column, found in steps.items():
        model, _, context = column.partition(", ")
        panels.setdefault(model, []).append((int(context.replace(",", "")), found))
    figure, drawn = new_figure(NAME, 8, 4.2, len(panels))
    for axes, (model, points) in zip(drawn, panels.items(), strict=True):
        for method, color in LINES.items():
            axes.plot(*zip(*((context, found[method]) for context, found in points)), ".-", color=color, label=method)
        axes.set(xscale="log", yscale="log", title=model, xlabel="tokens of context", ylabel="CPU ms a token")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*drawn[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def main() -> None:
    """Draw the picture."""
    result = json.loads((ROOT / "benchmarks" / "results" / "speed.json").read_text(encoding="utf-8"))
    save(plot(result["milliseconds"]["steps"]), NAME)


if __name__ == "__main__":
    main()
