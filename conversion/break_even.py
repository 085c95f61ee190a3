"""From which length on linear attention is faster than softmax: what `benchmarks/speed_break_even.py` measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


MEASURED = Path(__file__).with_name("break_even.json")


def faster_from(settings: Mapping[str, Any], is_causal: bool | None) -> str | None:
    """Half a sentence for settings of linear attention, with what was measured; None where nothing like it was.

    Args:
        is_causal: None for an encoder and a decoder together.
    """
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    row = next((row for row in measured["rows"] if _is_like(row["settings"], settings)), None)
    if row is None:
        return None
    forms = ("bidirectional", "causal") if is_causal is None else ("causal",) if is_causal else ("bidirectional",)
    lengths = [_words(row[form], measured["longest"]) for form in forms if form in row]
    places = (" in the encoder", " in the decoder") if len(lengths) == 2 else ("",)
    found = ", ".join(length + place for length, place in zip(lengths, places))
    return f"{found} (measured: {row['name']}, {measured['conditions']})" if found else None


def _is_like(row: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """The same mechanism and kind; sizes may differ, and are in the row's name."""
    return all(settings.get(name) == value for name, value in row.items() if isinstance(value, str))


def _words(tokens: int | None, longest: int) -> str:
    return f"more than {longest:,} tokens" if tokens is None else f"{tokens:,} tokens"
