"""How `hybrid` joins exact sums over near keys with linear ones over far keys: the option `normalization`.

Sums are pairs `(sums [B, Hkv, G, N, D + 1], log_scale [B, Hkv, G, N, 1])` as `kernel_sums` and `exact_sums` return
them: numerator and denominator, exp(log_scale) times larger than they stand there.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import nn
from transformers import initialization as init

from .attention_kernels import EMPTY_MAXIMUM
from .attention_kernels import normalize


Sums = tuple[torch.Tensor, torch.Tensor]


class NearFarMix(nn.Module):
    """`forward(near, far, half_query_norm)` -> output `[B, Hkv, G, N, D]`.

    `far` may have several parts; `half_query_norm` is scaling |q|^2 / 2, `[B, Hkv, G, N, 1]`.
    """

    # Whether the scale of the near sums cancels, so that it needs no gradient.
    is_scale_constant: ClassVar[bool] = True

    def __init__(self, num_heads: int):
        super().__init__()
        self.num_heads = num_heads

    def reset_parameters(self, feature_map: nn.Module) -> None:
        raise NotImplementedError

    def _per_query(self, parameter: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """`[H]` -> `[Hkv, G, 1, 1]`."""
        return parameter.to(like.dtype).unflatten(0, (like.shape[1], -1))[:, :, None, None]


class JointMix(NearFarMix):
    """One denominator: far keys weigh exp(b - a scaling |q|^2 / 2) phi(q)·phi(k), near ones exp(scaling q·k).

    b and a are learned per head. Both share one log-sum-exp, so the far part need not learn the softmax normaliser.
    """

    def __init__(self, num_heads: int):
        super().__init__(num_heads)
        self.far_log_scale = nn.Parameter(torch.empty(num_heads))
        self.query_norm_weight = nn.Parameter(torch.empty(num_heads))

    def reset_parameters(self, feature_map):
        # With the norm terms of the softmax kernel's random features on both sides, and the mean over F features, the
        # expected weight of a far key starts at most at exp(scaling q·k): the difference is (c^2 - 1) |q + k|^2 / 2 in
        # the exponent, with c the initial scale of W.
        init.constant_(self.far_log_scale, -math.log(feature_map.num_features))
        init.ones_(self.query_norm_weight)
        if isinstance(norm_weight := getattr(feature_map, "key_norm_weight", None), torch.Tensor):
            init.ones_(norm_weight)

    def forward(self, near, far, half_query_norm):
        log_scale, norm_weight = (self._per_query(p, near[0]) for p in (self.far_log_scale, self.query_norm_weight))
        exponent = log_scale - norm_weight * half_query_norm
        # Its detached value goes into the scale, so that exp sees numbers near 0 alone; its gradient stays.
        gradient = (exponent - exponent.detach()).exp()
        return normalize(add_scaled(near, *((sums * gradient, scale + exponent.detach()) for sums, scale in far)))


class SeparateMix(NearFarMix):
    """Two denominators: (1 - m) near attention + m far attention, m = sigmoid of a learned number per head.

    The form of published hybrids (Infini-attention 2024, equation 10), for comparison. A query with no far key yet
    takes the near part alone. Starts at m = 0.1.
    """

    def __init__(self, num_heads: int):
        super().__init__(num_heads)
        self.far_weight = nn.Parameter(torch.empty(num_heads))

    def reset_parameters(self, feature_map):
        init.constant_(self.far_weight, math.log(0.1 / 0.9))

    def forward(self, near, far, half_query_norm):
        sums = add_scaled(*far)
        share = self._per_query(self.far_weight, sums).sigmoid() * (sums[..., -1:] > 0)
        return torch.lerp(normalize(add_scaled(near)), normalize(sums), share)


class WindowMaximumMix(NearFarMix):
    """LoLCATs 2024, equation 7: one denominator over g exp(scaling q·k - c) near and phi(q)·phi(k) far, for comparison.

    c is the maximum of the near logits alone, so the weight of the far part depends on it. g = sigmoid of a learned
    number per head, 0.1 at the start as in their code.
    """

    is_scale_constant = False

    def __init__(self, num_heads: int):
        super().__init__(num_heads)
        self.window_weight = nn.Parameter(torch.empty(num_heads))

    def reset_parameters(self, feature_map):
        init.constant_(self.window_weight, math.log(0.1 / 0.9))

    def forward(self, near, far, half_query_norm):
        sums, scale = near
        near = (sums * self._per_query(self.window_weight, sums).sigmoid(), torch.zeros_like(scale))
        return normalize(add_scaled(near, *far))


NORMALIZATIONS: dict[str, type[NearFarMix]] = {
    "joint": JointMix,
    "separate": SeparateMix,
    "window_maximum": WindowMaximumMix,
}


def add_scaled(*parts: Sums) -> torch.Tensor:
    """The sum of sums exp(log_scale), divided by what makes the largest denominator 1.

    By the denominators and not by the scales: the scale of a query that sees no far key yet means nothing.
    """
    sizes = [
        torch.where(sums[..., -1:] > 0, scale + sums.detach()[..., -1:].log(), EMPTY_MAXIMUM) for sums, scale in parts
    ]
    largest = sizes[0]
    for size in sizes[1:]:
        largest = torch.maximum(largest, size)
    terms = [
        sums * torch.where(size > EMPTY_MAXIMUM, scale - largest, 0.0).exp()
        for (sums, scale), size in zip(parts, sizes)
    ]
    return sum(terms[1:], start=terms[0])
