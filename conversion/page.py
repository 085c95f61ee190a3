"""report.html: what a conversion gave, as one page without scripts that loads nothing.

The page is made from conversion_report.json, training_report.json and config.json in a folder alone, so that it can be
made again at any time: `write_page(folder)`. Its headline is a verdict in words. Each section is made from entries of
the reports, and left out if these are not there.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2

from hf_linear_attention._common.model_card import HISTORY, PAGE, REPORT, format_value
from hf_linear_attention.configuration_linear_attention import entries_of
from hf_linear_attention.conversion.layer_speed import first_faster
from hf_linear_attention.conversion.report import (
    CHECKED,
    COLUMNS,
    EARLIER,
    LABELS,
    comparison,
    data_notes,
    quality_rows,
    settings_of,
)
from hf_linear_attention.training.tasks import UNITS


TEMPLATE_FILE = Path(__file__).with_name("page.html")
COMMAND = "hf-linear-attention convert"
MOST_FIGURES = 3  # of a training, in the headline

GOOD, USABLE, NOT_YET = "Good", "Usable", "Not yet"
# How far a model's nats per token may lie above the original's, relative to these.
GOOD_GAP, USABLE_GAP = 0.02, 0.1
# Cosines to the original's embeddings, and what a correlation may lose.
GOOD_COSINE, USABLE_COSINE = 0.98, 0.9
GOOD_LOSS, USABLE_LOSS = 0.01, 0.05
NEARNESS = {GOOD: "nearly as good as", USABLE: "close to", NOT_YET: "far from"}
WINDOW = "a window of the same bytes, which needs no training"
FEWEST_ERRORS = 2  # a difference of fewer standard errors counts as none
MORE = 4  # the next training is proposed with so many times the tokens of the last one

# The figures at the top of the page.
TILES = ("student", "teacher", "same_bytes", "agreement", "kl", "cosine", "spearman", "spearman_teacher")
# Lines in a fixed order of styles: a model has the same colour in every plot.
LINES = ("teacher", "student", "same_bytes", "window_alone", "healed")
# Plots are 420 units wide, so that a text of 12 units can still be read on a phone.
WIDTH, HEIGHT = 420.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 60.0, 14.0, 14.0, 46.0
# The styles of lines in the style sheet of the template; the first is that of the original.
STYLES = 6

Report = Mapping[str, Any]
Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Section:
    """A part of the page; `samples` have a `prompt` and `sides`: (title, text or its parts `same`, `first`, `rest`)."""

    title: str
    texts: list[str] = field(default_factory=list)
    figures: Sequence[Chart] = ()
    tables: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    code: str | None = None


def write_page(folder: str | Path, name: str | None = None) -> Path:
    """Write report.html into a folder with config.json and conversion_report.json; returns its path.

    Args:
        name: the title; by default the folder's name.

    Raises:
        OSError: if a file is missing or cannot be written.
    """
    folder = Path(folder)
    report, config = (json.loads((folder / file).read_text(encoding="utf-8")) for file in (REPORT, "config.json"))
    history = folder / HISTORY
    runs = json.loads(history.read_text(encoding="utf-8"))["runs"] if history.is_file() else []
    path = folder / PAGE
    path.write_text(page_of(report, runs, config, name or folder.resolve().name), encoding="utf-8")
    return path


def page_of(report: Report, runs: Runs, config: Mapping[str, Any], name: str) -> str:
    """The page of a converted model as HTML.

    Args:
        report: the content of conversion_report.json.
        runs: the training runs in training_report.json, oldest first.
        config: the content of config.json.
        name: the title.
    """
    footer = [f"All figures are in {REPORT}; this page loads nothing and runs no script."]
    if versions := report.get("versions"):
        footer.insert(0, "Converted with " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".")
    return rendered(
        name, headline(report, runs), _lead(report, runs, config), _tiles(report), sections(report, runs), footer
    )


def rendered(
    name: str,
    title: str,
    lead: Sequence[str],
    tiles: Sequence[tuple[str, str]],
    parts: Sequence[Section],
    footer: Sequence[str],
) -> str:
    """The template, filled in; every text is escaped."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(TEMPLATE_FILE.read_text(encoding="utf-8"))
    text = template.render(name=name, headline=title, lead=lead, tiles=tiles, sections=parts, footer=footer)
    return "".join(f"{line}\n" for line in text.splitlines() if line.strip())


