"""The batches that each process trains on, and a test of whether a model keeps packed documents apart.

For data that does not fit into memory or on the disk, rows are read as they are needed (`--streaming`). Every process
reads different ones (`datasets.distributed.split_dataset_by_node`), shuffled in a buffer of `BUFFER` rows by the seed
and the epoch. A resumed run reads the data again, and skips the examples that it has trained on.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from datasets.distributed import split_dataset_by_node
from torch import nn
from transformers import PreTrainedTokenizerBase

from hf_linear_attention._common.errors import DataError
from hf_linear_attention.training.data.batches import (
    Batch,
    Stream,
    TrainBatches,
    loader,
    masking_of,
    pad,
    steps_for_tokens,
)
from hf_linear_attention.training.data.file_checks import folder_files
from hf_linear_attention.training.data.packing import Example, PackedBlocks, Tokens, boundaries
from hf_linear_attention.training.data.rows import READERS, bad_text, report
from hf_linear_attention.training.data.tokenization import document_tokens
from hf_linear_attention.training.losses.outputs import run_model
from hf_linear_attention.training.recipe import Recipe


logger = logging.getLogger(__name__)
DEFAULT_EPOCHS = 3.0
MANY_EPOCHS = 20
CONTENT = "train_content"  # the fact that says which rows a run was trained on
BUFFER = 10_000
TOKENIZED_AT_ONCE = 64
ROW = "__row__"


class StreamedExamples:
    """An endless stream of examples for each process; with `is_packed`, documents share blocks (causal_lm only)."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self.recipe, self.tokenizer, self.max_length = recipe, tokenizer, max_length
        self.is_packed, self.masking = recipe.model.task == "causal_lm", masking_of(recipe, tokenizer)

    def batches(self, start: int, batch_size: int, rank: int, world_size: int, pad_token_id: int) -> Iterator[Batch]:
        """The batches of process `rank` of `world_size`, starting with number `start`."""
        examples = itertools.islice(enumerate(self._examples(rank, world_size)), start * batch_size, None)
        while rows := list(itertools.islice(examples, batch_size)):
            yield pad([self._finished(number * world_size + rank, row) for number, row in rows], pad_token_id)

    def _finished(self, position: int, example: Example) -> Example:
        example = {**example, "index": position}
        return example if self.masking is None else {**example, **self.masking(example, self.recipe.run.seed, position)}

    def _examples(self, rank: int, world_size: int) -> Iterator[Example]:
        documents = self._documents(rank, world_size)
        if self.is_packed:
            return packed(documents, self.max_length)
        names = ("input_ids", "labels") if self.recipe.model.task == "causal_lm" else ("input_ids",)
        size = self.max_length  # only documents of a causal model can be longer
        cut = (document[start : start + size] for document in documents for start in range(0, len(document), size))
        return (dict.fromkeys(names, document) for document in cut)

    def _documents(self, rank: int, world_size: int) -> Iterator[Tokens]:
        rows = split_dataset_by_node(self._rows(), rank, world_size)
        is_causal = self.recipe.model.task == "causal_lm"
        for epoch in itertools.count():
            rows.set_epoch(epoch)
            count = 0
            texts = self._texts(rows)
            while chunk := list(itertools.islice(texts, TOKENIZED_AT_ONCE)):
                for document in document_tokens(chunk, self.tokenizer, self.recipe.model.task, self.max_length):
                    if len(document) > is_causal:  # for a causal model, a single token predicts nothing
                        count += 1
                        yield document
            if count == 0:
                raise DataError(
                    f"process {rank} of {world_size} found no text in the streamed training data; check the data, or "
                    "launch fewer processes"
                )

    def _rows(self) -> datasets.IterableDataset:
        data = self.recipe.data
        if data.train_file is not None:
            builder, options = READERS[Path(data.train_file).suffix]
            rows = datasets.load_dataset(
                builder, data_files=[data.train_file], split="train", streaming=True, **options
            )
        else:
            rows = datasets.load_dataset(data.dataset_name, data.dataset_config_name, split="train", streaming=True)
        numbered = rows.map(lambda row, number: {**row, ROW: number}, with_indices=True)
        return numbered.shuffle(seed=self.recipe.run.seed, buffer_size=BUFFER)

    def _texts(self, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
        data = self.recipe.data
        prompt = self.recipe.text_prompt if self.recipe.model.task == "embedding" else ""
        for row in rows:
            if data.text_column_name not in row:
                columns = ", ".join(name for name in row if name != ROW)
                raise DataError(f"`--text_column_name {data.text_column_name}` is not a column; the data has {columns}")
            text = row[data.text_column_name]
            if isinstance(text, str):
                yield prompt + text
            else:
                report([f"row {row[ROW]}: {bad_text(data.text_column_name, text)}"], "the stream", data)


def packed(documents: Iterable[Tokens], size: int) -> Iterator[Example]:
    """Blocks of `size` tokens, like those of `packing.PackedBlocks`."""
    tokens, starts = np.empty(0, np.int64), np.empty(0, np.int64)
    for document in documents:
        starts, tokens = np.append(starts, len(tokens)), np.concatenate([tokens, document])
        while len(tokens) >= size:
            block, inside = tokens[:size], starts[(starts > 0) & (starts < size)]
            more = boundaries(block, inside) if len(inside) else {"labels": block}
            yield {"input_ids": block, **more}
            tokens, starts = tokens[size:], starts[starts >= size] - size


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

    source: Stream | StreamedExamples
    recipe: Recipe
    accelerator: Accelerator
    pad_token_id: int

    def facts(self) -> dict[str, int | str | None]:
        """The facts about the data that must be the same when the run is resumed."""
        streamed = isinstance(self.source, StreamedExamples)
        file = self.recipe.data.train_file
        return {
            "sequences_per_step": sequences_per_step(self.recipe, self.accelerator),
            "train_examples": None if isinstance(self.source, StreamedExamples) else len(self.source),
            CONTENT: content_of([file] if file is not None else folder_files(self.recipe.data, "train")),
            "streaming_processes": self.accelerator.num_processes if streamed else None,
        }

    def batches(self, start: int, stop: int) -> Iterable[Batch]:
        """The batches from optimizer step `start` to `stop`, `gradient_accumulation_steps` of them per step."""
        plan, accelerator = self.recipe.optimization, self.accelerator
        rank, world_size, size = accelerator.process_index, accelerator.num_processes, plan.per_device_train_batch_size
        accumulation = plan.gradient_accumulation_steps
        if isinstance(self.source, StreamedExamples):
            first = self.source.batches(start * accumulation, size, rank, world_size, self.pad_token_id)
            return itertools.islice(first, (stop - start) * accumulation)
        positions = TrainBatches(start, stop, size, accumulation, rank, world_size)
        return loader(self.source, positions, self.pad_token_id)

    def total_steps(self) -> int:
        """The length of the run in optimizer steps: the limit in epochs, steps or tokens that is reached first.

        Streamed data is limited by steps only (`recipe_parser.py`).
        """
        plan, per_step = self.recipe.optimization, sequences_per_step(self.recipe, self.accelerator)
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

    def warn_of_repetition(self, total_steps: int) -> None:
        """Warn of a run that repeats its data so often that it learns them by heart, unless epochs were asked for."""
        if isinstance(self.source, StreamedExamples) or self.recipe.optimization.num_train_epochs is not None:
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
        device = next(
            value.device for value in model.parameters() if not value.is_meta
        )  # offloaded weights are meta tensors
        outputs = run_model(model, {name: value.to(device) for name, value in batch.items()}, None)
        logits.append(outputs.logits[0, -len(second) :].float())
    model.train(was_training)
    scale = logits[1].abs().max().clamp(min=1e-6)
    return bool((logits[0] - logits[1]).abs().max() < 1e-3 * scale)
