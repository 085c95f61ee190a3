# SPDX-License-Identifier: Apache-2.0
"""The linear layers of Qwen3.5 (`Qwen3_5GatedDeltaNet` in transformers) as a form of `gated_delta`.

    q, k, v = silu(conv(W_qkv h))         over the 4 newest tokens, one weight per channel and distance
    beta    = sigmoid(W_b h)              g = -exp(A) softplus(W_a h + d), one of each per head
    S_t     = exp(g) S_(t-1) + beta k (v - (exp(g) S_(t-1))^T k)^T          with q and k of length 1
    o_t     = S_t^T q_t / sqrt(D)
    output  = w o / rms(o) * silu(W_z h)  per head, before the output projection of the layer

Nothing has a bias or a rotary position. There is one state per query head: keys and values of a group are repeated in
W_qkv. The layer's own projections of queries, keys and values are those of the original, for its softmax attention;
this form does not read them after the start. What it computes is exactly a linear layer of a Qwen3.5 checkpoint, which
`conversion/export/qwen3_5.py` writes.

Axes: B batch, H query heads, Hkv key/value heads, N length, D head_dim, E hidden size.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..torch_kernels.blocks import accumulated, with_dtype
from ..torch_kernels.delta import gated_delta, unit_length
from .base import LayerShape, MechanismInputs, hidden_size_of
from .token_gates import INITIAL_SLOPE


# silu is nearly linear for small values, and the norm of the output takes the scale away again.
VALUE_SCALE = 0.1


class Qwen35Rule(nn.Module):
    """The projections, gates and norm of a Qwen3.5 linear layer around the gated delta rule."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        size, width = hidden_size_of(shape), shape.num_heads * shape.head_dim
        self.shape, self.epsilon = shape, shape.norm_epsilon
        for name in "qkvz":
            self.register_parameter(f"in_proj_{name}", nn.Parameter(torch.empty(width, size)))
        self.in_proj_b = nn.Parameter(torch.empty(shape.num_heads, size))
        self.in_proj_a = nn.Parameter(torch.empty(shape.num_heads, size))
        self.dt_bias = nn.Parameter(torch.empty(shape.num_heads))
        self.A_log = nn.Parameter(torch.empty(shape.num_heads))
        self.norm = nn.Parameter(torch.empty(shape.head_dim))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start with beta = 1/2, the usual decay, and an output of 0 for every token, and with random projections.

        The norm leaves no other start: an output of the size of its values was farther from softmax attention than 0
        (relative squared errors of 1.2 to 2.3 on a model of stories), and trained worse.
        """
        query, key, value, *others = self._projections()
        for weight in (query, key, value):
            start = torch.randn(weight.shape, generator=generator, dtype=torch.float32, device="cpu")
            init.copy_(weight, start * weight.shape[1] ** -0.5)
        for weight in (*others, self.A_log):
            init.zeros_(weight)
        init.constant_(self.dt_bias, math.log(math.expm1(INITIAL_SLOPE)))
        init.ones_(self.norm)

    def start_from(self, attention: Any) -> None:
        """Start with the layer's own queries, keys and values, each of them repeated for the heads of its group."""
        groups = self.shape.num_heads // self.shape.num_key_value_heads

        def of_heads(name: str) -> Tensor:
            weight: Tensor = getattr(attention, f"{name}_proj").weight.unflatten(0, (-1, self.shape.head_dim))
            norm = getattr(attention, f"{name}_norm", None)
            return weight if norm is None else weight * norm.weight[:, None]

        key, value = (of_heads(name).repeat_interleave(groups, dim=0) for name in "kv")
        for weight, start in zip(self._projections(), (of_heads("q"), key, value * VALUE_SCALE)):
            init.copy_(weight, start.flatten(0, 1))

    def gates(self, hidden_states: Tensor) -> Tensor:
        """All projections of every token side by side, `[B, N, 4 H D + 2 H]` in the accumulation dtype."""
        hidden = accumulated(hidden_states)
        return F.linear(hidden, with_dtype(torch.cat(self._projections()), hidden.dtype))

    def _projections(self) -> list[Tensor]:
        return [getattr(self, f"in_proj_{name}") for name in "qkvzba"]

    def projected(self, inputs: MechanismInputs) -> MechanismInputs:
        """Queries, keys and values `[B, H, N, D]` before their convolution, and z, b and a `[B, H, N, D + 2]`."""
        heads, width = self.shape.num_heads, self.shape.num_heads * self.shape.head_dim
        parts = cast(Tensor, inputs.gates).split((width,) * 4 + (heads,) * 2, dim=-1)
        query, key, value, z, b, a = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in parts)
        return inputs._replace(query=query, key=key, value=value, gates=torch.cat((z, b, a), dim=-1))

    def forward(self, inputs: MechanismInputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output `[B, H, N, D]` and the state S `[B, H, D, D]`, from `projected` inputs after the convolution."""
        query, key, value = (F.silu(x) for x in inputs[:3])
        z, b, a = cast(Tensor, inputs.gates).split((self.shape.head_dim, 1, 1), dim=-1)
        rate = a.squeeze(-1) + with_dtype(self.dt_bias, a.dtype)[:, None]
        decay = with_dtype(self.A_log, a.dtype).exp()[:, None] * F.softplus(rate)
        query, key = unit_length(query) * self.shape.head_dim**-0.5, unit_length(key)
        beta, mask = b.squeeze(-1).sigmoid(), inputs.attention_mask
        output, state = gated_delta(query, key, value, -decay, beta, key_mask=mask, state=state)
        scale = (output.square().mean(dim=-1, keepdim=True) + self.epsilon).rsqrt()
        return output * scale * with_dtype(self.norm, output.dtype) * F.silu(z), state