# ---- The headline, and the sentences below it


def verdict(quality: Mapping[str, Any]) -> tuple[str, str] | None:
    """One of the three words, and its reason; None without figures that say it."""
    if quality.get("student") is not None:
        return _verdict_on_language(quality)
    if quality.get("cosine") is not None:
        word = _verdict_on_embeddings(quality)
        return word, f"its embeddings are {NEARNESS[word]} those of the original"
    return None


def _verdict_on_language(quality: Mapping[str, Any]) -> tuple[str, str]:
    word = _word((quality["student"] - quality["teacher"]) / quality["teacher"], GOOD_GAP, USABLE_GAP)
    text = f"{NEARNESS[word]} the original"
    if (control := quality.get("same_bytes")) is None:
        return word, text
    difference = quality.get("student_minus_same_bytes") or {"mean": quality["student"] - control}
    error = FEWEST_ERRORS * (difference.get("standard_error") or 0.0)
    if difference["mean"] > error:
        return NOT_YET, f"worse than {WINDOW}"
    if difference["mean"] >= -error:
        return (USABLE if word == GOOD else word), f"{text}, but no better than {WINDOW}"
    return word, f"{text}, and better than a window of the same bytes"


def _verdict_on_embeddings(quality: Mapping[str, Any]) -> str:
    if quality.get("spearman") is not None:  # what the embeddings are for counts for more than their likeness
        return _word(quality["spearman_teacher"] - quality["spearman"], GOOD_LOSS, USABLE_LOSS)
    return _word(-quality["cosine"], -GOOD_COSINE, -USABLE_COSINE)


def _word(distance: float, good: float, usable: float) -> str:
    return GOOD if distance <= good else USABLE if distance <= usable else NOT_YET


def headline(report: Report, runs: Runs = ()) -> str:
    """The result in words, as in "Good: nearly as good as the original, and better than a window of the same bytes"."""
    if (found := verdict(report.get("quality") or {})) is not None:
        return ": ".join(found)
    outputs = (report.get("checks") or {}).get("student_against_teacher") or {}
    if not report.get("layers"):
        return "No layer was converted"
    if runs:
        # `eval_nats_per_token` -> `nats per token`
        metrics = {name.removeprefix("eval_").replace("_", " "): value for name, value in runs[-1]["metrics"].items()}
        figures = [f"{name} {format_value(value)}" for name, value in metrics.items()]
        return f"Trained: {', '.join(figures[:MOST_FIGURES])}" if figures else "Trained, and not measured"
    name = next(
        (name for name in ("top1_agreement", "mean_embedding_cosine", "hidden_state_error") if name in outputs), ""
    )
    if not name:
        return "Converted, and not measured"
    if "beyond" in outputs:
        return f"Converted, not trained: {CHECKED[name].format(outputs['beyond'][name])} beyond the windows"
    return f"Converted, not trained: {CHECKED[name].format(outputs[name])} on short samples"


def _lead(report: Report, runs: Runs, config: Mapping[str, Any]) -> list[str]:
    """What was converted and trained, the lengths, and what to do next."""
    mechanisms = " and ".join(dict.fromkeys(entry["mechanism"] for entry in entries_of(settings_of(config, report))))
    base = Path(str(report["base_model"]))
    about = f"{base.name if base.is_absolute() else report['base_model']} with linear attention ({mechanisms})"
    layers = len(report.get("layers") or ())
    if "num_layers" in report:
        about += f" in {layers} of {report['num_layers']} layers"
    if layers or "num_layers" not in report:
        units = [unit for unit in UNITS.values() if any(run["training"].get(unit) for run in runs)]
        amounts = [f"{sum(run['training'].get(unit) or 0 for run in runs):,} {unit}" for unit in units]
        options = [name for run in runs for name, value in run["training"].items() if value]
        objectives = {name for name in options if name.endswith("_weight")}
        about += f", trained on {' and '.join(amounts)}" if amounts else ", trained" if runs else ", not trained yet"
        about += " to imitate its original" if objectives - {"task_loss_weight"} else ""
    more = (_lengths(report), next_step(report, runs))
    return [f"{about}.", *(sentence for sentence in more if sentence is not None)]


