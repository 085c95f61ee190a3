"""The classes and scores in the label column of a data set."""

from __future__ import annotations

import logging
from typing import Any

import datasets
import numpy as np

from hf_linear_attention._common.errors import DataError
from hf_linear_attention.training.data.rows import path_of
from hf_linear_attention.training.recipe import DataArguments, Recipe


logger = logging.getLogger(__name__)


def pair_scores(rows: datasets.Dataset, data: DataArguments, split: str) -> list[float] | None:
    """The score of every pair, given twice, once for each text; None for training data, which needs no scores.

    Raises:
        DataError: if there is no column of scores, or a value in it is not a number.
    """
    name = data.label_column_name
    if split == "train":
        return None
    if name not in rows.column_names:
        raise DataError(
            f"`--label_column_name {name}`, the score of each pair, is not a column of the {split} data; it has "
            f"{', '.join(rows.column_names)}"
        )
    wrong = [value for value in rows[name] if isinstance(value, bool) or not isinstance(value, (int, float))]
    if wrong:
        raise DataError(f"column `{name}` holds {wrong[0]!r}, but scores must be numbers; correct the data")
    return [float(value) for value in rows[name] for _ in range(2)]


def class_labels(
    rows: datasets.Dataset, recipe: Recipe, classes: dict[str, int] | None, split: str
) -> list[int] | None:
    """The class index of every row; None if the data is unlabelled and training only imitates a teacher.

    Raises:
        DataError: if labels are needed and there are none, or a class is unknown.
    """
    name = recipe.data.label_column_name
    if name not in rows.column_names:
        if split == "train" and not recipe.objective.task_loss_weight:
            return None
        columns = ", ".join(rows.column_names)
        raise DataError(f"`--label_column_name {name}` is not a column of the {split} data; it has {columns}")
    values = label_names(rows, name, path_of(recipe.data, split))
    unknown = sorted({value for value in values if value not in (classes or {})})
    if unknown:
        raise DataError(
            f"there are unknown classes in the {split} data: {unknown[:10]}; the known classes are "
            f"{sorted(classes or {})}"
        )
    return [classes[value] for value in values] if classes else None


def label_names(rows: datasets.Dataset, name: str, path: str | None = None, *, of_words: bool = False) -> list[Any]:
    """The label of every row as text: the class name for a `ClassLabel` column, otherwise the value itself.

    If the labels are those `of_words`, a row has a list of them.

    Raises:
        DataError: if a value is neither a name nor a whole number.
    """
    feature = rows.features[name]
    if of_words and isinstance(inner := getattr(feature, "feature", None), datasets.ClassLabel):
        return [[inner.int2str(value) for value in row] for row in rows[name]]
    if isinstance(feature, datasets.ClassLabel):
        return [feature.int2str(value) for value in rows[name]]
    values = list(rows[name])
    if of_words:
        flat = _as_names([value for row in values for value in row], name, path)
        ends = np.cumsum([len(row) for row in values])[:-1]
        return [list(map(str, part)) for part in np.split(np.array(flat, dtype=object), ends)]
    return _as_names(values, name, path)


def _as_names(values: list[Any], name: str, path: str | None) -> list[str]:
    wrong = [value for value in values if not isinstance(value, (str, int))]
    if wrong:
        raise DataError(
            f"column `{name}` of {path or 'the data'} holds {wrong[0]!r}, but classes must be whole numbers or names; "
            "correct the data"
        )
    return [str(value) for value in values]
