# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: a state that erases what it holds at a key before it writes there.

A step of one token, and longer inputs, are operators of torch (see kernels.operators). C computes them if it supports
the tensors, and torch in plain operations otherwise (`torch_kernels.delta`, which has the mathematics).

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N tokens, F features, D head dimension of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_kernels.blocks import accumulation_dtype, needs_plain, with_dtype
from ..torch_kernels.causal import gradients_with_graph
from ..torch_kernels.delta import plain_delta
from .checks import (
    check_blocks,
    check_heads,
    check_mask,
    check_needed,
    check_results,
    check_rows,
    check_shape,
    check_state,
)
from .cpu import (
    in_large_pages,
    refuse_without_library,
    run_attention,
    run_short_step,
    step_states,
    takes_attention,
    takes_step,
    without_dispatcher,
)
from .fla import delta_on_gpu, takes_on_gpu
from .operators import Operator, gradients_in_torch, grouped, or_nothing, register, saving, with_rows


# The fewest columns of values that a thread computes alone, where there are fewer key/value heads than threads.
NARROWEST_PART = 32
# Places in the tensor list of C, csrc/linear_attention.h: what has columns of values, and gradients that sum over them.
OF_VALUES, SHARED = (2, 5, 6, 7, 8, 9, 12, 15), (10, 11, 13, 14)
DELTA = "Tensor query, Tensor key, Tensor value, Tensor log_decay, Tensor beta, Tensor? state, bool erases"


