# SPDX-License-Identifier: Apache-2.0
"""Exact softmax attention to near keys and to sink tokens in torch, and how `hybrid` joins it with far keys.

A part is a pair `(output [B, Hkv, G, N, W], log_size [B, Hkv, G, N, 1])`: the average over some keys and the logarithm
of its denominator, EMPTY_MAXIMUM where no key is seen. Averages join by their sizes and stay in the range of values.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, w width, s sinks, c queries in a block.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .kernels_torch import EMPTY_MAXIMUM
from .kernels_torch import accumulation_dtype
from .kernels_torch import joined
from .kernels_torch import with_dtype
from .kernels_torch import with_ones


Part = tuple[torch.Tensor, torch.Tensor]
# On a CPU: 1 MB in float32.
LOGITS_IN_CACHE = 1 << 18
# On a CPU exp of less than -87 is 60 times slower, and products with its result again. 9e-27 vanishes beside the 1 of
# the largest logit, in float64 too: below, weights are 0.
LOWEST_EXPONENT = -60.0


class NearKeys(NamedTuple):
    """Keys in a row with room before the first query: query t sees the places t .. t + width - 1."""

    key: torch.Tensor  # [B, Hkv, N + width - 1, D]
    value: torch.Tensor  # [B, Hkv, N + width - 1, D]
    visible: torch.Tensor  # [B, N + width - 1] bool
    centre: int  # the place t + centre is query t itself
    numbers: torch.Tensor | None = None  # [B, N + width - 1]: query t sees places of its own packed sequence alone


class SinkKeys(NamedTuple):
    """Keys that every query sees, once they are there; `[B, Hkv, N, s, D]` where every query has its own."""

    key: torch.Tensor  # [B, Hkv, s, D]
    value: torch.Tensor  # [B, Hkv, s, D]
    seen: torch.Tensor  # [B, N, s] bool
    distance: torch.Tensor | None  # [B, N, s] real tokens between sink and query, needed by a decay


def plain_window(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    sink_key: torch.Tensor,
    sink_value: torch.Tensor,
    seen: torch.Tensor,
    sink_query: torch.Tensor | None,
    scaling: float,
    *,
    log_decay: torch.Tensor | None = None,
    centre: int = 0,
    distance: torch.Tensor | None = None,
    numbers: torch.Tensor | None = None,
    is_scale_constant: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax output `[B, Hkv, G, N, W]`, logarithm of its denominator and largest logit `[B, Hkv, G, N, 1]`.

    The cost is O(N (c + width + s)) with blocks of c <= width queries.

    Args:
        query: `[B, H, N, D]`.
        key, value, visible: see `NearKeys`, and `SinkKeys` for `sink_key`, `sink_value`, `seen` and `distance`.
        sink_query: `[B, H, N, D]`, what sinks are compared with; the queries themselves if None.
        log_decay: `[Hkv]`, added to a logit for every token between query and key (ALiBi), or None. It needs `centre`
            and `distance`.
        numbers: see `NearKeys`; they need `centre`.
        is_scale_constant: the largest logit cancels in what follows and needs no gradient.
    """
    dtype, length = accumulation_dtype(query), query.shape[2]
    kv_heads, width = key.shape[1], key.shape[2] - length + 1
    if not query.shape[0] * length:
        size = query.to(dtype).sum(dim=-1, keepdim=True).unflatten(1, (kv_heads, -1))
        return size.expand(*size.shape[:4], value.shape[3]), size, size
    key, value = (x.masked_fill(~visible[:, None, :, None], 0.0) for x in (key, value))
    size = max(1, min(length, width))
    offset = torch.arange(width + size - 1, device=query.device) - torch.arange(size, device=query.device)[:, None]

    def blocks(x: torch.Tensor, dim: int) -> torch.Tensor:
        """Pads the N of `dim` to whole blocks and gives each its own axis."""
        return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, -length % size)).unflatten(dim, (-1, size))

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return blocks((x.to(dtype) * scaling).unflatten(1, (kv_heads, -1)), 3)

    query = scaled(query)
    to_sinks = query if sink_query is None else scaled(sink_query)
    key, value, visible = _windows(key, value, visible, width, size, -length % size, dtype)
    visible = visible[:, :, None] & (offset >= 0) & (offset < width)
    if numbers is not None:
        own = blocks(numbers[:, centre : centre + length], 1).unsqueeze(3)
        visible = visible & (F.pad(numbers, (0, -length % size)).unfold(1, width + size - 1, size).unsqueeze(2) == own)
    visible = visible[:, None, None]
    distance = seen if distance is None else distance
    seen, distance = (blocks(x, 1)[:, None, None] for x in (seen, distance))
    slope = None if log_decay is None else log_decay.to(dtype)[:, None, None, None, None]
    to_query = (offset - centre).abs()
    sink_key = sink_key.to(dtype)[:, :, None, None].transpose(-1, -2)
    sink_values = with_ones(sink_value, dtype)[:, :, None, None]
    results = []
    count = _blocks_at_a_time(query, key)
    parts = ((query, 3), (to_sinks, 3), (key, 2), (value, 2), (visible, 3), (seen, 3), (distance, 3))
    for query, to_sinks, key, value, visible, seen, distance in zip(*(x.split(count, dim=dim) for x, dim in parts)):
        logits, sink_logits = query @ key.unsqueeze(2).transpose(-1, -2), to_sinks @ sink_key
        if slope is not None:
            logits, sink_logits = logits + slope * to_query, sink_logits + slope * distance
        logits = logits.masked_fill_(~visible, EMPTY_MAXIMUM)
        sink_logits = sink_logits.masked_fill_(~seen, EMPTY_MAXIMUM)
        scale = _maximum((logits, sink_logits), is_scale_constant)
        shift = scale.clamp(min=EMPTY_MAXIMUM / 2)
        weights, sink_weights = (_weights(x - shift) for x in (logits, sink_logits))
        sums = weights @ with_ones(value, dtype).unsqueeze(2) + sink_weights @ sink_values
        numerator, denominator = sums.split_with_sizes((sums.shape[-1] - 1, 1), dim=-1)
        is_empty = scale == EMPTY_MAXIMUM  # then all weights are 0
        denominator = denominator.masked_fill(is_empty, 1.0)
        log_size = (shift + denominator.log()).masked_fill(is_empty, EMPTY_MAXIMUM)
        results.append((numerator / denominator, log_size, scale))
    output, log_size, scale = (joined(part).flatten(3, 4)[:, :, :, :length] for part in zip(*results))
    return output, log_size, scale


