"""The order in which each process sees the examples, and how they become padded tensors.

The order is a pure function of the seed: position p of the endless training stream is example
`order(seed + p // n)[p % n]` of n examples. Optimizer step s takes the E positions [s E, (s + 1) E), where E =
batch size x accumulation x processes. So the split of E does not change which examples are in a step, and a resumed
run needs only the number of the step.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase
from transformers.trainer_pt_utils import LengthGroupedSampler

from hf_linear_attention.training.data.file_checks import folder_files
from hf_linear_attention.training.data.packing import IGNORED, Example, Examples, Tokens
from hf_linear_attention.training.recipe import Recipe


if TYPE_CHECKING:  # conversions without the extra for training read this file
    from accelerate import Accelerator


Batch = dict[str, Tensor]


class Masking:
    """BERT's masking by transformers: of the chosen tokens, 80 % become [MASK], 10 % a random token, and 10 % stay."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, probability: float) -> None:
        self.collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability, return_tensors="np")
        self.special_ids = tokenizer.all_special_ids

    def __call__(self, example: Example, seed: int, position: int) -> Example:
        """The masked input_ids and the labels of an example.

        They depend on `seed` and `position` alone, so neither resumption nor the number of processes changes them.
        """
        self.collator.generator = np.random.default_rng([seed, position])
        tokens = np.array(example["input_ids"])[None]
        special = np.isin(tokens, self.special_ids)
        (masked,), (labels,) = self.collator.numpy_mask_tokens(tokens, special_tokens_mask=special)
        return {"input_ids": masked, "labels": labels}


class Stream(Dataset[Example]):
    """Examples by position: with `shuffle` endless and shuffled anew for every epoch, otherwise once and in order.

    With `step_size`, the examples of an optimizer step have similar lengths (`LengthGroupedSampler`).
    """

    def __init__(
        self, examples: Examples, seed: int, shuffle: bool, masking: Masking | None = None, step_size: int | None = None
    ) -> None:
        self.examples, self.seed, self.shuffle, self.masking = examples, seed, shuffle, masking
        self.step_size = step_size
        self._epoch, self._order = -1, np.arange(len(examples))

    def __len__(self) -> int:
        return len(self.examples)

    def indices(self, start: int, stop: int) -> Tokens:
        """The index of the example at each position in [start, stop)."""
        return np.array([self._index(position) for position in range(start, stop)], dtype=np.int64)

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self.examples))
        if self.shuffle and epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            if self.step_size is None:
                self._order = torch.randperm(len(self.examples), generator=generator).numpy()
            else:
                lengths = self.examples.lengths.tolist()
                self._order = np.array(list(LengthGroupedSampler(self.step_size, lengths=lengths, generator=generator)))
            self._epoch = epoch
        return int(self._order[offset])

    def __getitem__(self, position: int) -> Example:
        index = self._index(position)
        example = {**self.examples[index], "index": index}
        if self.masking is None:
            return example
        return {**example, **self.masking(example, self.seed, position)}


def stream_of(
    examples: Examples, recipe: Recipe, processor: Any, shuffle: bool, step_size: int | None = None
) -> Stream:
    """The examples by position, with the seed and the masking of the recipe.

    Args:
        step_size: the number of examples in an optimizer step, if these shall have similar lengths.
    """
    is_masked = recipe.model.task == "masked_lm"
    masking = Masking(processor, recipe.data.mlm_probability) if is_masked else None
    return Stream(examples, recipe.run.seed, shuffle, masking, step_size)


def pad(examples: list[Example], pad_token_id: int) -> Batch:
    """The batch of some examples: every field, right-padded, and the number [B] of every example as `index`.

    - Texts have input_ids, attention_mask and labels [B, N] (classes: [B]). Pairs of texts also have token_type_ids.
      loss_mask tells the logits from which is learned.
    - For an encoder-decoder, labels are the targets [B, T], and decoder_attention_mask tells which are not padding.
    - Images of one size have pixel_values [B, C, H, W].
    """
    fills = {"input_ids": pad_token_id, "labels": IGNORED, "targets": IGNORED}
    batch = {name: _stacked([example[name] for example in examples], fills.get(name, 0)) for name in examples[0]}
    if "input_ids" in batch:
        batch["attention_mask"] = _stacked([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in examples], 0)
    if "targets" in batch:
        batch["labels"] = batch.pop("targets")
        lengths = [torch.ones(len(example["targets"]), dtype=torch.long) for example in examples]
        batch["decoder_attention_mask"] = _stacked(lengths, 0)
    return batch


