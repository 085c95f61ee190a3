"""What an earlier evaluation measured and the present one did not: it stays, with what it was measured on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_linear_attention.conversion.figure_tables import comparison, quality_rows


# What says whether two evaluations read the same text.
SAME_TEXT = ("validation_file", "max_tokens", "max_length", "targets")
# Figures of embeddings that come from files of their own, and what is measured without a text.
OF_OTHER_FILES = ("pairs_file", "spearman", "retrieval", "recall_at", "ndcg_at", "heads", "speed")
EARLIER = "earlier"


def with_earlier(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The figures `now`, and those of `before` that `now` lacks, where both are `quality` in conversion_report.json.

    On the same text they are put together. An evaluation of another text stays as a whole under `earlier` if it has
    figures that are not there now, but for those that do not depend on the text, and for recall, which names its text.
    """
    result = dict(now)
    records = [] if not before else [before, *before.get(EARLIER, ())]
    others = []
    for record in records:
        record = {name: value for name, value in record.items() if name != EARLIER}
        if all(record.get(name) == now.get(name) for name in SAME_TEXT):
            result = _filled(result, record)
        else:
            result = _filled(result, _of_any_text(record))
            others.append(record)
    left = [record for record in others if _shown(record) - _shown(result)]
    return {**result, EARLIER: left} if left else result


def _of_any_text(record: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in record.items() if name.startswith(OF_OTHER_FILES)}
    recall = record.get("recall") or {}
    if recall.get("buckets"):
        kept["recall"] = {"validation_file": record["validation_file"], **recall}
        kept["train_file"] = record.get("train_file")
    return {**kept, "dims": record["dims"]} if "dims" in record else kept


def _filled(now: Any, before: Any) -> Any:
    """`now` with what only `before` has; of lists, only buckets with the same edges are put together."""
    if isinstance(now, Mapping) and isinstance(before, Mapping):
        if now.get("left_out") and not before.get("left_out"):
            return before
        filled = {name: _filled(now.get(name), before.get(name)) for name in {**now, **before}}
        if "dims" in filled:
            filled["dims"] = sorted({*(now.get("dims") or ()), *(before.get("dims") or ())})
        return filled
    if _edges(now) and _edges(now) == _edges(before):
        return [_filled(mine, other) for mine, other in zip(now, before, strict=True)]
    return before if now is None else now


def _edges(value: Any) -> list[tuple[Any, ...]]:
    if not isinstance(value, Sequence) or not all(isinstance(part, Mapping) and "from" in part for part in value):
        return []
    return [(part["from"], part["to"], part.get("targets")) for part in value]


def _shown(quality: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """The names of all figures that the report and the card show."""
    table = comparison(quality) or {"header": [], "rows": []}
    cells = {(row[0], name) for row in table["rows"] for name, cell in zip(table["header"], row) if cell != "-"}
    return {*((name,) for name in quality_rows(quality)), *cells}