def _lengths(report: Report) -> str | None:
    """From which length it is faster, and which length the model reads, in a sentence."""
    reads, found = report.get("max_length"), [part for part in [faster(report)] if part is not None]
    buckets = ((report.get("quality") or {}).get("positions") or {}).get("buckets") or ()
    measured = max((bucket["to"] for bucket in buckets), default=0)
    if reads and measured > reads:  # positions beyond those of the training work, or the evaluation had stopped there
        found.append(f"it was measured to {measured:,} tokens, where the original was trained for {reads:,}")
    elif reads:
        found.append(f"it reads {reads:,} tokens")
    text = "; ".join(found)
    return f"{text[:1].upper()}{text[1:]}." if text else None


def faster(report: Report) -> str | None:
    """From which length it is faster, as a part of a sentence: the whole model where it was timed, or its attention."""
    measured = (report.get("quality") or {}).get("speed") or {}
    if curves := measured.get("model"):
        parts = [_faster(verb, curves[name]) for verb, name in (("reads", "reading"), ("writes", "writing"))]
        return " and ".join(part for part in parts if part) or None
    length = measured.get("faster_from")
    return f"its attention alone is faster from {length:,} tokens" if length else None


def _faster(verb: str, curve: Sequence[Mapping[str, float]]) -> str | None:
    """`reads 3.7 times as fast at 2,048 tokens (faster from 512)`."""
    if not curve:
        return None
    last, first = curve[-1], first_faster(curve)
    if first is None:
        return f"{verb} no faster up to {last['length']:,.0f} tokens"
    ratio = last["softmax_seconds"] / last["seconds"]
    return f"{verb} {ratio:.2g} times as fast at {last['length']:,.0f} tokens (faster from {first:,.0f})"


def next_step(report: Report, runs: Runs) -> str | None:
    """What to do now, in a sentence; None if nothing was converted."""
    if not report.get("layers"):
        return None
    found = verdict(report.get("quality") or {})
    if found is None and runs:
        return "Next: measure it on data of your own task, beside its original."
    if found is None or (not runs and found[0] != GOOD):
        return "Next: train it, with --preset default and a --train_file; some minutes are enough for a small model."
    word, reason = found
    if word == GOOD:
        return "Next: try it on your own task; it loads as its original does."
    tokens = float(f"{MORE * sum(run['training'].get('tokens') or 0 for run in runs):.2g}")
    count = f"{tokens / 1e6:.3g}M" if tokens >= 10**6 else f"{tokens / 1e3:.3g}k"
    longer = f"--tokens {count}" if tokens else "more --tokens"
    if reason.endswith(WINDOW):
        return f"Next: train longer, with {longer}, or take that window (--attention window)."
    return f"Next: train longer, with {longer}; more of the text that it will read helps most."


def _tiles(report: Report) -> list[tuple[str, str]]:
    """The most important figures as (label, value)."""
    quality, weights = report.get("quality") or {}, report.get("weights") or {}
    window = "nats per token, a window of the same bytes"
    labels = {**LABELS, "student": "nats per token, this model", "same_bytes": window}
    tiles = [(labels[name], format_value(quality[name])) for name in TILES if quality.get(name) is not None]
    if report.get("state_bytes"):
        tiles.append(("state per sequence of any length", bytes_text(report["state_bytes"])))
    if weights.get("new"):
        tiles.append(("of its weights are new", f"{weights['new'] / weights['total']:.2%}"))
    return tiles


# ---- The sections


def sections(report: Report, runs: Runs) -> list[Section]:
    """All sections for which there is data, in the order of the page.

    Args:
        report: the content of conversion_report.json.
        runs: the training runs in training_report.json, oldest first.
    """
    quality = report.get("quality") or {}
    found = [
        position_section(quality),
        *sample_sections(quality),
        *head_sections(report, quality),
        loss_section(runs, quality),
        cost_section(report),
        dropped_section(report),
        quality_section(quality),
        *(_earlier_section(record) for record in quality.get(EARLIER, ())),
        command_section(report),
    ]
    return [section for section in found if section is not None]