def _stacked(values: list[Any], fill: int) -> Tensor:
    if np.ndim(values[0]) == 0:
        return torch.tensor(values)
    return pad_sequence([torch.as_tensor(value) for value in values], batch_first=True, padding_value=fill)


def train_batches(
    start: int, stop: int, batch_size: int, accumulation: int, rank: int, world_size: int
) -> Iterator[list[int]]:
    """The positions of the batches that one process sees, from optimizer step `start` to `stop`."""
    for batch in range(start * accumulation, stop * accumulation):
        first = (batch * world_size + rank) * batch_size
        yield list(range(first, first + batch_size))


class EvaluationBatches:
    """The positions of the batches of one process, to which every `world_size`-th example belongs.

    All processes have as many batches as the first, because processes with shards of one model must compute together.
    A process without an example left takes example 0, which the evaluator counts only once.
    """

    def __init__(self, count: int, batch_size: int, rank: int, world_size: int) -> None:
        self.mine, self.batch_size = range(rank, count, world_size), batch_size
        self.most = len(range(0, count, world_size))

    def __len__(self) -> int:
        return -(-self.most // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, self.most, self.batch_size):
            yield list(self.mine[start : start + self.batch_size]) or [0]


def loader(stream: Stream, batches: Iterable[list[int]], pad_token_id: int) -> DataLoader[Batch]:
    """A loader with a separate generator: if it used the global one, dropout would depend on it."""
    return DataLoader(
        stream,
        batch_sampler=cast(Any, batches),
        collate_fn=lambda examples: pad(examples, pad_token_id),
        generator=torch.Generator().manual_seed(stream.seed),
    )


def steps_for_tokens(stream: Stream, sequences_per_step: int, max_tokens: int, most: int) -> int:
    """The number of optimizer steps, at most `most`, after which the stream has reached `max_tokens` tokens."""
    lengths, seen = stream.examples.lengths, 0
    for step in range(most):
        seen += int(lengths[stream.indices(step * sequences_per_step, (step + 1) * sequences_per_step)].sum())
        if seen >= max_tokens:
            return step + 1
    return most


def aligned_labels(batch: Batch, task: str) -> Tensor:
    """The labels of the logits, one for each: [B, N] for tokens, [B, T] for targets, [B] for classes.

    A causal language model predicts the next token.
    """
    labels = batch["labels"]
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED) if task == "causal_lm" else labels


def count_units(batch: Batch) -> Tensor:
    """The number of tokens in a batch, not counting padding, or of its images, as a long scalar."""
    return _row_units(batch).sum()


def _row_units(batch: Batch) -> Tensor:
    """The units in every row [B]: its tokens, with those of its target, or 1 for an image."""
    if "pixel_values" in batch:
        return torch.ones(len(batch["pixel_values"]), dtype=torch.long, device=batch["pixel_values"].device)
    tokens = batch["attention_mask"].sum(-1)
    return tokens + batch["decoder_attention_mask"].sum(-1) if "decoder_attention_mask" in batch else tokens


def token_weights(batch: Batch, length: int, is_decoder: bool = False) -> Tensor:
    """The weights [B, N] of the N positions of an input, or with `is_decoder` of those of its target.

    Padding has the weight 0; the weights of all other positions of a row are equal. They add up to the units of the row
    (`count_units`), so a token has the weight 1, and a position of an image 1 / N. In an encoder-decoder, each side of
    a row has the weight of both.
    """
    if "pixel_values" in batch:
        images = batch["pixel_values"]
        return torch.full((len(images), length), 1 / length, device=images.device)
    if "decoder_attention_mask" not in batch:
        return batch["attention_mask"].float()
    mask = batch["decoder_attention_mask" if is_decoder else "attention_mask"].float()
    return mask * (_row_units(batch) / mask.sum(-1).clamp(min=1)).unsqueeze(-1)


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
        plan, size = self.recipe.optimization, self.recipe.optimization.per_device_train_batch_size
        place = self.accelerator.process_index, self.accelerator.num_processes
        positions = train_batches(start, stop, size, plan.gradient_accumulation_steps, *place)
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
