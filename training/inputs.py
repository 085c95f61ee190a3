"""What a run reads: the examples of both splits, and the batches that each process trains on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import datasets
from accelerate import Accelerator
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

from hf_linear_attention.training import models
from hf_linear_attention.training.batches import Batch, Masking, Stream, TrainBatches, loader, steps_for_tokens
from hf_linear_attention.training.data import build_examples, image_examples, label_names, usable_texts
from hf_linear_attention.training.images import usable_images
from hf_linear_attention.training.packing import Examples
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.rows import count_skipped, load_rows
from hf_linear_attention.training.streaming import StreamedExamples


DEFAULT_EPOCHS = 3.0


@dataclass
class Data:
    """The examples of both splits, the class indices that their labels became, and the bad rows that were left out."""

    train: Examples | StreamedExamples | None
    validation: Examples | None
    classes: dict[str, int] | None
    skipped: dict[str, int]


def _load_images(recipe: Recipe, processor: BaseImageProcessor) -> Data:
    labels = recipe.data.label_column_name
    rows, skipped = _read(
        recipe,
        ("train", "validation"),
        lambda part, split: usable_images(part, recipe.data, split, labelled=labels in part.column_names),
    )
    classes = _classes(recipe, rows)
    examples = {split: image_examples(recipe, part, processor, classes, split) for split, part in rows.items()}
    return Data(examples.get("train"), examples.get("validation"), classes, skipped)


def _read(
    recipe: Recipe, splits: Sequence[str], usable: Callable[[datasets.Dataset, str], datasets.Dataset]
) -> tuple[dict[str, datasets.Dataset], dict[str, int]]:
    """Usable rows of the splits that there are, and how many were left out."""
    found = {split: rows for split in splits if (rows := load_rows(recipe.data, split)) is not None}
    kept = {split: usable(rows, split) for split, rows in found.items()}
    skipped = {split: count_skipped(rows, kept[split], recipe.data, split) for split, rows in found.items()}
    return kept, {split: count for split, count in skipped.items() if count}


def _classes(recipe: Recipe, rows: dict[str, datasets.Dataset]) -> dict[str, int] | None:
    """By the first labelled split; classes in the other that it does not have are an error."""
    column = recipe.data.label_column_name
    labelled = [part for part in rows.values() if column in part.column_names]
    return models.class_mapping(models.load_config(recipe), label_names(labelled[0], column)) if labelled else None


def load_data(recipe: Recipe, processor: models.Processor) -> Data:
    """Both splits as examples."""
    if isinstance(processor, BaseImageProcessor):
        return _load_images(recipe, processor)
    return _load_texts(recipe, processor)


def _load_texts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Data:
    max_length = models.sequence_length(recipe, tokenizer, models.load_config(recipe))
    read_now = ("validation",) if recipe.data.streaming else ("train", "validation")
    rows, skipped = _read(recipe, read_now, lambda part, split: usable_texts(recipe, part, split))
    classes = _classes(recipe, rows) if recipe.model.task == "sequence_classification" else None
    examples = {
        split: build_examples(recipe, part, tokenizer, max_length, classes, split) for split, part in rows.items()
    }
    train = StreamedExamples(recipe, tokenizer, max_length) if recipe.data.streaming else examples.get("train")
    return Data(train, examples.get("validation"), classes, skipped)


def masking_of(recipe: Recipe, processor: models.Processor) -> Masking | None:
    if recipe.model.task != "masked_lm" or isinstance(processor, BaseImageProcessor):
        return None
    special = tuple(processor.all_special_ids)
    return Masking(recipe.data.mlm_probability, processor.mask_token_id, len(processor), special)


def stream_of(examples: Examples, recipe: Recipe, processor: models.Processor, shuffle: bool) -> Stream:
    return Stream(examples, recipe.run.seed, shuffle, masking_of(recipe, processor))


@dataclass
class TrainInputs:
    """The training batches of one process, as a function of the optimizer step."""

    source: Stream | StreamedExamples
    recipe: Recipe
    accelerator: Accelerator
    masking: Masking | None
    pad_token_id: int

    @property
    def sequences_per_step(self) -> int:
        plan = self.recipe.optimization
        return plan.per_device_train_batch_size * plan.gradient_accumulation_steps * self.accelerator.num_processes

    def facts(self) -> dict[str, int | None]:
        """What a resumed run must have in common with the first one."""
        streamed = isinstance(self.source, StreamedExamples)
        return {
            "sequences_per_step": self.sequences_per_step,
            "train_examples": None if isinstance(self.source, StreamedExamples) else len(self.source),
            "streaming_processes": self.accelerator.num_processes if streamed else None,
        }

    def batches(self, start: int, stop: int) -> Iterable[Batch]:
        """From optimizer step `start` to `stop`, `gradient_accumulation_steps` of them a step."""
        plan, accelerator = self.recipe.optimization, self.accelerator
        rank, world_size, size = accelerator.process_index, accelerator.num_processes, plan.per_device_train_batch_size
        accumulation = plan.gradient_accumulation_steps
        if isinstance(self.source, StreamedExamples):
            first = self.source.batches(start * accumulation, size, rank, world_size, self.masking, self.pad_token_id)
            return itertools.islice(first, (stop - start) * accumulation)
        positions = TrainBatches(start, stop, size, accumulation, rank, world_size)
        return loader(self.source, positions, self.pad_token_id)

    def total_steps(self) -> int:
        """The limit that is reached first: epochs, steps or tokens. A stream has steps alone (`validation.py`)."""
        plan, per_step = self.recipe.optimization, self.sequences_per_step
        if isinstance(self.source, StreamedExamples):
            return int(plan.max_train_steps or 0)
        unlimited = plan.max_train_steps is None and plan.max_train_tokens is None
        epochs = plan.num_train_epochs or (DEFAULT_EPOCHS if unlimited else None)
        limits = [math.ceil(epochs * len(self.source) / per_step)] if epochs else []
        limits += [plan.max_train_steps] if plan.max_train_steps else []
        if plan.max_train_tokens is not None:
            most = min(limits, default=plan.max_train_tokens)  # a step has at least one token
            return steps_for_tokens(self.source, per_step, plan.max_train_tokens, most)
        return min(limits)