def position_section(quality: Mapping[str, Any]) -> Section | None:
    """Nats per token by position, of all models that were measured, and by the distance of what has to be recalled."""
    positions, table = quality.get("positions") or {}, comparison(quality)
    buckets = positions.get("buckets", ())
    if table is None or len(buckets) < 2:
        return None
    middles = [math.sqrt(max(part["from"], part["to"] / 4) * part["to"]) for part in buckets]
    parts = list(zip(middles, buckets, strict=True))
    lines = [
        Line(COLUMNS[name], [(x, part[name]) for x, part in parts if part.get(name) is not None], LINES.index(name))
        for name in LINES
    ]
    # The original, which may fail beyond its trained length, must not flatten the other lines.
    others = [y for line in lines[1:] for _, y in line.points]
    most_y = max(others) + 0.5 * (max(others) - min(others))
    chart = line_chart(
        "Nats per token by position",
        "Nats per token over the position in the text, on a logarithmic scale; lower is better.",
        lines,
        ("position of the token", "nats per token"),
        is_log=True,
        most_y=most_y,
        marks=[(positions["trained_length"], f"trained length {positions['trained_length']:,}")],
        names={x: f"{part['from']:,} to {part['to'] - 1:,}" for x, part in parts},
    )
    texts = ["Lower is better. To the right of the dotted line, texts are longer than the original was trained for."]
    highest = max((y for _, y in lines[0].points), default=0.0)
    if highest > most_y:
        texts.append(f"The original rises to {highest:.1f}, above the plot.")
    if (quality.get("recall") or {}).get("buckets"):
        texts.append(
            "The rows of recall are about places where the text repeats a rare sequence of words. The lower they are, "
            "the better the model remembers what it read that many tokens ago."
        )
    return Section("How far it reads", texts, [chart], tables=[table], notes=table["notes"])


def sample_sections(quality: Mapping[str, Any]) -> list[Section]:
    """What both models write after the same prompts."""
    found = []
    if samples := quality.get("samples"):
        text = (
            "Both models continue the same held-out texts, spread evenly over the file, always with the likeliest "
            "token. What they have in common is shaded, and the first different token is marked; after it they "
            "continue different texts."
        )
        displayed = [
            {
                "prompt": f"… {sample['prompt']}",
                "sides": [
                    ("original", {"same": sample["same"], **sample["original"]}),
                    ("this model", {"same": sample["same"], **sample["student"]}),
                ],
            }
            for sample in samples
        ]
        found.append(Section("What it writes", [text], samples=displayed))
    return found


def head_sections(report: Report, quality: Mapping[str, Any]) -> list[Section]:
    """The error of every head before and after the training, and the half-life of every head with a decay."""
    before, after = (report.get("checks") or {}).get("heads"), quality.get("heads")
    if before == after:  # measured again without a training
        before = None
    measured = [(when, heads) for when, heads in (("as converted", before), ("as it is now", after)) if heads]
    if not measured:
        return []
    about_errors = (
        "How far the output of each head is from that of softmax attention on the same queries, keys and values: "
        f"0 is exact, and 1 is as wrong as an output of zeros. Measured on {measured[0][1]['inputs']}."
    )
    about_half_lives = "After how many tokens the weight of a key has halved, for each head of keys and values."
    found = []
    for title, about, name, label, text in (
        ("Which heads are hard", about_errors, "error", "Error of the heads", "{:.2f}".format),
        ("What the heads forget", about_half_lives, "half_life", "Half-life in tokens", _tokens_text),
    ):
        tables = []
        for when, heads in measured:
            rows = [[str(layer["layer"]), *map(text, layer[name])] for layer in heads["layers"] if layer.get(name)]
            header = ["layer", *(f"head {head}" for head in range(max(map(len, rows), default=1) - 1))]
            tables += [{"title": f"{label}, {when}", "header": header, "rows": rows}] if rows else []
        found += [Section(title, [about], tables=tables)] if tables else []
    return found


def _tokens_text(value: float) -> str:
    """A number of tokens in at most four characters."""
    if value < 9950:
        return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
    return f"{value / 1000:.0f}k" if value < 999_500 else "≥1M"


def loss_section(runs: Runs, quality: Mapping[str, Any]) -> Section | None:
    """The losses of all stages, and the nats per token on held-out text."""
    figures: list[Chart] = []
    evaluated: list[tuple[float, float]] = []
    start = 0.0
    for number, run in enumerate(runs, 1):
        loss = run.get("loss") or {}
        points = [(float(x), float(y)) for x, y in loss.get("points", ()) if y > 0]
        title = f"Loss of stage {number}, {run['training'].get('stage') or f'run {number}'}"
        unit = loss.get("unit", "tokens")
        if len(points) > 1:
            lines = [Line("each step that was logged", points, 1)]
            figures.append(line_chart(title, f"{title}, over {unit}.", lines, (unit, "loss")))
        evaluated += [(start + x, float(y)) for x, y in loss.get("evaluated", ())]
        start += points[-1][0] if points else 0
    if len(evaluated) > 1:
        lines = [Line("this model", evaluated, 1)]
        if quality.get("teacher") is not None:
            lines.append(Line("original", [(x, quality["teacher"]) for x in (evaluated[0][0], evaluated[-1][0])], 0))
        held_out = "Nats per token on held-out text"
        labels = ("tokens", "nats per token")
        figures.insert(0, line_chart(held_out, f"{held_out} during the training.", lines, labels))
    text = (
        "Each step reads other texts, and some are harder than others, so the loss goes up and down. Where a stage has "
        "little left to learn, the curve shows nothing else, and the figures on held-out text are what counts."
    )
    return Section("Training", [text], figures) if figures else None


