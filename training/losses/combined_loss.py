"""The loss that training minimises. For one optimizer step, it is

    sum over objectives of  weight * (sum over the step's units of the objective) / (number of units in the step)

where units are counted over all processes and accumulated batches before the first backward pass. So one batch of 4,
four accumulated batches of 1 and two processes with 2 each give the same gradient, however the lengths of texts differ.

A new objective needs a class like those in `objectives.py`, a row in `OBJECTIVES` and an option `--<row>_weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hf_linear_attention.attention_observation import ObservedAttention, observe_attention
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.losses.objectives import (
    AttentionMap,
    AttentionTransfer,
    Embedding,
    FarShare,
    HiddenState,
    LogitsKL,
    Objective,
    TaskLoss,
    check_far_share,
)
from hf_linear_attention.training.losses.outputs import (
    Outputs,
    StudentOutputs,
    hidden_states_of,
    logits_of,
    run_model,
)
from hf_linear_attention.training.recipe import Recipe


class LastLayerReachedError(Exception):
    """Ends a forward pass after the last converted layer."""


def layer_name(objective: str, layer: int) -> str:
    """The name of a layer's error in metrics.jsonl."""
    return f"{objective}.layer_{layer}"


class TransferLayers:
    """The converted layers, which attention transfer trains.

    Every layer is trained on the softmax model's activations. So what follows the last one need not be computed.
    """

    def __init__(self, model: nn.Module, is_sharded: bool = False) -> None:
        """Find the converted layers of `model`.

        Args:
            model: the student.
            is_sharded: whether the model has hooks after its layers that must run in every pass.
        """
        self.modules = list(linear_attention_modules(model).values())
        self.numbers = [module.linear_attention.shape.layer for module in self.modules]
        self.called, self.is_sharded = list[nn.Module](), is_sharded
        # After its call a pass can end. If a module is called several times (ALBERT), there is none.
        self.final: nn.Module | None = None

    def observe(self, seen: list[ObservedAttention], call: ObservedAttention) -> None:
        """Append `call` to `seen`.

        Raises:
            LastLayerReachedError: after `final`.
        """
        self.called.append(call.module)
        seen.append(call)
        if call.module is self.final:
            raise LastLayerReachedError

    def begin_pass(self) -> None:
        """Forget the calls of the last pass."""
        self.called.clear()

    def end_whole_pass(self) -> None:
        """Let later passes end in the last module if it was called last, and once, in this whole pass."""
        last = self.modules[-1]
        if not self.is_sharded and self.called[-1:] == [last] and self.called.count(last) == 1:
            self.final = last


def layer_of(call: ObservedAttention) -> int:
    """The number of the layer that made the call."""
    return call.module.linear_attention.shape.layer


Note = Callable[[Batch, Any, str | None], None]
LOSS = "loss"  # the name of the weighted sum among the figures of a step
Term = TypeVar("Term", Tensor, float)

OBJECTIVES: dict[str, Callable[[Recipe], Objective]] = {
    "far_share": FarShare,  # before those that only need the output, which is computed with the shares
    "attention_transfer": AttentionTransfer,
    "attention_map": AttentionMap,
    "task_loss": TaskLoss,
    "logits_kl": LogitsKL,
    "hidden_state": HiddenState,
    "embedding": Embedding,
}


def build_objectives(recipe: Recipe) -> dict[str, tuple[float, Objective]]:
    """The objectives whose weight is above 0, with their weights."""
    weights = {name: getattr(recipe.objective, f"{name}_weight") for name in OBJECTIVES}
    return {name: (weight, OBJECTIVES[name](recipe)) for name, weight in weights.items() if weight}


def weighted_sum(objectives: Mapping[str, tuple[float, Objective]], terms: Mapping[str, Term]) -> Term:
    """The loss, given the term of every objective, for the whole model or for one layer."""
    return cast(Term, sum(weight * terms[name] for name, (weight, _) in objectives.items()))


class StudentWithObjectives(nn.Module):
    """The student and its losses in one forward pass.

    DistributedDataParallel wraps this module instead of the student. So its only output is the loss, parameters that
    do not reach the loss (a pooler, an unused head) are recognised, and mixed precision leaves logits in 16 bits.
    """

    def __init__(
        self,
        student: Any,
        objectives: dict[str, tuple[float, Objective]],
        layers: str | None,
        transfer: TransferLayers | None = None,
        note: Note | None = None,
    ) -> None:
        """Combine the student and its objectives.

        Args:
            layers: which hidden states the student returns: "last", "all" or None.
            transfer: the layers that attention transfer trains; by default those of `student`.
            note: what is called with every batch and the outputs of the softmax model in attention transfer.
        """
        super().__init__()
        if "far_share" in objectives:
            check_far_share(student)
        self.student, self.objectives, self.layers = student, objectives, layers
        self.transfer, self.note = transfer or TransferLayers(student), note
        self.observes_attention = any(objective.observes_attention for _, objective in objectives.values())
        if any(objective.needs_attention_weights for _, objective in objectives.values()):
            student.set_attn_implementation("eager")

    def forward(
        self, batch: Batch, teacher: Outputs | None, scales: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and detached figures by name: the loss, and every objective's term without its weight.

        An objective's term is its sum over the units, multiplied by its entry in `scales`; objectives on attention also
        have one figure per layer.
        """
        student = self._observed(batch) if self.observes_attention else self._outputs(batch)
        terms: dict[str, Tensor] = {}
        of_layers: dict[str, Tensor] = {}
        for name, (_, objective) in self.objectives.items():
            total = objective.total(batch, student, teacher) * scales[name]
            terms[name] = total.mean()
            if total.dim():
                errors = list(zip(map(layer_of, student.attention), total.detach(), strict=True))
                for layer in self.transfer.numbers:  # a layer that is called several times has several errors
                    own = torch.stack([error for called, error in errors if called == layer])
                    of_layers[layer_name(name, layer)] = own.mean()
        loss = weighted_sum(self.objectives, terms)
        figures = {LOSS: loss.detach()} | {name: term.detach() for name, term in terms.items()}
        return loss, figures | of_layers

    def _outputs(self, batch: Batch) -> StudentOutputs:
        outputs = run_model(self.student, batch, self.layers)
        return StudentOutputs(
            hidden_states=hidden_states_of(outputs, self.layers),
            decoder_states=hidden_states_of(outputs, self.layers, "decoder_"),
            all_logits=logits_of(outputs, batch),
        )

    def _observed(self, batch: Batch) -> StudentOutputs:
        seen: list[ObservedAttention] = []
        self.transfer.begin_pass()
        with observe_attention(self.student, partial(self.transfer.observe, seen)), suppress(LastLayerReachedError):
            outputs = run_model(self.student, batch, self.layers)
            if self.note is not None:
                self.note(batch, outputs, self.layers)
            else:  # nobody needs what follows the last attention
                self.transfer.end_whole_pass()
        return StudentOutputs(attention=tuple(seen))
