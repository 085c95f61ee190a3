"""The teacher, which runs on the student's inputs in evaluation mode and without gradients.

If its own positions are fewer than the tokens of a text, it reads the text window by window.

Windows have the teacher's length and overlap by half. Each has the special tokens that begin and end a text, so that it
is an input as the teacher knows it. A token's hidden state is that of the window in which it is farthest from both
ends; those of the special tokens are means over the windows.

    text       [CLS] a b c d e f g h [SEP]
    windows    [CLS] a b c d [SEP]     [CLS] c d e f [SEP]     [CLS] e f g h [SEP]
    taken             a b c                     d e                     f g h
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attention.positions.limit import position_tables, reserved_rows
from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.losses.output_layer import ByRow, Rows
from hf_linear_attention.training.losses.outputs import Outputs, hidden_states_of, run_model


HiddenStates = tuple[Tensor, ...]


@dataclass(frozen=True)
class Window:
    """One window of a text: the tokens `start` to `stop - 1` between the special tokens, of which those from `first` to
    `last - 1` take their hidden states from it. Positions count from the first token that is not special."""

    row: int
    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class TeacherWindows:
    """Windows of `size` tokens, of which `before` and `after` are the special tokens at the ends of every text."""

    size: int
    before: int
    after: int

    def hidden_states(self, run: Callable[[Batch], HiddenStates], batch: Batch) -> HiddenStates:
        """The hidden states `[B, N, D]` by layer of right-padded texts, which are 0 at padding.

        Args:
            run: the teacher, for a batch of windows.
        """
        lengths = batch["attention_mask"].sum(1).tolist()
        windows = [window for row, length in enumerate(lengths) for window in self.of_text(row, length)]
        together = max(1, len(lengths))  # as many windows at once as there are texts
        found: list[Tensor] = []
        seen = dict.fromkeys(range(len(lengths)), 0)
        for start in range(0, len(windows), together):
            part = windows[start : start + together]
            states = run(self._batch(batch, part, lengths))
            if not found:
                found = [state.new_zeros(*batch["input_ids"].shape, state.shape[-1]) for state in states]
            for place, window in enumerate(part):
                seen[window.row] += 1
                for whole, state in zip(found, states, strict=True):
                    self._take(whole[window.row], state[place], window, lengths[window.row], seen[window.row])
        return tuple(found)

    def of_text(self, row: int, length: int) -> Iterator[Window]:
        """The windows of a text of `length` tokens."""
        count, most = length - self.before - self.after, self.size - self.before - self.after
        last_start = max(0, count - most)
        starts = [*range(0, last_start, max(1, most // 2)), last_start]
        # The border between two windows is the middle of their overlap.
        borders = [0, *((left + most + right) // 2 for left, right in itertools.pairwise(starts)), count]
        for start, (first, last) in zip(starts, itertools.pairwise(borders), strict=True):
            yield Window(row, start, min(start + most, count), first, last)

    def _batch(self, batch: Batch, windows: list[Window], lengths: list[int]) -> Batch:
        """The windows as a padded batch with the fields that a model reads."""
        device = batch["input_ids"].device
        places = [
            torch.cat(
                (
                    torch.arange(self.before, device=device),
                    torch.arange(self.before + window.start, self.before + window.stop, device=device),
                    torch.arange(lengths[window.row] - self.after, lengths[window.row], device=device),
                )
            )
            for window in windows
        ]
        index = torch.nn.utils.rnn.pad_sequence(places, batch_first=True)
        sizes = torch.tensor([len(place) for place in places], device=device)
        mask = (torch.arange(index.shape[1], device=device) < sizes[:, None]).long()
        rows = torch.tensor([window.row for window in windows], device=device)[:, None]
        names = [name for name in ("input_ids", "token_type_ids") if name in batch]
        return {**{name: batch[name][rows, index] for name in names}, "attention_mask": mask}

    def _take(self, whole: Tensor, state: Tensor, window: Window, length: int, number: int) -> None:
        """Put the hidden states `[size, D]` of the text's window `number`, counted from 1, into those of the text."""
        shift = self.before - window.start
        taken = state[shift + window.first : shift + window.last]
        whole[self.before + window.first : self.before + window.last] = taken
        end = self.before + window.stop - window.start
        whole[: self.before] += (state[: self.before] - whole[: self.before]) / number  # a running mean
        tail = whole[length - self.after : length]
        tail += (state[end : end + self.after] - tail) / number


def windows_for(teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int) -> TeacherWindows | None:
    """The windows in which a teacher reads texts of `max_length` tokens; None if it can read them as they are."""
    limit = learned_positions(teacher)
    if limit is None or max_length <= limit:
        return None
    special = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    before = special.index(0)
    return TeacherWindows(limit, before, special[::-1].index(0))


def learned_positions(model: PreTrainedModel) -> int | None:
    """The number of tokens for which a model has learned positions; None if its positions are not learned."""
    limits = [
        table.num_embeddings - reserved_rows(table, model.config.max_position_embeddings)
        for table in position_tables(model).values()
    ]
    return min(limits, default=None)


class Teacher:
    """Runs the teacher and provides its logits by row (`output_layer.py`)."""

    def __init__(
        self,
        model: PreTrainedModel,
        autocast: Callable[[], AbstractContextManager[None]],
        layers: str | None,
        windows: TeacherWindows | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            windows: how it reads batches that are longer than its positions; None if there are none.
        """
        self.windows = windows
        self.model = model.eval().requires_grad_(False)
        self.autocast, self.layers = autocast, layers
        self.by_row = ByRow(self.model)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Outputs:
        """The hidden states of the teacher for a batch, and its logits, if there are any."""
        if self.windows is not None and batch["input_ids"].shape[1] > self.windows.size:
            return Outputs(None, self.windows.hidden_states(self._hidden_states, batch))
        with self.autocast():
            outputs, rows = self.by_row.outputs(batch, self.layers)
        states = hidden_states_of(outputs, self.layers), hidden_states_of(outputs, self.layers, "decoder_")
        return Outputs(None if rows is None else self._in_autocast(rows), *states)

    @torch.no_grad()
    def rows(self, batch: Batch) -> Callable[[Tensor], Tensor]:
        """The logits of the teacher for a batch, by row."""
        with self.autocast():
            return self._in_autocast(self.by_row.rows(batch))

    def _hidden_states(self, batch: Batch) -> tuple[Tensor, ...]:
        with self.autocast():
            return hidden_states_of(run_model(self.model, batch, self.layers), self.layers)

    def _in_autocast(self, rows: Rows) -> Callable[[Tensor], Tensor]:
        @torch.no_grad()
        def logits(numbers: Tensor) -> Tensor:
            with self.autocast():
                return rows(numbers)

        return logits
