# SPDX-License-Identifier: Apache-2.0
"""Softmax attention with few keys (compressed keys, landmarks, latents) or few queries (those that compress them)."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from .blocks import with_dtype
from .implementations import implemented


def slot_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """softmax(scaling q k^T) v, `[B, H, N, W]`; 0 for a row that sees no key. Hidden keys may hold any value.

    Args:
        query: `[B, H, N, D]`.
        key, value: `[B, Hkv, S, D]` and `[B, Hkv, S, W]`.
        visible: bool `[B or 1, Hkv or 1, S]`, or None for all keys.

    Raises:
        ValueError: if the shapes, dtypes or devices do not match.
    """
    if (found := implemented("slot_attention", query, key, value, visible, scaling)) is not None:
        return found
    groups, dtype = query.shape[1] // key.shape[1], query.dtype
    wide = functools.reduce(torch.promote_types, (key.dtype, value.dtype), dtype)
    query, key, value = (with_dtype(x, wide) for x in (query, key, value))
    if visible is not None:
        key, value = (torch.where(visible.unsqueeze(3), x, 0.0) for x in (key, value))
        visible = visible | ~visible.any(dim=-1, keepdim=True)
        visible = (visible.repeat_interleave(groups, dim=1) if visible.shape[1] > 1 else visible).unsqueeze(2)
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if torch._C._functorch.maybe_current_level() is None:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
        return with_dtype(output, dtype)
    logits = (query * scaling) @ key.transpose(-1, -2)  # the fused kernel has no forward derivatives
    logits = logits if visible is None else logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    return with_dtype(logits.softmax(dim=-1) @ value, dtype)
