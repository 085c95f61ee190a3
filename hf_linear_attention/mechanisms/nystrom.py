# SPDX-License-Identifier: Apache-2.0
"""`nystrom`: softmax attention through landmarks (Xiong 2021, "Nystromformer", equations 11 to 15).

softmax(s Q Kl^T)  pinv(softmax(s Ql Kl^T))  softmax(s Ql K^T) V        Ql, Kl: M segment means of Q and K

     N x M       x        M x M           x        M x N

The pseudo-inverse is approximated by a few steps of an iteration. On the attention of a real MiniLM the exact pseudo-
inverse is 5 to 1000 times worse, because its small singular values are noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..torch_kernels.blocks import accumulation_dtype
from ..torch_kernels.window import slot_attention
from .base import (
    AttentionMechanism,
    LayerShape,
    MechanismInputs,
    State,
    gather_tokens,
    inverse_order,
    real_first,
    segment_mean_weights,
    segment_means,
    without_padding,
)
from .settings import NystromOptions


class NystromAttention(NystromOptions, AttentionMechanism):
    """Softmax attention through `num_landmarks` segment means of queries and keys (Nystromformer).

    Landmarks are means over the real tokens of each row, so neither padding nor other rows of the batch change a
    result. A row of at most `num_landmarks` tokens is exact, since its landmarks are its tokens and A pinv(A) A = A.
    The weights of longer rows may be negative and need not sum to 1.
    """

    def __init__(self, settings: Mapping[str, Any], shape: LayerShape):
        super().__init__(settings, shape)
        self.num_landmarks = settings["num_landmarks"]
        width = settings["conv_kernel_size"]
        self.conv_weight = nn.Parameter(torch.empty(shape.num_heads, 1, width, 1)) if width else None

    def reset_parameters(self) -> None:
        """Start with a convolution of zeros, so a converted model starts without it."""
        if self.conv_weight is not None:
            init.zeros_(self.conv_weight)

    def forward(self, inputs: MechanismInputs, state: State | None = None) -> tuple[Tensor, State | None]:
        """Attend through the landmarks, or exactly for short inputs; see `AttentionMechanism.forward`."""
        groups = self.shape.num_heads // self.shape.num_key_value_heads
        query, key, value, mask, scaling, *_ = inputs
        dtype = accumulation_dtype(query)
        query_, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        is_exported = torch.compiler.is_exporting()  # a graph for any length must not compare it
        if is_exported and mask is None:  # with a mask, short rows are exact behind landmarks too
            mask = torch.ones_like(key[:, 0, :, 0], dtype=torch.bool)
        if not is_exported and key.shape[2] <= self.num_landmarks:
            output = slot_attention(query_, key, value, None if mask is None else mask.unsqueeze(1), scaling)
        else:
            output = self._through_landmarks(query_, key, value, mask, scaling, groups)
        if self.conv_weight is not None:
            values = without_padding(value, mask).repeat_interleave(groups, dim=1)
            output = output + self._convolve(values, mask, self.conv_weight)
        return without_padding(output, mask).transpose(1, 2).to(query.dtype), None

    def _through_landmarks(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, groups: int
    ) -> Tensor:
        weights = occupied = visible = None
        if mask is not None:
            weights = segment_mean_weights(mask, self.num_landmarks, query.dtype).unsqueeze(1)
            occupied, visible = weights.sum(dim=3) > 0, mask.unsqueeze(1)  # [B, 1, M], [B, 1, N]

        def means(x: Tensor) -> Tensor:
            return segment_means(without_padding(x, mask), self.num_landmarks, weights)

        query_landmarks, key_landmarks = means(query), means(key)  # [B, H, M, D], [B, Hkv, M, D]
        # For grouped queries, one product with the key/value head takes the landmarks of all its query heads.
        rows = query_landmarks.unflatten(1, (-1, groups)).flatten(2, 3)  # [B, Hkv, G M, D]
        gathered = slot_attention(rows, key, value, visible, scaling).unflatten(2, (groups, -1)).flatten(1, 2)
        key_landmarks = key_landmarks.repeat_interleave(groups, dim=1)
        mixing = landmark_weights(query_landmarks, key_landmarks, occupied, scaling)
        summaries = iterative_pinv(mixing) @ gathered  # [B, H, M, D]
        if mask is not None:
            tokens = means(value).repeat_interleave(groups, dim=1)
            is_short = (mask.sum(dim=1) <= self.num_landmarks)[:, None, None, None]
            summaries = torch.where(is_short, tokens, summaries)
        return slot_attention(query, key_landmarks, summaries, occupied, scaling)

    def _convolve(self, value: Tensor, mask: Tensor | None, weight: Tensor) -> Tensor:
        """Convolve the real tokens with one kernel per head, `[B, H, N, D]`; the result is arbitrary at padding."""
        if not value.shape[2]:
            return value
        weight = weight.to(value.dtype)
        padding = (weight.shape[2] // 2, 0)
        if mask is None:
            return F.conv2d(value, weight, padding=padding, groups=self.shape.num_heads)
        places = real_first(mask)
        together = F.conv2d(gather_tokens(value, places), weight, padding=padding, groups=self.shape.num_heads)
        return gather_tokens(together, inverse_order(places))


def landmark_weights(query: Tensor, key: Tensor, occupied: Tensor | None, scaling: float) -> Tensor:
    """softmax(scaling Ql Kl^T) `[B, H, M, M]`, 0 where one of the landmarks is empty (`occupied` is `[B, 1, M]`)."""
    logits = scaling * query @ key.transpose(-1, -2)
    if occupied is None:
        return logits.softmax(dim=-1)
    logits = logits.masked_fill(~occupied.unsqueeze(2), torch.finfo(logits.dtype).min)
    return logits.softmax(dim=-1) * (occupied.unsqueeze(3) & occupied.unsqueeze(2))


def iterative_pinv(matrix: Tensor, iterations: int = 6) -> Tensor:
    """Approximate pseudo-inverse of each matrix of `[..., M, M]` (Razavi 2014; Nystromformer, eq. 15, 6 steps).

    The iteration starts from A^T / (|A|_1 |A|_inf) of each matrix, whereas common implementations take the maximum over
    the whole batch, so that an output depends on the other samples. The last step corrects the earlier ones and runs in
    float64 (except on Apple GPUs, which lack it): the rounding error falls by a fifth, for a tenth of the time at 512
    tokens.
    """
    size = matrix.abs()
    norms = size.sum(dim=-2).amax(dim=-1) * size.sum(dim=-1).amax(dim=-1)
    inverse = matrix.transpose(-1, -2) / torch.where(norms > 0, norms, 1.0)[..., None, None]
    matrices, inverse = (x.reshape(-1, *x.shape[-2:]) for x in (matrix, inverse))
    for step in range(iterations):  # Z (13 I - P (15 I - P (7 I - P))) / 4 with P = A Z
        if step == iterations - 1 and matrix.device.type != "mps":
            matrices, inverse = matrices.double(), inverse.double()
        product = matrices @ inverse
        inner = torch.baddbmm(product, product, product, beta=7, alpha=-1)
        inner = torch.baddbmm(product, product, inner, beta=15, alpha=-1)
        inverse = torch.baddbmm(inverse, inverse, inner, beta=13 / 4, alpha=-1 / 4)
    return inverse.to(matrix.dtype).view_as(matrix)
