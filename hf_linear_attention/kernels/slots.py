# SPDX-License-Identifier: Apache-2.0
"""The operator of `torch_kernels.slots`: softmax attention with few keys or few queries, in C."""

from __future__ import annotations

import torch

from ..torch_kernels.attention import is_eager
from ..torch_kernels.blocks import PLAIN
from .checks import check_heads, check_shape
from .cpu import in_large_pages, run_attention
from .operators import Operator, refuse_without_library, register, takes_attention, with_rows, without_dispatcher


def slot_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None, scaling: float
) -> torch.Tensor | None:
    """The operator where C takes these tensors; None leaves checked arguments to torch.

    torch's fused kernel is made for many queries and many keys; if no gradient is required, C takes two thirds of its
    time.

    Raises:
        ValueError: if the shapes, dtypes or devices do not match.
    """
    check_slots(query, key, value, visible)
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if has_gradient or not is_eager(query) or not takes_attention(query, key, value, None, 1):
        return None
    step = without_dispatcher(OPERATORS.slot_attention, _slot_attention)
    return step(query, key, value, visible, scaling).transpose(1, 2)


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
OPERATORS = register(OPERATORS_OF_SLOTS)
