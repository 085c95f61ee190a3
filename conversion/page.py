"""report.html: what a conversion gave, as one page without scripts that loads nothing.

The page is made from conversion_report.json, training_report.json and config.json in a folder alone, so that it can be
made again at any time: `write_page(folder)`. A section without data is left out. The plot needs matplotlib.
"""

from __future__ import annotations

import io
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hf_linear_attention._common.model_card import PAGE, REPORT, format_value, training_history
from hf_linear_attention.configuration_linear_attention import entries_of
from hf_linear_attention.conversion.figures import COLUMNS, GOOD, WINDOW, Figures, Table, figures_of
from hf_linear_attention.conversion.report import settings_of
from hf_linear_attention.conversion.result_text import CHECKED
from hf_linear_attention.layer_ranges import ranges_of
from hf_linear_attention.training.tasks import UNITS


TEMPLATE = Path(__file__).with_name("page.html")
MORE = 4  # the next training is proposed with so many times the tokens of the last one
# The lines of the plot, in colours that are readable on black and on white.
STYLES = {
    "teacher": ("#8a8a8a", "--"),
    "student": ("#2f7fd6", "-"),
    "same_bytes": ("#d9692a", ":"),
    "window_alone": ("#8f6fd0", "-."),
    "healed": ("#1f9e6e", "-"),
}
INK = "#123456"  # which becomes the colour of the text of the page

Report = Mapping[str, Any]
Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str
    texts: Sequence[str] = ()
    plot: Markup | None = None
    tables: Sequence[Table] = ()
    code: str | None = None


def write_page(folder: str | Path, name: str | None = None) -> Path:
    """Write report.html into a folder with config.json and conversion_report.json; returns its path.

    The title is `name`, or else the folder's.
    """
    folder = Path(folder)
    report, config = (json.loads((folder / file).read_text(encoding="utf-8")) for file in (REPORT, "config.json"))
    runs, path = training_history(str(folder)), folder / PAGE
    path.write_text(page_of(report, runs, config, name or folder.resolve().name), encoding="utf-8")
    return path


def page_of(report: Report, runs: Runs, config: Mapping[str, Any], name: str) -> str:
    """The page as HTML, from conversion_report.json, the runs in training_report.json, and config.json."""
    quality = report.get("quality") or {}
    figures = figures_of(quality) if quality else None
    parts = [_figures_section(figures, quality), _speed_section(quality), _layers_section(report)]
    parts += [_heads_section(report, quality), _command_section(report)]
    lead = (_about(report, runs, config), next_step(report, runs, figures))
    versions = ", ".join(f"{name} {version}" for name, version in (report.get("versions") or {}).items())
    footer = f"Converted with {versions or 'unknown versions'}. All figures are in {REPORT}."
    texts = {"name": name, "headline": headline(report, runs, figures), "lead": filter(None, lead), "footer": footer}
    options: Any = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    template = jinja2.Environment(**options).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(**texts, sections=filter(None, parts)) + "\n"


# ---- The headline, and the sentences below it


def headline(report: Report, runs: Runs, figures: Figures | None) -> str:
    """The result in words, as in "Good: nearly as good as the original, and better than a window of the same bytes"."""
    if figures is not None and figures.verdict is not None:
        return ": ".join(figures.verdict)
    if not report.get("layers"):
        return "No layer was converted"
    if runs:
        metrics = [f"{name.removeprefix('eval_')} {format_value(x)}" for name, x in runs[-1]["metrics"].items()]
        return f"Trained: {', '.join(metrics[:3]).replace('_', ' ')}" if metrics else "Trained, and not measured"
    outputs = (report.get("checks") or {}).get("student_against_teacher") or {}
    where = "beyond the windows" if "beyond" in outputs else "on short samples"
    outputs = outputs.get("beyond", outputs)
    for name in ("top1_agreement", "mean_embedding_cosine", "hidden_state_error"):
        if name in outputs:
            return f"Converted, not trained: {CHECKED[name].format(outputs[name])} {where}"
    return "Converted, and not measured"


