"""The interface of an objective, and the objectives.

Some compare logits and hidden states with a teacher's. The others compare the mechanism of every layer with the softmax
that it replaces, on the same activations.

The loss that training minimises. For one optimizer step, it is

    sum over objectives of  weight * (sum over the step's units of the objective) / (number of units in the step)

where units are counted over all processes and accumulated batches before the first backward pass. So one batch of 4,
four accumulated batches of 1 and two processes with 2 each give the same gradient, however the lengths of texts differ.

A new objective needs a class like those in `objectives.py`, a row in `OBJECTIVES` and an option `--<row>_weight`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.attention.layer import LinearizedCrossAttention
from hf_linear_attention.attention_observation import ObservedAttention, observe_attention
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.data.batches import Batch, aligned_labels, count_units, token_weights
from hf_linear_attention.training.data.packing import IGNORED
from hf_linear_attention.training.distributed import mean_gradient, reshard
from hf_linear_attention.training.losses.divergence import divergence, widened
from hf_linear_attention.training.losses.gradients import GRADIENT_SCALE, gradients_of, with_gradients
from hf_linear_attention.training.losses.output_layer import ByRow, Rows
from hf_linear_attention.training.losses.outputs import (
    Outputs,
    StudentOutputs,
    hidden_states_of,
    pooled,
    scored_logits,
)
from hf_linear_attention.training.recipe import Recipe


class Objective:
    """One term of the loss.

    With `observes_attention`, the student computes its original softmax attention, and the mechanism of every layer is
    run on the same inputs.
    """

    needs_logits: bool = False  # and has `rows` and `of_rows` in place of `total`
    needs_hidden_states: bool = False
    needs_teacher: bool = False
    observes_attention: bool = False

    def __init__(self, recipe: Recipe) -> None:
        """Read the options of this objective; most have none."""

    def units(self, batch: Batch) -> Tensor:
        """Number of units in this batch, a long scalar; most count tokens, or images."""
        return count_units(batch)

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        """Sum over the units: a scalar, or one value for each of `student.attention`, whose mean is the term."""
        raise NotImplementedError

    def rows(self, batch: Batch) -> Tensor:
        """Which rows of the flattened logits the term needs: bool [R]."""
        raise NotImplementedError

    def of_rows(self, logits: Tensor, rows: Tensor, batch: Batch, teacher: Outputs | None) -> Tensor:
        """Sum over the units among these rows [r], whose logits are [r, V]."""
        raise NotImplementedError


class TaskLoss(Objective):
    """Cross-entropy with the labels: the next token, the masked tokens, the target, or the class."""

    needs_logits = True

    def __init__(self, recipe: Recipe) -> None:
        self.task = recipe.model.task

    def units(self, batch: Batch) -> Tensor:
        """Number of labels, a long scalar."""
        return (aligned_labels(batch, self.task) != IGNORED).sum()

    def rows(self, batch: Batch) -> Tensor:
        """Those that have a label."""
        return (aligned_labels(batch, self.task) != IGNORED).flatten()

    def of_rows(self, logits: Tensor, rows: Tensor, batch: Batch, teacher: Outputs | None) -> Tensor:
        """Sum of the cross-entropies, in nats."""
        labels = aligned_labels(batch, self.task).flatten()[rows]
        return F.cross_entropy(widened(logits), labels, ignore_index=IGNORED, reduction="sum")


class LogitsKL(Objective):
    """KL(teacher || student) of all logits that are not of padding: those of tokens, of classes, ... (`tasks.py`)."""

    needs_logits = needs_teacher = True

    def __init__(self, recipe: Recipe) -> None:
        self.logits_of = recipe.task.logits
        self.temperature = recipe.objective.temperature

    def units(self, batch: Batch) -> Tensor:
        """Number of tokens or targets, or of sequences or images for a classifier, a long scalar."""
        return scored_logits(batch, self.logits_of).sum()

    def rows(self, batch: Batch) -> Tensor:
        """Those that are not of padding."""
        return scored_logits(batch, self.logits_of).flatten()

    def of_rows(self, logits: Tensor, rows: Tensor, batch: Batch, teacher: Outputs | None) -> Tensor:
        """Sum of T^2 KL(teacher || student) at temperature T, in nats.

        With T^2, the gradient does not shrink with T (Hinton et al. 2015, arXiv:1503.02531, section 2).
        """
        if teacher is None or teacher.logits is None:
            raise RuntimeError("`logits_kl` needs the teacher's logits")
        kept = self.rows(batch)[rows]
        if not kept.all():
            logits, rows = logits[kept], rows[kept]
        return self.temperature**2 * divergence(logits, teacher.logits(rows), self.temperature).sum()


class HiddenState(Objective):
    """|student - teacher|^2 / |teacher|^2 of the hidden state of every token, averaged over the compared layers.

    The error is relative because the norm of hidden states differs by orders of magnitude between layers and tokens.
    """

    needs_hidden_states = needs_teacher = True

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        """Sum of the relative squared errors."""
        if teacher is None:
            raise RuntimeError("`hidden_state` needs a teacher")
        sums = _error_sums(student.hidden_states, teacher.hidden_states, batch, is_decoder=False)
        sums += _error_sums(student.decoder_states, teacher.decoder_states, batch, is_decoder=True)
        return torch.stack(sums).mean()


class Embedding(Objective):
    """1 - cosine similarity of the embeddings, which are pooled as the files of sentence-transformers say."""

    needs_hidden_states = needs_teacher = True

    def __init__(self, recipe: Recipe) -> None:
        self.pooling = recipe.pooling

    def units(self, batch: Batch) -> Tensor:
        """Number of sequences, a long scalar."""
        return torch.tensor(len(batch["index"]), device=batch["index"].device)

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        """Sum of 1 - cosine similarity."""
        if teacher is None:
            raise RuntimeError("`embedding` needs a teacher")
        mine, yours = student.hidden_states[-1], teacher.hidden_states[-1]
        mask = token_weights(batch, mine.shape[1]) > 0
        mine, yours = (pooled(hidden, mask, self.pooling) for hidden in (mine, yours))
        return (1 - F.cosine_similarity(mine, yours, dim=-1)).sum()


def _error_sums(mine: tuple[Tensor, ...], yours: tuple[Tensor, ...], batch: Batch, is_decoder: bool) -> list[Tensor]:
    """The weighted sum of the relative squared errors of every layer of one side of the model."""
    sums = []
    for a, b in zip(mine, yours, strict=True):
        weights = token_weights(batch, a.shape[1], is_decoder)
        mask = weights > 0
        a, b = a[mask].float(), b[mask].float()  # [T, D]
        errors = (a - b).square().sum(-1) / b.square().sum(-1).clamp(min=1e-12)
        sums.append((errors * weights[mask]).sum())
    return sums


class AttentionTransfer(Objective):
    """|mechanism - softmax|^2 / |softmax|^2 of the output of every layer and head, on the softmax model's activations.

    The error is relative per sequence and head, because absolute errors (LoLCATs 2024, equation 8) span 0.0008 to 48
    across the layers of one model, and averaged over heads and layers. Every layer is trained separately: errors of
    earlier layers do not reach it (section 3.2 of that paper).
    """

    observes_attention = True

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        """Sum over the units of the mean error of the heads, for each entry of `student.attention`."""
        weights = [query_weights(seen, batch) for seen in student.attention]
        pairs = list(zip(student.attention, weights, strict=True))
        errors = torch.stack([relative_head_error(seen, w > 0) for seen, w in pairs])
        # No error has a gradient in the scores of keys, because they only choose; their own is not part of the value.
        scores = torch.stack([score_error(seen, w) for seen, w in pairs])
        scores = scores - scores.detach()
        return (errors.mean(dim=2) * weights[0].sum(-1)).sum(-1) + scores  # of [layers, B, H]; layers weigh a row alike


def score_error(seen: ObservedAttention, weights: Tensor) -> Tensor:
    """Cross-entropy between the softmax weights of the keys behind the window and the softmax of their scores.

    It is the mean over sampled queries, in proportion to their weight behind the window, and over heads, times the sum
    of the tokens' `weights` [B, N]; 0 without scores. So the largest scores belong to the keys that later queries look
    for most.
    """
    mechanism: Any = seen.module.linear_attention
    if not getattr(mechanism, "num_exact_keys", 0):
        return weights.new_zeros((), dtype=torch.float32)
    sample, hidden = SampledQueries.of(seen), torch.finfo(torch.float32).min / 2  # finite, because padding sees no key
    with torch.no_grad():
        target = sample.logits.masked_fill(~sample.visible[:, None, None], hidden).softmax(-1).mean(2)
        counted = ((weights > 0) & sample.real)[:, sample.chosen]
        target = target * (sample.far & counted.unsqueeze(-1))[:, None]
    scores = cast(Tensor, sample.scores).unsqueeze(2).masked_fill(~sample.far[:, None], hidden)
    entropy = -(target * scores.log_softmax(-1)).sum(dim=(2, 3)) / target.sum(dim=(2, 3)).clamp(min=1e-6)
    return (entropy.mean(1) * weights.sum(1)).sum()


def query_weights(seen: ObservedAttention, batch: Batch) -> Tensor:
    """The weights [B, N] of the queries of a layer; in an encoder-decoder, those of the side that asks."""
    is_decoder = seen.inputs.is_causal or isinstance(seen.module, LinearizedCrossAttention)
    return token_weights(batch, seen.softmax_output.shape[1], is_decoder)


def relative_head_error(seen: ObservedAttention, mask: Tensor) -> Tensor:
    """Relative squared error [B, H] of the mechanism's output over the tokens for which `mask` [B, N] is true."""
    mine, yours = (x.float().masked_fill(~mask[:, :, None, None], 0.0) for x in (seen.output, seen.softmax_output))
    return (mine - yours).square().sum(dim=(1, 3)) / yours.square().sum(dim=(1, 3)).clamp(min=1e-12)


