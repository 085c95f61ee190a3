"""The batches that each process trains on, and a test of whether a model keeps packed documents apart."""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from hf_linear_attention.training.data.batches import Batch, Stream, TrainBatches, loader, pad, steps_for_tokens
from hf_linear_attention.training.data.file_checks import folder_files
from hf_linear_attention.training.data.packing import PackedBlocks
from hf_linear_attention.training.losses.outputs import run_model
from hf_linear_attention.training.recipe import Recipe


logger = logging.getLogger(__name__)
DEFAULT_EPOCHS = 3.0
MANY_EPOCHS = 20
CONTENT = "train_content"  # the fact that says which rows a run was trained on


def content_of(paths: Sequence[str]) -> str | None:
    """The SHA-256 of a file, or of those of several files, which others share only if they hold the same; or None."""
    digests = []
    for path in paths:
        with open(path, "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256("".join(digests).encode()).hexdigest() if len(digests) > 1 else next(iter(digests), None)


def sequences_per_step(recipe: Recipe, accelerator: Accelerator) -> int:
    """Sequences (or images) in one optimizer step, over all processes and accumulated batches."""
    plan = recipe.optimization
    return plan.per_device_train_batch_size * plan.gradient_accumulation_steps * accelerator.num_processes


def with_enough_steps(recipe: Recipe, lengths: np.ndarray, num_processes: int) -> Recipe:
    """The recipe for examples of these `lengths` in tokens, with batches that give at least `min_train_steps` steps.

    Batches never grow, and keep one example; so short texts, or few tokens, may still give other numbers of steps.
    """
    plan = recipe.optimization
    if plan.min_train_steps is None or plan.max_train_tokens is None:
        return recipe
    tokens = plan.max_train_tokens / (plan.min_train_steps * plan.gradient_accumulation_steps * num_processes)
    size = max(1, min(plan.per_device_train_batch_size, int(tokens / lengths.mean())))
    if size < plan.per_device_train_batch_size:
        logger.info("batches of %d texts instead of %d (min_train_steps)", size, plan.per_device_train_batch_size)
    return replace(recipe, optimization=replace(plan, per_device_train_batch_size=size))


@dataclass
class TrainInputs:
    """The training batches of one process, as a function of the optimizer step."""

    source: Stream
    recipe: Recipe
    accelerator: Accelerator
    pad_token_id: int

    def facts(self) -> dict[str, int | str | None]:
        """The facts about the data that must be the same when the run is resumed."""
        file = self.recipe.data.train_file
        return {
            "sequences_per_step": sequences_per_step(self.recipe, self.accelerator),
            "train_examples": len(self.source),
            CONTENT: content_of([file] if file is not None else folder_files(self.recipe.data, "train")),
        }

    def batches(self, start: int, stop: int) -> Iterable[Batch]:
        """The batches from optimizer step `start` to `stop`, `gradient_accumulation_steps` of them per step."""
        plan, accelerator = self.recipe.optimization, self.accelerator
        rank, world_size, size = accelerator.process_index, accelerator.num_processes, plan.per_device_train_batch_size
        accumulation = plan.gradient_accumulation_steps
        positions = TrainBatches(start, stop, size, accumulation, rank, world_size)
        return loader(self.source, positions, self.pad_token_id)

    def total_steps(self) -> int:
        """The length of the run in optimizer steps: the limit in epochs, steps or tokens that is reached first."""
        plan, per_step = self.recipe.optimization, sequences_per_step(self.recipe, self.accelerator)
        unlimited = plan.max_train_steps is None and plan.max_train_tokens is None
        epochs = plan.num_train_epochs or (DEFAULT_EPOCHS if unlimited else None)
        limits = [math.ceil(epochs * len(self.source) / per_step)] if epochs else []
        limits += [plan.max_train_steps] if plan.max_train_steps else []
        if plan.max_train_tokens is not None:
            most = min(limits, default=plan.max_train_tokens)  # a step has at least one token
            return steps_for_tokens(self.source, per_step, plan.max_train_tokens, most)
        return min(limits)

    def warn_of_repetition(self, total_steps: int) -> None:
        """Warn of a run that repeats its data so often that it learns them by heart, unless epochs were asked for."""
        if self.recipe.optimization.num_train_epochs is not None:
            return
        per_step, unit = sequences_per_step(self.recipe, self.accelerator), self.recipe.unit
        epochs = total_steps * per_step / len(self.source)
        if epochs <= MANY_EPOCHS or not self.accelerator.is_main_process:
            return
        data = int(self.source.examples.lengths.sum()) if unit == "tokens" else len(self.source)
        logger.warning(
            f"the training data has {data:,} {unit}, and this run trains on {data * epochs:,.0f}: {epochs:,.0f} "
            "epochs, which learn it by heart; give more data, or train on less"
        )


@torch.no_grad()
def keeps_documents_apart(model: nn.Module) -> bool:
    """Whether the second of two packed documents gets the logits that it gets alone, up to the rounding of float16.

    transformers recognises packed documents by `position_ids` that restart, in models that accept them and pass them on
    to the mask; every mechanism of this package then attends within each document.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    first, second = np.arange(1, 7), np.arange(7, 12)
    was_training = model.training
    model.eval()
    logits = []
    for documents in ([first, second], [second]):
        batch = pad([{**PackedBlocks(documents, 16)[0], "index": 0}], 0)
        device = next(model.parameters()).device
        outputs = run_model(model, {name: value.to(device) for name, value in batch.items()}, None)
        logits.append(outputs.logits[0, -len(second) :].float())
    model.train(was_training)
    scale = logits[1].abs().max().clamp(min=1e-6)
    return bool((logits[0] - logits[1]).abs().max() < 1e-3 * scale)
