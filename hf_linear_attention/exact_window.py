"""Exact softmax attention to near keys and to sink tokens, as a part that can share a denominator with other keys.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, w width, s sinks, c queries in a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .attention_kernels import EMPTY_MAXIMUM
from .attention_kernels import accumulation_dtype
from .attention_kernels import with_ones
from .native_attention import native_window
from .native_attention import takes_native


# On a CPU: 1 MB in float32.
LOGITS_IN_CACHE = 1 << 18


# On a CPU exp of less than -87 is 60 times slower, and products with its result again. 9e-27 vanishes beside the 1 of
# the largest logit, in float64 too.
LOWEST_EXPONENT = -60.0


class NearKeys(NamedTuple):
    """Keys in a row with room before the first query: query t sees the places t .. t + width - 1."""

    key: torch.Tensor  # [B, Hkv, N + width - 1, D]
    value: torch.Tensor  # [B, Hkv, N + width - 1, D]
    visible: torch.Tensor  # [B, N + width - 1] bool
    centre: int  # the place t + centre is query t itself


class SinkKeys(NamedTuple):
    """Keys that every query sees, once they are there."""

    key: torch.Tensor  # [B, Hkv, s, D]
    value: torch.Tensor  # [B, Hkv, s, D]
    seen: torch.Tensor  # [B, N, s] bool
    distance: torch.Tensor  # [B, N, s] real tokens between sink and query


def exact_part(
    query: torch.Tensor,
    near: NearKeys,
    sinks: SinkKeys,
    scaling: float,
    log_decay: torch.Tensor | None = None,
    is_scale_constant: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax output `[B, Hkv, G, N, D]`, logarithm of its denominator and largest logit `[B, Hkv, G, N, 1]`.

    The cost is O(N (c + width + s)) with blocks of c <= width queries.

    Args:
        query: `[B, H, N, D]`.
        log_decay: `[Hkv]`, added to a logit for every token between query and key (ALiBi), or None.
        is_scale_constant: the largest logit cancels in what follows and needs no gradient.
    """
    is_known = log_decay is None and (is_scale_constant or not torch.is_grad_enabled())
    if is_known and takes_native(query, near.key, near.value, near.visible):
        return native_window(query, *near[:3], *sinks[:3], scaling=scaling)
    dtype, length = accumulation_dtype(query), query.shape[2]
    query = (query.to(dtype) * scaling).unflatten(1, (near.key.shape[1], -1))
    width = near.key.shape[2] - length + 1
    size = min(length, width)
    offset = torch.arange(width + size - 1, device=query.device) - torch.arange(size, device=query.device)[:, None]

    def blocks(x: torch.Tensor, dim: int) -> torch.Tensor:
        """Pads the N of `dim` to whole blocks and gives each its own axis."""
        return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, -length % size)).unflatten(dim, (-1, size))

    query = blocks(query, 3)
    key, value, visible = _windows(near, width, size, -length % size, dtype)
    visible = (visible[:, :, None] & (offset >= 0) & (offset < width))[:, None, None]
    seen, distance = (blocks(x, 1)[:, None, None] for x in (sinks.seen, sinks.distance))
    slope = None if log_decay is None else log_decay.to(dtype)[:, None, None, None, None]
    to_query = (offset - near.centre).abs()
    sink_key = sinks.key.to(dtype)[:, :, None, None].transpose(-1, -2)
    sink_values = with_ones(sinks.value, dtype)[:, :, None, None]
    results = []
    count = _blocks_at_a_time(query, key)
    parts = ((query, 3), (key, 2), (value, 2), (visible, 3), (seen, 3), (distance, 3))
    for query, key, value, visible, seen, distance in zip(*(x.split(count, dim=dim) for x, dim in parts)):
        logits, sink_logits = query @ key.unsqueeze(2).transpose(-1, -2), query @ sink_key
        if slope is not None:
            logits, sink_logits = logits + slope * to_query, sink_logits + slope * distance
        logits = logits.masked_fill_(~visible, EMPTY_MAXIMUM)
        sink_logits = sink_logits.masked_fill_(~seen, EMPTY_MAXIMUM)
        scale = _maximum((logits, sink_logits), is_scale_constant)
        shift = scale.clamp(min=EMPTY_MAXIMUM / 2)
        weights, sink_weights = ((x - shift).clamp(min=LOWEST_EXPONENT).exp_() for x in (logits, sink_logits))
        sums = weights @ with_ones(value, dtype).unsqueeze(2) + sink_weights @ sink_values
        numerator, denominator = sums.split_with_sizes((sums.shape[-1] - 1, 1), dim=-1)
        log_size = (shift + denominator.log()).masked_fill(scale == EMPTY_MAXIMUM, EMPTY_MAXIMUM)
        results.append((numerator / denominator, log_size, scale))
    joined = (torch.cat(part, dim=3) if len(part) > 1 else part[0] for part in zip(*results))
    output, log_size, scale = (x.flatten(3, 4)[:, :, :, :length] for x in joined)
    return output, log_size, scale


def _blocks_at_a_time(query: torch.Tensor, key: torch.Tensor) -> int:
    """On a CPU as many as have logits that stay in its cache, else all."""
    if query.device.type != "cpu" or torch.compiler.is_compiling():
        return query.shape[3]
    per_block = query.shape[0] * query.shape[1] * query.shape[2] * query.shape[4] * key.shape[3]
    return max(1, LOGITS_IN_CACHE // per_block)


def _maximum(logits: tuple[torch.Tensor, ...], is_constant: bool) -> torch.Tensor:
    """Over the last axes of all that have places `[..., 1]`."""
    largest = [(x.detach() if is_constant else x).amax(dim=-1, keepdim=True) for x in logits if x.shape[-1]]
    return torch.maximum(*largest) if len(largest) == 2 else largest[0]


def _windows(near: NearKeys, width: int, size: int, pad: int, dtype: torch.dtype):
    """Keys, values `[B, Hkv, blocks, width + c - 1, D]` and visibility `[B, blocks, width + c - 1]` of each block."""
    span = width + size - 1
    key, value = (
        F.pad(x.to(dtype), (0, 0, 0, pad)).unfold(2, span, size).transpose(-1, -2) for x in (near.key, near.value)
    )
    return key, value, F.pad(near.visible, (0, pad)).unfold(1, span, size)
