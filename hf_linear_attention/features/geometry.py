# SPDX-License-Identifier: Apache-2.0
"""Learned affine maps of queries and keys before random features (`geometry` of `performer`).

Random features estimate exp(q·k) without bias for any q and k, but the relative variance of the estimate grows as
exp(|q + k|^2). Attention transfer finds maps after which the estimate is precise where softmax has its weight.

Axes: B batch, H query heads, Hkv key/value heads, N length, D head_dim.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import initialization as init

from ..torch_kernels.blocks import accumulated, with_dtype


class HeadMaps(nn.Module):
    """x -> exp(t) x A + b with A `[heads, D, D]`, t `[heads, 1, 1]` and b `[heads, 1, D]`; at the start x -> x.

    t is a redundant parameter with a purpose: real queries and keys are too long for random features, and an optimiser
    shortens them with t in a few steps, for which it would have to move all numbers of A.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        self.log_scale = nn.Parameter(torch.empty(num_heads, 1, 1))
        self.bias = nn.Parameter(torch.empty(num_heads, 1, head_dim))

    def reset_parameters(self) -> None:
        """Start as the identity."""
        identity = torch.eye(self.weight.shape[-1], dtype=torch.float32, device="cpu")
        init.copy_(self.weight, identity.expand_as(self.weight))
        init.zeros_(self.log_scale)
        init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[B, heads, N, D]` to the same shape in the accumulation dtype."""
        x = accumulated(x)
        weight, log_scale, bias = (with_dtype(part, x.dtype) for part in (self.weight, self.log_scale, self.bias))
        return x @ (log_scale.exp() * weight) + bias


class LearnedGeometry(nn.Module):
    """A map per query head for queries and a map per key/value head for keys, so that the state is one per key head."""

    def __init__(self, num_heads: int, num_key_value_heads: int, head_dim: int) -> None:
        super().__init__()
        self.query = HeadMaps(num_heads, head_dim)
        self.key = HeadMaps(num_key_value_heads, head_dim)

    def reset_parameters(self) -> None:
        """Start as the identity, which is FAVOR+."""
        self.query.reset_parameters()
        self.key.reset_parameters()

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map queries `[B, H, N, D]` and keys `[B, Hkv, S, D]`; the results are in the accumulation dtype."""
        return self.query(query), self.key(key)
