"""comparison.json as the table that `compare` prints, as a recommendation in one sentence, and as report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_linear_attention.conversion.page import rendered
from hf_linear_attention.conversion.page_plots import Line, bytes_text, grouped, line_chart
from hf_linear_attention.conversion.page_sections import CONTEXTS, Section, speed_chart, speed_conditions


HEADER = ["mechanism", "untrained", "trained", "faster here from", "state", "whole preset"]
MEASURES = {"kl": "KL to the original, in nats per token (0 is equal)", "cosine": "cosine to the original's embeddings"}


def table_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The `header` and `rows` of the mechanisms that the model supports."""
    rows = [_row(row, content["max_length"]) for row in supported(content)]
    return {"header": HEADER, "rows": rows}


def supported(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The mechanisms that the model supports."""
    return [row for row in content["mechanisms"] if row["refused"] is None]


def _row(row: Mapping[str, Any], max_length: int | None) -> list[str]:
    minutes = row.get("minutes")
    whole = "-" if minutes is None else f"{minutes:,.1f} min for {row['preset_tokens']:,} tokens"
    state = "-" if row["state_bytes"] is None else bytes_text(row["state_bytes"])
    return [
        row["mechanism"], _figure(row["before"]), _figure(row.get("after")), speed_text(row, max_length), state, whole,
    ]  # fmt: skip


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def speed_text(row: Mapping[str, Any], max_length: int | None) -> str:
    """From which length the mechanism is faster here, against the longest input of the model."""
    faster, curve = row["faster_from"], row["curve"]
    if not curve:
        return "-"
    if faster is None:
        longest = curve[-1]["length"]
        if max_length is not None and max_length <= longest:
            return f"never within its {max_length:,} positions"
        return f"not up to {longest:,} tokens"
    if max_length is not None and faster > max_length:
        return f"never within its {max_length:,} positions ({faster:,} tokens)"
    return f"{faster:,} tokens"


def recommendation(content: Mapping[str, Any]) -> str:
    """One sentence: the mechanism nearest to the original, after the training if there was one, and what it costs."""
    rows = supported(content)
    when = "after" if any(row.get("after") is not None for row in rows) else "before"
    known = [row for row in rows if row.get(when) is not None]
    if not known:
        return "There is nothing to recommend: no mechanism could be measured on text."
    ranked = sorted(known, key=lambda row: row[when] if row["measure"] == "kl" else -row[when])
    best = ranked[0]
    name = "KL" if best["measure"] == "kl" else "cosine"
    trained = f"after {content['tokens']:,} tokens" if when == "after" else "without training"
    others = "".join(f", `{row['mechanism']}` {row[when]:.3g}" for row in ranked[1:3])
    faster = speed_text(best, content["max_length"])
    speed = "it is faster than softmax here from " + faster if faster[0].isdigit() else f"faster here {faster}"
    found = f"{name} {best[when]:.3g}{others}"
    cost = best.get("minutes")
    minutes = "" if cost is None else f"; its whole preset takes about {cost:,.1f} minutes here"
    return f"Take `{best['mechanism']}`: {trained} it is nearest to the original ({found}); {speed}{minutes}."


def describe_comparison(content: Mapping[str, Any]) -> str:
    """For the terminal."""
    table = table_of(content)
    cells = [table["header"], *table["rows"]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
    return "\n".join([*_notes(content), "", *lines, "", *_refusals(content), content["recommendation"]])


def _notes(content: Mapping[str, Any]) -> list[str]:
    rows = supported(content)
    if not rows:
        return [Path(content["base_model"]).name]
    measure = next((MEASURES[row["measure"]] for row in rows if row["measure"]), "no text could be read")
    text = (
        "the built-in sentences as one text"
        if content["train_file"] is None
        else f"the last tenth of {content['train_file']}"
    )
    tokens = "" if content["tokens"] is None else f", trained on {content['tokens']:,} tokens"
    return [
        f"{Path(content['base_model']).name}: {measure}, on {text}{tokens}.",
        f"Speed: {speed_conditions({**rows[0], 'threads': content['threads']})}, measured now.",
    ]


def _refusals(content: Mapping[str, Any]) -> list[str]:
    refused = [f"`{row['mechanism']}` is refused: {row['refused']}" for row in content["mechanisms"] if row["refused"]]
    rows = supported(content)
    return refused + [
        f"`{row['mechanism']}` is not trained: {row['not_trained']}" for row in rows if row["not_trained"]
    ]


def comparison_page(content: Mapping[str, Any]) -> str:
    """report.html of a comparison."""
    rows = supported(content)
    notes = [*_notes(content), *_refusals(content)]
    parts = [Section("One row per mechanism", tables=[table_of(content)], notes=notes)] if rows else []
    parts += [section for section in (_speed_section(rows, content), _memory_section(rows)) if section is not None]
    name = Path(content["base_model"]).name
    footer = ["All figures are in comparison.json; this page loads nothing and runs no script."]
    title, _, reason = content["recommendation"].replace("`", "").partition(": ")
    lead = [f"{reason[:1].upper()}{reason[1:]}", *([] if rows else notes)]
    return rendered(name, title, lead, [], parts, footer)


def _speed_section(rows: Sequence[Mapping[str, Any]], content: Mapping[str, Any]) -> Section | None:
    chart = speed_chart({row["mechanism"]: row["curve"] for row in rows}, content["max_length"])
    return None if chart is None else Section("Speed here", figures=[chart])


def _memory_section(rows: Sequence[Mapping[str, Any]]) -> Section | None:
    kept = [row for row in rows if row["state_bytes"]]
    if not kept:
        return None
    cache = kept[0]["cache_bytes_per_token"]
    lines = [Line("original: keys and values", [(length, cache * length) for length in CONTEXTS], 0)]
    lines += [
        Line(row["mechanism"], [(length, float(row["state_bytes"])) for length in CONTEXTS], number % 5 + 1)
        for number, row in enumerate(rows)
        if row["state_bytes"]
    ]
    chart = line_chart(
        "Memory over length",
        "Bytes of context for one sequence over its length, for the cache of the original and the states.",
        lines,
        ("tokens of context", "bytes (both scales are logarithmic)"),
        x_log=2,
        y_log=10,
        formats=(grouped, bytes_text),
    )
    return None if chart is None else Section("Memory", figures=[chart])
