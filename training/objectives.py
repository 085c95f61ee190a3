"""What training minimises. The loss of an optimizer step is

    sum over objectives of  weight * (sum over the step's units of the objective) / (number of units in the step)

with units counted over all processes and accumulated batches before the first backward pass. So one batch of 4, four
accumulated batches of 1 and two processes with 2 each give the same gradient, however ragged the texts are.

A new objective is a class like those below, a row in `OBJECTIVES` and a `--<row>_weight` option.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_linear_attention.attention_observation import ObservedAttention, observe_attention
from hf_linear_attention.training.batches import Batch
from hf_linear_attention.training.divergence import LogitRows, chunked_kl
from hf_linear_attention.training.layer_transfer import LastLayerReachedError, TransferLayers, layer_name, layer_of
from hf_linear_attention.training.packing import IGNORED
from hf_linear_attention.training.recipe import Recipe


LOSS = "loss"  # the weighted sum, among the figures of a step
Term = TypeVar("Term", Tensor, float)


@dataclass(frozen=True)
class Outputs:
    """What one model says about a batch: logits by row of the flattened batch, hidden states [B, N, D] by layer."""

    logits: LogitRows | None = None
    hidden_states: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class StudentOutputs(Outputs):
    """The student's logits [B, N, V] or [B, C] exist as a whole: their gradient does, too."""

    all_logits: Tensor | None = None
    attention: tuple[ObservedAttention, ...] = ()


class Objective(Protocol):
    """`observes_attention`: the student computes its original softmax attention, and every layer is looked at;
    `needs_attention_weights`: and that softmax shows its weights."""

    needs_logits: bool
    needs_hidden_states: bool
    needs_teacher: bool
    observes_attention: bool = False
    needs_attention_weights: bool = False

    def units(self, batch: Batch) -> Tensor:
        """Number of units (tokens, sequences) of this batch, a long scalar."""
        ...

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        """Sum over the units: a scalar, or one for each of `student.attention`, of which the mean counts."""
        ...


class TaskLoss(Objective):
    """Cross-entropy with the labels: the next token, the masked tokens, or the class."""

    needs_logits, needs_hidden_states, needs_teacher = True, False, False

    def __init__(self, recipe: Recipe) -> None:
        self.task = recipe.model.task

    def units(self, batch: Batch) -> Tensor:
        return (aligned_labels(batch, self.task) != IGNORED).sum()

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        logits, labels = _logits(student).flatten(0, -2), aligned_labels(batch, self.task).flatten()
        return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


class LogitsKL(Objective):
    """KL(teacher || student) of the logits of every real token, or of the classes."""

    needs_logits, needs_hidden_states, needs_teacher = True, False, True

    def __init__(self, recipe: Recipe) -> None:
        self.per_sequence = recipe.is_classification
        self.temperature = recipe.objective.temperature

    def _mask(self, batch: Batch) -> Tensor:
        mask = token_weights(batch, 1) > 0
        return mask.any(-1) if self.per_sequence else mask

    def units(self, batch: Batch) -> Tensor:
        return self._mask(batch).sum()

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        rows = None if teacher is None else teacher.logits
        if rows is None:
            raise RuntimeError("`logits_kl` needs the teacher's logits")
        return chunked_kl(_logits(student).flatten(0, -2), rows, self._mask(batch).flatten(), self.temperature)


class HiddenState(Objective):
    """|student - teacher|^2 / |teacher|^2 of every real token's hidden state, mean over the matched layers.

    Relative, because the size of hidden states differs by orders of magnitude between layers and tokens.
    """

    needs_logits, needs_hidden_states, needs_teacher = False, True, True

    def __init__(self, recipe: Recipe) -> None:
        pass

    def units(self, batch: Batch) -> Tensor:
        return count_units(batch)

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        pairs = _hidden_pairs(student, teacher)
        weights = token_weights(batch, pairs[0][0].shape[1])
        mask = weights > 0
        return torch.stack([(_relative_errors(a[mask], b[mask]) * weights[mask]).sum() for a, b in pairs]).mean()


class Embedding(Objective):
    """1 - cosine of the mean-pooled last hidden states, the pooling of sentence-transformers."""

    needs_logits, needs_hidden_states, needs_teacher = False, True, True

    def __init__(self, recipe: Recipe) -> None:
        pass

    def units(self, batch: Batch) -> Tensor:
        return torch.tensor(batch["input_ids"].shape[0], device=batch["input_ids"].device)

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        mine, yours = _hidden_pairs(student, teacher)[-1]
        return (1 - embedding_cosine(mine, yours, batch["attention_mask"])).sum()


