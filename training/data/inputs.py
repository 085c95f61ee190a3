"""The batches that each process trains on, and whether a model keeps the documents of one block apart."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from hf_linear_attention.training.data.batches import (
    Batch,
    Masking,
    Stream,
    TrainBatches,
    loader,
    pad,
    steps_for_tokens,
)
from hf_linear_attention.training.data.packing import PackedBlocks
from hf_linear_attention.training.data.streaming import StreamedExamples
from hf_linear_attention.training.losses.outputs import run_model
from hf_linear_attention.training.recipe import Recipe


DEFAULT_EPOCHS = 3.0


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


@torch.no_grad()
def keeps_documents_apart(model: nn.Module) -> bool:
    """Whether the second of two packed documents gets the logits that it gets alone, within float16's rounding.

    transformers tells them apart by `position_ids` that restart, in models that take them and hand them on to the mask;
    ours then attends within each document, whatever the mechanism.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    first, second = np.arange(1, 7), np.arange(7, 12)
    was_training = model.training
    model.eval()
    logits = []
    for documents in ([first, second], [second]):
        batch = pad([{**PackedBlocks(documents, 16)[0], "index": 0}], 0)
        device = next(value.device for value in model.parameters() if not value.is_meta)  # the others are on disk
        outputs = run_model(model, {name: value.to(device) for name, value in batch.items()}, None)
        logits.append(outputs.logits[0, -len(second) :].float())
    model.train(was_training)
    scale = logits[1].abs().max().clamp(min=1e-6)
    return bool((logits[0] - logits[1]).abs().max() < 1e-3 * scale)
