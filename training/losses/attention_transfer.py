"""Objectives that compare the mechanism of every layer with the softmax that it replaces, on the same activations."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_linear_attention.attention.layer import LinearizedCrossAttention
from hf_linear_attention.attention_observation import ObservedAttention
from hf_linear_attention.training.data.batches import Batch, count_units, token_weights
from hf_linear_attention.training.losses.objectives import Objective
from hf_linear_attention.training.losses.outputs import Outputs, StudentOutputs
from hf_linear_attention.training.recipe import Recipe


class AttentionTransfer(Objective):
    """|mechanism - softmax|^2 / |softmax|^2 of the output of every layer and head, on the softmax model's activations.

    The error is relative per sequence and head, because absolute errors span 0.0008 to 48 across the layers of one
    model, and averaged over heads and layers. With `attention_transfer_error` = `absolute`, it is the mean of squares
    (LoLCATs 2024, equation 8). Every layer is trained separately: errors of earlier layers do not reach it (section 3.2
    of that paper).
    """

    needs_logits, needs_hidden_states, needs_teacher = False, False, False
    observes_attention = True

    def __init__(self, recipe: Recipe) -> None:
        is_relative = recipe.objective.attention_transfer_error == "relative"
        self.error = relative_head_error if is_relative else absolute_head_error

    def units(self, batch: Batch) -> Tensor:
        """Number of tokens or images, a long scalar."""
        return count_units(batch)

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        """Sum over the units of the mean error of the heads, for each entry of `student.attention`."""
        weights = [query_weights(seen, batch) for seen in student.attention]
        errors = torch.stack([self.error(seen, w > 0) for seen, w in zip(student.attention, weights, strict=True)])
        return (errors.mean(dim=2) * weights[0].sum(-1)).sum(-1)  # of [layers, B, H]; all layers weigh a row alike


def query_weights(seen: ObservedAttention, batch: Batch) -> Tensor:
    """The weights [B, N] of the queries of a layer; in an encoder-decoder, those of the side that asks."""
    is_decoder = seen.inputs.is_causal or isinstance(seen.module, LinearizedCrossAttention)
    return token_weights(batch, seen.softmax_output.shape[1], is_decoder)


def relative_head_error(seen: ObservedAttention, mask: Tensor) -> Tensor:
    """Relative squared error [B, H] of the mechanism's output over the tokens for which `mask` [B, N] is true."""
    mine, yours = _real_outputs(seen, mask)
    return (mine - yours).square().sum(dim=(1, 3)) / yours.square().sum(dim=(1, 3)).clamp(min=1e-12)


def absolute_head_error(seen: ObservedAttention, mask: Tensor) -> Tensor:
    """Mean squared error [B, H] of the mechanism's output over the tokens for which `mask` [B, N] is true."""
    mine, yours = _real_outputs(seen, mask)
    return (mine - yours).square().mean(dim=3).sum(dim=1) / mask.sum(-1, keepdim=True).clamp(min=1)


def _real_outputs(seen: ObservedAttention, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs [B, N, H, D] of mechanism and softmax, with 0 at padding."""
    mine, yours = (x.float().masked_fill(~mask[:, :, None, None], 0.0) for x in (seen.output, seen.softmax_output))
    return mine, yours


class AttentionMap(Objective):
    """Cross-entropy between the attention weights of softmax and those of the mechanism (Hedgehog 2024, equation 4).

    It is - sum_j A_ij log W_ij, averaged over heads and layers. The N x N weights of both are formed, as in the paper.
    """

    needs_logits, needs_hidden_states, needs_teacher = False, False, False
    observes_attention = needs_attention_weights = True

    def __init__(self, recipe: Recipe) -> None:
        pass

    def units(self, batch: Batch) -> Tensor:
        """Number of tokens or images, a long scalar."""
        return count_units(batch)

    def total(self, batch: Batch, student: StudentOutputs, teacher: Outputs | None) -> Tensor:
        """Sum over the units of the mean cross-entropy of the heads, for each entry of `student.attention`."""
        return torch.stack([map_cross_entropy(seen, query_weights(seen, batch)) for seen in student.attention])


def map_cross_entropy(seen: ObservedAttention, counts: Tensor) -> Tensor:
    """The cross-entropy of one layer: the sum over the tokens, weighted by `counts` [B, N], averaged over heads."""
    if seen.softmax_weights is None:
        raise RuntimeError("the softmax weights are needed, but the attention that ran did not return them")
    # A weight of exactly 0, such as one outside a window, would make the cross-entropy infinite.
    weights = seen.weights().float().clamp(min=1e-8)
    real = counts > 0
    return -((seen.softmax_weights.float() * weights.log()).sum(-1).mean(1)[real] * counts[real]).sum()
