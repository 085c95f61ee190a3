"""Checks of data files before anything else is done: that they can be read as a whole, and have the columns in use.

`datasets` reads many damaged files without a word: a table whose rows have more fields than the header gets its columns
shifted, for example. Rows that are merely unusable are refused later (`rows.py`).
"""

from __future__ import annotations

import csv
import functools
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_linear_attention._common.errors import UsageError, one_line
from hf_linear_attention._common.reading import reading, require_file
from hf_linear_attention.training.recipe import DataArguments, Recipe
from hf_linear_attention.training.tasks import CLASSIFICATION, MESSAGES


SUFFIXES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet")
LINES_SHOWN = 3  # the number of malformed lines that a message names
csv.field_size_limit(sys.maxsize)  # a whole document may stand in one cell


def wanted_columns(recipe: Recipe, split: str) -> dict[str, str | None]:
    """The columns that the files of a split must have, and the options that name them."""
    data, name = recipe.data, recipe.model.task
    needs_labels = split == "validation" or bool(recipe.objective.task_loss_weight)
    if recipe.task.inputs == "images":
        wanted: dict[str, str | None] = {data.image_column_name: "image_column_name"}
    else:
        wanted = {data.text_column_name: "text_column_name"}
        if data.text_pair_column_name is not None:
            wanted[data.text_pair_column_name] = "text_pair_column_name"
    has_scores = name == "embedding" and data.text_pair_column_name is not None and split == "validation"
    has_classes = needs_labels and name in CLASSIFICATION
    return {**wanted, data.label_column_name: "label_column_name"} if has_scores or has_classes else wanted


def folder_files(data: DataArguments, split: str) -> list[str]:
    """The files of a split ("train" or "validation") of the folder `--dataset_name`; none for a data set of the Hub.

    Raises:
        UsageError: if `datasets` finds no data in the folder.
    """
    name = data.dataset_name
    if name is None or not Path(name).is_dir():
        return []
    import datasets

    with reading(f"`--dataset_name {name}`", "give a folder or the name of a data set"):
        found: Any = datasets.load_dataset_builder(name).config.data_files or {}
    if split == "validation" and split not in found:  # as `load_rows` does
        split = "test"
    return sorted(map(str, found.get(split, ())))


def column_instead(recipe: Recipe) -> str | None:
    """The column that may stand in place of all `wanted_columns`: conversations need no text."""
    return MESSAGES if recipe.model.task == "causal_lm" and "text_column_name" not in recipe.given else None


def option_problems(option: str, path: str, columns: Mapping[str, str | None], instead: str | None = None) -> list[str]:
    """One sentence for everything wrong with the file that `--option` names: its type, its path, and its content."""
    if Path(path).suffix not in SUFFIXES:
        return [f"`--{option} {path}`: the file must be one of {', '.join('*' + kind for kind in SUFFIXES)}"]
    if not os.path.isfile(path):  # unlike `Path.is_file`, it is False in a folder that may not be read
        what = "not a file" if os.path.exists(path) else "there is no such file, or its folder may not be read"
        return [f"`--{option} {path}`: {what}; check the path"]
    return file_problems(path, columns, instead)


def file_problems(path: str, columns: Mapping[str, str | None], instead: str | None = None) -> list[str]:
    """One sentence for everything wrong with a file that must have `columns`, named by options, or else `instead`."""
    if os.path.expandvars(path) != path:
        return [f"{path}: `datasets` would replace the variable in this name; rename the file"]
    try:
        require_file(Path(path))
        state = Path(path).stat()
        names = _columns(path, state.st_size, state.st_mtime_ns)
    except UsageError as error:
        return list(error.problems)
    if names is None or instead in names:
        return []
    named = {name: f"`--{option} {name}`" if option else f"`{name}`" for name, option in columns.items()}
    rest = f"is not a column of {path}, which has {', '.join(names)}; rename a column, or name another one"
    return [f"{text} {rest}" for name, text in named.items() if name not in names]


@functools.lru_cache(maxsize=8)
def _columns(path: str, size: int, changed: int) -> list[str] | None:
    """The columns of a file, or None if it has none.

    `size` and `changed` stand for its content, so that it is read only once.
    """
    if path.endswith(".txt"):
        texts = [line.strip() != "" for line in _decoded(path)]  # all of them, because the last may be damaged
        if not any(texts):
            raise UsageError(f"{path} holds no text; check the file")
        return None
    if size == 0:
        raise UsageError(f"{path} is empty; check the file")
    if path.endswith(".parquet"):
        return _parquet_columns(path)
    return _json_columns(path) if path.endswith(".jsonl") else _table_columns(path)


def _parquet_columns(path: str) -> list[str]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are both
        raise UsageError(f"{path} is not a complete .parquet file ({one_line(error)}); get it again") from error
    if file.metadata.num_rows == 0:
        raise UsageError(f"{path} has no rows; check the file")
    return list(file.schema_arrow.names)


def _json_columns(path: str) -> list[str]:
    """The columns of the first object; other lines may be bad rows."""
    first = None
    for line in _decoded(path):
        if first is None and line.strip():
            try:
                first = json.loads(line)
            except (ValueError, RecursionError):
                first = ""  # no JSON: a bad row
    if first is None:
        raise UsageError(f"{path} has no rows; check the file")
    if isinstance(first, list) and first and isinstance(first[0], dict):  # one list of all rows, which is read as well
        first = first[0]
    if isinstance(first, dict):
        return list(first)
    raise UsageError(f"{path}: its first row is not a JSON object; give one object per line")


def _table_columns(path: str) -> list[str]:
    """The header of a .csv or .tsv whose rows all have as many fields."""
    options: dict = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if path.endswith(".tsv") else {"strict": True}
    reader = csv.reader(_decoded(path), **options)
    header: list[str] = []
    wrong: list[str] = []
    count, line = 0, 1
    try:
        for row in reader:
            if not header:
                header = row
            elif row:
                count += 1
                wrong += [f"line {line} has {len(row)} fields"] if len(row) != len(header) else []
            line = reader.line_num + 1
    except csv.Error as error:
        raise UsageError(f"{path}: line {line} cannot be read ({error}); correct the quotes or separators") from error
    if wrong:
        more = f" and {len(wrong) - LINES_SHOWN} more lines" if len(wrong) > LINES_SHOWN else ""
        raise UsageError(
            f"{path}: {'; '.join(wrong[:LINES_SHOWN])}{more}, but the header has {len(header)} ({', '.join(header)}); "
            "correct or quote these lines"
        )
    if len({*header}) < len(header) or count == 0:
        raise UsageError(f"{path} {'has no rows' if count == 0 else 'names a column twice in its header'}; correct it")
    return header


def _decoded(path: str) -> Iterator[str]:
    """The lines of a file in UTF-8, without a byte order mark."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UsageError(f"{path}: line {number} is not UTF-8 ({error.reason}); save it as UTF-8") from error
            if "\0" in text:
                raise UsageError(f"{path}: line {number} holds a NUL, so it is no text; check the file")
            yield text