# Queries per sequence that are compared: all logits of these are computed, beyond what a step costs without.
MOST_QUERIES = 64
# Where both log odds differ by less, the error of the output has a gradient, and knows better what the share is worth.
TOLERANCE = 2.0


def has_far_share(model: nn.Module) -> bool:
    """Whether a layer of the model gives near and far keys a common denominator."""
    return any(hasattr(module, "log_odds") for module in model.modules())


class FarShare(Objective):
    """KL(softmax || mechanism) of the shares of near and far keys, averaged over heads, in nats; for causal attention.

    Shares whose log odds differ by less than TOLERANCE count as equal.

    At most MOST_QUERIES queries of a sequence are compared, at equal distances. Layers that have no common denominator
    of both kinds of keys contribute 0.
    """

    observes_attention = True

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        """Sum over the units of the mean divergence, for each entry of `student.attention`."""
        return torch.stack([_layer_total(seen, query_weights(seen, batch)) for seen in student.attention])


def _layer_total(seen: ObservedAttention, weights: Tensor) -> Tensor:
    odds = seen.far_log_odds
    if odds is None:
        return weights.new_zeros((), dtype=torch.float32)
    sample = SampledQueries.of(seen)
    real, chosen = sample.real, sample.chosen
    # The mechanism moves real tokens to the right end.
    moved = (sample.place + odds.shape[2] - real.sum(1, keepdim=True))[:, None, chosen].clamp(min=0)
    target = softmax_log_odds(sample)
    divergence = share_divergence(target, odds.gather(2, moved.expand(-1, odds.shape[1], -1)).float())
    counted = ((weights > 0) & real)[:, chosen].float()
    per_row = (divergence.mean(1) * counted).sum(1) / counted.sum(1).clamp(min=1)
    return (per_row * weights.sum(1)).sum()