class AttentionTransfer(Objective):
    """|mechanism - softmax|^2 / |softmax|^2 of every layer's and head's output on the softmax model's own activations.

    Relative by sequence and head (absolute errors span 0.0008 to 48 across the layers of one model), mean over heads
    and layers; `attention_transfer_error` = `absolute` is the plain mean of squares (LoLCATs 2024, equation 8). Every
    layer learns by itself: no error of the layers before it reaches it (section 3.2 there).
    """

    needs_logits, needs_hidden_states, needs_teacher = False, False, False
    observes_attention = True

    def __init__(self, recipe: Recipe) -> None:
        is_relative = recipe.objective.attention_transfer_error == "relative"
        self.error = relative_head_error if is_relative else absolute_head_error

    def units(self, batch: Batch) -> Tensor:
        return count_units(batch)

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        weights = token_weights(batch, student.attention[0].softmax_output.shape[1])
        errors = torch.stack([self.error(seen, weights > 0) for seen in student.attention])  # [layers, B, H]
        return (errors.mean(dim=2) * weights.sum(-1)).sum(-1)


def relative_head_error(seen: ObservedAttention, mask: Tensor) -> Tensor:
    """Relative squared error [B, H] of the mechanism's output over the tokens where `mask` [B, N]."""
    mine, yours = _real_outputs(seen, mask)
    return (mine - yours).square().sum(dim=(1, 3)) / yours.square().sum(dim=(1, 3)).clamp(min=1e-12)


def absolute_head_error(seen: ObservedAttention, mask: Tensor) -> Tensor:
    """Mean squared error [B, H] of the mechanism's output over the tokens where `mask` [B, N]."""
    mine, yours = _real_outputs(seen, mask)
    return (mine - yours).square().mean(dim=3).sum(dim=1) / mask.sum(-1, keepdim=True).clamp(min=1)


def _real_outputs(seen: ObservedAttention, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Of mechanism and softmax, [B, N, H, D], 0 at padding."""
    mine, yours = (x.float().masked_fill(~mask[:, :, None, None], 0.0) for x in (seen.output, seen.softmax_output))
    return mine, yours


class AttentionMap(Objective):
    """Cross-entropy of every layer's and head's attention weights with those of softmax (Hedgehog 2024, equation 4).

    - sum_j A_ij log W_ij, mean over heads and layers. Forms the N x N weights of both, as the paper does.
    """

    needs_logits, needs_hidden_states, needs_teacher = False, False, False
    observes_attention = needs_attention_weights = True

    def __init__(self, recipe: Recipe) -> None:
        pass

    def units(self, batch: Batch) -> Tensor:
        return count_units(batch)

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        weights = token_weights(batch, student.attention[0].softmax_output.shape[1])
        return torch.stack([map_cross_entropy(seen, weights) for seen in student.attention])


def map_cross_entropy(seen: ObservedAttention, counts: Tensor) -> Tensor:
    """Sum over the tokens, each times `counts` [B, N], mean over heads."""
    if seen.softmax_weights is None:
        raise RuntimeError("the softmax weights are wanted, but the attention that ran shows none")
    # A weight of exactly 0, such as a window's beyond its edge, would cost infinitely much.
    weights = seen.weights().float().clamp(min=1e-8)
    real = counts > 0
    return -((seen.softmax_weights.float() * weights.log()).sum(-1).mean(1)[real] * counts[real]).sum()


OBJECTIVES: dict[str, Callable[[Recipe], Objective]] = {
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
    """The loss from every objective's term: of the whole model, whose gradient is taken, or of one layer."""
    return cast(Term, sum(weight * terms[name] for name, (weight, _) in objectives.items()))


def aligned_labels(batch: Batch, task: str) -> Tensor:
    """Labels at the position of the logits that predict them: [B, N], or [B] for classes."""
    labels = batch["labels"]
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED) if task == "causal_lm" else labels


