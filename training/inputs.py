"""What a run reads: the examples of both splits, and the batches that each process trains on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from training import models
from training.arguments import Recipe
from training.batches import Batch, Masking, Stream, TrainBatches, loader, steps_for_tokens
from training.data import build_examples, label_names
from training.packing import Examples
from training.rows import load_rows, usable_rows
from training.streaming import StreamedExamples


DEFAULT_EPOCHS = 3.0


@dataclass
class Data:
    """The examples of both splits, and the class indices that their labels became."""

    train: Examples | StreamedExamples | None
    validation: Examples | None
    classes: dict[str, int] | None


def load_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Both splits as examples."""
    config = models.load_config(recipe)
    max_length = models.sequence_length(recipe, tokenizer, config)
    read_now = ("validation",) if recipe.data.streaming else ("train", "validation")
    rows = {split: load_rows(recipe.data, split) for split in read_now}
    classes = None
    if recipe.model.task == "sequence_classification":
        column = recipe.data.label_column_name
        # the first labelled split decides; unknown classes in the other are an error
        for split, found in rows.items():
            if classes is None and found is not None and column in found.column_names:
                labels = label_names(usable_rows(found, recipe.data, split, labelled=True), column)
                classes = models.class_mapping(config, labels)
    examples = {
        split: None if found is None else build_examples(recipe, found, tokenizer, max_length, classes, split)
        for split, found in rows.items()
    }
    train = StreamedExamples(recipe, tokenizer, max_length) if recipe.data.streaming else examples["train"]
    return Data(train, examples["validation"], classes)


def masking_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Masking | None:
    if recipe.model.task != "masked_lm":
        return None
    special = tuple(tokenizer.all_special_ids)
    return Masking(recipe.data.mlm_probability, tokenizer.mask_token_id, len(tokenizer), special)


def stream_of(examples: Examples, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, shuffle: bool) -> Stream:
    return Stream(examples, recipe.run.seed, shuffle, masking_of(recipe, tokenizer))


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
