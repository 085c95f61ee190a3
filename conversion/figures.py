"""The figures of held-out text as terminal, model card and report.html show them, from conversion_report.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_linear_attention._common.model_card import format_value


# Figures of `quality` with their names in the tables.
LABELS = {
    "teacher": "nats per token, the original",
    "student": "nats per token",
    "gap": "gap to the original, nats per token",
    "window_alone": "nats per token, untrained window and sinks alone",
    "without_far": "nats per token, all but window and sinks switched off",
    "agreement": "same top token",
    "kl": "KL(original, this model), nats per token",
    "recall_teacher": "recall of copied text, the original",
    "recall": "recall of copied text",
    "cosine": "cosine of embeddings",
    "cosine_min": "cosine of embeddings, lowest",
    "spearman_teacher": "Spearman's correlation with the pairs' scores, the original",
    "spearman": "Spearman's correlation with the pairs' scores",
}
# The columns of the table by position.
COLUMNS = {
    "targets": "targets",
    "teacher": "original",
    "student": "this model",
    "window_alone": "its window alone",
    "same_bytes": "window of the same bytes",
    "healed": "the same, healed",
    "student_minus_window_alone": "less than its window",
    "student_minus_same_bytes": "less than the same bytes",
    "student_minus_healed": "less than these, healed",
}

GOOD, USABLE, NOT_YET = "Good", "Usable", "Not yet"
NEARNESS = {GOOD: "nearly as good as", USABLE: "close to", NOT_YET: "far from"}
WINDOW = "a window of the same bytes, which needs no training"
# The most for the first two words: nats per token above the original's, relative to these; the distance of embeddings
# from the original's; and what a correlation may lose.
GAPS, DISTANCES, LOSSES = (0.02, 0.1), (0.02, 0.1), (0.01, 0.05)
FEWEST_ERRORS = 2  # a difference of fewer standard errors counts as none


@dataclass(frozen=True)
class Table:
    """A table of texts, whose first column names the rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    title: str = ""

    def lines(self) -> list[str]:
        """The table for the terminal, all columns but the first on the right."""
        first, *widths = (max(map(len, column)) for column in zip(self.header, *self.rows))
        return [
            "  ".join([f"{row[0]:<{first}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths))])
            for row in (self.header, *self.rows)
        ]


@dataclass(frozen=True)
class Figures:
    """What was measured on held-out text; terminal, model card and report.html print this.

    Args:
        about: the text, in a sentence.
        rows: the figures by name.
        by_position: nats per token by position beside the controls; None for embedding models.
        notes: what else was read.
        verdict: one of three words, and its reason; None without figures that say it.
    """

    about: str
    rows: dict[str, Any]
    by_position: Table | None
    notes: list[str]
    verdict: tuple[str, str] | None

    def text(self) -> str:
        """The figures for the terminal."""
        width = max(map(len, self.rows), default=0)
        lines = [f"On {self.about}:", *(f"  {name:<{width}}  {format_value(x)}" for name, x in self.rows.items())]
        table = [self.by_position.lines(), self.by_position.notes] if self.by_position is not None else []
        for part in (self.notes, *table):
            lines += ["", *(f"  {line}" for line in part)] if part else []
        return "\n".join(lines)


def figures_of(quality: Mapping[str, Any]) -> Figures:
    """The figures in `quality` of conversion_report.json."""
    rows = {text: quality[name] for name, text in LABELS.items() if quality.get(name) is not None}
    notes = [f"Pairs with scores: {quality['pairs_file']}."] if quality.get("pairs_file") else []
    about = f"{quality['validation_file']} (about {quality['max_tokens']:,} tokens at most)"
    return Figures(about, rows, _by_position(quality), notes, _verdict(quality))


def _by_position(quality: Mapping[str, Any]) -> Table | None:
    if "positions" not in quality:
        return None
    control, positions = quality["control"], quality["positions"]
    entries = [("whole text, inside the length", quality)]
    entries += [(f"positions {part['from']:,} to {part['to'] - 1:,}", part) for part in positions["buckets"]]
    names = [name for name in COLUMNS if any(part.get(name) is not None for _, part in entries)]
    rows = [[text, *(_cell(part.get(name)) for name in names)] for text, part in entries]
    notes = [
        f"By position in windows of {positions['length']:,} tokens ({positions['windows']:,} of them), which end with "
        f"{positions['ended_by']}; the trained length is {positions['trained_length']:,}. ± is a standard error of the "
        "paired difference."
    ]
    if "window_size" in control:
        notes.append(
            f"The window of the same bytes has {control['window_size']:,} tokens and {control['num_sinks']} sinks "
            f"({control['state_bytes']:,} bytes), the better of windows with and without sinks."
        )
    elif control.get("left_out"):
        notes.append(f"There is no window of the same bytes: {control['left_out']}.")
    return Table(["nats per token", *(COLUMNS[name] for name in names)], rows, notes)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):  # a difference that is less than 0 is a gain
        error = value["standard_error"]
        return "-" if value["mean"] is None else f"{-value['mean']:z.3f}" + ("" if error is None else f" ± {error:.3f}")
    return f"{value:.4f}" if isinstance(value, float) else format_value(value)


def _verdict(quality: Mapping[str, Any]) -> tuple[str, str] | None:
    if quality.get("student") is not None:
        return _verdict_on_language(quality)
    if quality.get("cosine") is None:
        return None
    # What the embeddings are for counts for more than their likeness.
    if quality.get("spearman") is not None:
        word = _word(quality["spearman_teacher"] - quality["spearman"], *LOSSES)
    else:
        word = _word(1 - quality["cosine"], *DISTANCES)
    return word, f"its embeddings are {NEARNESS[word]} those of the original"


def _verdict_on_language(quality: Mapping[str, Any]) -> tuple[str, str]:
    word = _word((quality["student"] - quality["teacher"]) / quality["teacher"], *GAPS)
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


def _word(distance: float, good: float, usable: float) -> str:
    return GOOD if distance <= good else USABLE if distance <= usable else NOT_YET