def packed_window(
    query: torch.Tensor,
    near: NearKeys,
    sinks: SinkKeys,
    scaling: float,
    log_decay: torch.Tensor | None,
    is_scale_constant: bool,
    sink_query: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`plain_window` within packed sequences: every query has sinks of its own, those of its sequence."""
    none = (x.new_empty(*x.shape[:2], 0, x.shape[-1]) for x in (sinks.key, sinks.value))
    options: dict[str, Any] = {"log_decay": log_decay, "centre": near.centre, "numbers": near.numbers}
    given: tuple[Any, ...] = (query, near.key, near.value, near.visible, *none, sinks.seen[..., :0], None, scaling)
    output, size, largest = plain_window(*given, **options, is_scale_constant=is_scale_constant)
    if not sinks.seen.shape[-1]:
        return output, size, largest
    to_sinks = query if sink_query is None else sink_query
    rows = (to_sinks.to(output.dtype) * scaling).unflatten(1, (near.key.shape[1], -1)).transpose(2, 3)
    logits = (rows @ sinks.key.to(output.dtype).transpose(-1, -2)).transpose(2, 3)  # [B, Hkv, G, N, s]
    if log_decay is not None and sinks.distance is not None:
        logits = logits + log_decay.to(output.dtype)[:, None, None, None] * sinks.distance[:, None, None]
    logits = logits.masked_fill(~sinks.seen[:, None, None], EMPTY_MAXIMUM)
    average = (logits.softmax(dim=-1).transpose(2, 3) @ sinks.value.to(output.dtype)).transpose(2, 3)
    sink_size = logits.logsumexp(dim=-1, keepdim=True)
    sink_size = sink_size.masked_fill(~sinks.seen.any(dim=-1)[:, None, None, :, None], EMPTY_MAXIMUM)
    largest = torch.maximum(largest, _maximum((logits,), is_scale_constant))
    return *join((output, size), (average, sink_size)), largest


def _weights(logits: torch.Tensor) -> torch.Tensor:
    """exp of numbers of at most 0, exactly 0 below `LOWEST_EXPONENT`."""
    weights = logits.clamp(min=LOWEST_EXPONENT).exp()
    return F.threshold(weights, 1.01 * math.exp(LOWEST_EXPONENT), 0.0)


def _blocks_at_a_time(query: torch.Tensor, key: torch.Tensor) -> int:
    """On a CPU as many as have logits that stay in its cache, else all."""
    if query.device.type != "cpu" or torch.compiler.is_compiling():
        return query.shape[3]
    per_block = query.shape[0] * query.shape[1] * query.shape[2] * query.shape[4] * key.shape[3]
    return max(1, LOGITS_IN_CACHE // max(1, per_block))


def _maximum(logits: tuple[torch.Tensor, ...], is_constant: bool) -> torch.Tensor:
    """Over the last axes of all that have places `[..., 1]`."""
    largest = [(x.detach() if is_constant else x).amax(dim=-1, keepdim=True) for x in logits if x.shape[-1]]
    return torch.maximum(*largest) if len(largest) == 2 else largest[0]


def _windows(key, value, visible, width: int, size: int, pad: int, dtype: torch.dtype):
    """Keys, values `[B, Hkv, blocks, width + c - 1, D]` and visibility `[B, blocks, width + c - 1]` of each block."""
    span = width + size - 1
    key, value = (F.pad(x.to(dtype), (0, 0, 0, pad)).unfold(2, span, size).transpose(-1, -2) for x in (key, value))
    return key, value, F.pad(visible, (0, pad)).unfold(1, span, size)


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

    def kernel_parameters(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What the C kernels need to join the parts of a token themselves; None where they do not know how."""
        return None

    def _per_query(self, parameter: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """`[H]` -> `[Hkv, G, 1, 1]`."""
        return with_dtype(parameter, like.dtype).view(like.shape[1], -1, 1, 1)


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

    def kernel_parameters(self):
        return with_dtype(self.far_log_scale, torch.float32), with_dtype(self.query_norm_weight, torch.float32)

    def forward(self, near, far, largest, half_query_norm):
        log_scale, norm_weight = (self._per_query(p, near[0]) for p in (self.far_log_scale, self.query_norm_weight))
        exponent = torch.addcmul(log_scale, norm_weight, half_query_norm, value=-1)
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
