# SPDX-License-Identifier: Apache-2.0
"""Softmax attention with few keys (compressed keys, landmarks, latents) or few queries (those that compress them)."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from .kernels import is_eager
from .kernels_checks import check_heads
from .kernels_checks import check_shape
from .kernels_cpu import in_large_pages
from .kernels_cpu import run_attention
from .kernels_operators import Operator
from .kernels_operators import refuse_without_library
from .kernels_operators import register
from .kernels_operators import takes_attention
from .kernels_operators import with_rows
from .kernels_operators import without_dispatcher
from .kernels_torch import PLAIN
from .kernels_torch import with_dtype


def slot_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """softmax(scaling q k^T) v, `[B, H, N, W]`; 0 for a row that sees no key. Hidden keys may hold any value.

    torch's fused kernel is made for many queries and many keys; if no gradient is required, C takes two thirds of its
    time.

    Args:
        query: `[B, H, N, D]`.
        key, value: `[B, Hkv, S, D]` and `[B, Hkv, S, W]`.
        visible: bool `[B or 1, Hkv or 1, S]`, or None for all keys.

    Raises:
        ValueError: if the shapes, dtypes or devices do not match.
    """
    check_slots(query, key, value, visible)
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if not has_gradient and is_eager(query) and takes_attention(query, key, value, None, 1):
        return without_dispatcher(OPERATORS.slot_attention, _slot_attention)(
            query, key, value, visible, scaling
        ).transpose(1, 2)
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


def check_slots(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None) -> None:
    """Check the arguments of the operator `slot_attention`.

    Raises:
        ValueError: for the first invalid argument.
    """
    batch, heads, kv_heads = check_heads(query, key, value)
    check_shape("query", query, (batch, heads, None, key.shape[3]), like=query)
    if visible is None:
        return
    check_shape("visible", visible, *((b, h, key.shape[2]) for b in (batch, 1) for h in (kv_heads, 1)), like=query)
    if visible.dtype != torch.bool:
        raise ValueError(f"`visible` is {visible.dtype}; it must be bool, True where a key takes part.")


def _slot_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """The operator behind `slot_attention`; its output is `[B, N, H, W]`."""
    check_slots(query, key, value, visible)
    refuse_without_library(query, key, value)
    batch, length, kv_heads = query.shape[0], query.shape[2], key.shape[1]
    output = in_large_pages(_fake_slot_attention(query, key, value, visible, scaling))
    if not key.shape[2]:
        return output.zero_()
    are_few_keys = key.shape[2] <= length
    # Scaled in float32: the softmax of logits near 100 would change if they were rounded to bfloat16.
    query, key = (query, key.float() * scaling) if are_few_keys else (query.float() * scaling, key)
    if visible is not None:
        visible = visible[:, :, None, :, None].expand(batch, kv_heads, -1, -1, -1)
    by_head = output.transpose(1, 2).unflatten(1, (kv_heads, -1))
    query = with_rows(query).unflatten(1, (kv_heads, -1))
    key, value = (with_rows(x).unsqueeze(2) for x in (key, value))
    run_attention("slots_forward", (0, PLAIN, are_few_keys), (query, key, value, visible, by_head))
    return output


def _fake_slot_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1])


OPERATORS_OF_SLOTS = {
    "slot_attention": Operator(
        "(Tensor query, Tensor key, Tensor value, Tensor? visible, float scaling) -> Tensor",
        _slot_attention,
        _fake_slot_attention,
    ),
}
OPERATORS = register(OPERATORS_OF_SLOTS, "slots")