def _about(report: Report, runs: Runs, config: Mapping[str, Any]) -> str:
    """What was converted and trained, what it reads, and the memory of a context."""
    mechanisms = " and ".join(dict.fromkeys(entry["mechanism"] for entry in entries_of(settings_of(config, report))))
    base = Path(str(report["base_model"]))
    about = f"{base.name if base.is_absolute() else report['base_model']} with linear attention ({mechanisms})"
    if "num_layers" in report:
        about += f" in {len(report['layers'])} of {report['num_layers']} layers"
    amounts = {unit: sum(run["training"].get(unit) or 0 for run in runs) for unit in UNITS.values()}
    texts = [f"{amount:,} {unit}" for unit, amount in amounts.items() if amount]
    about += f", trained on {' and '.join(texts)}." if texts else ", trained." if runs else ", not trained yet."
    if report.get("max_length"):
        about += f" The original reads {report['max_length']:,} tokens."
    layers = [layer for layer in report.get("layers") or () if layer.get("state_bytes")]
    if cache := sum(layer.get("cache_bytes_per_token") or 0 for layer in layers):
        state = sum(layer["state_bytes"] for layer in layers)
        about += f" The converted layers keep {state:,} bytes of a sequence of any length, as much as the keys and "
        about += f"values of {state / cache:,.0f} tokens."
    return about


def next_step(report: Report, runs: Runs, figures: Figures | None) -> str | None:
    """What to do now, in a sentence; None if nothing was converted."""
    if not report.get("layers"):
        return None
    found = None if figures is None else figures.verdict
    if found is None and runs:
        return "Next: measure it on data of your own task, beside its original."
    if found is None or (not runs and found[0] != GOOD):
        return "Next: train it, with --preset default and a --train_file; some minutes are enough for a small model."
    if found[0] == GOOD:
        return "Next: try it on your own task; it loads as its original does."
    tokens = MORE * sum(run["training"].get("tokens") or 0 for run in runs)
    longer = f"Next: train longer, with {f'--tokens {tokens / 1e6:.2g}M' if tokens else 'more --tokens'}"
    return f"{longer}, or take that window (--attention window)." if found[1].endswith(WINDOW) else f"{longer}."


# ---- The sections


def _figures_section(figures: Figures | None, quality: Mapping[str, Any]) -> Section | None:
    """All figures of held-out text, with a plot of those by position."""
    if figures is None:
        return None
    table = Table(["figure", "value"], [[name, format_value(value)] for name, value in figures.rows.items()])
    texts, positions = [f"Measured on {figures.about}.", *figures.notes], quality.get("positions") or {}
    plot = plot_by_position(positions) if positions.get("buckets") else None
    return Section("Figures on held-out text", texts, plot, [*filter(None, (table, figures.by_position))])


