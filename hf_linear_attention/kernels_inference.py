# SPDX-License-Identifier: Apache-2.0
"""Operators without gradients, for a CPU with the C kernels: one token after others, softmax with few keys, elu + 1.

`kernels_operators` registers them; their callers have asked `kernels_cpu.takes` before and compute in torch otherwise.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, S keys, D head_dim, F features, W head
dimension of the values, w places of a window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .kernels_checks import check_axes
from .kernels_checks import check_hybrid_step
from .kernels_checks import check_slots
from .kernels_checks import check_step
from .kernels_cpu import NATIVE_DTYPES
from .kernels_cpu import PLAIN
from .kernels_cpu import in_large_pages
from .kernels_cpu import run_attention
from .kernels_cpu import run_elu_plus_one
from .kernels_cpu import run_plain_step
from .kernels_cpu import run_step
from .kernels_cpu import takes
from .kernels_torch import with_dtype


FLOAT32 = (torch.float32,)
SCHEMAS = {
    "attention_step": (
        "(Tensor query, Tensor key, Tensor value, Tensor state, Tensor? log_decay, bool log_features) "
        "-> (Tensor, Tensor)"
    ),
    "hybrid_step": (
        "(Tensor query, Tensor key, Tensor value, Tensor? sink_query, Tensor? position, Tensor query_exponent, "
        "Tensor key_exponent, Tensor? log_decay, Tensor[] state, Tensor? log_scale, Tensor? norm_weight, "
        "int key_dim, float scaling) -> Tensor[]"
    ),
    "slot_attention": "(Tensor query, Tensor key, Tensor value, Tensor? visible, float scaling) -> Tensor",
    "elu_plus_one": "(Tensor x) -> Tensor",
}


def _refuse(*tensors: torch.Tensor | None, dtypes=NATIVE_DTYPES) -> None:
    if not takes(*tensors, dtypes=dtypes):
        raise NotImplementedError(
            "There is no C kernel for these tensors here; see `hf_linear_attention.kernel_backend()`, and call the "
            "functions of hf_linear_attention.kernels, which then compute in torch."
        )


def attention_step(query, key, value, state, log_decay, log_features):
    """See `kernels.attention_step`."""
    check_step(query, key, value, state, log_decay, log_features)
    _refuse(query, key, value)
    _refuse(state, dtypes=FLOAT32)
    query, key, value = (with_dtype(x, torch.float32) for x in (query, key, value))
    output, new_state = _fake_attention_step(query, key, value, state, log_decay, log_features)
    query, key, value, state = (x.contiguous() for x in (query, key, value, state))
    if not log_features:
        if log_decay is not None:
            raise NotImplementedError("A step with a decay of plain features is torch's.")
        run_plain_step(query, key, value, state, output, new_state)
        return output, new_state
    (batch, heads, _, features), kv_heads, width = query.shape, key.shape[1], value.shape[-1]
    size = query.new_empty(batch, heads)
    log_decay = None if log_decay is None else log_decay.float().contiguous()
    shape = (batch, kv_heads, heads // kv_heads, 0, 0, 0, 0, features, width, 4, 4, 4)
    given = (None, None, value, None, None, query, key, log_decay, state, *[None] * 9)
    run_step("log_step", shape, (*given, new_state, *[None] * 10, output, size))
    return output, new_state


def _fake_attention_step(query, key, value, state, log_decay, log_features):
    return state.new_empty(*query.shape[:3], value.shape[-1]), state.new_empty(state.shape)


def hybrid_step(
    query, key, value, sink_query, position, query_exponent, key_exponent, log_decay, state, log_scale, norm_weight,
    key_dim, scaling,
):  # fmt: skip
    """One real token of `hybrid` after others: the oldest place of the window goes to the far sums.

    `sink_query [B, H, 1, D]` is what sinks are compared with, the query itself if None. With `position [B, 1]` (int32,
    of the token) the state has an eighth tensor, the positions of the window `[B, w]`, which moves on with its keys.

    Returns:
        The tensors of the new state, then in float32 one tensor `[B H (2 W + 3)]`, which `step_parts` takes apart.
    """
    given = (query, key, value, sink_query, position, query_exponent, key_exponent, log_decay)
    check_hybrid_step(*given, state, log_scale, norm_weight, key_dim)
    _refuse(query, key, value, sink_query)
    (batch, heads), kv_heads = query.shape[:2], key.shape[1]
    if sink_query is not None:
        sink_query = sink_query.to(query.dtype)
    results = _fake_hybrid_step(*given, state)
    shape = (
        *(batch, kv_heads, heads // kv_heads, state[1].shape[2], state[4].shape[2]),
        *(key_dim, key.shape[3], key_exponent.shape[-1], value.shape[3]),
        *(x.element_size() for x in (query, key, value)),
    )
    no_positions = (None,) * (8 - len(state))
    numbers = (query, key, value, sink_query, *given[4:], *state, *no_positions, log_scale, norm_weight)
    dense = [x if x is None or x.is_contiguous() else x.contiguous() for x in numbers]
    rows, width = batch * heads, value.shape[3]
    offsets = [0, rows * width, rows * (width + 1), rows * (width + 2), rows * (2 * width + 2)]
    *new_state, parts = results
    run_step("hybrid_step", shape, (*dense, *new_state, *no_positions, parts), scaling, offsets)
    return results


def step_parts(parts: torch.Tensor, query: torch.Tensor, key: torch.Tensor, width: int) -> list[torch.Tensor]:
    """What `hybrid_step` computed of queries `[B, H, 1, D]` with keys `[B, Hkv, 1, D]`, each `[B, Hkv, G, 1, ...]`.

    The near part (W numbers; joined with the far one where `log_scale` and `norm_weight` were given), its log size and
    largest logit, the far part and its log size.
    """
    (batch, heads), kv_heads = query.shape[:2], key.shape[1]
    columns = (width, 1, 1, width, 1)
    found = parts.split_with_sizes([batch * heads * n for n in columns])
    return [x.view(batch, kv_heads, heads // kv_heads, 1, n) for x, n in zip(found, columns)]


def _fake_hybrid_step(
    query, key, value, sink_query, position, query_exponent, key_exponent, log_decay, state, *_
):  # fmt: skip
    parts = state[0].new_empty(query.shape[0] * query.shape[1] * (2 * value.shape[-1] + 3))
    return [*(torch.empty_like(x, memory_format=torch.contiguous_format) for x in state), parts]


def slot_attention(query, key, value, visible, scaling):
    """See `kernels_slots.slot_attention`; the output is `[B, N, H, W]`."""
    check_slots(query, key, value, visible)
    _refuse(query, key, value)
    batch, length, kv_heads = query.shape[0], query.shape[2], key.shape[1]
    output = in_large_pages(_fake_slot_attention(query, key, value, visible, scaling))
    if not key.shape[2]:
        return output.zero_()
    are_few_keys = key.shape[2] <= length
    # in float32: logits of a hundred that were rounded in bfloat16 would be another softmax
    query, key = (query, key.float() * scaling) if are_few_keys else (query.float() * scaling, key)
    if visible is not None:
        visible = visible[:, :, None, :, None].expand(batch, kv_heads, -1, -1, -1)
    by_head = output.transpose(1, 2).unflatten(1, (kv_heads, -1))
    query = with_rows(query).unflatten(1, (kv_heads, -1))
    key, value = (with_rows(x).unsqueeze(2) for x in (key, value))
    run_attention("slots_forward", (0, PLAIN, are_few_keys), (query, key, value, visible, by_head))
    return output


def _fake_slot_attention(query, key, value, visible, scaling):
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1])


def with_rows(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy whose rows are dense in memory, as the C kernels need them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def elu_plus_one(x):
    """elu(x) + 1 of a float32 tensor of four axes, in its memory order."""
    check_axes(x)
    _refuse(x, dtypes=FLOAT32)
    if not (x.is_contiguous() or x.transpose(1, -2).is_contiguous()):
        x = x.contiguous()
    output = torch.empty_like(x)
    run_elu_plus_one(x, output)
    return output


def _fake_elu_plus_one(x):
    check_axes(x)
    dense = x.is_contiguous() or x.transpose(1, -2).is_contiguous()
    return torch.empty_like(x) if dense else x.new_empty(x.shape)


IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention_step": (attention_step, _fake_attention_step),
    "hybrid_step": (hybrid_step, _fake_hybrid_step),
    "slot_attention": (slot_attention, _fake_slot_attention),
    "elu_plus_one": (elu_plus_one, _fake_elu_plus_one),
}
