# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule with its features and gates, for the mechanism `gated_delta` and the far part of `hybrid`.

Axes: B batch, H query heads, Hkv key/value heads, N length, D head_dim, E hidden size, F features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from ..features.maps import orthogonal_random_matrix
from ..torch_kernels.blocks import accumulation_dtype, with_dtype
from ..torch_kernels.delta import gated_delta
from .base import LayerShape, MechanismInputs
from .token_gates import ForgetGate, SigmoidGate, hidden_size_of, scaled


# Added to the square of a length before the division by it, as in flash-linear-attention's `l2norm`.
EPSILON = 1e-6


class NormalizedFeatures(nn.Module):
    """phi(x) = silu(x A + b) / |silu(x A + b)| per head, x scaled by sqrt(scaling); A starts as the identity, b as 0.

    Query heads of a group have their own A and b. With more features than channels, A starts with further random
    columns.
    """

    def __init__(self, shape: LayerShape, num_features: int) -> None:
        super().__init__()
        heads, kv_heads, size = shape.num_heads, shape.num_key_value_heads, shape.head_dim
        self.query_projection = nn.Parameter(torch.empty(heads, size, num_features))
        self.query_bias = nn.Parameter(torch.empty(heads, 1, num_features))
        self.key_projection = nn.Parameter(torch.empty(kv_heads, size, num_features))
        self.key_bias = nn.Parameter(torch.empty(kv_heads, 1, num_features))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start with A = identity and b = 0."""
        size, num_features = self.key_projection.shape[1:]
        start = torch.eye(size, num_features, dtype=torch.float32, device="cpu")
        if num_features > size:  # columns that start equal would stay equal
            extra = orthogonal_random_matrix(num_features - size, size, generator).T
            start[:, size:] = extra / extra.norm(dim=0)
        for projection, bias in (
            (self.query_projection, self.query_bias),
            (self.key_projection, self.key_bias),
        ):
            init.copy_(projection, start.expand_as(projection))
            init.zeros_(bias)

    def queries(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """The features `[B, H, N, F]` of queries `[B, H, N, D]`."""
        return self._features(query, self.query_projection, self.query_bias, scaling)

    def keys(self, key: torch.Tensor, scaling: float) -> torch.Tensor:
        """The features `[B, Hkv, N, F]` of keys `[B, Hkv, N, D]`."""
        return self._features(key, self.key_projection, self.key_bias, scaling)

    def _features(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, scaling: float) -> torch.Tensor:
        dtype = accumulation_dtype(x)
        x = (with_dtype(x, dtype) * math.sqrt(scaling)) @ with_dtype(weight, dtype) + with_dtype(bias, dtype)
        x = F.silu(x)
        return x * (x.square().sum(dim=-1, keepdim=True) + EPSILON).rsqrt()


class DeltaRule(nn.Module):
    """S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - (exp(g_t) S_(t-1))^T k_t)^T and o_t = scale S_t^T q_t.

    q and k are features of length 1. beta and g follow from the hidden states; at the start beta is 1/2, and g is the
    negative slope of the head. `decay` is `none`, `head` or `channel`.
    """

    def __init__(
        self,
        shape: LayerShape,
        num_features: int,
        *,
        decay: str,
        slopes: Sequence[float],
        erases: bool = True,
    ) -> None:
        super().__init__()
        heads, size = shape.num_key_value_heads, hidden_size_of(shape)
        self.num_heads, self.decay, self.erases = heads, decay, erases
        self.features = NormalizedFeatures(shape, num_features)
        self.beta = SigmoidGate(size, heads, start=0.5)
        self.forget = None
        if decay != "none":
            repeats, rank = (num_features, shape.head_dim) if decay == "channel" else (1, None)
            self.forget = ForgetGate(size, [slope for slope in slopes for _ in range(repeats)], rank)
        self.output_scale = nn.Parameter(torch.empty(shape.num_heads, 1, 1))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initialise the features, the gates and the output scale."""
        self.features.reset_parameters(generator)
        self.beta.reset_parameters()
        if self.forget is not None:
            self.forget.reset_parameters(generator)
        init.ones_(self.output_scale)

    def gates(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """beta and the log-decay side by side, `[B, N, C]` in the accumulation dtype."""
        hidden = scaled(hidden_states)
        beta = self.beta(hidden)
        return beta if self.forget is None else torch.cat((beta, self.forget(hidden)), dim=-1)

    def forward(self, inputs: MechanismInputs, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The output `[B, H, N, D]` and the state S `[B, Hkv, F, D]`; see `torch_kernels.delta.gated_delta`."""
        query, key, value, mask, scaling, *_ = inputs
        beta, log_decay = self._split(cast(torch.Tensor, inputs.gates))
        # The scale of the output is one of the queries, because the output is linear in them.
        features = self.features.queries(query, scaling)
        return gated_delta(
            features * with_dtype(self.output_scale, features.dtype),
            self.features.keys(key, scaling),
            value,
            log_decay,
            beta,
            erases=self.erases,
            key_mask=mask,
            state=state,
        )

    def _split(self, gates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """beta `[B, Hkv, N]`, and the log-decay `[B, Hkv, N]` or `[B, Hkv, N, F]`."""
        beta, log_decay = gates.tensor_split((self.num_heads,), dim=-1)
        beta = beta.transpose(1, 2)
        if self.forget is None:
            return beta, torch.zeros_like(beta)
        log_decay = log_decay.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return beta, log_decay if self.decay == "channel" else log_decay.squeeze(-1)
