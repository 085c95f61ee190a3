# SPDX-License-Identifier: Apache-2.0
"""The operator `window_attention`: exact softmax to a window and to sinks.

Keys are read where they stand, without padding.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, P places of keys, D head_dim, W head
dimension of the values, s sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_kernels.blocks import accumulation_dtype, needs_plain
from ..torch_kernels.causal import gradients_with_graph
from ..torch_kernels.window import plain_window
from .checks import check_results, check_shape, check_window
from .cpu import in_large_pages, run_attention, takes, takes_attention, without_dispatcher
from .operators import (
    Operator,
    gradients_in_torch,
    grouped,
    or_nothing,
    register,
    saving,
    window_arguments,
    with_rows,
)


WINDOW = (
    "Tensor query, Tensor key, Tensor value, Tensor visible, Tensor sink_key, Tensor sink_value, Tensor seen, "
    "Tensor? sink_query, float scaling, int window"
)


def window(given: Sequence[Any], scaling: float, log_decay: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
    """The operator `window_attention` where a graph or C takes these tensors; None leaves checked arguments to torch.

    Args:
        given: the tensors of `torch_kernels.window.plain_window`.

    Returns:
        What `plain_window` returns.

    Raises:
        ValueError: if the shapes, dtypes or devices do not match.
    """
    query, key, value, visible, *_ = given
    if (
        log_decay is None
        and not needs_plain(query)
        and (torch.compiler.is_compiling() or takes_attention(query, key, value, visible, 1))
    ):
        output, size, largest = OPERATORS.window_attention(*given, scaling, 0)
        return output.transpose(1, 2).unflatten(1, (key.shape[1], -1)), size, largest
    check_window(0, *given)
    check_shape("log_decay", log_decay, (key.shape[1],), like=query)
    return None


def window_both_ways(tensors: Sequence[Any], scaling: float, size: int) -> Tensor | None:
    """The operator `window_attention` for queries that see `size` - 1 places on either side, if C takes these tensors.

    Args:
        tensors: those of `torch_kernels.window.plain_window`, with one key for every query.

    Returns:
        The output `[B, N, H, W]` in the accumulation dtype, or None.

    Raises:
        ValueError: if the shapes, dtypes or devices do not match.
    """
    query, key, value, visible, *_ = tensors
    if needs_plain(query) or not takes_attention(query, key, value, visible, 1):
        return None
    has_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    attend = OPERATORS.window_attention
    attend = attend if has_gradient else without_dispatcher(attend, _window)
    return attend(*tensors, scaling, size)[0]


def _window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    seen: Tensor,
    sink_query: Tensor | None,
    scaling: float,
    window: int,
) -> tuple[Tensor, ...]:
    given = (query, key, value, visible, sink_key, sink_value, seen, sink_query)
    width = check_window(window, *given)
    if not _takes_window(query, key, value, visible, sink_key, sink_value, sink_query):
        return tuple(x.contiguous() for x in _window_in_torch(*given, scaling, window))
    output, size, largest = _new_window_outputs(*given)
    arguments = window_arguments(scaling, *given)
    results = (grouped(in_large_pages(output).transpose(1, 2), key.shape[1]), size, largest)
    run_attention("window_forward", (width, sink_key.shape[2], not window), (*arguments, None, None, *results))
    return output, size, largest


def _takes_window(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, *sinks: Tensor | None) -> bool:
    """Whether C computes; without queries it would leave the gradients of the keys unwritten."""
    return bool(query.shape[2]) and takes_attention(query, key, value, visible, 1) and takes(*sinks)


def _window_in_torch(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The operator in torch, with results in its layout."""
    query, key, value, visible, *others, window = given
    beside = max(0, window - 1)
    key, value = (F.pad(x, (0, 0, beside, beside)) for x in (key, value))
    output, size, largest = plain_window(query, key, value, F.pad(visible, (beside, beside)), *others)
    return output.flatten(1, 2).transpose(1, 2), size, largest


