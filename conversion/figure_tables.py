"""The figures of `conversion_report.json` as model card and terminal show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_linear_attention._common.model_card import format_value


LABELS = {
    "teacher": "nats per token, the original",
    "student": "nats per token",
    "gap": "gap to the original, nats per token",
    "window_alone": "nats per token, untrained window and sinks alone",
    "without_far": "nats per token, linear part switched off",
    "agreement": "same top token",
    "kl": "KL(original, this model), nats per token",
    "cosine": "cosine of embeddings",
    "cosine_min": "cosine of embeddings, lowest",
    "same_neighbour": "same nearest neighbour",
    "spearman_teacher": "Spearman's correlation with the pairs' scores, the original",
    "spearman": "Spearman's correlation with the pairs' scores",
    "recall_at_1_teacher": "recall of retrieval at 1, the original",
    "recall_at_1": "recall of retrieval at 1",
    "recall_at_10_teacher": "recall of retrieval at 10, the original",
    "recall_at_10": "recall of retrieval at 10",
    "ndcg_at_10_teacher": "nDCG of retrieval at 10, the original",
    "ndcg_at_10": "nDCG of retrieval at 10",
}
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
GENERATION = {
    "agreement_length": "tokens of greedy agreement, of {greedy}",
    "teacher_on_student": "nats of the original on samples of this model",
    "teacher_on_teacher": "nats of the original on its own samples",
    "repeated_student": "repeated 4-grams in samples of this model",
    "repeated_teacher": "repeated 4-grams in samples of the original",
}


def quality_rows(quality: Mapping[str, Any]) -> dict[str, Any]:
    """The figures under their names."""
    rows = {text: quality[name] for name, text in LABELS.items() if quality.get(name) is not None}
    for count in quality.get("dims", ()):
        found = {text: quality.get(f"{name}_dim_{count}") for name, text in LABELS.items()}
        rows |= {f"{text}, first {count:,} dimensions": value for text, value in found.items() if value is not None}
    for entry in quality.get("generation", ()):
        for name, text in GENERATION.items():
            rows[f"{text.format(**entry)}, at length {entry['length']:,}"] = entry[name]
    return rows


def comparison(quality: Mapping[str, Any]) -> dict[str, Any] | None:
    """The table of nats per token by position and distance: `header`, `rows` (texts) and `notes`; None without one."""
    if "positions" not in quality:
        return None
    positions, recall = quality["positions"], quality["recall"]
    entries = [("whole text, inside the length", quality)]
    entries += [(f"positions {part['from']:,} to {part['to'] - 1:,}", part) for part in positions["buckets"]]
    entries += [
        (f"recall, {part['from']:,} to {part['to'] - 1:,} tokens back", part) for part in recall.get("buckets", ())
    ]
    shown = [name for name in COLUMNS if any(part.get(name) is not None for _, part in entries)]
    rows = [[text, *(_cell(name, part.get(name)) for name in shown)] for text, part in entries]
    return {"header": ["nats per token", *(COLUMNS[name] for name in shown)], "rows": rows, "notes": _notes(quality)}


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):  # a difference that is less than 0 is a gain
        error = value["standard_error"]
        return "-" if value["mean"] is None else f"{-value['mean']:z.3f}" + ("" if error is None else f" ± {error:.3f}")
    return f"{value:.4f}" if isinstance(value, float) else format_value(value)


def _notes(quality: Mapping[str, Any]) -> list[str]:
    control, positions, recall = quality["control"], quality["positions"], quality["recall"]
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
    if "left_out" in recall:
        notes.append(f"There are no figures of recall: {recall['left_out']}.")
    else:
        counted = f" ({quality['train_file']})" if quality.get("train_file") else ""
        notes.append(
            f"Recall is of targets that end a 4-gram which the training text{counted} has 20 times at most, and the "
            "context too."
        )
        if recall.get("validation_file"):  # of an earlier evaluation
            notes.append(f"Recall was measured on {recall['validation_file']}.")
    return notes


def data_notes(quality: Mapping[str, Any]) -> list[str]:
    """What the figures of pairs and of retrieval were measured on."""
    notes = [f"Pairs with scores: {quality['pairs_file']}."] if quality.get("pairs_file") else []
    if test := quality.get("retrieval"):
        notes.append(f"Retrieval: {test['queries']:,} queries among {test['documents']:,} documents of {test['file']}.")
    return notes


def describe_quality(quality: Mapping[str, Any]) -> str:
    """For the terminal."""
    rows = quality_rows(quality)
    width = max(map(len, rows))
    lines = [f"On {quality['validation_file']} (about {quality['max_tokens']:,} tokens at most):"]
    lines += [f"  {name:<{width}}  {format_value(value)}" for name, value in rows.items()]
    if notes := data_notes(quality):
        lines += ["", *(f"  {note}" for note in notes)]
    table = comparison(quality)
    if table is not None:
        lines += ["", *_aligned([table["header"], *table["rows"]]), "", *(f"  {note}" for note in table["notes"])]
    return "\n".join(lines)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]
