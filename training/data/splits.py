"""The training and validation examples of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hf_linear_attention._common.errors import DataError
from hf_linear_attention.training.data.images import check_images, image_examples
from hf_linear_attention.training.data.packing import Examples, Part
from hf_linear_attention.training.data.processors import Processor, load_config, sequence_length, warn_of_length
from hf_linear_attention.training.data.rows import label_names, load_rows, path_of
from hf_linear_attention.training.data.texts import (
    build_examples,
    check_language,
    check_texts,
    language_examples,
    target_examples,
)
from hf_linear_attention.training.models import class_mapping
from hf_linear_attention.training.recipe import Recipe


@dataclass
class Splits:
    """The examples of both splits, and the class index of every label."""

    train: Examples | None
    validation: Examples | None
    classes: dict[str, int] | None


@dataclass(frozen=True)
class Reader:
    """How the rows of a task become examples: `check` refuses bad rows of a split, `examples` makes those of others."""

    check: Callable[[Part], None]
    examples: Callable[[Part], Examples]
    has_classes: bool = False


TEXT = Reader(check_texts, build_examples)
# The tasks that are not here read texts (`TEXT`).
READERS = {
    "causal_lm": Reader(check_language, language_examples),
    "seq2seq_lm": Reader(check_texts, target_examples),
    "sequence_classification": Reader(check_texts, build_examples, has_classes=True),
    "image_classification": Reader(check_images, image_examples, has_classes=True),
    "image_embedding": Reader(check_images, image_examples),
}


def _classes(recipe: Recipe, parts: list[Part]) -> dict[str, int] | None:
    """The class index of every label in the first labelled split; the other split may have no further classes."""
    column = recipe.data.label_column_name
    labelled = [part for part in parts if column in part.rows.column_names]
    if not labelled:
        return None
    path = path_of(recipe.data, labelled[0].split)
    classes = class_mapping(load_config(recipe), label_names(labelled[0].rows, column, path))
    if len(classes) == 1:
        place = path or f"`--dataset_name {recipe.data.dataset_name}`"
        raise DataError(f"`{column}` is {min(classes)!r} in every row of {place}, so there is nothing to tell apart")
    return classes


def load_data(recipe: Recipe, processor: Processor) -> Splits:
    """Read both splits, and make examples of them.

    Raises:
        TrainingError: if a split holds nothing that can be used.
    """
    reader = READERS.get(recipe.model.task, TEXT)
    max_length = sequence_length(recipe, processor, config := load_config(recipe))
    warn_of_length(max_length, config)
    read = {split: load_rows(recipe.data, split) for split in ("train", "validation")}
    parts = [Part(recipe, rows, split, processor, max_length) for split, rows in read.items() if rows is not None]
    for part in parts:
        reader.check(part)
    classes = _classes(recipe, parts) if reader.has_classes else None
    examples: dict[str, Any] = {part.split: reader.examples(replace(part, classes=classes)) for part in parts}
    return Splits(examples.get("train"), examples.get("validation"), classes)