def plot_by_position(positions: Mapping[str, Any]) -> Markup | None:
    """Nats per token of all models by position as SVG; None without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return None
    buckets, trained = positions["buckets"], positions["trained_length"]
    middles = [math.sqrt(max(part["from"], part["to"] / 4) * part["to"]) for part in buckets]
    colours = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    options: Any = {"svg.fonttype": "none", "svg.hashsalt": PAGE, "axes.spines.top": False, "axes.spines.right": False}
    options |= dict.fromkeys(colours, INK)
    with rc_context(options):
        figure = Figure(figsize=(6, 3.4), layout="constrained", facecolor="none")
        axes = figure.add_subplot(facecolor="none", xscale="log", xlabel="position of the token")
        axes.set_ylabel("nats per token (lower is better)")
        for name, (colour, style) in STYLES.items():
            if any(name in part for part in buckets):
                values = [part.get(name) for part in buckets]
                axes.plot(middles, values, style, color=colour, marker="o", markersize=4, label=COLUMNS[name])
        # The original, which may fail beyond its trained length, must not flatten the other lines.
        others = [part[name] for part in buckets for name in STYLES if name != "teacher" and part.get(name) is not None]
        axes.set_ylim(top=max(others) + max(0.1, (max(others) - min(others)) / 2))
        axes.axvline(trained, color=INK, linestyle=":", linewidth=1, label=f"trained length {trained:,}")
        axes.set_xticks(middles, [f"{middle:,.0f}" for middle in middles], minor=False)
        axes.minorticks_off()
        axes.legend(frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    # In HTML, SVG needs no namespaces.
    text = re.sub(r' xmlns(:\w+)?="[^"]+"', "", file.getvalue()).replace(INK, "currentColor")
    return Markup(text[text.index("<svg") :])


def _speed_section(quality: Mapping[str, Any]) -> Section | None:
    """How many times as fast as its original the model is, by length."""
    speed = quality.get("speed") or {}
    curves = [
        {point["length"]: f"{point['softmax_seconds'] / point['seconds']:.2f}" for point in curve}
        for curve in (speed.get("model") or {}).values()
    ]
    rows = [[f"{length:,}", *(curve.get(length, "-") for curve in curves)] for length in sorted(set().union(*curves))]
    if not rows:
        return None
    threads = f"{speed['threads']} thread{'s' * (speed['threads'] > 1)}"
    text = (
        "How many times as fast as its original the whole model is, on the machine that measured it: reading one text, "
        f"and writing one token after so many; {speed['dtype']}, {threads}."
    )
    return Section("Speed", [text], tables=[Table(["tokens", *speed["model"]], rows)])


def _layers_section(report: Report) -> Section | None:
    """The plan: the attention of all layers, and what the original has and the result lacks."""
    groups: dict[tuple[str, str], list[int]] = {}
    for layer in report.get("layers") or ():
        if "layer" in layer:
            size = "-" if layer.get("state_bytes") is None else f"{layer['state_bytes']:,}"
            groups.setdefault((layer["mechanism"], size), []).append(layer["layer"])
    rows = [[ranges_of(sorted(set(layers))), *texts] for texts, layers in groups.items()]
    texts = [f"The converted layers lack: {feature}." for feature in report.get("dropped_features") or ()]
    if dropped := (report.get("tensors") or {}).get("dropped"):
        texts.append(f"Not in the result: {', '.join(str(tensor['source']) for tensor in dropped)}.")
    table = Table(["layers", "attention", "bytes of state per layer"], rows)
    return Section("Layers", texts, tables=[table]) if rows or texts else None


def _heads_section(report: Report, quality: Mapping[str, Any]) -> Section | None:
    """The error of every head before and after the training."""
    before, after = (report.get("checks") or {}).get("heads"), quality.get("heads")
    measured = {"as converted": None if before == after else before, "as it is now": after}
    tables = []
    for when, heads in measured.items():
        rows = [[str(x["layer"]), *(f"{error:.2f}" for error in x["error"])] for x in (heads or {}).get("layers", ())]
        header = ["layer", *(f"head {head}" for head in range(max(map(len, rows), default=1) - 1))]
        tables += [Table(header, rows, title=f"Error of the heads, {when}")] if rows else []
    text = (
        "How far the output of each head is from that of softmax attention on the same queries, keys and values: "
        f"0 is exact, and 1 is as wrong as an output of zeros. Measured on {(after or before or {}).get('inputs')}."
    )
    return Section("Which heads are hard", [text], tables=tables) if tables else None


def _command_section(report: Report) -> Section | None:
    """The command that makes this model again."""
    if not report.get("command"):
        return None
    code = f"hf-linear-attention convert {shlex.join(report['command'])}".replace(" --", " \\\n    --")
    text = "Folders of files on the author's disk are left out; put your own in front of the names."
    return Section("How to repeat it", [text], code=code)
