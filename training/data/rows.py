"""Files and `datasets` data sets as rows, and what is done about rows that cannot be used (`--on_bad_rows`)."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError

from hf_linear_attention._common.errors import TrainingError
from hf_linear_attention.training.recipe import DataArguments


logger = logging.getLogger(__name__)

# pandas would read a text "null" as missing and join lines at quotes; neither is meant here.
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {"sample_by": "document"}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {"keep_default_na": False}),
    ".tsv": ("csv", {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "keep_default_na": False}),
    ".parquet": ("parquet", {}),
}
SHOWN = 5  # bad rows by line in a message; the rest are counted


def path_of(data: DataArguments, split: str) -> str | None:
    return data.train_file if split == "train" else data.validation_file


def load_rows(data: DataArguments, split: str) -> datasets.Dataset | None:
    """The raw rows of `split` ("train" or "validation"), or None when there are none.

    Raises:
        TrainingError: for a file that cannot be read; by `--on_bad_rows`, a .jsonl with lines that are no objects.
    """
    path = path_of(data, split)
    if path is not None:
        builder, options = READERS[Path(path).suffix]
        try:
            return datasets.load_dataset(builder, data_files=[path], split="train", **options)
        except (DatasetGenerationError, ValueError) as error:  # the readers' own errors are ValueErrors
            if Path(path).suffix != ".jsonl":
                raise TrainingError(f"{path} cannot be read: {error.__cause__ or error}") from error
            return _read_line_by_line(path, data)
    if data.dataset_name is None:
        return None
    splits = datasets.load_dataset(data.dataset_name, data.dataset_config_name)
    if split == "train" and split not in splits:
        raise TrainingError(f"`--dataset_name {data.dataset_name}` has no split `train`, only {', '.join(splits)}")
    return splits.get(split)


def _read_line_by_line(path: str, data: DataArguments) -> datasets.Dataset:
    """The good lines of a .jsonl that cannot be read as a whole, with the columns that are used."""
    good, bad = [], []
    wanted = (data.text_column_name, data.text_pair_column_name, data.label_column_name)
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                row = _parse(line)
                text = None if row is None else row.get(data.text_column_name)
                if row is None or not isinstance(text, str):
                    what = "is no JSON object" if row is None else f"`{data.text_column_name}` is {text!r}"
                    bad.append(f"line {number}: {what}")
                else:
                    good.append({name: row.get(name) for name in wanted if name in row})
    report(bad, path, data)
    try:
        return datasets.Dataset.from_list(good)
    except (ValueError, TypeError) as error:  # pyarrow's errors are both
        raise TrainingError(f"{path}: a column holds values of several types ({error}); make them one") from error


def _parse(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def usable_rows(rows: datasets.Dataset, data: DataArguments, split: str, labelled: bool) -> datasets.Dataset:
    """`rows` without the bad ones: no text, no second text, or (`labelled`) no label or an empty text.

    Raises:
        TrainingError: if there are bad ones and they may not be skipped; if there is no column with the texts.
    """
    columns = [name for name in (data.text_column_name, data.text_pair_column_name) if name is not None]
    for option, name in zip(("text_column_name", "text_pair_column_name"), columns):
        require_column(rows, option, name)
    labels = list(rows[data.label_column_name]) if labelled else None
    bad: dict[int, str] = {}
    for name in columns:
        for number, text in enumerate(rows[name]):
            if not isinstance(text, str):
                bad.setdefault(number, bad_text(name, text))
            elif labelled and not text.strip():
                bad.setdefault(number, f"`{name}` is empty, with a label")
    for number, label in enumerate(labels or ()):
        if label is None:
            bad.setdefault(number, f"`{data.label_column_name}` is missing")
    return without_bad(rows, bad, data, split)


def require_column(rows: datasets.Dataset, option: str, name: str) -> None:
    if name not in rows.column_names:
        raise TrainingError(f"`--{option} {name}` is not a column; the data has {', '.join(rows.column_names)}")


def without_bad(rows: datasets.Dataset, bad: dict[int, str], data: DataArguments, split: str) -> datasets.Dataset:
    """`rows` without those that are `bad`, by number with what is wrong; refuses them if they may not be skipped."""
    if not bad:
        return rows
    source = path_of(data, split) or f"{data.dataset_name}, {split}"
    places = dict(zip(sorted(bad), _places(path_of(data, split), sorted(bad)), strict=True))
    report([f"{places[number]}: {bad[number]}" for number in sorted(bad)], source, data)
    return rows.select([number for number in range(len(rows)) if number not in bad])


def count_skipped(rows: datasets.Dataset, usable: datasets.Dataset, data: DataArguments, split: str) -> int:
    """How many of what `load_rows` has read, or could not read as rows, are not among the `usable` ones."""
    path = path_of(data, split)
    if data.on_bad_rows == "skip" and path is not None and path.endswith(".jsonl"):
        return sum(1 for _ in _lines(path)) - len(usable)
    return len(rows) - len(usable)


def bad_text(column: str, value: Any) -> str:
    return f"`{column}` is {value!r}, not a text"


def report(bad: list[str], source: str, data: DataArguments) -> None:
    """Refuse bad rows, or say that they are left out."""
    more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    text = f"{len(bad)} bad row(s) in {source}: {'; '.join(bad[:SHOWN])}{more}"
    if bad and data.on_bad_rows == "raise":
        raise TrainingError(f"{text}. Mend them, or leave them out with `--on_bad_rows skip`")
    if bad:
        logger.warning("left out %s", text)


def _places(path: str | None, rows: list[int]) -> list[str]:
    """Where rows, by number from 0, are in their file: `line 7`."""
    if path is None or path.endswith(".parquet"):
        return [f"row {row}" for row in rows]
    wanted, lines = set(rows), {}
    for row, line in enumerate(_lines(path)):
        if row in wanted:
            lines[row] = line
    return [f"line {lines[row]}" if row in lines else f"row {row}" for row in rows]


def _lines(path: str) -> Iterator[int]:
    """The number of the line on which each row of a file begins."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        if not path.endswith(".csv"):
            numbers = (number for number, line in enumerate(file, 1) if line.strip())
            yield from list(numbers)[path.endswith(".tsv") :]
            return
        reader, begin = csv.reader(file), 1
        for number, row in enumerate(reader):
            if row and number:
                yield begin
            begin = reader.line_num + 1