def _new_window_outputs(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, length, _), kv_heads = query.shape, key.shape[1]
    dtype = accumulation_dtype(query)
    output = query.new_empty(batch, length, heads, value.shape[-1], dtype=dtype)
    size = output.new_empty(batch, kv_heads, heads // kv_heads, length, 1)
    return output, size, torch.empty_like(size)


def _fake_window(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    check_window(given[9], *given[:8])
    return _new_window_outputs(*given)


def _window_backward(grad_output: Tensor | None, grad_size: Tensor | None, *given: Any) -> list[Tensor]:
    *inputs, scaling, window, output, size = given
    width = check_window(window, *inputs)
    query, key, value, visible, sink_key, sink_value, _, sink_query = inputs
    made = _new_window_outputs(query.to("meta"), key.to("meta"), value.to("meta"))[:2]
    check_results(query, (*made, *made), grad_output=grad_output, grad_log_size=grad_size, output=output, log_size=size)
    if not _takes_window(query, key, value, visible, sink_key, sink_value, sink_query):
        grads = gradients_in_torch(
            lambda *x: _window_in_torch(*x, scaling, window), inputs, (True,) * 8, (grad_output, grad_size, None)
        )
        return [grads[place].contiguous() for place in (0, 1, 2, 4, 5, 7)]
    kv_heads = key.shape[1]
    grads = [in_large_pages(x.new_empty(x.shape)) for x in (query, key, value, sink_key, sink_value)]
    grad_sink_query = None if sink_query is None else sink_query.new_zeros(sink_query.shape)
    grad_output = None if grad_output is None else grouped(with_rows(grad_output).transpose(1, 2), kv_heads)
    computed = (
        grouped(grads[0], kv_heads),
        *(grad.unsqueeze(2) for grad in grads[1:]),
        None if grad_sink_query is None else grouped(grad_sink_query, kv_heads),
    )
    arguments = window_arguments(scaling, *inputs)
    results = (grouped(output.transpose(1, 2), kv_heads), size, None)
    incoming = (grad_output, None if grad_size is None else grad_size.contiguous())
    run_attention(
        "window_backward",
        (width, sink_key.shape[2], not window),
        (*arguments, None, None, *results, *incoming, *computed),
    )
    return [*grads, or_nothing(grad_sink_query, query)]


def _fake_window_backward(grad_output: Tensor | None, grad_size: Tensor | None, *given: Any) -> list[Tensor]:
    query, key, value, _, sink_key, sink_value, _, sink_query = given[:8]
    check_window(given[9], *given[:8])
    grads = [x.new_empty(x.shape) for x in (query, key, value, sink_key, sink_value)]
    return [*grads, query.new_empty(0) if sink_query is None else sink_query.new_empty(sink_query.shape)]


def _differentiate_window(
    ctx: Any, grad_output: Tensor | None, grad_size: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    *inputs, output, size = ctx.saved_tensors
    if torch.is_grad_enabled():
        incoming = (grad_output, grad_size, None)
        return *gradients_with_graph(lambda *x: _window_in_torch(*x, *ctx.how), inputs, incoming), None, None
    found = OPERATORS.window_attention_backward(grad_output, grad_size, *inputs, *ctx.how, output, size)
    query, key, value, sink_key, sink_value, sink_query = found
    grads = (query, key, value, None, sink_key, sink_value, None, sink_query if inputs[7] is not None else None)
    return *grads, None, None


OPERATORS_OF_WINDOW = {
    "window_attention": Operator(
        f"({WINDOW}) -> (Tensor, Tensor, Tensor)",
        _window,
        _fake_window,
        _differentiate_window,
        saving(8, outputs=2, constants=[2]),
    ),
    "window_attention_backward": Operator(
        f"(Tensor? grad_output, Tensor? grad_log_size, {WINDOW}, Tensor output, Tensor log_size) -> Tensor[]",
        _window_backward,
        _fake_window_backward,
    ),
}
OPERATORS = register(OPERATORS_OF_WINDOW)
