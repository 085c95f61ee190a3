# SPDX-License-Identifier: Apache-2.0
"""Gates of linear attention: per token, how much its key weighs, and how fast earlier keys fade.

Query i weighs key j by phi(q_i)·phi(k_j) exp(a_j + g_(j+1) + ... + g_i), where a (the input gate) and g <= 0 (the
forget gate) depend on the hidden states from which the layer makes queries, keys and values. These are the gates of
mLSTM (Beck 2024, "xLSTM"), with the same running maximum against overflow; g alone is the decay of Mamba-2 and, with
other features, of gated linear attention (Yang 2023).

Where features are exponents, both gates are numbers added to the exponents of the keys: a_j - (g_1 + ... + g_j). What
is common to all keys of a query cancels, and a state counts from its last token because its maximum fades.

Axes: B batch, H query heads, Hkv key/value heads, N length, D head_dim, E hidden size, F features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..features.maps import orthogonal_random_matrix
from ..torch_kernels.blocks import Affine, KernelMap, accumulated, with_dtype
from .base import LayerShape, hidden_size_of, scaled


# -g at the start. The heads of stories260k look 4 to 44 tokens back on average, and a state that starts with the
# trained length as its half-life first has to learn to forget (benchmarks/results/conversion.md).
INITIAL_SLOPE = 1 / 20
# Exponents count from the start of a part, so that float32 keeps their digits however long the input is.
TOKENS_PER_PART = 4096


class ForgetGate(nn.Module):
    """The log-decay g = -softplus(w·h + r) of every token and output, for `scaled` hidden states h.

    w starts as 0, and r as what gives the `slopes`, one per output, for every token. With a `rank`, w is the product of
    two matrices (Kimi Linear 2025, section 3).
    """

    def __init__(self, hidden_size: int, slopes: Sequence[float], rank: int | None = None) -> None:
        super().__init__()
        self.slopes = tuple(slopes)
        self.reduction = None if rank is None else nn.Parameter(torch.empty(rank, hidden_size))
        self.projection = nn.Parameter(torch.empty(len(self.slopes), rank or hidden_size))
        self.rate = nn.Parameter(torch.empty(len(self.slopes)))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start with the initial slopes for every token."""
        if self.reduction is not None:
            rank, size = self.reduction.shape
            init.copy_(self.reduction, orthogonal_random_matrix(rank, size, generator))
        init.zeros_(self.projection)
        rates = [math.log(math.expm1(slope)) for slope in self.slopes]
        init.copy_(self.rate, torch.tensor(rates, dtype=torch.float32, device="cpu"))

    def forward(self, hidden: Tensor) -> Tensor:
        """The log-decays `[B, N, outputs]` of `[B, N, E]`."""
        if self.reduction is not None:
            hidden = F.linear(hidden, with_dtype(self.reduction, hidden.dtype))
        rate = F.linear(hidden, *(with_dtype(x, hidden.dtype) for x in (self.projection, self.rate)))
        # Softplus; the backward pass of `F.softplus` has other strides in a graph than outside (torch 2.13).
        return -torch.logaddexp(rate, torch.zeros_like(rate))


class SigmoidGate(nn.Module):
    """sigmoid(w·h + b) of every token and output, for `scaled` hidden states h; at first w is 0 and it is `start`."""

    def __init__(self, hidden_size: int, outputs: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.projection = nn.Parameter(torch.empty(outputs, hidden_size))
        self.bias = nn.Parameter(torch.empty(outputs))

    def reset_parameters(self) -> None:
        """Start with the same gate for every token."""
        init.zeros_(self.projection)
        init.constant_(self.bias, math.log(self.start / (1 - self.start)))

    def forward(self, hidden: Tensor) -> Tensor:
        """The gates `[B, N, outputs]` of `[B, N, E]`, between 0 and 1."""
        return F.linear(hidden, *(with_dtype(x, hidden.dtype) for x in (self.projection, self.bias))).sigmoid()


class TokenGates(nn.Module):
    """a = u·h and g (`ForgetGate`) for every token and key/value head, side by side: `[B, N, C]`.

    u starts as 0. `has_input` and `has_forget` say which of the two gates there are.
    """

    def __init__(self, shape: LayerShape, slopes: tuple[float, ...], *, has_input: bool, has_forget: bool) -> None:
        super().__init__()
        self.num_heads, size = shape.num_key_value_heads, hidden_size_of(shape)
        self.input_projection = nn.Parameter(torch.empty(self.num_heads, size)) if has_input else None
        self.forget = ForgetGate(size, slopes) if has_forget else None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start with equal weights, and with the initial slopes for every token."""
        if self.input_projection is not None:
            init.zeros_(self.input_projection)
        if self.forget is not None:
            self.forget.reset_parameters(generator)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The gates `[B, N, C]` of hidden states `[B, N, E]`, in the accumulation dtype."""
        hidden = scaled(hidden_states)
        gates = []
        if self.input_projection is not None:
            gates.append(F.linear(hidden, with_dtype(self.input_projection, hidden.dtype)))
        if self.forget is not None:
            gates.append(self.forget(hidden))
        return torch.cat(gates, dim=-1)

    def split(self, gates: Tensor, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The exponents a and the log-decays g, both `[B, Hkv, N]` or None; 0 where the mask `[B, N]` is."""
        gates = gates.transpose(1, 2)
        if mask is not None:
            gates = gates.masked_fill((mask <= 0)[:, None], 0.0)
        if self.input_projection is None:
            return None, gates
        return gates[:, : self.num_heads], gates[:, self.num_heads :] if self.forget is not None else None


def gates_of(settings: Mapping[str, Any], shape: LayerShape) -> TokenGates:
    """The gates that the settings `decay` = `gated` and `input_gate` ask for."""
    has_forget, has_input = settings.get("decay") == "gated", bool(settings.get("input_gate"))
    slopes = shape.alibi_slopes or (INITIAL_SLOPE,) * shape.num_key_value_heads
    return TokenGates(shape, slopes, has_input=has_input, has_forget=has_forget)


def with_key_exponents(
    feature_map: KernelMap, query: Tensor, key: Tensor, exponents: Tensor
) -> tuple[KernelMap, Tensor, Tensor]:
    """The affine map, queries and keys for which `exponents [B, Hkv, S]` are added to those of the keys.

    They become one more channel of the keys, whose weight is 1 for every feature. The norm term goes there too, because
    it would count that channel.
    """
    query_map, key_map = feature_map.query, feature_map.key
    if query_map is None or key_map is None:
        raise ValueError("Exponents can be added to an affine map only.")
    query, key = accumulated(query), accumulated(key)
    if key_map.norm is not None:
        norm = with_dtype(key_map.norm, key.dtype).view(1, -1, 1)
        exponents = exponents - norm / 2 * key.square().sum(dim=-1)
    ones, zeros = torch.ones_like(key_map.weight[:, :1]), torch.zeros_like(query_map.weight[:, :1])
    key_map = Affine(torch.cat((key_map.weight, ones), dim=1), key_map.bias)
    query_map = Affine(torch.cat((query_map.weight, zeros), dim=1))
    key = torch.cat((key, exponents.to(key.dtype).unsqueeze(-1)), dim=-1)
    return KernelMap(feature_map.function, query_map, key_map), F.pad(query, (0, 1)), key


def faded(state: Tensor, log_decay: Tensor) -> Tensor:
    """`state [B, Hkv, F, W + 2]` after a decay by `log_decay [B, Hkv]`, which its maximum takes in."""
    maximum = state[..., -1:] + log_decay[:, :, None, None].to(state.dtype)
    return torch.cat((state[..., :-1], maximum), dim=-1)
