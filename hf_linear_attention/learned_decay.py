"""A learned forgetting rate per key/value head: the option `decay` of causal mechanisms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .attention_mechanism import Option


DECAY_OPTION = Option(
    str,
    "none",
    "learned: the weight of a key shrinks by a learned factor of its head with every token; decoders only",
    choices=("none", "learned"),
)
# softplus(-8) = 3.4e-4 a token: a converted model starts with a half-life of 2,000 tokens, nearly without.
INITIAL_RATE = -8.0


class LearnedDecay(nn.Module):
    """`log_decay [Hkv]` = -softplus(rate), below 0: `kernel_attention` multiplies weights by its exp per token."""

    def __init__(self, num_key_value_heads: int):
        super().__init__()
        self.rate = nn.Parameter(torch.empty(num_key_value_heads))

    def reset_parameters(self) -> None:
        init.constant_(self.rate, INITIAL_RATE)

    def forward(self) -> torch.Tensor:
        return -F.softplus(self.rate.float() if self.rate.dtype != torch.float64 else self.rate)


def decay_of(settings, num_key_value_heads: int) -> LearnedDecay | None:
    """The module that the setting `decay` asks for, or None."""
    return LearnedDecay(num_key_value_heads) if settings.get("decay") == "learned" else None