def share_divergence(target: Tensor, odds: Tensor) -> Tensor:
    """t log(t / s) + (1 - t) log((1 - t) / (1 - s)) of the shares t = sigmoid(target) and s = sigmoid(odds).

    Before, `odds` move towards `target` by TOLERANCE, but not past it. The divergence is 0 where `target` is infinite:
    there is no far key, or no near key.
    """
    finite = target.isfinite()
    target, odds = (x.masked_fill(~finite, 0.0) for x in (target, odds))
    odds = target + F.softshrink(odds - target, TOLERANCE)
    terms = [t.sigmoid() * (F.logsigmoid(t) - F.logsigmoid(s)) for t, s in ((target, odds), (-target, -odds))]
    return (terms[0] + terms[1]).masked_fill(~finite, 0.0)


@dataclass(frozen=True)
class SampledQueries:
    """Queries of a layer of `hybrid` at equal distances, at most MOST_QUERIES of a sequence, and all of its keys.

    Attributes:
        chosen: `[n]`, the queries.
        place: `[B, N]`, the number of real tokens of its sequence before each.
        real: bool `[B, N]`, False at padding.
        logits: `[B, Hkv, G, n, N]`, those of softmax.
        visible: bool `[B, n, N]`.
        far: bool `[B, n, N]`, the visible keys behind window and sinks.
        scores: `[B, Hkv, N]` of the keys, or None.
        num_exact_keys: how many far keys of each head the mechanism keeps.
    """

    chosen: Tensor
    place: Tensor
    real: Tensor
    logits: Tensor
    visible: Tensor
    far: Tensor
    scores: Tensor | None
    num_exact_keys: int

    @classmethod
    def of(cls, seen: ObservedAttention) -> SampledQueries:
        """Those of one call of a layer."""
        mechanism: Any = seen.module.linear_attention
        query, key, mask = seen.inputs.query, seen.inputs.key.float(), seen.inputs.attention_mask
        length = query.shape[2]
        numbers = torch.ones(query.shape[0], length, dtype=torch.long, device=query.device) if mask is None else mask
        place = numbers.long().cumsum(1) - 1
        chosen = torch.arange(0, length, -(-length // MOST_QUERIES), device=query.device)
        with torch.no_grad():
            rows = query[:, :, chosen].float().unflatten(1, (key.shape[1], -1))
            logits = seen.inputs.scaling * rows @ key.unsqueeze(2).transpose(-1, -2)
        gap = place[:, chosen, None] - place[:, None, :]
        visible = (gap >= 0) & (numbers[:, chosen, None] == numbers[:, None]) & (numbers > 0)[:, None]
        far = visible & (gap >= mechanism.window_size) & (place >= mechanism.num_sinks)[:, None]
        count = mechanism.num_exact_keys
        scores = mechanism.scores(seen.inputs, place + 1)
        return cls(
            chosen, place, numbers > 0, logits, visible, far, None if scores is None else scores.squeeze(-1), count
        )

    @property
    def kept(self) -> Tensor:
        """The far keys that the mechanism keeps, bool `[B, 1 or Hkv, n, N]`."""
        far = self.far[:, None]
        if self.scores is None:
            return torch.zeros_like(far)
        # All queries share the order of the keys, which is sorted once.
        order = self.scores.detach().sort(dim=-1, descending=True, stable=True).indices.unsqueeze(2)
        order = order.expand(-1, -1, far.shape[2], -1)
        best = far.expand_as(order).gather(3, order)
        return torch.zeros_like(best).scatter(
            3, order, best & (best.cumsum(3, dtype=torch.int32) <= self.num_exact_keys)
        )


@torch.no_grad()
def softmax_log_odds(sample: SampledQueries) -> Tensor:
    """What `ObservedAttention.far_log_odds` is in softmax attention, for some queries: `[B, H, n]`."""
    far = sample.far[:, None] & ~sample.kept
    near = sample.visible[:, None] & ~far
    odds = [_log_sum(sample.logits, mask.unsqueeze(2)) for mask in (far, near)]
    return (odds[0] - odds[1]).flatten(1, 2)


def _log_sum(logits: Tensor, mask: Tensor) -> Tensor:
    """`logsumexp` over the last dimension where `mask` is true, -inf where it nowhere is.

    Adding -inf and dividing by the largest share take a sixth of the time of `masked_fill` and `logsumexp`.
    """
    logits = logits + torch.zeros_like(mask, dtype=logits.dtype).masked_fill(~mask, float("-inf"))
    largest, share = logits.amax(-1), logits.softmax(-1).amax(-1)
    return torch.where(largest.isfinite(), largest - share.log(), largest)


LOSS = "loss"  # the name of the weighted sum among the figures of a step

OBJECTIVES: dict[str, Callable[[Recipe], Objective]] = {
    "far_share": FarShare,  # before those that only need the output, which is computed with the shares
    "attention_transfer": AttentionTransfer,
    "task_loss": TaskLoss,
    "logits_kl": LogitsKL,
    "hidden_state": HiddenState,
    "embedding": Embedding,
}


def build_objectives(recipe: Recipe) -> dict[str, tuple[float, Objective]]:
    """The objectives whose weight is above 0, with their weights."""
    weights = {name: getattr(recipe.objective, f"{name}_weight") for name in OBJECTIVES}
    return {name: (weight, OBJECTIVES[name](recipe)) for name, weight in weights.items() if weight}


class StudentWithObjectives(nn.Module):
    """The student and its losses in one forward pass.

    DistributedDataParallel wraps this module instead of the student. So its only output is the loss, parameters that
    do not reach the loss (a pooler, an unused head) are recognised, and mixed precision leaves logits in 16 bits.
    """

    def __init__(self, student: Any, objectives: dict[str, tuple[float, Objective]], layers: str | None) -> None:
        """Combine the student and its objectives; `layers` are the hidden states that it returns (`run_model`)."""
        super().__init__()
        if "far_share" in objectives and not has_far_share(student):
            raise UsageError("`--far_share_weight` needs layers of `hybrid`; drop the option")
        self.student, self.objectives, self.layers = student, objectives, layers
        self.numbers = [module.linear_attention.shape.layer for module in linear_attention_modules(student).values()]
        self.needs_logits = any(objective.needs_logits for _, objective in objectives.values())
        self.by_row = ByRow(student)
        self.gradient_scale: Callable[[], float] = lambda: GRADIENT_SCALE
        self.observes_attention = any(objective.observes_attention for _, objective in objectives.values())

    def forward(
        self, batch: Batch, teacher: Outputs | None, scales: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and detached figures by name: the loss, and every objective's term without its weight.

        An objective's term is its sum over the units, multiplied by its entry in `scales`; objectives on attention also
        have one figure per layer.
        """
        if self.observes_attention:
            return self._transferred(batch, scales)
        losses: list[Tensor] = []
        figures: dict[str, Tensor] = {}

        def read(logits: Rows) -> None:
            if self.needs_logits:
                loss, found = self._of_rows(logits, batch, teacher, scales)
                losses.append(loss)
                figures.update(found)

        outputs = self.by_row.run(read, batch, layers=self.layers)
        if self.needs_logits and not losses:
            raise RuntimeError("these objectives need a model with logits")
        student = StudentOutputs(
            hidden_states=hidden_states_of(outputs, self.layers),
            decoder_states=hidden_states_of(outputs, self.layers, "decoder_"),
        )
        others = {name: o for name, (_, o) in self.objectives.items() if not o.needs_logits}
        terms = {name: o.total(batch, student, teacher) * scales[name] for name, o in others.items()}
        loss = cast(Tensor, sum(losses) + self._weighted(terms))
        return loss, {LOSS: loss.detach()} | figures | {name: term.detach() for name, term in terms.items()}

    def _weighted(self, terms: dict[str, Tensor]) -> Tensor:
        return cast(Tensor, sum(self.objectives[name][0] * term for name, term in terms.items()))

    def _of_rows(
        self, logits: Rows, batch: Batch, teacher: Outputs | None, scales: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of the objectives that need logits, and their figures."""
        used = {name: o for name, (_, o) in self.objectives.items() if o.needs_logits}
        rows = torch.stack([o.rows(batch) for o in used.values()]).any(0).nonzero().squeeze(-1)

        def loss(some: Tensor, numbers: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            terms = {name: o.of_rows(some, numbers, batch, teacher) * scales[name] for name, o in used.items()}
            return self._weighted(terms), {name: term.detach() for name, term in terms.items()}

        layer = self.by_row.layer
        parameters = () if layer is None else layer.module.parameters()
        return logits.summed(rows, parameters, loss, self.gradient_scale())

    def _transferred(self, batch: Batch, scales: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and the figures of attention transfer, in which every layer is done with before the next one."""
        layers: list[int] = []
        losses: list[Tensor] = []
        found: list[tuple[nn.Module, list[Tensor | None]]] = []
        terms: dict[str, list[Tensor]] = {name: [] for name in self.objectives}
        scale = self.gradient_scale()

        def observe(seen: ObservedAttention) -> None:
            mechanism, own = seen.module.linear_attention, StudentOutputs(attention=(seen,))
            parts = {name: o.total(batch, own, None)[0] * scales[name] for name, (_, o) in self.objectives.items()}
            loss = self._weighted(parts)
            found.append((mechanism, gradients_of(loss, list(mechanism.parameters()), scale)))
            losses.append(loss.detach())
            layers.append(mechanism.shape.layer)
            for name, part in parts.items():
                terms[name].append(part.detach())

        # Every layer learns on the activations of the softmax model, so nobody needs logits.
        with observe_attention(self.student, observe):
            self.by_row.run(lambda rows: None, batch, self.layers)
        # With FSDP2, what the layers computed with is gone, and the optimizer has the shards.
        reshard(self.student)
        sources: list[nn.Parameter] = []
        gradients: list[Tensor] = []
        for mechanism, slopes in found:
            for parameter, slope in zip(mechanism.parameters(), slopes, strict=True):
                if (mean := mean_gradient(slope, parameter)) is not None:
                    sources.append(parameter)
                    gradients.append(mean)
        loss = with_gradients(torch.stack(losses).mean(), gradients, sources, scale * len(losses))
        figures = {LOSS: loss.detach()}
        for name, values in terms.items():
            figures[name] = torch.stack(values).mean()
            for layer in self.numbers:  # a layer that is called several times has several errors
                own = torch.stack([value for called, value in zip(layers, values) if called == layer])
                figures[f"{name}.layer_{layer}"] = own.mean()
        return loss, figures
