"""The teacher, which runs on the student's inputs in evaluation mode and without gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.losses.outputs import Outputs, hidden_states_of, logits_of, run_model
from hf_linear_attention.training.losses.teacher_windows import TeacherWindows


class Teacher:
    """Runs the teacher and provides its logits by row.

    If the results of the output layer are the logits (without scaling or capping after it), the layer is applied only
    to the rows that are requested, and the full tensor [tokens, vocabulary] never exists.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        autocast: Callable[[], AbstractContextManager[None]],
        needs_logits: bool,
        layers: str | None,
        windows: TeacherWindows | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            windows: how it reads batches that are longer than its positions; None if there are none.
        """
        self.windows = windows
        self.model = model.eval().requires_grad_(False)
        self.autocast, self.needs_logits, self.layers = autocast, needs_logits, layers
        self.head = _separable_head(self.model) if needs_logits else None

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Outputs:
        """The hidden states of the teacher for a batch and, if they are needed, its logits."""
        if self.windows is not None and batch["input_ids"].shape[1] > self.windows.size:
            return Outputs(None, self.windows.hidden_states(self._hidden_states, batch))
        recorder = _Recorder(self.head) if self.head is not None else None
        with self.autocast():
            outputs = run_model(self.model, batch, self.layers)
        states = hidden_states_of(outputs, self.layers), hidden_states_of(outputs, self.layers, "decoder_")
        if not self.needs_logits:
            return Outputs(None, *states)
        if self.head is None or recorder is None:
            logits = _logits(outputs, batch).flatten(0, -2)
            return Outputs(lambda rows: logits[rows], *states)
        return Outputs(self._rows(self.head, recorder.close().flatten(0, -2)), *states)

    @torch.no_grad()
    def all_logits(self, batch: Batch) -> Tensor:
        """The logits (`logits_of`) of the teacher for a batch, as a whole; for evaluation."""
        with self.autocast():
            return _logits(run_model(self.model, batch, None), batch)

    def _hidden_states(self, batch: Batch) -> tuple[Tensor, ...]:
        with self.autocast():
            return hidden_states_of(run_model(self.model, batch, self.layers), self.layers)

    def _rows(self, head: nn.Module, inputs: Tensor) -> Callable[[Tensor], Tensor]:
        @torch.no_grad()
        def logits(rows: Tensor) -> Tensor:
            with self.autocast():
                return head(inputs[rows])

        return logits


def _logits(outputs: Any, batch: Batch) -> Tensor:
    logits = logits_of(outputs, batch)
    if logits is None:
        raise RuntimeError("the teacher has no logits")
    return logits


class _Recorder:
    """Keeps the inputs of the output layer, and passes only the last position on to it."""

    def __init__(self, head: nn.Module) -> None:
        self.inputs: Tensor | None = None
        self.hook = head.register_forward_pre_hook(self._record)

    def _record(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.inputs = arguments[0]
        return (arguments[0][:, -1:], *arguments[1:])

    def close(self) -> Tensor:
        self.hook.remove()
        if self.inputs is None:
            raise RuntimeError("the teacher's output layer was not called")
        return self.inputs


@torch.no_grad()
def _separable_head(model: PreTrainedModel) -> nn.Module | None:
    """The output layer, if its outputs are exactly the logits of the model on a small input; otherwise None."""
    head = model.get_output_embeddings()
    if head is None or model.main_input_name != "input_ids":
        return None
    seen: list[tuple[tuple[Tensor, ...], Tensor]] = []
    hook = head.register_forward_hook(lambda module, arguments, output: seen.append((arguments, output)))
    tokens = torch.arange(1, 9, device=model.device).unsqueeze(0)  # 0 is often padding, which is embedded as zeros
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if model.config.is_encoder_decoder:
        batch |= {"labels": tokens, "decoder_attention_mask": torch.ones_like(tokens)}
    logits = run_model(model, batch, None).logits
    hook.remove()
    if logits.abs().max() < 0.1:  # capping cannot be recognised on logits this small
        return None
    plain = len(seen) == 1 and len(seen[0][0]) == 1 and seen[0][0][0].dim() == 3
    return head if plain and torch.equal(seen[0][1].float(), logits.float()) else None
