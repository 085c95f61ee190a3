# SPDX-License-Identifier: Apache-2.0
"""The operators of `hybrid`: exact softmax over a window and sinks, with gradients, and one whole decoding step.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, D head_dim, F features, W head dimension of
the values, w tokens of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..features.maps import half_squared_norm
from ..mechanisms.base import MechanismInputs, State
from ..mechanisms.hybrid import HybridAttention
from ..mechanisms.window import WindowState
from ..torch_kernels.attention import needs_plain
from ..torch_kernels.blocks import EXP, HEDGEHOG, accumulation_dtype, with_dtype
from ..torch_kernels.causal import gradients_with_graph
from ..torch_kernels.window import plain_window
from .checks import check_heads, check_results, check_shape
from .cpu import in_large_pages, run_attention, run_step, takes
from .operators import (
    Operator,
    Tensors,
    autograd_in_operator,
    gradients_of,
    grouped,
    or_nothing,
    refuse_without_library,
    register,
    takes_attention,
    takes_step,
    with_rows,
    without_dispatcher,
)


WINDOW = (
    "Tensor query, Tensor key, Tensor value, Tensor visible, Tensor sink_key, Tensor sink_value, Tensor seen, "
    "Tensor? sink_query, float scaling"
)

STEP = (
    "Tensor query, Tensor key, Tensor value, Tensor? sink_query, Tensor? position, Tensor? far_query, Tensor? far_key, "
    "Tensor key_weight, Tensor? key_bias, Tensor? key_norm, Tensor query_weight, Tensor? log_decay, {} state, "
    "Tensor? log_scale, Tensor? norm_weight, int function, float scaling"
)
# The place of the state among these arguments.
STEP_STATE = 12


def window(
    given: Sequence[Any], scaling: float, log_decay: Tensor | None, is_scale_constant: bool
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The operator `window_attention` where a graph or C takes these tensors; None leaves checked arguments to torch.

    Args:
        given: the tensors of `torch_kernels.window.plain_window`.

    Returns:
        What `plain_window` returns.

    Raises:
        ValueError: if the shapes, dtypes or devices do not match.
    """
    query, key, value, visible, *_ = given
    is_known = log_decay is None and (is_scale_constant or not torch.is_grad_enabled())
    if (
        is_known
        and not needs_plain(query)
        and (torch.compiler.is_compiling() or takes_attention(query, key, value, visible, 1))
    ):
        output, size, largest = OPERATORS.window_attention(*given, scaling)
        return output.transpose(1, 2).unflatten(1, (key.shape[1], -1)), size, largest
    check_window(*given)
    check_shape("log_decay", log_decay, (key.shape[1],), like=query)
    return None


def hybrid_step(mechanism: HybridAttention, inputs: MechanismInputs, old: WindowState) -> tuple[Tensor, State] | None:
    """One token of `hybrid` where a graph or C takes these tensors, without gradients."""
    query, key, value, _, scaling, _, positions, *_ = inputs
    if not takes_step(query, key, value, old.key, old.value, in_graphs=True):
        return None
    state = old.stored
    # Under autocast, rotary positions make queries and keys float32, whereas values remain bfloat16.
    key, value = with_dtype(key, old.key.dtype), with_dtype(value, old.value.dtype)
    far_rows = (None, None) if mechanism.shift is None else mechanism.far_rows(query, old, positions)
    joint, kernel_map = mechanism.mix.kernel_parameters(), mechanism.feature_map.unscaled_map()
    log_decay = None if mechanism.decay is None else mechanism.decay()
    given = (
        *(query, key, value, mechanism.sink_query(inputs), None if mechanism.shift is None else positions),
        *(*far_rows, *kernel_map.key, kernel_map.query.weight, log_decay, list(state)),
        *(*(joint or (None, None)), kernel_map.function, scaling),
    )
    if inputs.in_place:
        parts = without_dispatcher(OPERATORS.hybrid_step_, _hybrid_step_)(*given)
    else:
        *new, parts = without_dispatcher(OPERATORS.hybrid_step, _hybrid_step)(*given)
        state = tuple(new)
    (batch, heads), width = query.shape[:2], value.shape[-1]
    if joint is not None:
        near = parts[: batch * heads * width]
    else:
        near, near_size, largest, far, far_size = step_parts(parts, query, key, width)
        norm = half_squared_norm(query, scaling).view(largest.shape)
        near = mechanism.mix((near, near_size), [(far, far_size)], largest, norm)
    return with_dtype(near.view(batch, 1, heads, width), query.dtype), state


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
) -> tuple[Tensor, ...]:
    given = (query, key, value, visible, sink_key, sink_value, seen, sink_query)
    width = check_window(*given)
    if not _takes_window(query, key, value, visible, sink_key, sink_value, sink_query):
        return tuple(x.contiguous() for x in _window_laid_out(*plain_window(*given, scaling)))
    output, size, largest = _new_window_outputs(*given)
    arguments = _window_arguments(scaling, *given)
    results = (grouped(in_large_pages(output).transpose(1, 2), key.shape[1]), size, largest)
    run_attention("window_forward", (width, sink_key.shape[2], True), (*arguments, *results))
    return output, size, largest


