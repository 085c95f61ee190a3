"""The teacher, which runs on the student's inputs in evaluation mode and without gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.losses.output_layer import ByRow, Rows
from hf_linear_attention.training.losses.outputs import Outputs, hidden_states_of


class Teacher:
    """Runs the teacher and provides its logits by row (`output_layer.py`)."""

    def __init__(
        self, model: PreTrainedModel, autocast: Callable[[], AbstractContextManager[None]], layers: str | None
    ) -> None:
        """Wrap a model."""
        self.model = model.eval().requires_grad_(False)
        self.autocast, self.layers = autocast, layers
        self.by_row = ByRow(self.model)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Outputs:
        """The hidden states of the teacher for a batch, and its logits, if there are any."""
        with self.autocast():
            outputs, rows = self.by_row.outputs(batch, self.layers)
        states = hidden_states_of(outputs, self.layers), hidden_states_of(outputs, self.layers, "decoder_")
        return Outputs(None if rows is None else self._in_autocast(rows), *states)

    @torch.no_grad()
    def rows(self, batch: Batch) -> Callable[[Tensor], Tensor]:
        """The logits of the teacher for a batch, by row."""
        with self.autocast():
            return self._in_autocast(self.by_row.rows(batch))

    def _in_autocast(self, rows: Rows) -> Callable[[Tensor], Tensor]:
        @torch.no_grad()
        def logits(numbers: Tensor) -> Tensor:
            with self.autocast():
                return rows(numbers)

        return logits
