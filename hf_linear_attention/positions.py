# SPDX-License-Identifier: Apache-2.0
"""Decay of a key's weight with its distance: ALiBi's fixed slopes, and the option `decay` of causal mechanisms."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .mechanism import LayerShape
from .mechanism import Option


DECAY_OPTION = Option(
    str,
    "none",
    "learned: the weight of a key shrinks by a learned factor of its head with every token; decoders only",
    choices=("none", "learned"),
)
# softplus(-8) = 3.4e-4 a token: a converted model starts with a half-life of 2,000 tokens, nearly without.
INITIAL_RATE = -8.0


class AlibiDecay(nn.Module):
    """`log_decay [Hkv]` = -slopes (ALiBi, Press 2022): exp(q·k - slope (i - j)) is exp(q·k) decayed once per token."""

    log_decay: torch.Tensor

    def __init__(self, slopes: tuple[float, ...]):
        super().__init__()
        self.slopes = slopes
        self.register_buffer("log_decay", torch.empty(len(slopes)))

    def reset_parameters(self) -> None:
        init.copy_(self.log_decay, -torch.tensor(self.slopes))

    def forward(self) -> torch.Tensor:
        return self.log_decay


class LearnedDecay(nn.Module):
    """`log_decay [Hkv]` = -softplus(rate), below 0: `kernel_attention` multiplies weights by its exp per token.

    Starts from the slopes of a model with ALiBi, and from almost no decay in any other.
    """

    def __init__(self, num_key_value_heads: int, slopes: tuple[float, ...] | None = None):
        super().__init__()
        self.slopes = slopes
        self.rate = nn.Parameter(torch.empty(num_key_value_heads))

    def reset_parameters(self) -> None:
        if self.slopes is None:
            init.constant_(self.rate, INITIAL_RATE)
        else:
            init.copy_(self.rate, torch.tensor([math.log(math.expm1(slope)) for slope in self.slopes]))

    def forward(self) -> torch.Tensor:
        return -F.softplus(self.rate.float() if self.rate.dtype != torch.float64 else self.rate)


def decay_of(settings, shape: LayerShape) -> LearnedDecay | AlibiDecay | None:
    """The decay that the setting `decay` asks for, or else the one that the model itself has, or None."""
    if settings.get("decay") == "learned":
        return LearnedDecay(shape.num_key_value_heads, shape.alibi_slopes)
    return alibi_of(shape)


def alibi_of(shape: LayerShape) -> AlibiDecay | None:
    """The model's own ALiBi, or None."""
    return None if shape.alibi_slopes is None else AlibiDecay(shape.alibi_slopes)
