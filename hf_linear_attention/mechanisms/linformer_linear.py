# SPDX-License-Identifier: Apache-2.0
"""`linformer_linear`: linear attention whose keys and values are first compressed along the length, in its valid form.

    o = Phi(Q) [(E Phi(K))^T (F V)]  /  Phi(Q) [(E Phi(K))^T (F 1)]        E, F >= 0: [k, n]

The weights Phi(Q) Phi(K)^T E^T F are non-negative because every factor is, and they sum to 1 because the denominator is
the numerator for v = 1. The combination is often written with arbitrary E and F and with the denominator Phi(Q) sum
Phi(K) of plain linear attention; then neither holds. `reference.linformer_linear_slides` and
`benchmarks/papers/untrained.py` show this, and what the valid form gains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..torch_kernels.blocks import EMPTY_MAXIMUM, accumulation_dtype, largest_visible, normalize, with_ones
from .base import LayerShape, MechanismInputs, State, without_padding
from .linear import LinearAttention
from .linformer import LinformerAttention, compress, project
from .settings import LinformerLinearOptions


class LinformerLinearAttention(LinformerLinearOptions, LinformerAttention):
    """Linear attention on keys and values compressed along the length by non-negative E and F. Encoders only.

    E and F are the absolute values of the learned parameters and start as segment means. Each row of E is rescaled by
    the share of its weight that falls on real tokens, as in `linformer`. F is not rescaled, so a slot counts for as
    many tokens as it holds.
    """

    def __init__(self, settings: Mapping[str, Any], shape: LayerShape):
        super().__init__(settings, shape)
        sizes = (shape.num_heads, shape.num_key_value_heads, shape.head_dim)
        self.feature_map = LinearAttention.feature_map_class(settings)(*sizes, settings["num_features"])

    def reset_parameters(self) -> None:
        """Start E and F as segment means and initialise the feature map."""
        super().reset_parameters()
        self.feature_map.reset_parameters(self.generator())

    def forward(self, inputs: MechanismInputs, state: State | None = None) -> tuple[Tensor, State | None]:
        """Compress key features and values, at most as many as E has columns (ValueError), and attend to the slots."""
        query, key, value, mask, scaling, *_ = inputs
        self._check_length(key)
        key = without_padding(key, mask)
        queries = self.feature_map.forward_queries(query, scaling)
        keys = self.feature_map.forward_visible_keys(key, scaling, mask)
        if self.feature_map.log_features:
            queries, keys = exponentiate_together(queries, keys, mask)
        keys = without_padding(keys, mask)
        values = without_padding(with_ones(value, accumulation_dtype(value)), mask)
        key_projection, value_projection = (non_negative(x) for x in self._projections)
        slots, _ = compress(keys, key_projection, mask)  # [B, Hkv, k, F]
        sums = slots.transpose(-1, -2) @ project(values, value_projection, mask)[0]  # [B, Hkv, F, D + 1]
        rows = queries.unflatten(1, (keys.shape[1], -1))  # [B, Hkv, G, N, F]
        output = normalize(rows @ sums.unsqueeze(2)).flatten(1, 2)
        return output.transpose(1, 2).to(query.dtype), None


def non_negative(x: Tensor) -> Tensor:
    """|x| with derivative 1 at 0, where torch's derivative is 0 and the zeros of a segment mean would remain zeros."""
    return torch.where(x >= 0, x, -x)


def exponentiate_together(queries: Tensor, keys: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Turn exponents into features in [0, 1]; the maxima are constants that cancel, so they need no gradient.

    `queries` are `[B, H, N, F]` and `keys` are `[B, Hkv, S, F]`; padded keys may hold any value.
    """
    visible = keys if mask is None else keys.masked_fill(~mask[:, None, :, None], EMPTY_MAXIMUM)
    largest = largest_visible(visible, None).unsqueeze(2)
    keys = (visible - largest).exp()
    queries = queries + largest.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    return (queries - queries.detach().amax(dim=-1, keepdim=True)).exp(), keys