def mean_pooled(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Mean of the hidden states [B, N, D] over the real tokens: [B, D], in float32."""
    mask = attention_mask.bool().unsqueeze(-1)
    return hidden.float().masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def embedding_cosine(mine: Tensor, yours: Tensor, attention_mask: Tensor) -> Tensor:
    """Cosine [B] of the mean-pooled hidden states [B, N, D] of two models."""
    return F.cosine_similarity(mean_pooled(mine, attention_mask), mean_pooled(yours, attention_mask), dim=-1)


def _relative_errors(mine: Tensor, yours: Tensor) -> Tensor:
    """Relative squared error [T] of the tokens of [T, D]."""
    mine, yours = mine.float(), yours.float()
    return (mine - yours).square().sum(-1) / yours.square().sum(-1).clamp(min=1e-12)


def count_units(batch: Batch) -> Tensor:
    """Real tokens of a batch, or its images: a long scalar."""
    if "pixel_values" in batch:
        return torch.tensor(len(batch["pixel_values"]), device=batch["pixel_values"].device)
    return batch["attention_mask"].sum()


def token_weights(batch: Batch, length: int) -> Tensor:
    """What each of the N positions of a batch counts, [B, N]: a token 1, padding 0; those of an image share 1."""
    if "pixel_values" in batch:
        images = batch["pixel_values"]
        return torch.full((len(images), length), 1 / length, device=images.device)
    return batch["attention_mask"].float()


def _logits(student: StudentOutputs) -> Tensor:
    if student.all_logits is None:
        raise RuntimeError("this objective needs a model with logits")
    return student.all_logits


def _hidden_pairs(student: StudentOutputs, teacher: Outputs | None) -> list[tuple[Tensor, Tensor]]:
    if teacher is None or len(student.hidden_states) != len(teacher.hidden_states):
        raise RuntimeError("student and teacher must give the same number of hidden states")
    return list(zip(student.hidden_states, teacher.hidden_states, strict=True))


class StudentWithObjectives(nn.Module):
    """The student and its losses in one forward pass.

    DistributedDataParallel wraps this module, not the student: then its only output is the loss, parameters that do
    not reach the loss (a pooler, an unused head) are recognised as such, and mixed precision leaves logits in 16 bit.
    """

    def __init__(
        self,
        student: Any,
        objectives: dict[str, tuple[float, Objective]],
        layers: str | None,
        transfer: TransferLayers | None = None,
    ) -> None:
        """`transfer`: the layers that learn where attention is observed; by default all."""
        super().__init__()
        self.student, self.objectives, self.layers = student, objectives, layers
        self.transfer = transfer or TransferLayers(student)
        self.observes_attention = any(objective.observes_attention for _, objective in objectives.values())
        if any(objective.needs_attention_weights for _, objective in objectives.values()):
            student.set_attn_implementation("eager")

    def forward(
        self, batch: Batch, teacher: Outputs | None, scales: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss; and, detached, the loss again and each objective's sum times its scale, unweighted, by name, with
        that of every observed layer."""
        student = self._observed(batch) if self.observes_attention else self._outputs(batch)
        terms: dict[str, Tensor] = {}
        of_layers: dict[str, Tensor] = {}
        for name, (_, objective) in self.objectives.items():
            total = objective.total(batch, student, teacher) * scales[name]
            terms[name] = total.mean()
            if total.dim():
                errors = list(zip(map(layer_of, student.attention), total.detach(), strict=True))
                for layer in self.transfer.learning:  # one that is called several times has several errors
                    own = torch.stack([error for called, error in errors if called == layer])
                    of_layers[layer_name(name, layer)] = own.mean()
        loss = weighted_sum(self.objectives, terms)
        parts = {LOSS: loss.detach()} | {name: term.detach() for name, term in terms.items()}
        return loss, parts | of_layers

    def _outputs(self, batch: Batch) -> StudentOutputs:
        outputs = run_model(self.student, batch, self.layers)
        return StudentOutputs(None, hidden_states_of(outputs, self.layers), getattr(outputs, "logits", None))

    def _observed(self, batch: Batch) -> StudentOutputs:
        seen: list[ObservedAttention] = []
        with observe_attention(self.student, partial(self.transfer.observe, seen)), suppress(LastLayerReachedError):
            run_model(self.student, batch, None)
        return StudentOutputs(attention=tuple(seen))


def run_model(model: nn.Module, batch: Batch, layers: str | None) -> Any:
    """The model's outputs, with the hidden states that `layers` ("last", "all" or None) asks for."""
    keywords: dict[str, Any] = {"output_hidden_states": True} if layers else {}
    if "pixel_values" in batch:
        return model(pixel_values=batch["pixel_values"], **keywords)
    accepted = inspect.signature(model.forward).parameters
    if "use_cache" in accepted:
        keywords["use_cache"] = False  # a decoder would fill a cache that nobody reads
    # transformers looks for packed documents (position_ids that restart) only where there is no mask
    places = "position_ids" if "position_ids" in batch else "attention_mask"
    if "token_type_ids" in batch and "token_type_ids" in accepted:
        keywords["token_type_ids"] = batch["token_type_ids"]
    return model(input_ids=batch["input_ids"], **{places: batch[places]}, **keywords)


def hidden_states_of(outputs: Any, layers: str | None) -> tuple[Tensor, ...]:
    """Hidden states [B, N, D] after each layer, or after the last one; without the embeddings."""
    if layers is None:
        return ()
    return tuple(outputs.hidden_states[1:] if layers == "all" else outputs.hidden_states[-1:])
