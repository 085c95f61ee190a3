"""Reading of files and of `datasets` data sets as rows, the refusal of bad rows, and the labels of rows."""

from __future__ import annotations

import csv
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetGenerationError

from hf_linear_attention._common.errors import DataError
from hf_linear_attention._common.reading import reading
from hf_linear_attention.training.data.packing import Part
from hf_linear_attention.training.recipe import DataArguments
from hf_linear_attention.training.tasks import MESSAGES


logger = logging.getLogger(__name__)

# With its defaults, pandas would read the text "null" as missing, in a .tsv join lines between quotes, and shift the
# columns of rows that have more fields than the header.
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {"sample_by": "document"}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {"keep_default_na": False, "index_col": False}),
    ".tsv": ("csv", {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "keep_default_na": False, "index_col": False}),
    ".parquet": ("parquet", {}),
}
SHOWN = 5  # the number of bad rows that a message names; the others are only counted


def path_of(data: DataArguments, split: str) -> str | None:
    """The file of a split ("train" or "validation"), or None if it is not read from a file."""
    return data.train_file if split == "train" else data.validation_file


def folder_of(part: Part) -> Path:
    """The folder to which the paths in the rows are relative."""
    path = path_of(part.recipe.data, part.split)
    return Path(path).parent if path is not None else Path()


def load_rows(data: DataArguments, split: str) -> datasets.Dataset | None:
    """The raw rows of `split` ("train" or "validation"), or None if there is no data for it.

    Raises:
        DataError: if a file cannot be read, or a .jsonl has lines that are not objects.
    """
    path = path_of(data, split)
    if path is not None:
        builder, options = READERS[Path(path).suffix]
        try:
            return datasets.load_dataset(builder, data_files=[path], split="train", **options)
        # The readers' own errors are ValueErrors, and that of JSON that is nested too deeply a RecursionError.
        except (DatasetGenerationError, ValueError, RecursionError, StopIteration) as error:
            if Path(path).suffix != ".jsonl":
                raise DataError(f"{path} cannot be read: {error.__cause__ or error}") from error
            named = (data.text_column_name, data.text_pair_column_name, data.label_column_name, data.image_column_name)
            return _read_line_by_line(path, {*named, MESSAGES} - {None})
    if data.dataset_name is None:
        return None
    with reading(f"`--dataset_name {data.dataset_name}`", "give a folder or the name of a data set"):
        splits = datasets.load_dataset(data.dataset_name)
    if split == "train" and split not in splits:
        raise DataError(f"`--dataset_name {data.dataset_name}` has no split `train`, only {', '.join(splits)}")
    if split == "validation" and split not in splits and "test" in splits:
        logger.info("`--dataset_name %s` has no split `validation`: its split `test` is evaluated", data.dataset_name)
        split = "test"
    return splits.get(split)


def _read_line_by_line(path: str, used: set[Any]) -> datasets.Dataset:
    """The rows of a .jsonl that cannot be read at once, with the columns that are `used`.

    Raises:
        DataError: naming the lines that are no objects, and the values of another type than most in their column.
    """
    rows: dict[int, dict[str, Any]] = {}
    bad: dict[int, str] = {}
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if isinstance(row, dict):
                    rows[number] = row
                else:
                    bad[number] = "is not a JSON object"
    columns = {name: [row.get(name) for row in rows.values()] for name in used if any(name in r for r in rows.values())}
    for name, values in columns.items():
        kinds = Counter(type(value) for value in values if value is not None)
        if len(kinds) > 1 and kinds.keys() != {int, float}:
            usual = kinds.most_common(1)[0][0]
            others = {n: v for n, v in zip(rows, values, strict=True) if v is not None and type(v) is not usual}
            bad |= {number: f"`{name}` is {value!r}" for number, value in others.items()}
    _refuse([f"line {number}: {bad[number]}" for number in sorted(bad)], path)
    try:
        return datasets.Dataset.from_dict(columns)
    except (ValueError, TypeError) as error:  # pyarrow's errors are both
        raise DataError(f"{path} mixes types in a column ({error}); give its values the same type") from error