def cost_section(report: Report) -> Section | None:
    """From which length the model is faster, its speed where it was measured, and its memory over the length."""
    texts, figures, reads = [], [], report.get("max_length")
    measured = (report.get("quality") or {}).get("speed") or {}
    whole = {name: curve for name, curve in (measured.get("model") or {}).items() if curve}
    timed = (
        speed_chart(whole, reads, "the model") if whole else speed_chart({"this model": measured.get("curve")}, reads)
    )
    if report.get("layers") and timed is None:
        texts.append("Speed was not measured; hf-linear-attention compare measures it.")
    if timed is not None:
        figures.append(timed)
        if reads and not whole and (measured.get("faster_from") or 0) > reads:
            texts.append(f"The model reads {reads:,} tokens, so it is never faster within its own length.")
        texts.append(f"The speed is that of {speed_conditions(measured)}, on the machine that measured this model.")
    layers = [layer for layer in report.get("layers") or () if layer.get("state_bytes")]
    state, cache = (sum(layer.get(name) or 0 for layer in layers) for name in ("state_bytes", "cache_bytes_per_token"))
    if cache:  # which reports of an earlier version lack
        texts.append(memory_text(cache, state))
    return Section("Speed and memory", texts, figures) if texts else None


def speed_conditions(measured: Mapping[str, Any]) -> str:
    """What `layer_speed` has timed, in words: the whole model or one layer."""
    with_what = f"{measured['dtype']}, {measured['threads']} thread{'s' * (measured['threads'] > 1)}"
    if not any((measured.get("model") or {}).values()):
        return (
            "one attention layer without its projections beside torch's softmax attention, "
            f"{measured['heads']} heads of {measured['head_dim']}, {with_what}"
        )
    text = "the whole model beside its original: reading one text"
    if measured["model"]["writing"]:
        text += ", and writing one token after so many, both with a cache"
    else:
        text += ", which the original reads in chunks where it is longer than the original can read"
    return f"{text}; {with_what}"


def speed_chart(
    curves: Mapping[str, Sequence[Mapping[str, float]] | None], reads: int | None, subject: str = "one layer"
) -> Chart | None:
    """How many times as fast as softmax it is over the length: a line for each curve that is not empty."""
    lines = [
        Line(name, [(p["length"], p["softmax_seconds"] / p["seconds"]) for p in curve or ()], style_of(number))
        for number, (name, curve) in enumerate(curves.items(), 1)
    ]
    lengths = [length for line in lines for length, _ in line.points]
    if not lengths:
        return None
    lines.append(Line("equally fast", [(min(lengths), 1.0), (max(lengths), 1.0)], 0))
    is_inside = reads is not None and min(lengths) <= reads <= max(lengths)
    return line_chart(
        "Speed over length",
        f"How many times as fast as with softmax attention {subject} is, over the length of the input.",
        lines,
        ("tokens", "times as fast as softmax"),
        is_log=True,
        marks=[(float(reads), f"the original reads {reads:,}")] if reads and is_inside else [],
    )


def memory_text(cache: int, state: int) -> str:
    """The bytes of a context, from the sizes of the tensors, in words.

    Args:
        cache: the bytes per token of keys and values in the original.
        state: the bytes of the state.
    """
    return (
        f"While the model writes, the context of one sequence takes {bytes_text(state)} in the converted layers at any "
        f"length; the keys and values of the original take {cache:,} bytes per token: as much after "
        f"{state / cache:,.0f} tokens."
    )


