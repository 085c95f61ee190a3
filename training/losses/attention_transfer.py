"""Objectives that compare every layer's mechanism with the softmax that it replaces, on the same activations."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_linear_attention.attention_observation import ObservedAttention
from hf_linear_attention.training.data.batches import Batch, count_units, token_weights
from hf_linear_attention.training.losses.objectives import Objective
from hf_linear_attention.training.losses.outputs import Outputs, StudentOutputs
from hf_linear_attention.training.recipe import Recipe


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
