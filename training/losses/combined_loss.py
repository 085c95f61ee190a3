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
from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.losses.attention_transfer import AttentionMap, AttentionTransfer
from hf_linear_attention.training.losses.far_share import FarShare, check_far_share
from hf_linear_attention.training.losses.layer_transfer import (
    LastLayerReachedError,
    TransferLayers,
    layer_name,
    layer_of,
)
from hf_linear_attention.training.losses.objectives import Embedding, HiddenState, LogitsKL, Objective, TaskLoss
from hf_linear_attention.training.losses.outputs import (
    Outputs,
    StudentOutputs,
    hidden_states_of,
    logits_of,
    run_model,
)
from hf_linear_attention.training.recipe import Recipe


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
            transfer: the layers that are trained by attention transfer; by default all.
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
        have one figure per layer that is trained.
        """
        student = self._observed(batch) if self.observes_attention else self._outputs(batch)
        terms: dict[str, Tensor] = {}
        of_layers: dict[str, Tensor] = {}
        for name, (_, objective) in self.objectives.items():
            total = objective.total(batch, student, teacher) * scales[name]
            terms[name] = total.mean()
            if total.dim():
                errors = list(zip(map(layer_of, student.attention), total.detach(), strict=True))
                for layer in self.transfer.learning:  # a layer that is called several times has several errors
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
