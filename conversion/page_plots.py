"""The geometry of the plots in report.html: every number is a coordinate, which the template only writes down.

Plots are 420 units wide, so that a text of 12 units can still be read on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


WIDTH, HEIGHT = 420.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 60.0, 14.0, 14.0, 46.0
# The styles of lines in the style sheet of the template; the first is that of the original.
STYLES = 6


@dataclass(frozen=True)
class Line:
    """One line of a chart: its `points` in the units of the data."""

    name: str
    points: Sequence[tuple[float, float]]
    style: int = 0


@dataclass(frozen=True)
class Chart:
    """Lines in an SVG: `ticks` are (coordinate, text), `lines` (name, style, points), `marks` (x, text, anchor)."""

    title: str
    description: str
    x_label: str
    y_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[tuple[str, int, list[tuple[float, float]]]]
    marks: list[tuple[float, str, str]]
    table: dict[str, Any]
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM


@dataclass(frozen=True)
class Axis:
    """The scale of one axis: the smallest and the largest value, linear or logarithmic (`log` is the base of ticks)."""

    least: float
    most: float
    log: int | None = None
    format: Callable[[float], str] = field(default=lambda value: f"{value:,.4g}")

    def place(self, value: float) -> float:
        """From 0 at the smallest value to 1 at the largest."""
        least, most, value = (math.log(x) if self.log else x for x in (self.least, self.most, value))
        return (value - least) / (most - least) if most > least else 0.5

    @property
    def ticks(self) -> list[float]:
        """At most seven round values: powers of the base, or of 1, 2 or 5 times a power of ten."""
        if self.log:
            first, last = (math.log(x, self.log) for x in (self.least, self.most))
            powers = range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1)
            if len(powers) > 2 or self.log != 10:
                return [float(self.log) ** power for power in powers[:: math.ceil(len(powers) / 6) or 1]]
            steps = [times * 10.0**power for power in range(math.floor(first), math.ceil(last)) for times in (1, 2, 5)]
            steps = [step for step in steps if self.least <= step <= self.most]
            if len(steps) > 1:
                return steps
        if self.most <= self.least:
            return [self.least]
        rough = (self.most - self.least) / 4
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough)
        first = math.ceil(self.least / step - 1e-9)
        return [step * number for number in range(first, math.floor(self.most / step + 1e-9) + 1)]


def style_of(number: int) -> int:
    """The style of the line with this number, from 1 on, beside the original."""
    return (number - 1) % (STYLES - 1) + 1


def grouped(value: float) -> str:
    """A number of tokens."""
    return f"{value:,.0f}"


def bytes_text(value: float) -> str:
    """A number of bytes in the unit that needs the fewest digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def line_chart(
    title: str,
    description: str,
    lines: Sequence[Line],
    labels: tuple[str, str],
    *,
    x_log: int | None = None,
    y_log: int | None = None,
    most_y: float = math.inf,
    marks: Sequence[tuple[float, str]] = (),
    formats: tuple[Callable[[float], str], Callable[[float], str]] = (grouped, "{:,.4g}".format),
    names: Mapping[float, str] | None = None,
) -> Chart:
    """A chart of those lines that have points; at least one has.

    Args:
        labels: of the x and the y axis.
        x_log: the base of a logarithmic scale; None for a linear one.
        most_y: values above this leave the plot at its top; the table has them.
        marks: vertical lines with a text, at values of x, which may widen the axis.
        formats: what writes the values of x and y.
        names: of values of x, for the table.
    """
    lines = [line for line in lines if line.points]
    xs = [x for line in lines for x, _ in line.points] + [x for x, _ in marks]
    ys = [min(y, most_y) for line in lines for _, y in line.points]
    margin = 0.0 if y_log else 0.08 * (max(ys) - min(ys))
    x_axis = Axis(min(xs), max(xs), x_log, formats[0])
    y_axis = Axis(min(ys) - margin, max(ys) + margin, y_log, formats[1])

    def x_of(value: float) -> float:
        return round(LEFT + x_axis.place(value) * (WIDTH - LEFT - RIGHT), 1)

    def y_of(value: float) -> float:
        return round(HEIGHT - BOTTOM - y_axis.place(value) * (HEIGHT - BOTTOM - TOP), 1)

    return Chart(
        title,
        description,
        *labels,
        [(x_of(tick), x_axis.format(tick)) for tick in x_axis.ticks],
        [(y_of(tick), y_axis.format(tick)) for tick in y_axis.ticks],
        [(line.name, line.style, [(x_of(x), y_of(y)) for x, y in line.points]) for line in lines],
        [(x_of(x), text, "end" if x_axis.place(x) > 0.5 else "start") for x, text in marks],
        _table(labels[0], lines, lambda x: (names or {}).get(x) or x_axis.format(x), y_axis.format),
    )


def _table(
    label: str, lines: Sequence[Line], x_text: Callable[[float], str], y_text: Callable[[float], str]
) -> dict[str, Any]:
    values = [dict(line.points) for line in lines]
    xs = sorted({x for column in values for x in column})
    rows = [[x_text(x), *(y_text(column[x]) if x in column else "" for column in values)] for x in xs]
    return {"header": [label, *(line.name for line in lines)], "rows": rows}
