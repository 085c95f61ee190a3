"""The classes and scores in the label column of a data set."""

from __future__ import annotations

import itertools
from typing import Any

import datasets

from hf_linear_attention._common.errors import DataError
from hf_linear_attention.training.data.rows import path_of
from hf_linear_attention.training.recipe import DataArguments, Recipe


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
    rows: datasets.Dataset, recipe: Recipe, classes: dict[str, int] | None, split: str, *, of_words: bool = False
) -> list[Any] | None:
    """The class index of every row; None if the data is unlabelled and training only imitates a teacher.

    If the labels are those `of_words`, a row has a list of them.

    Raises:
        DataError: if labels are needed and there are none, or a class is unknown.
    """
    name, known = recipe.data.label_column_name, classes or {}
    if name not in rows.column_names:
        if split == "train" and not recipe.objective.task_loss_weight:
            return None
        columns = ", ".join(rows.column_names)
        raise DataError(f"`--label_column_name {name}` is not a column of the {split} data; it has {columns}")
    values = label_names(rows, name, path_of(recipe.data, split), of_words=of_words)
    if unknown := sorted({*(itertools.chain(*values) if of_words else values)} - {*known}):
        raise DataError(
            f"there are unknown classes in the {split} data: {unknown[:10]}; the known classes are {sorted(known)}"
        )
    return [[known[value] for value in row] for row in values] if of_words else [known[value] for value in values]


def label_names(rows: datasets.Dataset, name: str, path: str | None = None, *, of_words: bool = False) -> list[Any]:
    """The label of every row as text: the class name for a `ClassLabel` column, otherwise the value itself.

    If the labels are those `of_words`, a row has a list of them.

    Raises:
        DataError: if a value is neither a name nor a whole number.
    """
    feature = getattr(rows.features[name], "feature", None) if of_words else rows.features[name]

    def as_name(value: Any) -> str:
        if isinstance(feature, datasets.ClassLabel):
            return feature.int2str(value)
        if not isinstance(value, (str, int)):
            raise DataError(
                f"column `{name}` of {path or 'the data'} holds {value!r}, but classes must be whole numbers or names; "
                "correct the data"
            )
        return str(value)

    return [[as_name(value) for value in row] if of_words else as_name(row) for row in rows[name]]
