"""report.html: what a conversion gave, as one page without scripts that loads nothing.

The page is made from conversion_report.json, training_report.json and config.json in a folder alone, so that it can be
made again at any time: `write_page(folder)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from hf_linear_attention._common.model_card import HISTORY, REPORT, format_value
from hf_linear_attention.configuration_linear_attention import entries_of
from hf_linear_attention.conversion.page_plots import bytes_text
from hf_linear_attention.conversion.page_sections import Section, percent, sections
from hf_linear_attention.conversion.verdict import faster, next_step, verdict
from hf_linear_attention.training.tasks import UNITS


PAGE = "report.html"
# Of a training, in the headline.
MOST_FIGURES = 3
TEMPLATE_FILE = Path(__file__).with_name("page.html")


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


def page_of(report: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], config: Mapping[str, Any], name: str) -> str:
    """The page of a converted model as HTML.

    Args:
        report: the content of conversion_report.json.
        runs: the training runs in training_report.json, oldest first.
        config: the content of config.json.
        name: the title.
    """
    lead = _lead(report, runs, config)
    return rendered(name, headline(report, runs), lead, _tiles(report), sections(report, runs), _footer(report))


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
    title = title.replace(" %", "\N{NO-BREAK SPACE}%")
    text = template.render(name=name, headline=title, lead=lead, tiles=tiles, sections=parts, footer=footer)
    return "".join(f"{line}\n" for line in text.splitlines() if line.strip())


def headline(report: Mapping[str, Any], runs: Sequence[Mapping[str, Any]] = ()) -> str:
    """The result in words, as in "Good: nearly as good as the original, and better than a window of the same bytes"."""
    found = verdict(report.get("quality") or {})
    return _without_figures(report, runs) if found is None else ": ".join(found)


def _kept(quality: Mapping[str, Any]) -> str | None:
    """The figures behind the headline, in a sentence."""
    if quality.get("agreement") is not None:
        lost = quality["student"] - quality["teacher"]
        return (
            f"It predicts held-out text with {quality['student']:.3f} nats per token, the original with "
            f"{quality['teacher']:.3f} ({lost:+.3f}; lower is better), and its likeliest next token is the original's "
            f"in {percent(quality['agreement'])} of the places."
        )
    if quality.get("cosine") is not None:
        return (
            f"Its embeddings of held-out texts have a cosine of {quality['cosine']:.3f} to the original's, and "
            f"{percent(quality['same_neighbour'])} of the texts keep their nearest neighbour."
        )
    return None


def _without_figures(report: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    outputs = (report.get("checks") or {}).get("student_against_teacher") or {}
    if not report.get("layers"):
        return "No layer was converted"
    if runs:
        figures = [f"{_words(name)} {format_value(value)}" for name, value in runs[-1]["metrics"].items()]
        return f"Trained: {', '.join(figures[:MOST_FIGURES])}" if figures else "Trained, and not measured"
    if "top1_agreement" in outputs:
        return f"Converted, not trained: {percent(outputs['top1_agreement'])} of token choices kept on short samples"
    if "mean_embedding_cosine" in outputs:
        return f"Converted, not trained: embeddings have a cosine of {outputs['mean_embedding_cosine']:.3f} on samples"
    if "hidden_state_error" in outputs:
        return f"Converted, not trained: hidden states err by {percent(outputs['hidden_state_error'])} on samples"
    return "Converted, and not measured"


def _words(name: str) -> str:
    """`eval_nats_per_token` -> `nats per token`."""
    return name.removeprefix("eval_").replace("_", " ")


def _lengths(report: Mapping[str, Any]) -> str | None:
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


def _lead(report: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[str]:
    mechanisms = " and ".join(dict.fromkeys(entry["mechanism"] for entry in entries_of(config["linear_attention"])))
    base = (
        Path(str(report["base_model"])).name if Path(str(report["base_model"])).is_absolute() else report["base_model"]
    )
    layers = len(report.get("layers") or ())
    text = f"{base} with linear attention ({mechanisms})"
    if "num_layers" in report:
        text += f" in {layers} of {report['num_layers']} layers"
    units = [unit for unit in UNITS.values() if any(run["training"].get(unit) for run in runs)]
    amounts = [f"{sum(run['training'].get(unit) or 0 for run in runs):,} {unit}" for unit in units]
    weights = {name for run in runs for name, value in run["training"].items() if name.endswith("_weight") and value}
    trained = f", trained on {' and '.join(amounts)}" if amounts else ", trained" if runs else ", not trained yet"
    trained += " to imitate its original." if weights - {"task_loss_weight"} else "."
    about = text + (trained if layers or "num_layers" not in report else ".")
    more = (_kept(report.get("quality") or {}), _lengths(report), next_step(report, runs))
    return [about, *(sentence for sentence in more if sentence is not None)]


def _tiles(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    quality = report.get("quality") or {}
    tiles = []
    if quality.get("student") is not None:
        tiles += [
            ("nats per token, this model", f"{quality['student']:.3f}"),
            ("nats per token, the original", f"{quality['teacher']:.3f}"),
        ]
        if quality.get("same_bytes") is not None:
            tiles.append(("nats per token, a window of the same bytes", f"{quality['same_bytes']:.3f}"))
    if quality.get("kl") is not None:
        tiles.append(("KL to the original, nats per token", f"{quality['kl']:.3g}"))
    if quality.get("spearman") is not None:
        tiles += [
            ("Spearman's correlation, this model", f"{quality['spearman']:.3f}"),
            ("Spearman's correlation, the original", f"{quality['spearman_teacher']:.3f}"),
        ]
    if quality.get("ndcg_at_10") is not None:
        tiles += [
            ("nDCG@10 of retrieval, this model", f"{quality['ndcg_at_10']:.3f}"),
            ("nDCG@10 of retrieval, the original", f"{quality['ndcg_at_10_teacher']:.3f}"),
        ]
    if report.get("state_bytes"):
        tiles.append(("state per sequence of any length", bytes_text(report["state_bytes"])))
    weights = report.get("weights") or {}
    if weights.get("new"):
        tiles.append(("of its weights are new", percent(weights["new"] / weights["total"])))
    return tiles


def _footer(report: Mapping[str, Any]) -> list[str]:
    texts = []
    if versions := report.get("versions"):
        texts.append("Converted with " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".")
    texts.append(f"All figures are in {REPORT}; this page loads nothing and runs no script.")
    return texts