def require_column(rows: datasets.Dataset, option: str, name: str) -> None:
    """Refuse `name`, the value of `--option`, if it is not a column of `rows`.

    Raises:
        DataError: with the columns that there are.
    """
    if name not in rows.column_names:
        raise DataError(f"`--{option} {name}` is not a column; the data has {', '.join(rows.column_names)}")


def refuse_bad(bad: dict[int, str], data: DataArguments, split: str) -> None:
    """Refuse the rows in `bad`, which maps the number of a row to its problem.

    Raises:
        DataError: if there are any.
    """
    if bad:
        path = path_of(data, split)
        places = dict(zip(sorted(bad), _places(path, sorted(bad)), strict=True))
        _refuse([f"{places[number]}: {bad[number]}" for number in sorted(bad)], path or f"{data.dataset_name}, {split}")


def bad_texts(rows: datasets.Dataset, names: Iterable[str]) -> dict[int, str]:
    """The problems, by row, of the cells of columns that must hold texts."""
    bad: dict[int, str] = {}
    for name in names:
        for number, text in enumerate(rows[name]):
            if not isinstance(text, str):
                bad.setdefault(number, f"`{name}` is {text!r}, not a text")
            elif not text.strip():
                bad.setdefault(number, f"`{name}` is empty")
    return bad


def missing_labels(rows: datasets.Dataset, name: str) -> dict[int, str]:
    """The rows without a value in the column of labels, if there is such a column."""
    labels = enumerate(rows[name]) if name in rows.column_names else ()
    return {number: f"`{name}` is missing" for number, label in labels if label is None or label == ""}


def _refuse(bad: list[str], source: str) -> None:
    if bad:
        more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise DataError(f"{len(bad)} bad row(s) in {source}: {'; '.join(bad[:SHOWN])}{more}. Correct or remove them")


def _places(path: str | None, rows: list[int]) -> list[str]:
    """The places of rows, which are numbered from 0, in their file, such as `line 7`."""
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


def pair_scores(part: Part) -> list[float] | None:
    """The score of every pair, given twice, once for each text; None for training data, which needs no scores.

    Raises:
        DataError: if there is no column of scores, or a value in it is not a number.
    """
    rows, split, name = part.rows, part.split, part.recipe.data.label_column_name
    if split == "train":
        return None
    if name not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise DataError(f"`--label_column_name {name}`, for scores, is not a column of the {split} data: {columns}")
    wrong = [value for value in rows[name] if isinstance(value, bool) or not isinstance(value, (int, float))]
    if wrong:
        raise DataError(f"column `{name}` holds {wrong[0]!r}, but scores must be numbers; correct the data")
    return [float(value) for value in rows[name] for _ in range(2)]


def class_labels(part: Part) -> list[int] | None:
    """The class index of every row; None if the data is unlabelled and training only imitates a teacher.

    Raises:
        DataError: if labels are needed and there are none, or a class is unknown.
    """
    recipe, rows, split, known = part.recipe, part.rows, part.split, part.classes or {}
    name = recipe.data.label_column_name
    if name not in rows.column_names:
        if split == "train" and not recipe.objective.task_loss_weight:
            return None
        columns = ", ".join(rows.column_names)
        raise DataError(f"`--label_column_name {name}` is not a column of the {split} data; it has {columns}")
    values = label_names(rows, name, path_of(recipe.data, split))
    if unknown := sorted({*values} - {*known}):
        raise DataError(f"unknown classes in the {split} data: {unknown[:10]}; known are {sorted(known)}")
    return [known[value] for value in values]


def label_names(rows: datasets.Dataset, name: str, path: str | None = None) -> list[str]:
    """The label of every row as text: the class name for a `ClassLabel` column, otherwise the value itself.

    Raises:
        DataError: if a value is neither a name nor a whole number.
    """
    feature = rows.features[name]

    def as_name(value: Any) -> str:
        if isinstance(feature, datasets.ClassLabel):
            return feature.int2str(value)
        if not isinstance(value, (str, int)):
            place = path or "the data"
            raise DataError(f"column `{name}` of {place} holds {value!r}; classes are whole numbers or names")
        return str(value)

    return [as_name(value) for value in rows[name]]