def delta_step(given: Sequence[Any], key_mask: Tensor | None, rows: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """The operator `gated_delta_step` or `gated_delta_step_` where C takes the arguments of `gated_delta`."""
    query, key, value, _, _, state, _ = given
    if state is None or key_mask is not None or query.shape[-2:-1] != (1,) or not takes_step(query, key, value, state):
        return None
    if rows is None:
        return without_dispatcher(OPERATORS.gated_delta_step, _delta_step)(*given)
    return without_dispatcher(OPERATORS.gated_delta_step_, _delta_step_)(*given, rows), state


def check_arguments(given: Sequence[Any], key_mask: Tensor | None, rows: Tensor | None) -> None:
    """Raise ValueError for the first invalid argument of `torch_kernels.delta.gated_delta`."""
    query, key, value, log_decay, beta, state, _ = given
    check_delta(query, key, value, log_decay, beta, state, rows)
    check_mask(key_mask, key, query)


def delta(given: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """The gated delta rule of real tokens, in a graph, by C or on CUDA by fla-core; None leaves it to torch."""
    query, key, value, *_ = given
    if needs_plain(value):
        return None
    if torch.compiler.is_compiling() or takes_attention(query, key, value, None, 1):
        output, state = OPERATORS.gated_delta(*given)
        return output.transpose(1, 2), state
    return delta_on_gpu(*given[:6]) if takes_on_gpu(*given) else None


def _in_torch(*given: Any) -> tuple[Tensor, Tensor]:
    """The operator `gated_delta` without C: on CUDA by fla-core, or in plain operations."""
    return _dense(delta_on_gpu(*given[:6]) if takes_on_gpu(*given) else plain_delta(*given))


def check_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    rows: Tensor | None = None,
) -> None:
    """Raise ValueError for the first invalid tensor of `gated_delta`, except the mask."""
    batch, heads, kv_heads = check_heads(query, key, value)
    per_token, (features, width) = (batch, kv_heads, query.shape[2]), (key.shape[3], value.shape[3])
    check_shape("query", query, (batch, heads, key.shape[2], features), like=query)
    check_shape("log_decay", log_decay, per_token, (*per_token, features), like=query)
    check_shape("beta", beta, per_token, like=query)
    for name, tensor in (("log_decay", log_decay), ("beta", beta)):
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` is {tensor.dtype}; it must be a floating-point tensor.")
    if state is not None:
        check_state("state", state, (check_rows(rows, state, query), kv_heads, features, width), query, value)


def _delta(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, erases: bool
) -> tuple[Tensor, Tensor]:
    """The operator behind `gated_delta`; its output is `[B, N, H, D]`, as models read it."""
    check_delta(query, key, value, log_decay, beta, state)
    if not takes_attention(query, key, value, None, 1):
        return _in_torch(query, key, value, log_decay, beta, state, erases)
    output, new_state = _fake_delta(query, key, value, log_decay, beta, state, erases)
    arguments = _arguments(query, key, value, log_decay, beta, state)
    results = (grouped(in_large_pages(output).transpose(1, 2), key.shape[1]), new_state.unsqueeze(2))
    function = (arguments[3].shape[-1], erases, True)
    run_attention("delta_forward", function, *_parts((*arguments, *results), query, key, value))
    return output, new_state


def _dense(results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The results in the layout of the operator."""
    output, state = results
    return output.transpose(1, 2).contiguous(), state.contiguous()


def _fake_delta(*given: Any) -> tuple[Tensor, Tensor]:
    check_delta(*given[:6])
    return _new_results(*given[:3])


def _new_results(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    (batch, heads, length, features), kv_heads, width = query.shape, key.shape[1], value.shape[3]
    output = query.new_empty(batch, length, heads, width, dtype=accumulation_dtype(value))
    return output, output.new_empty(batch, kv_heads, features, width)


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> list[Any]:
    """The arguments of the C kernel, with five axes each."""
    log_decay, beta = (with_dtype(x, torch.float32) for x in (log_decay, beta))
    log_decay = log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(3)
    others: Any = (key, value, log_decay, beta.unsqueeze(3), state)
    return [
        grouped(with_rows(query), key.shape[1]),
        *(None if x is None else with_rows(x).unsqueeze(2) for x in others),
    ]


def _parts(tensors: Sequence[Any], query: Tensor, key: Tensor, value: Tensor) -> list[list[Any]]:
    """The tensors, or views of groups of columns of the values if there are fewer key/value heads than threads.

    Each part computes its columns of the state alone; what decays and keys are to each other is computed in all.
    """
    width, pairs = value.shape[3], key.shape[0] * key.shape[1]
    count = max(1, min(torch.get_num_threads() // max(1, pairs), width // NARROWEST_PART))
    size, parts = -(-width // count), []
    for start in range(0, width, size):
        part = list(tensors)
        for place in OF_VALUES:
            if place < len(part) and part[place] is not None and count > 1:
                part[place] = part[place][..., start : start + size]
        parts.append(part)
    return parts


def _delta_backward(grad_output: Tensor | None, grad_state: Tensor | None, *given: Any) -> list[Tensor]:
    *inputs, erases, needed = given
    query, key, value, log_decay, beta, state = inputs
    check_delta(query, key, value, log_decay, beta, state)
    made = _new_results(query.to("meta"), key.to("meta"), value.to("meta"))
    check_results(query, made, grad_output=grad_output, grad_state=grad_state)
    check_needed(needed, 6)
    if not takes_attention(query, key, value, None, 1):
        wanted = (True,) * 5 + (needed[5],)  # as C makes them
        found = gradients_in_torch(lambda *x: _in_torch(*x, erases), inputs, wanted, (grad_output, grad_state))
        return [grad.contiguous() for grad in found]
    grads = [in_large_pages(x) for x in _fake_delta_backward(grad_output, grad_state, *given)]
    in_float32 = [with_dtype(x, torch.float32) for x in grads[3:5]]  # C writes decays and beta so
    incoming = (
        None if grad_output is None else grouped(with_rows(grad_output).transpose(1, 2), key.shape[1]),
        None if grad_state is None else with_rows(grad_state).unsqueeze(2),
    )
    results: Any = (*grads[:3], *in_float32, grads[5] if grads[5].numel() else None)
    computed = _arguments(*results)
    arguments = _arguments(query, key, value, log_decay, beta, state)
    parts = _parts((*arguments, None, None, *incoming, *computed), query, key, value)
    if len(parts) > 1:
        for part in parts:
            for place in SHARED:
                part[place] = torch.empty(part[place].shape, dtype=torch.float32, device="cpu")
    run_attention("delta_backward", (arguments[3].shape[-1], erases, True), *parts)
    if len(parts) > 1:
        for place in SHARED:
            computed[place - SHARED[0]].copy_(sum(part[place] for part in parts))
    return [*grads[:3], *(with_dtype(x, y.dtype) for x, y in zip(in_float32, (log_decay, beta))), grads[5]]


def _fake_delta_backward(grad_output: Tensor | None, grad_state: Tensor | None, *given: Any) -> list[Tensor]:
    *inputs, _, needed = given
    check_delta(*inputs)
    state = inputs[5] if needed[5] else None
    return [
        *(x.new_empty(x.shape) for x in inputs[:5]),
        or_nothing(None if state is None else state.new_empty(state.shape), inputs[0]),
    ]


def _differentiate_delta(ctx: Any, grad_output: Tensor | None, grad_state: Tensor | None) -> tuple[Tensor | None, ...]:
    inputs, needed = ctx.saved_tensors, [bool(need) for need in ctx.needs_input_grad[:6]]
    if torch.is_grad_enabled():
        incoming = (grad_output, grad_state)
        return *gradients_with_graph(lambda *x: _dense(plain_delta(*x, *ctx.how)), inputs, incoming), None
    grads = OPERATORS.gated_delta_backward(grad_output, grad_state, *inputs, *ctx.how, needed)
    return *(grad if need and x is not None else None for grad, need, x in zip(grads, needed, inputs)), None


def _delta_step(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, erases: bool,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operator behind `gated_delta` for one token, without gradients; its output is `[B, H, 1, D]`."""
    check_delta(query, key, value, log_decay, beta, state, rows)
    if query.shape[2] != 1:
        raise ValueError(f"Got {query.shape[2]} tokens; a step has one.")
    refuse_without_library(query, key, value)
    tokens = [with_dtype(x, torch.float32).contiguous() for x in (query, key, value, log_decay, beta)]
    output = _fake_delta_step_(*tokens, state)
    old, new = step_states(state, rows)
    (batch, kv_heads, _, features), count = key.shape, 1 if log_decay.ndim == 3 else key.shape[3]
    groups, width = query.shape[1] // kv_heads, value.shape[3]
    shape = (batch, state.shape[0], kv_heads, groups, 0, 0, count, features, width, erases, 4, 4, 4)
    run_short_step("delta_step", shape, (*tokens, output, None, old, new), count, rows)
    return output, new


def _delta_step_(*given: Any) -> Tensor:
    """`_delta_step` in the blocks `rows` of the state."""
    check_blocks(given[5])
    return _delta_step(*given)[0]


def _fake_delta_step(*given: Any) -> tuple[Tensor, Tensor]:
    return _fake_delta_step_(*given), given[5].new_empty(given[5].shape)


def _fake_delta_step_(*given: Any) -> Tensor:
    query, _, value, _, _, state, *_ = given
    return state.new_empty(*query.shape[:3], value.shape[3])


OPERATORS_OF_DELTA = {
    "gated_delta": Operator(f"({DELTA}) -> (Tensor, Tensor)", _delta, _fake_delta, _differentiate_delta, saving(6)),
    "gated_delta_backward": Operator(
        f"(Tensor? grad_output, Tensor? grad_state, {DELTA}, bool[] needed) -> Tensor[]",
        _delta_backward,
        _fake_delta_backward,
    ),
    "gated_delta_step": Operator(
        f"({DELTA.replace('Tensor? state', 'Tensor state')}) -> (Tensor, Tensor)", _delta_step, _fake_delta_step
    ),
    "gated_delta_step_": Operator(
        f"({DELTA.replace('Tensor? state', 'Tensor(a!) state')}, Tensor rows) -> Tensor",
        _delta_step_,
        _fake_delta_step_,
    ),
}
OPERATORS = register(OPERATORS_OF_DELTA)
