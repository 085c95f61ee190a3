"""The training and validation examples of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import datasets
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

from hf_linear_attention.training.data.batches import Masking, Stream
from hf_linear_attention.training.data.examples import build_examples, image_examples, usable_texts
from hf_linear_attention.training.data.images import usable_images
from hf_linear_attention.training.data.labels import label_names
from hf_linear_attention.training.data.packing import Examples
from hf_linear_attention.training.data.processors import Processor, load_config, sequence_length
from hf_linear_attention.training.data.rows import count_skipped, load_rows, path_of
from hf_linear_attention.training.data.streaming import StreamedExamples
from hf_linear_attention.training.models import class_mapping
from hf_linear_attention.training.recipe import Recipe


@dataclass
class Splits:
    """The examples of both splits, the class index of every label, and the number of rows skipped in each split."""

    train: Examples | StreamedExamples | None
    validation: Examples | None
    classes: dict[str, int] | None
    skipped: dict[str, int]


def _load_images(recipe: Recipe, processor: BaseImageProcessor) -> Splits:
    labels = recipe.data.label_column_name
    rows, skipped = _read(
        recipe,
        ("train", "validation"),
        lambda part, split: usable_images(part, recipe.data, split, labelled=labels in part.column_names),
    )
    classes = _classes(recipe, rows)
    examples = {split: image_examples(recipe, part, processor, classes, split) for split, part in rows.items()}
    return Splits(examples.get("train"), examples.get("validation"), classes, skipped)


def _read(
    recipe: Recipe, splits: Sequence[str], usable: Callable[[datasets.Dataset, str], datasets.Dataset]
) -> tuple[dict[str, datasets.Dataset], dict[str, int]]:
    """The usable rows of every split that exists, and the number of those skipped in each split that has any."""
    found = {split: rows for split in splits if (rows := load_rows(recipe.data, split)) is not None}
    kept = {split: usable(rows, split) for split, rows in found.items()}
    skipped = {split: count_skipped(rows, kept[split], recipe.data, split) for split, rows in found.items()}
    return kept, {split: count for split, count in skipped.items() if count}


def _classes(recipe: Recipe, rows: dict[str, datasets.Dataset]) -> dict[str, int] | None:
    """The class index of every label in the first labelled split; the other split may have no further classes."""
    column = recipe.data.label_column_name
    labelled = [(split, part) for split, part in rows.items() if column in part.column_names]
    if not labelled:
        return None
    split, first = labelled[0]
    return class_mapping(load_config(recipe), label_names(first, column, path_of(recipe.data, split)))


def load_data(recipe: Recipe, processor: Processor) -> Splits:
    """Read both splits, and make examples of them."""
    if isinstance(processor, BaseImageProcessor):
        return _load_images(recipe, processor)
    return _load_texts(recipe, processor)


def _load_texts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Splits:
    max_length = sequence_length(recipe, tokenizer, load_config(recipe))
    read_now = ("validation",) if recipe.data.streaming else ("train", "validation")
    rows, skipped = _read(recipe, read_now, lambda part, split: usable_texts(recipe, part, split))
    classes = _classes(recipe, rows) if recipe.model.task == "sequence_classification" else None
    examples = {
        split: build_examples(recipe, part, tokenizer, max_length, classes, split) for split, part in rows.items()
    }
    train = StreamedExamples(recipe, tokenizer, max_length) if recipe.data.streaming else examples.get("train")
    return Splits(train, examples.get("validation"), classes, skipped)


def masking_of(recipe: Recipe, processor: Processor) -> Masking | None:
    """The masking of tokens for masked_lm; None for other tasks."""
    if recipe.model.task != "masked_lm" or isinstance(processor, BaseImageProcessor):
        return None
    special = tuple(processor.all_special_ids)
    return Masking(recipe.data.mlm_probability, processor.mask_token_id, len(processor), special)


def stream_of(examples: Examples, recipe: Recipe, processor: Processor, shuffle: bool) -> Stream:
    """The examples by position, with the seed and the masking of the recipe."""
    return Stream(examples, recipe.run.seed, shuffle, masking_of(recipe, processor))