def _takes_window(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, *sinks: Tensor | None) -> bool:
    """Whether C computes; without queries it would leave the gradients of the keys unwritten."""
    return bool(query.shape[2]) and takes_attention(query, key, value, visible, 1) and takes(*sinks)


def _window_laid_out(output: Tensor, size: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The results in the layout of the operator."""
    return output.flatten(1, 2).transpose(1, 2), size, largest


def _new_window_outputs(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, length, _), kv_heads = query.shape, key.shape[1]
    dtype = accumulation_dtype(query)
    output = query.new_empty(batch, length, heads, value.shape[-1], dtype=dtype)
    size, largest = (output.new_empty(batch, kv_heads, heads // kv_heads, length, 1) for _ in range(2))
    return output, size, largest


def _fake_window(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    check_window(*given[:8])
    return _new_window_outputs(*given)


def _window_backward(grad_output: Tensor | None, grad_size: Tensor | None, *given: Any) -> list[Tensor]:
    *inputs, scaling, output, size = given
    width = check_window(*inputs)
    query, key, value, visible, sink_key, sink_value, _, sink_query = inputs
    check_window_results(query, key, value, grad_output, grad_size, output, size)
    if not _takes_window(query, key, value, visible, sink_key, sink_value, sink_query):
        return _window_gradients_in_torch((grad_output, grad_size), inputs, scaling)
    kv_heads = key.shape[1]
    grads = [in_large_pages(x.new_empty(x.shape)) for x in (query, key, value, sink_key, sink_value)]
    grad_sink_query = None if sink_query is None else sink_query.new_zeros(sink_query.shape)
    grad_output = None if grad_output is None else grouped(with_rows(grad_output).transpose(1, 2), kv_heads)
    made = (
        grouped(grads[0], kv_heads),
        *(grad.unsqueeze(2) for grad in grads[1:]),
        None if grad_sink_query is None else grouped(grad_sink_query, kv_heads),
    )
    arguments = _window_arguments(scaling, *inputs)
    results = (grouped(output.transpose(1, 2), kv_heads), size, None)
    incoming = (grad_output, None if grad_size is None else grad_size.contiguous())
    run_attention("window_backward", (width, sink_key.shape[2], True), (*arguments, *results, *incoming, *made))
    return [*grads, or_nothing(grad_sink_query, query)]


def _fake_window_backward(grad_output: Tensor | None, grad_size: Tensor | None, *given: Any) -> list[Tensor]:
    query, key, value, _, sink_key, sink_value, _, sink_query = given[:8]
    check_window(*given[:8])
    grads = [x.new_empty(x.shape) for x in (query, key, value, sink_key, sink_value)]
    return [*grads, query.new_empty(0) if sink_query is None else sink_query.new_empty(sink_query.shape)]


def _window_gradients_in_torch(incoming: Tensors, inputs: Sequence[Any], scaling: float) -> list[Tensor]:
    leaves: Any = [x.detach().requires_grad_() if x is not None and x.is_floating_point() else x for x in inputs]
    with autograd_in_operator():
        outputs = _window_laid_out(*plain_window(*(*leaves, scaling)))
    grads = gradients_of(outputs, (*incoming, None), leaves)
    return [grad.contiguous() for grad, x in zip(grads, leaves) if x is None or x.requires_grad]


def _save_window(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    ctx.scaling = inputs[8]
    ctx.save_for_backward(*inputs[:8], output[0], output[1])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])


def _differentiate_window(
    ctx: Any, grad_output: Tensor | None, grad_size: Tensor | None, _: Any
) -> tuple[Tensor | None, ...]:
    *inputs, output, size = ctx.saved_tensors
    if torch.is_grad_enabled():

        def plain(*leaves: Any) -> tuple[Tensor, Tensor, Tensor]:
            return _window_laid_out(*plain_window(*(*leaves, ctx.scaling)))

        return *gradients_with_graph(plain, inputs, (grad_output, grad_size, None)), None
    found = OPERATORS.window_attention_backward(grad_output, grad_size, *inputs, ctx.scaling, output, size)
    query, key, value, sink_key, sink_value, sink_query = found
    grads = (query, key, value, None, sink_key, sink_value, None, sink_query if inputs[7] is not None else None)
    return *grads, None


def _window_arguments(
    scaling: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    seen: Tensor,
    sink_query: Tensor | None,
) -> list[Tensor | None]:
    """The arguments of the C kernel, with five axes each."""
    kv_heads = key.shape[1]
    scale = query.new_full((1,) * 5, scaling, dtype=torch.float32)
    numbers = (visible[:, None, None, :, None], seen[:, None, None], scale)
    visible, seen, scale = (with_rows(x).expand(query.shape[0], kv_heads, -1, -1, -1) for x in numbers)
    key, value, sink_key, sink_value = (with_rows(x).unsqueeze(2) for x in (key, value, sink_key, sink_value))
    sink_query = None if sink_query is None else grouped(with_rows(sink_query), kv_heads)
    return [
        grouped(with_rows(query), kv_heads),
        key,
        value,
        visible,
        sink_key,
        sink_value,
        seen,
        sink_query,
        scale,
        None,
        None,
        None,
    ]


def _hybrid_step(*given: Any) -> list[Tensor]:
    """One new real token of `hybrid`; the oldest token of the window moves to the far sums.

    Sinks are compared with `sink_query [B, H, 1, D]`, and the feature map sees `far_query [B, H, 1, D]` and `far_key
    [B, Hkv, 1, D]` (float32); where these are None, the query itself and the key that leaves the window. The map
    consists of `function` (`EXP` or `HEDGEHOG`) and the tensors of `KernelMap`, one matrix per head, for inputs scaled
    by sqrt(scaling). If `position [B, 1]` (int32, of the token) is given, the state has an eighth tensor, the positions
    `[B, w]` of the window.

    Returns:
        The tensors of the new state, then one float32 tensor `[B H (2 W + 3)]`, which `step_parts` splits.
    """
    check_hybrid_step(*given)
    results = _fake_hybrid_step(*given)
    _run_hybrid_step(given, [x.contiguous() for x in given[STEP_STATE]], results)
    return results


def _hybrid_step_(*given: Any) -> Tensor:
    """`_hybrid_step` in place, for a dense state."""
    check_hybrid_step(*given)
    state = given[STEP_STATE]
    for x in state:
        if not x.is_contiguous():
            raise ValueError(f"`state` has a tensor with strides {tuple(x.stride())}; it must be dense.")
    parts = _fake_hybrid_step_(*given)
    _run_hybrid_step(given, state, [*state, parts])
    return parts


def _run_hybrid_step(given: Sequence[Any], state: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    query, key, value, sink_query, *rest = given[:STEP_STATE]
    *joint, function, scaling = given[STEP_STATE + 1 :]
    refuse_without_library(query, key, value, sink_query)
    (batch, heads), kv_heads = query.shape[:2], key.shape[1]
    if sink_query is not None:
        sink_query = sink_query.to(query.dtype)
    shape = (
        *(batch, kv_heads, heads // kv_heads, state[1].shape[2], state[4].shape[2]),
        *(key.shape[3], state[0].shape[2], value.shape[3], function),
        *(x.element_size() for x in (query, key, value)),
    )
    no_positions = (None,) * (8 - len(state))
    numbers = (query, key, value, sink_query, *rest, *state, *no_positions, *joint)
    dense = [x if x is None or x.is_contiguous() else x.contiguous() for x in numbers]
    rows, width = batch * heads, value.shape[3]
    offsets = [0, rows * width, rows * (width + 1), rows * (width + 2), rows * (2 * width + 2)]
    *new_state, parts = results
    run_step("hybrid_step", shape, (*dense, *new_state, *no_positions, parts), scaling, offsets)


def step_parts(parts: Tensor, query: Tensor, key: Tensor, width: int) -> list[Tensor]:
    """Split the last result of `hybrid_step` for queries `[B, H, 1, D]` and keys `[B, Hkv, 1, D]`.

    Returns:
        The near output (joined with the far one if `log_scale` and `norm_weight` were given), its log size and its
        largest logit, the far output and its log size, each `[B, Hkv, G, 1, W or 1]`.
    """
    (batch, heads), kv_heads = query.shape[:2], key.shape[1]
    columns = (width, 1, 1, width, 1)
    found = parts.split_with_sizes([batch * heads * n for n in columns])
    return [x.view(batch, kv_heads, heads // kv_heads, 1, n) for x, n in zip(found, columns)]


def _fake_hybrid_step(*given: Any) -> list[Tensor]:
    new_state = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given[STEP_STATE]]
    return [*new_state, _fake_hybrid_step_(*given)]


def _fake_hybrid_step_(*given: Any) -> Tensor:
    query, _, value, *_ = given
    return given[STEP_STATE][0].new_empty(query.shape[0] * query.shape[1] * (2 * value.shape[-1] + 3))


def check_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    seen: Tensor,
    sink_query: Tensor | None,
) -> int:
    """Check the arguments of the operator `window_attention` and return the number of keys that a query sees.

    Raises:
        ValueError: for the first invalid argument.
    """
    batch, heads, kv_heads = check_heads(query, key, value)
    length, places = query.shape[2], key.shape[2]
    check_shape("query", query, (batch, heads, length, key.shape[3]), like=query)
    if places < max(length, 1):
        raise ValueError(f"Got {places} keys for {length} queries; every query needs at least one key of its own.")
    check_shape("visible", visible, (batch, places), like=query)
    check_shape("sink_key", sink_key, (batch, kv_heads, None, key.shape[3]), like=query)
    sinks = sink_key.shape[2]
    check_shape("sink_value", sink_value, (batch, kv_heads, sinks, value.shape[3]), like=query)
    check_shape("seen", seen, (batch, length, sinks), like=query)
    check_shape("sink_query", sink_query, tuple(query.shape), like=query)
    if visible.dtype != torch.bool or seen.dtype != torch.bool:
        raise ValueError(f"`visible` and `seen` are {visible.dtype} and {seen.dtype}; both must be bool.")
    return places - length + 1


def check_window_results(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor | None,
    grad_log_size: Tensor | None,
    output: Tensor,
    log_size: Tensor,
) -> None:
    """Check what the operator `window_attention_backward` takes in addition to the arguments of `window_attention`.

    Raises:
        ValueError: for the first invalid argument.
    """
    (batch, heads, length, _), kv_heads, dtype = query.shape, key.shape[1], accumulation_dtype(query)
    by_head, per_query = (batch, length, heads, value.shape[3]), (batch, kv_heads, heads // kv_heads, length, 1)
    check_results(
        query,
        grad_output=(grad_output, by_head, dtype),
        grad_log_size=(grad_log_size, per_query, dtype),
        output=(output, by_head, dtype),
        log_size=(log_size, per_query, dtype),
    )


def check_hybrid_step(
    query: Tensor, key: Tensor, value: Tensor, sink_query: Tensor | None, position: Tensor | None,
    far_query: Tensor | None, far_key: Tensor | None, key_weight: Tensor, key_bias: Tensor | None,
    key_norm: Tensor | None, query_weight: Tensor, log_decay: Tensor | None, state: Sequence[Tensor],
    log_scale: Tensor | None, norm_weight: Tensor | None, function: int, scaling: float,
) -> None:  # fmt: skip
    """Check the arguments of the operator `hybrid_step`, with the state in the order of `HybridState`.

    Raises:
        ValueError: for the first invalid argument.
    """
    if not query.ndim == key.ndim == value.ndim == 4 or query.shape[1] % (key.shape[1] or 1) or not key.shape[1]:
        check_heads(query, key, value)
    (batch, heads), kv_heads = query.shape[:2], key.shape[1]
    if len(state) != (7 if position is None else 8):
        raise ValueError(f"Got a state of {len(state)} tensors; a state of `hybrid` has 7, or 8 with positions.")
    sums, window_key, window_value, kind, sink_key, sink_value, num_seen, *window_position = state
    dim, width, device = key.shape[3], value.shape[3], query.device
    places, sinks = (x.shape[2] if x.ndim == 4 else 0 for x in (window_key, sink_key))
    columns = key_weight.shape[-1] if key_weight.ndim else 0
    features = columns * (1 + (function == HEDGEHOG))
    expected = (
        ("query", query, (batch, heads, 1, dim), None),
        ("key", key, (batch, kv_heads, 1, dim), None),
        ("value", value, (batch, kv_heads, 1, width), None),
        ("sink_query", sink_query, (batch, heads, 1, dim), None),
        ("far_query", far_query, (batch, heads, 1, dim), torch.float32),
        ("far_key", far_key, (batch, kv_heads, 1, dim), torch.float32),
        ("key_weight", key_weight, (kv_heads, dim, columns), torch.float32),
        ("key_bias", key_bias, (kv_heads, 1, columns), torch.float32),
        ("key_norm", key_norm, (kv_heads, 1, 1), torch.float32),
        ("query_weight", query_weight, (heads, dim, columns), torch.float32),
        ("log_decay", log_decay, (kv_heads,), torch.float32),
        ("log_scale", log_scale, (heads,), torch.float32),
        ("norm_weight", norm_weight, (heads,), torch.float32),
        ("state", sums, (batch, kv_heads, features, width + 2), torch.float32),
        ("state", window_key, (batch, kv_heads, places, dim), key.dtype),
        ("state", window_value, (batch, kv_heads, places, width), value.dtype),
        ("state", kind, (batch, places), torch.int8),
        ("state", sink_key, (batch, kv_heads, sinks, dim), key.dtype),
        ("state", sink_value, (batch, kv_heads, sinks, width), value.dtype),
        ("state", num_seen, (batch, 1), torch.int64),
        ("position", position, (batch, 1), torch.int32),
        *(("state", x, (batch, places), torch.int32) for x in window_position),
    )
    for name, tensor, shape, dtype in expected:
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.device != device:
            check_shape(name, tensor, shape, like=query)
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"`{name}` has a tensor of {tensor.dtype}; with these tokens it must be {dtype}.")
    if (log_scale is None) != (norm_weight is None):
        raise ValueError("`log_scale` and `norm_weight` belong together; pass both or neither.")
    if function not in (EXP, HEDGEHOG) or (function == HEDGEHOG and not (key_bias is None and key_norm is None)):
        raise ValueError(f"Got `function` = {function}; it must be 2 (exp), or 3 (Hedgehog) without bias and norm.")
    if not places or not dim or not columns:
        raise ValueError(
            f"Got a window of {places}, keys of {dim} and weights of {columns} columns; each must be at least 1."
        )


OPERATORS_OF_HYBRID = {
    "window_attention": Operator(
        f"({WINDOW}) -> (Tensor, Tensor, Tensor)", _window, _fake_window, _differentiate_window, _save_window
    ),
    "window_attention_backward": Operator(
        f"(Tensor? grad_output, Tensor? grad_log_size, {WINDOW}, Tensor output, Tensor log_size) -> Tensor[]",
        _window_backward,
        _fake_window_backward,
    ),
    "hybrid_step": Operator(f"({STEP.format('Tensor[]')}) -> Tensor[]", _hybrid_step, _fake_hybrid_step),
    "hybrid_step_": Operator(f"({STEP.format('Tensor(a!)[]')}) -> Tensor", _hybrid_step_, _fake_hybrid_step_),
}
OPERATORS = register(OPERATORS_OF_HYBRID)
