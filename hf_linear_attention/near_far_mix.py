"""How `hybrid` joins exact sums over near keys with linear ones over far keys: the option `normalization`.

A part is a pair `(output [B, Hkv, G, N, D], log_size [B, Hkv, G, N, 1])`: the average over some keys and the logarithm
of its denominator, EMPTY_MAXIMUM where no key is seen. Averages join by their sizes and stay in the range of values.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .attention_kernels import EMPTY_MAXIMUM


Part = tuple[torch.Tensor, torch.Tensor]


class NearFarMix(nn.Module):
    """`forward(near, far, largest, half_query_norm)` -> output `[B, Hkv, G, N, D]`.

    `far` may have several parts; `largest` is the largest logit of the near keys and `half_query_norm` scaling
    |q|^2 / 2, both `[B, Hkv, G, N, 1]`.
    """

    # Whether the largest near logit cancels, so that it needs no gradient.
    is_scale_constant: ClassVar[bool] = True

    def __init__(self, num_heads: int):
        super().__init__()
        self.num_heads = num_heads

    def reset_parameters(self, feature_map: nn.Module) -> None:
        raise NotImplementedError

    def native_parameters(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What the C kernels need to join the parts of a token themselves; None where they do not know how."""
        return None

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

    def native_parameters(self):
        return self.far_log_scale.float(), self.query_norm_weight.float()

    def forward(self, near, far, largest, half_query_norm):
        log_scale, norm_weight = (self._per_query(p, near[0]) for p in (self.far_log_scale, self.query_norm_weight))
        exponent = log_scale - norm_weight * half_query_norm
        return join(near, *((output, size + exponent) for output, size in far))[0]


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

    def forward(self, near, far, largest, half_query_norm):
        output, size = join(*far)
        share = self._per_query(self.far_weight, output).sigmoid() * (size > EMPTY_MAXIMUM / 2)
        return torch.lerp(near[0], output, share)


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

    def forward(self, near, far, largest, half_query_norm):
        output, size = near
        weight = F.logsigmoid(self._per_query(self.window_weight, output))
        return join((output, size - largest.clamp(min=EMPTY_MAXIMUM / 2) + weight), *far)[0]


NORMALIZATIONS: dict[str, type[NearFarMix]] = {
    "joint": JointMix,
    "separate": SeparateMix,
    "window_maximum": WindowMaximumMix,
}


def join(*parts: Part) -> Part:
    """One part over the keys of all; without gradients it takes the memory of the first."""
    output, size = parts[0]
    lerp = torch.lerp if torch.is_grad_enabled() else torch.Tensor.lerp_
    for other, other_size in parts[1:]:
        output = lerp(output, other, (other_size - size).sigmoid())
        size = torch.logaddexp(size, other_size)
    return output, size


def log_size(denominator: torch.Tensor, log_scale: torch.Tensor) -> torch.Tensor:
    """log(denominator) + log_scale; where the denominator is 0 the scale means nothing."""
    tiny = torch.finfo(denominator.dtype).tiny
    return (denominator.clamp(min=tiny).log() + log_scale).masked_fill(denominator == 0, EMPTY_MAXIMUM)
