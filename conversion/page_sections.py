"""The sections of report.html: each is made from entries of the reports, and left out if these are not there."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_linear_attention._common.model_card import format_value
from hf_linear_attention.conversion.earlier_figures import EARLIER
from hf_linear_attention.conversion.figure_tables import COLUMNS, comparison, data_notes, quality_rows
from hf_linear_attention.conversion.page_plots import Chart, HeatMap, Line, bytes_text, grouped, heat_map, line_chart


# Lines in a fixed order of styles: a model has the same colour in every plot.
LINES = ("teacher", "student", "same_bytes", "window_alone", "healed")
COMMAND = "hf-linear-attention convert"
MARGIN = 0.01  # nats per token above the highest line that is drawn whole
CONTEXTS = [2.0**power for power in range(6, 18)]
OPTIONS_A_LINE = 2
ONE_LAYER = "one layer"


@dataclass(frozen=True)
class Section:
    """A part of the page; `samples` have a `prompt` and `sides`: (title, text or its parts `same`, `first`, `rest`)."""

    title: str
    texts: list[str] = field(default_factory=list)
    figures: Sequence[Chart | HeatMap] = ()
    tables: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    code: str | None = None


def sections(report: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[Section]:
    """All sections for which there is data, in the order of the page.

    Args:
        report: the content of conversion_report.json.
        runs: the training runs in training_report.json, oldest first.
    """
    quality = report.get("quality") or {}
    found = [
        position_section(quality),
        recall_section(quality),
        generation_section(quality),
        neighbour_section(quality),
        error_section(report, quality),
        decay_section(report, quality),
        loss_section(runs, quality),
        cost_section(report),
        dropped_section(report),
        quality_section(quality),
        *earlier_sections(quality),
        command_section(report),
    ]
    return [section for section in found if section is not None]


def percent(share: float) -> str:
    """A share in words: whole numbers, or one digit more near 0 and 100."""
    value = 100 * share
    return f"{value:.1f} %" if value > 99 or 0 < value < 1 else f"{value:.0f} %"


def quality_section(quality: Mapping[str, Any]) -> Section | None:
    """The figures of held-out text."""
    rows = [[name, format_value(value)] for name, value in quality_rows(quality).items()]
    if not rows:
        return None
    text = f"Measured on {quality['validation_file']} (about {quality['max_tokens']:,} tokens at most)."
    tables = [{"header": ["figure", "value"], "rows": rows}]
    return Section("All figures of held-out text", [text], notes=data_notes(quality), tables=tables)


def earlier_sections(quality: Mapping[str, Any]) -> list[Section]:
    """The figures of earlier evaluations on other texts that have not all been measured again."""
    found = []
    for record in quality.get(EARLIER, ()):
        section, table = quality_section(record), comparison(record)
        if section is not None:
            tables = section.tables + ([table] if table is not None else [])
            notes = [*section.notes, *(table["notes"] if table is not None else ())]
            title = f"Measured earlier, on {record['validation_file']}"
            found.append(replace(section, title=title, tables=tables, notes=notes))
    return found


def position_section(quality: Mapping[str, Any]) -> Section | None:
    """Nats per token by position, of all models that were measured."""
    positions = quality.get("positions") or {}
    chart = _bucket_chart(
        positions.get("buckets", ()),
        "Nats per token by position",
        "Nats per token over the position in the text, on a logarithmic scale; lower is better.",
        "position of the token",
        [(positions["trained_length"], f"trained length {positions['trained_length']:,}")] if positions else [],
    )
    table = comparison(quality)
    if chart is None or table is None:
        return None
    nearer = _difference_chart(positions["buckets"])
    text = "Lower is better. To the right of the dotted line, texts are longer than the original was trained for."
    highest = max((part.get("teacher") or 0.0 for part in positions["buckets"]), default=0.0)
    texts = (
        [text, f"The original rises to {highest:.1f}, above the plots."]
        if highest > _top(positions["buckets"])
        else [text]
    )
    if nearer is None:
        return Section("How far it reads", texts, [chart], notes=table["notes"])
    texts.append("The second plot has the differences to this model, enlarged: where a line is above 0, it is worse.")
    return Section("How far it reads", texts, [chart, nearer], notes=table["notes"])


def _difference_chart(buckets: Sequence[Mapping[str, Any]]) -> Chart | None:
    """The same lines as differences to this model, which is 0: beside the whole scale they lie on each other."""
    if any(part.get("student") is None for part in buckets):
        return None
    parts = [
        {**part, **{name: part[name] - part["student"] for name in LINES if part.get(name) is not None}}
        for part in buckets
    ]
    inside = [part["teacher"] for part in parts[:-1] if part.get("teacher") is not None]
    rivals = [part[name] for part in parts for name in LINES[1:] if part.get(name) is not None]
    return _bucket_chart(
        parts,
        "Nats per token more than this model",
        "Nats per token of the others minus those of this model, by position; above 0 this model is better.",
        "position of the token",
        most_y=max(rivals + sorted(inside)[: len(inside) // 2 + 1]) + MARGIN,
    )


def recall_section(quality: Mapping[str, Any]) -> Section | None:
    """Nats per token by the distance of what has to be recalled."""
    chart = _bucket_chart(
        (quality.get("recall") or {}).get("buckets", ()),
        "Recall by distance",
        "Nats per token of rare words that the text had before, over the distance to them; lower is better.",
        "tokens back",
    )
    if chart is None:
        return None
    text = (
        "Nats per token where a rare sequence of words is repeated: the lower, the better the model has kept what "
        "stood so many tokens before. It rises where a model has forgotten."
    )
    return Section("Recall", [text], [chart])


def _bucket_chart(
    buckets: Sequence[Mapping[str, Any]],
    title: str,
    description: str,
    label: str,
    marks: Sequence[tuple[float, str]] = (),
    most_y: float | None = None,
) -> Chart | None:
    """A chart with a point in the middle of each bucket, for every model that the buckets know."""
    if len(buckets) < 2:
        return None
    middles = [math.sqrt(max(part["from"], part["to"] / 4) * part["to"]) for part in buckets]
    lines = [
        Line(
            COLUMNS[name],
            [(x, part[name]) for x, part in zip(middles, buckets, strict=True) if part.get(name) is not None],
            LINES.index(name),
        )
        for name in LINES
    ]
    names = {x: f"{part['from']:,} to {part['to'] - 1:,}" for x, part in zip(middles, buckets, strict=True)}
    labels = (label, "nats per token")
    most_y = _top(buckets) if most_y is None else most_y
    return line_chart(title, description, lines, labels, x_log=2, most_y=most_y, marks=marks, names=names)


def _top(buckets: Sequence[Mapping[str, Any]]) -> float:
    """Where a plot of the buckets ends: the original, which may fail beyond its trained length, must not flatten the
    other lines."""
    values = [part[name] for part in buckets for name in LINES[1:] if part.get(name) is not None]
    return max(values) + 0.5 * (max(values) - min(values))


def generation_section(quality: Mapping[str, Any]) -> Section | None:
    """What both models write after the same prompts."""
    samples = quality.get("samples") or ()
    if not samples:
        return None
    shown = [
        {
            "prompt": f"… {sample['prompt']}",
            "sides": [
                ("original", {"same": sample["same"], **sample["original"]}),
                ("this model", {"same": sample["same"], **sample["student"]}),
            ],
        }
        for sample in samples
    ]
    text = (
        "Both models continue the same held-out texts, spread evenly over the file, always with the likeliest token. "
        "What they have in common is shaded, and the first different token is marked; after it they continue "
        "different texts."
    )
    return Section("What it writes", [text], samples=shown)


def neighbour_section(quality: Mapping[str, Any]) -> Section | None:
    """The nearest texts of a few texts, by both models."""
    neighbours = quality.get("neighbours") or ()
    if not neighbours:
        return None
    shown = [
        {
            "prompt": entry["text"],
            "sides": [("nearest, original", entry["original"]), (_nearest_title(entry), entry["student"])],
        }
        for entry in neighbours
    ]
    return Section(
        "Nearest neighbours",
        ["The nearest other text in the validation file, of three texts spread evenly over it."],
        samples=shown,
    )


def _nearest_title(entry: Mapping[str, Any]) -> str:
    return "nearest, this model (" + ("the same)" if entry["original"] == entry["student"] else "another)")


def error_section(report: Mapping[str, Any], quality: Mapping[str, Any]) -> Section | None:
    """The error of every head before and after the training."""
    maps = [
        heat_map(
            f"Error of the heads, {when}",
            "The error of the output of each head, by layer and head: 0 is exact, 1 as wrong as an output of zeros.",
            [(layer["layer"], layer["error"]) for layer in heads.get("layers", ()) if layer.get("error")],
            lambda error: error,
        )
        for when, heads in _head_figures(report, quality)
    ]
    figures = [figure for figure in maps if figure is not None]
    if not figures:
        return None
    (_, heads), *_ = _head_figures(report, quality)
    text = (
        "How far the output of each head is from that of softmax attention on the same queries, keys and values: 0 "
        f"is exact, and 1 is as wrong as an output of zeros. Rows are layers, columns heads. Measured on "
        f"{heads['inputs']}."
    )
    return Section("Which heads are hard", [text], figures)


def decay_section(report: Mapping[str, Any], quality: Mapping[str, Any]) -> Section | None:
    """The half-life of every head that has a decay of its own."""
    named = [
        (when, [(layer["layer"], layer["half_life"]) for layer in heads.get("layers", ()) if layer.get("half_life")])
        for when, heads in _head_figures(report, quality)
    ]
    values = [math.log(max(value, 1)) for _, rows in named for _, row in rows for value in row]
    maps = [
        heat_map(
            f"Half-life in tokens, {when}",
            "After how many tokens the weight of a key has halved, by layer and head; stronger colours are longer.",
            rows,
            lambda value: 0.1 + 0.9 * (math.log(max(value, 1)) - min(values)) / (max(values) - min(values) or 1),
            _short,
        )
        for when, rows in named
    ]
    figures = [figure for figure in maps if figure is not None]
    if not figures:
        return None
    text = "After how many tokens the weight of a key has halved. Columns are the heads of keys and values."
    return Section("What the heads forget", [text], figures)


def _short(value: float) -> str:
    """At most four characters."""
    if value < 9950:
        return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
    return f"{value / 1000:.0f}k" if value < 999_500 else "≥1M"


def _head_figures(report: Mapping[str, Any], quality: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    before, after = (report.get("checks") or {}).get("heads"), quality.get("heads")
    if before == after:  # measured again without a training
        before = None
    named = [("as converted", before), ("as it is now", after)]
    return [(when, heads) for when, heads in named if heads]


def loss_section(runs: Sequence[Mapping[str, Any]], quality: Mapping[str, Any]) -> Section | None:
    """The losses of all stages, and the nats per token on held-out text."""
    figures: list[Chart] = []
    evaluated: list[tuple[float, float]] = []
    start = 0.0
    for number, run in enumerate(runs, 1):
        loss = run.get("loss") or {}
        stage = run["training"].get("stage") or f"run {number}"
        points = [(float(x), float(y)) for x, y in loss.get("points", ()) if y > 0]
        title, unit = f"Loss of stage {number}, {stage}", loss.get("unit", "tokens")
        lines = [Line("each step that was logged", points, 0), Line("mean of a few", smoothed(points), 1)]
        chart = line_chart(title, f"{title}, over {unit}.", lines, (unit, "loss (log scale)"), y_log=10)
        figures += [chart] if chart is not None and len(points) > 1 else []
        evaluated += [(start + x, float(y)) for x, y in loss.get("evaluated", ())]
        start += points[-1][0] if points else 0
    lines = [Line("this model", evaluated, 1)]
    if quality.get("teacher") is not None and evaluated:
        lines.append(Line("original", [(x, quality["teacher"]) for x in (evaluated[0][0], evaluated[-1][0])], 0))
    held_out = "Nats per token on held-out text"
    chart = line_chart(held_out, f"{held_out} during the training.", lines, ("tokens", "nats per token"))
    if chart is not None and len(evaluated) > 1:
        figures.insert(0, chart)
    text = (
        "Each step has other texts, some harder than others, so the loss goes up and down. A stage with little left to "
        "learn shows nothing else; what counts then are the figures of held-out text."
    )
    return Section("Training", [text], figures) if figures else None


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The means of neighbours, as many as a fifth of the points; the noise of single steps is smaller in them."""
    width = max(1, len(points) // 5)
    groups = [points[start : start + width] for start in range(len(points) - width + 1)]
    return [(sum(x for x, _ in group) / width, sum(y for _, y in group) / width) for group in groups]


def cost_section(report: Mapping[str, Any]) -> Section | None:
    """From which length the model is faster, its speed where it was measured, and its memory over the length."""
    texts, reads = [], report.get("max_length")
    measured = (report.get("quality") or {}).get("speed") or {}
    whole = {name: curve for name, curve in (measured.get("model") or {}).items() if curve}
    timed = speed_chart(
        whole or {"this model": measured.get("curve") or ()}, reads, "the model" if whole else ONE_LAYER
    )
    if report.get("layers") and timed is None:
        texts.append("Speed was not measured; hf-linear-attention compare measures it.")
    if timed is not None:
        conditions = whole_conditions(measured) if whole else speed_conditions(measured)
        texts.append(f"The speed is that of {conditions}, on the machine that measured this model.")
        if reads and not whole and (measured.get("faster_from") or 0) > reads:
            texts.append(f"The model reads {reads:,} tokens, so it is never faster within its own length.")
    memory = _memory_chart(report, reads)
    if memory is not None:
        texts.append(
            "The memory is that of the context of one sequence while the model writes, in the converted layers. It is "
            "computed from the sizes of the tensors."
        )
    figures = [chart for chart in (timed, memory) if chart is not None]
    return Section("Speed and memory", texts, figures) if texts else None


def speed_conditions(measured: Mapping[str, Any]) -> str:
    """What `layer_speed.model_speed` has timed, in words."""
    return (
        f"one attention layer without its projections beside torch's softmax attention, {measured['heads']} heads of "
        f"{measured['head_dim']}, {measured['dtype']}, {measured['threads']} thread{'s' * (measured['threads'] > 1)}"
    )


def whole_conditions(measured: Mapping[str, Any]) -> str:
    """What `layer_speed.whole_model_speed` has timed, in words."""
    text = "the whole model beside its original: reading one text"
    if measured["model"]["writing"]:
        text += ", and writing one token after so many, both with a cache"
    else:
        text += ", which the original reads in chunks where it is longer than the original can read"
    return f"{text}; {measured['dtype']}, {measured['threads']} thread{'s' * (measured['threads'] > 1)}"


def speed_chart(
    curves: Mapping[str, Sequence[Mapping[str, float]]], reads: int | None, subject: str = ONE_LAYER
) -> Chart | None:
    """How many times as fast as softmax it is over the length: a line for each curve that is not empty."""
    lines = [
        Line(name, [(p["length"], p["softmax_seconds"] / p["seconds"]) for p in curve], number % 5 + 1)
        for number, (name, curve) in enumerate(curves.items())
    ]
    lengths = [point["length"] for curve in curves.values() for point in curve]
    if not lengths:
        return None
    lines.append(Line("equally fast", [(min(lengths), 1.0), (max(lengths), 1.0)], 0))
    marks = [(float(reads), f"the original reads {reads:,}")] if reads and min(lengths) <= reads <= max(lengths) else []
    return line_chart(
        "Speed over length",
        f"How many times as fast as with softmax attention {subject} is, over the length of the input.",
        lines,
        ("tokens", "times as fast as softmax (both scales are logarithmic)"),
        x_log=2,
        y_log=10,
        marks=marks,
        formats=(grouped, "{:.3g}".format),
    )


def _memory_chart(report: Mapping[str, Any], reads: int | None) -> Chart | None:
    layers = [layer for layer in report.get("layers") or () if layer.get("state_bytes")]
    if not layers:
        return None
    state = sum(layer["state_bytes"] for layer in layers)
    cache, growing = (
        sum(layer.get(name) or 0 for layer in layers) for name in ("cache_bytes_per_token", "growing_bytes_per_token")
    )
    if not cache:  # reports of an earlier version lack it
        return None
    lines = [
        Line("original: keys and values", [(length, cache * length) for length in CONTEXTS], 0),
        Line("this model: its state", [(length, state + growing * length) for length in CONTEXTS], 1),
    ]
    marks = [(float(reads), f"the original reads {reads:,}")] if reads and CONTEXTS[0] <= reads <= CONTEXTS[-1] else []
    return line_chart(
        "Memory over length",
        "Bytes of context for one sequence over its length, for the cache of the original and the state of this model.",
        lines,
        ("tokens of context", "bytes (both scales are logarithmic)"),
        x_log=2,
        y_log=10,
        marks=marks,
        formats=(grouped, bytes_text),
    )


def dropped_section(report: Mapping[str, Any]) -> Section | None:
    """What the original has and the result lacks."""
    texts = [f"The converted layers lack: {feature}." for feature in report.get("dropped_features") or ()]
    tensors = (report.get("tensors") or {}).get("dropped") or ()
    rows = [[tensor["source"], " x ".join(map(str, tensor["shape"]))] for tensor in tensors]
    table = {"header": ["tensor of the original that is not in the result", "shape"], "rows": rows}
    if not texts and not tensors:
        return None
    return Section("What was left out", texts, tables=[table] if tensors else [])


def command_section(report: Mapping[str, Any]) -> Section | None:
    """The command that makes this model again."""
    words = report.get("command")
    if not words:
        return None
    lines: list[list[str]] = [[]]
    for word in map(shlex.quote, words):
        if word.startswith("--") and sum(part.startswith("--") for part in lines[-1]) >= OPTIONS_A_LINE:
            lines.append([])
        lines[-1].append(word)
    code = " \\\n    ".join([COMMAND, *map(" ".join, lines)])
    note = "Folders of files on the author's disk are left out; put your own in front of the names."
    return Section("How to repeat it", notes=[note], code=code)
