"""Exact softmax attention to near keys and to sink tokens, as sums that can share a denominator with other keys.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, w width, s sinks, c queries in a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from .attention_kernels import EMPTY_MAXIMUM
from .attention_kernels import accumulation_dtype
from .attention_kernels import with_ones


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


def exact_sums(
    query: torch.Tensor,
    near: NearKeys,
    sinks: SinkKeys,
    scaling: float,
    log_decay: torch.Tensor | None = None,
    is_scale_constant: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numerator and denominator `[B, Hkv, G, N, D + 1]` of softmax, and their log scale `[B, Hkv, G, N, 1]`.

    The cost is O(N (c + width + s)) with blocks of c <= width queries.

    Args:
        query: `[B, H, N, D]`.
        log_decay: `[Hkv]`, added to a logit for every token between query and key (ALiBi), or None.
        is_scale_constant: the log scale (the largest logit) cancels in what follows and needs no gradient.
    """
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
    seen = blocks(sinks.seen, 1)[:, None, None]
    logits = query @ key.unsqueeze(2).transpose(-1, -2)
    sink_logits = query @ sinks.key.to(dtype)[:, :, None, None].transpose(-1, -2)
    if log_decay is not None:
        slope = log_decay.to(dtype)[:, None, None, None, None]
        logits = logits + slope * (offset - near.centre).abs()
        sink_logits = sink_logits + slope * blocks(sinks.distance, 1)[:, None, None]
    scale = _masked_maximum(logits, visible)
    if sinks.key.shape[2]:
        scale = torch.maximum(scale, _masked_maximum(sink_logits, seen))
    if is_scale_constant:
        scale = scale.detach()
    sums = _masked_exp(logits, visible, scale) @ with_ones(value, dtype).unsqueeze(2)
    sums = sums + _masked_exp(sink_logits, seen, scale) @ with_ones(sinks.value, dtype)[:, :, None, None]
    return sums.flatten(3, 4)[:, :, :, :length], scale.flatten(3, 4)[:, :, :, :length]


def _windows(near: NearKeys, width: int, size: int, pad: int, dtype: torch.dtype):
    """Keys, values `[B, Hkv, blocks, width + c - 1, D]` and visibility `[B, blocks, width + c - 1]` of each block."""
    span = width + size - 1
    key, value = (
        F.pad(x.to(dtype), (0, 0, 0, pad)).unfold(2, span, size).transpose(-1, -2) for x in (near.key, near.value)
    )
    return key, value, F.pad(near.visible, (0, pad)).unfold(1, span, size)


def _masked_maximum(logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(~visible, EMPTY_MAXIMUM).amax(dim=-1, keepdim=True)


def _masked_exp(logits: torch.Tensor, visible: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (logits - scale).masked_fill(~visible, 0.0).exp() * visible
