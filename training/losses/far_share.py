"""The objective that a hybrid's far keys have the share of the weight that softmax gives them.

In `hybrid` near and far keys have one denominator, so where the far keys start with a share of nearly 0, hardly any
gradient of the output reaches them: with logits of 70 (a Llama that copies symbols) the share starts at e^-90, and
attention transfer alone leaves it there. The gradient of the divergence of the shares is their difference, whatever
their size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.attention_observation import ObservedAttention
from hf_linear_attention.training.data.batches import Batch, count_units
from hf_linear_attention.training.losses.attention_transfer import query_weights
from hf_linear_attention.training.losses.objectives import Objective
from hf_linear_attention.training.losses.outputs import Outputs, StudentOutputs
from hf_linear_attention.training.recipe import Recipe


# Queries per sequence that are compared: all logits of these are computed, beyond what a step costs without.
MOST_QUERIES = 64
# Where both log odds differ by less, the error of the output has a gradient, and knows better what the share is worth.
TOLERANCE = 2.0


def has_far_share(model: nn.Module) -> bool:
    """Whether a layer of the model gives near and far keys a common denominator."""
    return any(hasattr(module, "log_odds") for module in model.modules())


def check_far_share(model: nn.Module) -> None:
    """Refuse a model that has nothing to compare.

    Raises:
        UsageError: if no layer gives near and far keys a common denominator.
    """
    if not has_far_share(model):
        raise UsageError(
            "`--far_share_weight` needs layers of `hybrid` whose `normalization` is `joint`, and the model has none; "
            "drop the option"
        )


class FarShare(Objective):
    """KL(softmax || mechanism) of the shares of near and far keys, averaged over heads, in nats; for causal attention.

    Shares whose log odds differ by less than TOLERANCE count as equal.

    At most MOST_QUERIES queries of a sequence are compared, at equal distances. Layers that have no common denominator
    of both kinds of keys contribute 0.
    """

    needs_logits, needs_hidden_states, needs_teacher = False, False, False
    observes_attention = True

    def __init__(self, recipe: Recipe) -> None:
        pass

    def units(self, batch: Batch) -> Tensor:
        """Number of tokens, a long scalar."""
        return count_units(batch)

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        """Sum over the units of the mean divergence, for each entry of `student.attention`."""
        return torch.stack([_layer_total(seen, query_weights(seen, batch)) for seen in student.attention])


def _layer_total(seen: ObservedAttention, weights: Tensor) -> Tensor:
    odds, mask = seen.far_log_odds, seen.inputs.key_mask
    if odds is None:
        return weights.new_zeros((), dtype=torch.float32)
    length = odds.shape[2]
    real = torch.ones_like(weights, dtype=torch.bool) if mask is None else mask
    place = real.long().cumsum(1) - 1  # the number of real tokens before a token
    chosen = torch.arange(0, length, -(-length // MOST_QUERIES), device=odds.device)
    # The mechanism moves real tokens to the right end.
    moved = (place + length - real.sum(1, keepdim=True))[:, None, chosen].clamp(min=0).expand(-1, odds.shape[1], -1)
    divergence = share_divergence(softmax_log_odds(seen, place, real, chosen), odds.gather(2, moved).float())
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


@torch.no_grad()
def softmax_log_odds(seen: ObservedAttention, place: Tensor, real: Tensor, chosen: Tensor) -> Tensor:
    """What `ObservedAttention.far_log_odds` is in softmax attention, for some queries: `[B, H, n]`.

    Args:
        place: `[B, N]`, the number of real tokens before each.
        real: bool `[B, N]`, False at padding.
        chosen: `[n]`, the queries.
    """
    mechanism: Any = seen.module.linear_attention
    query, key = seen.inputs.query[:, :, chosen].float(), seen.inputs.key.float()
    logits = seen.inputs.scaling * query.unflatten(1, (key.shape[1], -1)) @ key.unsqueeze(2).transpose(-1, -2)
    gap = place[:, chosen, None] - place[:, None, :]
    visible = (gap >= 0) & real[:, None, :]
    near = (gap < mechanism.window_size) | (place[:, None, :] < mechanism.num_sinks)
    far, near = (_log_sum(logits, mask[:, None, None]) for mask in (visible & ~near, visible & near))
    return (far - near).flatten(1, 2)


def _log_sum(logits: Tensor, mask: Tensor) -> Tensor:
    """`logsumexp` over the last dimension where `mask` is true, -inf where it nowhere is.

    Adding -inf and dividing by the largest share take a sixth of the time of `masked_fill` and `logsumexp`.
    """
    logits = logits + torch.zeros_like(mask, dtype=logits.dtype).masked_fill(~mask, float("-inf"))
    largest, share = logits.amax(-1), logits.softmax(-1).amax(-1)
    return torch.where(largest.isfinite(), largest - share.log(), largest)