def dropped_section(report: Report) -> Section | None:
    """What the original has and the result lacks."""
    texts = [f"The converted layers lack: {feature}." for feature in report.get("dropped_features") or ()]
    tensors = (report.get("tensors") or {}).get("dropped") or ()
    rows = [[tensor["source"], " x ".join(map(str, tensor["shape"]))] for tensor in tensors]
    table = {"header": ["tensor of the original that is not in the result", "shape"], "rows": rows}
    return Section("What was left out", texts, tables=[table] if rows else []) if texts or rows else None


def quality_section(quality: Mapping[str, Any]) -> Section | None:
    """The figures of held-out text."""
    rows = [[name, format_value(value)] for name, value in quality_rows(quality).items()]
    if not rows:
        return None
    text = f"Measured on {quality['validation_file']} (about {quality['max_tokens']:,} tokens at most)."
    tables = [{"header": ["figure", "value"], "rows": rows}]
    return Section("All figures of held-out text", [text], notes=data_notes(quality), tables=tables)


def _earlier_section(record: Mapping[str, Any]) -> Section | None:
    """The figures of an earlier evaluation on another text that have not all been measured again."""
    section, table = quality_section(record), comparison(record)
    if section is None:
        return None
    tables, notes = ([], []) if table is None else ([table], table["notes"])
    title = f"Measured earlier, on {record['validation_file']}"
    return replace(section, title=title, tables=[*section.tables, *tables], notes=[*section.notes, *notes])


def command_section(report: Report) -> Section | None:
    """The command that makes this model again."""
    words = report.get("command")
    if not words:
        return None
    code = f"{COMMAND} {shlex.join(words)}".replace(" --", " \\\n    --")
    note = "Folders of files on the author's disk are left out; put your own in front of the names."
    return Section("How to repeat it", notes=[note], code=code)


# ---- The geometry of the plots: every number is a coordinate, which the template only writes down


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
    """The scale of one axis, linear or logarithmic, from the smallest to the largest value."""

    least: float
    most: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """From 0 at the smallest value to 1 at the largest."""
        least, most, value = (math.log(x) if self.is_log else x for x in (self.least, self.most, value))
        return (value - least) / (most - least) if most > least else 0.5

    @property
    def ticks(self) -> list[float]:
        """At most seven round values: powers of 2, or multiples of 1, 2 or 5 times a power of ten."""
        if self.is_log:
            powers = range(math.ceil(math.log2(self.least)), math.floor(math.log2(self.most)) + 1)
            return [2.0**power for power in powers[:: math.ceil(len(powers) / 6) or 1]]
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
    is_log: bool = False,
    most_y: float = math.inf,
    marks: Sequence[tuple[float, str]] = (),
    names: Mapping[float, str] | None = None,
) -> Chart:
    """A chart of those lines that have points; at least one has.

    Args:
        labels: of the x and the y axis.
        is_log: whether the scale of x is logarithmic.
        most_y: values above this leave the plot at its top; the table has them.
        marks: vertical lines with a text, at values of x, which may widen the axis.
        names: of values of x, for the table.
    """
    lines = [line for line in lines if line.points]
    xs = [x for line in lines for x, _ in line.points] + [x for x, _ in marks]
    ys = [min(y, most_y) for line in lines for _, y in line.points]
    margin = 0.08 * (max(ys) - min(ys))
    x_axis, y_axis = Axis(min(xs), max(xs), is_log), Axis(min(ys) - margin, max(ys) + margin)
    values = [dict(line.points) for line in lines]
    rows = [
        [(names or {}).get(x) or f"{x:,.0f}", *(f"{column[x]:,.4g}" if x in column else "" for column in values)]
        for x in sorted({x for column in values for x in column})
    ]

    def x_of(value: float) -> float:
        return round(LEFT + x_axis.place(value) * (WIDTH - LEFT - RIGHT), 1)

    def y_of(value: float) -> float:
        return round(HEIGHT - BOTTOM - y_axis.place(value) * (HEIGHT - BOTTOM - TOP), 1)

    return Chart(
        title,
        description,
        *labels,
        [(x_of(tick), f"{tick:,.0f}") for tick in x_axis.ticks],
        [(y_of(tick), f"{tick:,.4g}") for tick in y_axis.ticks],
        [(line.name, line.style, [(x_of(x), y_of(y)) for x, y in line.points]) for line in lines],
        [(x_of(x), text, "end" if x_axis.place(x) > 0.5 else "start") for x, text in marks],
        {"header": [labels[0], *(line.name for line in lines)], "rows": rows},
    )
