# SPDX-License-Identifier: Apache-2.0
"""The operators of `hybrid`: the window and the sinks alone, these and the far keys, and one whole decoding step.

`window_attention` is exact softmax over a window and sinks. In `joint_attention`, far keys have a share in the same
denominator. Two kernels take turns with the same memory there, in both directions: far keys leave their output where
the kernel of the window completes it, and far gradients are what those of the window are added to. Keys are read where
they stand, without padding, and rotary frequencies that the feature map must not see are taken back a block at a time.

           sinks           far                        window
    keys   0 1 2 3 | 4 5 ......... i - w | i - w + 1 ..... i

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, L rows of keys, D head_dim, F features, W
head dimension of the values, s sinks, w tokens of a window, R pairs of columns that are turned.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..features.maps import half_squared_norm
from ..mechanisms.base import MechanismInputs, State
from ..mechanisms.hybrid import HybridAttention
from ..mechanisms.window import Line, WindowState
from ..torch_kernels.attention import in_torch
from ..torch_kernels.blocks import (
    EMPTY_MAXIMUM,
    EXP,
    HEDGEHOG,
    accumulated,
    accumulation_dtype,
    needs_plain,
    with_dtype,
)
from ..torch_kernels.causal import gradients_with_graph
from ..torch_kernels.window import join, log_size, plain_window
from .checks import (
    check_attention,
    check_blocks,
    check_heads,
    check_needed,
    check_results,
    check_rows,
    check_shape,
)
from .cpu import (
    STEP_NUMBERS,
    attend,
    differentiate,
    in_large_pages,
    refuse_without_library,
    run_attention,
    run_step,
    takes,
    takes_attention,
    takes_step,
    without_dispatcher,
)
from .operators import (
    Operator,
    arguments_of_map,
    gradient_like,
    gradients_in_torch,
    grouped,
    memory_per_head,
    or_nothing,
    register,
    saving,
    shared_gradients,
    with_rows,
)


WINDOW = (
    "Tensor query, Tensor key, Tensor value, Tensor visible, Tensor sink_key, Tensor sink_value, Tensor seen, "
    "Tensor? sink_query, float scaling, int window"
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


def hybrid_step(mechanism: HybridAttention, inputs: MechanismInputs, old: WindowState) -> tuple[Tensor, State] | None:
    """One token of `hybrid` where a graph or C takes these tensors, without gradients."""
    query, key, value, _, scaling, _, positions, *_ = inputs
    if not takes_step(query, key, value, old.key, old.value, in_graphs=True):
        return None
    state = old.stored
    # Under autocast, rotary positions make queries and keys float32, whereas values remain bfloat16.
    key, value = with_dtype(key, old.key.dtype), with_dtype(value, old.value.dtype)
    far_rows: Any = (None, None)
    if mechanism.shift is not None:
        far_rows = mechanism.far_rows(query, old if inputs.rows is None else oldest(old, inputs.rows), positions)
    joint, kernel_map = mechanism.mix.kernel_parameters(), mechanism.feature_map.unscaled_map()
    log_decay = None if mechanism.decay is None else mechanism.decay()
    given = (
        *(query, key, value, mechanism.sink_query(inputs), None if mechanism.shift is None else positions),
        *(*far_rows, *kernel_map.key, kernel_map.query.weight, log_decay, list(state)),
        *(*(joint or (None, None)), kernel_map.function, scaling),
    )
    if inputs.in_place:
        parts = without_dispatcher(OPERATORS.hybrid_step_, _hybrid_step_)(*given, inputs.rows)
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


def oldest(old: WindowState, rows: Tensor) -> WindowState:
    """The key, and its position, that leaves each window of the blocks `rows`."""
    position: Any = old.position
    return old._replace(key=old.key[:, :, :1].index_select(0, rows), position=position[:, :1].index_select(0, rows))


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
    arguments = _window_arguments(scaling, *given)
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
    arguments = _window_arguments(scaling, *inputs)
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
    sink_turn: Tensor | None = None,
) -> list[Tensor | None]:
    """The arguments of the C kernel for window and sinks, up to the angles of the sinks, with five axes each."""
    kv_heads = key.shape[1]
    scale = query.new_full((1,) * 5, scaling, dtype=torch.float32)
    numbers = (visible[:, None, None, :, None], seen[:, None, None], scale)
    visible, seen, scale = (with_rows(x).expand(query.shape[0], kv_heads, -1, -1, -1) for x in numbers)
    keys = [with_rows(x).unsqueeze(2) for x in (key, value, sink_key, sink_value)]
    sink_query = None if sink_query is None else grouped(with_rows(sink_query), kv_heads)
    turn = _table(sink_turn, query, kv_heads)
    return [grouped(with_rows(query), kv_heads), *keys[:2], visible, *keys[2:], seen, sink_query, scale, turn]


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
    state = [x.contiguous() for x in given[STEP_STATE]]
    new_state = [torch.empty_like(x) for x in state]
    return [*new_state, _run_hybrid_step((*given[:STEP_STATE], state, *given[STEP_STATE + 1 :]), new_state)]


def _hybrid_step_(*arguments: Any) -> Tensor:
    """`_hybrid_step` in place, in the blocks `rows` of the state if they are given, else sequence b in block b."""
    check_hybrid_step(*arguments)
    *given, rows = arguments
    state = given[STEP_STATE]
    check_blocks(*state)
    return _run_hybrid_step(given, state, None if rows is None else rows.contiguous())


def _run_hybrid_step(given: Sequence[Any], new_state: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
    """Write the new state, and return the parts of the output."""
    state, log_scale, norm_weight, function, scaling = given[STEP_STATE:]
    query, key, value, sink_query = given[:4]
    refuse_without_library(query, key, value, sink_query)
    (batch, heads), kv_heads, width = query.shape[:2], key.shape[1], value.shape[3]
    if sink_query is not None:
        sink_query = sink_query.to(query.dtype)
    shape = (
        *(batch, state[0].shape[0], kv_heads, heads // kv_heads, state[1].shape[2], state[4].shape[2]),
        *(key.shape[3], state[0].shape[2], width, function),
        *(query.element_size(), key.element_size(), value.element_size()),
    )
    numbers = (query, key, value, sink_query, *given[4:STEP_STATE], log_scale, norm_weight)
    dense = [x if x is None or x.is_contiguous() else x.contiguous() for x in numbers]
    parts, size = _fake_hybrid_step_(*given), 4 * batch * heads
    offsets = (0, width, width + 1, width + 2, 2 * width + 2)
    addresses = [0 if x is None else x.data_ptr() for x in (*dense, None)]  # no beta
    addresses += [parts.data_ptr() + size * columns for columns in offsets]
    positions = [0] * (8 - len(state))
    for tensors in (state, new_state):
        addresses += [*(x.data_ptr() for x in tensors), *positions]
    is_dense = all(x.is_contiguous() for x in state)
    blocks = None if is_dense else (*(x.stride(0) * x.element_size() for x in state), *positions)
    run_step("hybrid_step", shape, addresses, _strides(shape[2:], blocks), rows, scaling)
    return parts


@functools.lru_cache
def _strides(shape: tuple[int, ...], blocks: tuple[int, ...] | None) -> bytes:
    """The strides of `hybrid_step` in bytes, of dense tensors or with these of its state."""
    kv_heads, groups, window, sinks, dim, features, width, _, query_bytes, key_bytes, value_bytes = shape
    heads = kv_heads * groups
    query, key, value = query_bytes * heads * dim, key_bytes * kv_heads * dim, value_bytes * kv_heads * width
    dense = (4 * kv_heads * features * (width + 2), key * window, value * window, window, key * sinks, value * sinks, 8)
    states = blocks or (*dense, 4 * window)
    tokens = (query, key, value, query, 4, 4 * heads * dim, 4 * kv_heads * dim)
    results = (4 * heads * width, 4 * heads, 4 * heads, 4 * heads * width, 4 * heads)
    return STEP_NUMBERS.pack(*tokens, *[0] * 8, *results, *states, *states)


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
    window: int,
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

    With a `window` above 0, there is a key for every query, which sees window - 1 places on either side of its own.
    With 0, query t sees the keys from t on, as `torch_kernels.window.NearKeys` has them.

    Raises:
        ValueError: for the first invalid argument.
    """
    batch, _, kv_heads = check_heads(query, key, value)
    length, places = query.shape[2], key.shape[2]
    if window < 0 or (window and places != length):
        raise ValueError(
            f"Got a window of {window} for {length} queries and {places} keys; with one above 0, there is "
            "a key for every query, and 0 stands for keys that are padded."
        )
    if places < max(length, 1):
        raise ValueError(f"Got {places} keys for {length} queries; every query needs at least one key of its own.")
    check_shape("query", query, (*query.shape[:3], key.shape[3]), like=query)
    check_shape("visible", visible, (batch, places), like=query)
    sinks = sink_key.shape[2] if sink_key.ndim == 4 else 0
    check_shape("sink_key", sink_key, (batch, kv_heads, sinks, key.shape[3]), like=query)
    check_shape("sink_value", sink_value, (batch, kv_heads, sinks, value.shape[3]), like=query)
    check_shape("seen", seen, (batch, length, sinks), like=query)
    check_shape("sink_query", sink_query, tuple(query.shape), like=query)
    if visible.dtype != torch.bool or seen.dtype != torch.bool:
        raise ValueError(f"`visible` and `seen` are {visible.dtype} and {seen.dtype}; both must be bool.")
    return 2 * window - 1 if window else places - length + 1


def check_hybrid_step(
    query: Tensor, key: Tensor, value: Tensor, sink_query: Tensor | None, position: Tensor | None,
    far_query: Tensor | None, far_key: Tensor | None, key_weight: Tensor, key_bias: Tensor | None,
    key_norm: Tensor | None, query_weight: Tensor, log_decay: Tensor | None, state: Sequence[Tensor],
    log_scale: Tensor | None, norm_weight: Tensor | None, function: int, scaling: float, rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Check the arguments of the operator `hybrid_step_`, with the state in the order of `HybridState`.

    Raises:
        ValueError: for the first invalid argument.
    """
    if not query.ndim == key.ndim == value.ndim == 4 or query.shape[1] % (key.shape[1] or 1) or not key.shape[1]:
        check_heads(query, key, value)
    (batch, heads), kv_heads = query.shape[:2], key.shape[1]
    if len(state) != (7 if position is None else 8):
        raise ValueError(f"Got a state of {len(state)} tensors; a state of `hybrid` has 7, or 8 with positions.")
    sums, window_key, window_value, kind, sink_key, sink_value, num_seen = state[:7]
    blocks = check_rows(rows, sums, query)
    dim, width, device = key.shape[3], value.shape[3], query.device
    places = window_key.shape[2] if window_key.ndim == 4 else 0
    sinks = sink_key.shape[2] if sink_key.ndim == 4 else 0
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
        ("state", sums, (blocks, kv_heads, features, width + 2), torch.float32),
        ("state", window_key, (blocks, kv_heads, places, dim), key.dtype),
        ("state", window_value, (blocks, kv_heads, places, width), value.dtype),
        ("state", kind, (blocks, places), torch.int8),
        ("state", sink_key, (blocks, kv_heads, sinks, dim), key.dtype),
        ("state", sink_value, (blocks, kv_heads, sinks, width), value.dtype),
        ("state", num_seen, (blocks, 1), torch.int64),
        ("position", position, (batch, 1), torch.int32),
        ("state", None if position is None else state[7], (blocks, places), torch.int32),
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
        raise ValueError(f"Got a window of {places}, keys of {dim} and weights of {columns} columns; none may be 0.")


# Pairs of columns: the first column, the step from pair to pair, and the distance within a pair.
Pairs = Sequence[int]


NO_PAIRS = (0, 1, 0)


JOINT = (
    "Tensor query, Tensor key, Tensor value, Tensor visible, Tensor sink_key, Tensor sink_value, Tensor seen, "
    "Tensor? query_turn, Tensor? key_turn, Tensor? sink_turn, Tensor? log_decay, Tensor? state, Tensor key_weight, "
    "Tensor? key_bias, Tensor? key_norm, Tensor query_weight, Tensor log_scale, Tensor norm_weight, int function, "
    "int window, float scaling, int[] pairs, int[] sink_pairs"
)


TENSORS = 18  # of which these can have gradients


DIFFERENTIABLE = (0, 1, 2, 4, 5, *range(10, 18))


class Given(NamedTuple):
    """The arguments of the operator.

    `key` has N rows, one for each query, or `window` rows more, of tokens before the first query; only then can there
    be a `state` of still older tokens. `visible` is False where a key belongs neither to the window nor to the far
    keys. A turn `[B or 1, N or L, 2 R]` (float32) holds the cosines and then the sines of the angles by which the
    pairs of columns of queries or keys are turned before the feature map (or, of queries, before the sinks) sees them;
    they are constants without gradient.
    A far key weighs exp(log_scale - norm_weight scaling |q|^2 / 2) phi(q)·phi(k), a near one exp(scaling q·k).
    """

    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, Hkv, L, D]
    value: Tensor  # [B, Hkv, L, W]
    visible: Tensor  # [B, L] bool
    sink_key: Tensor  # [B, Hkv, s, D]
    sink_value: Tensor  # [B, Hkv, s, W]
    seen: Tensor  # [B, N, s] bool
    query_turn: Tensor | None
    key_turn: Tensor | None
    sink_turn: Tensor | None
    log_decay: Tensor | None  # [Hkv]
    state: Tensor | None  # [B, Hkv, F, W + 2]
    key_weight: Tensor  # see `torch_kernels.blocks.KernelMap`
    key_bias: Tensor | None
    key_norm: Tensor | None
    query_weight: Tensor
    log_scale: Tensor  # [H]
    norm_weight: Tensor  # [H]
    function: int
    window: int
    scaling: float
    pairs: Pairs
    sink_pairs: Pairs

    @property
    def before(self) -> int:
        """The number of keys before the first query."""
        return self.key.shape[2] - self.query.shape[2]

    @property
    def ranges(self) -> tuple[int, int]:
        """The first query that has far keys, and the number of keys that are far from some query."""
        length = self.query.shape[2]
        first = min(self.window - self.before, length)
        return first, length - first

    def far(self) -> tuple[Any, ...]:
        """The arguments of the operator `attention` for far keys, and the queries that have some."""
        first, num_far = self.ranges
        key, value, mask = self.key[:, :, :num_far], self.value[:, :, :num_far], self.visible[:, :num_far]
        affine = self.key_weight, self.key_bias, self.key_norm, self.query_weight
        return self.query[:, :, first:], key, value, mask, self.log_decay, self.state, *affine, self.function, True


def hybrid(
    mechanism: HybridAttention,
    inputs: MechanismInputs,
    line: Line,
    sinks: tuple[Tensor, ...],
    seen: Tensor,
    sums: Tensor | None,
) -> tuple[Tensor, Tensor | None] | None:
    """The operator for the keys of `line` (see `WindowAttention._at_once`), at once or in a graph, where C takes them.

    Returns:
        The output `[B, H, N, W]` in the accumulation dtype, and the state after the keys that have left the window.

    Raises:
        ValueError: if the shapes, dtypes or devices do not match.
    """
    query, scaling, positions = inputs.query, inputs.scaling, cast(Tensor, inputs.positions)
    visible, features = line.kind, mechanism.feature_map.num_features
    if needs_plain(query) or not takes_attention(query, line.key, line.value, visible, features):
        return None
    constants, kernel_map = mechanism.mix.kernel_parameters(), mechanism.feature_map.kernel_map(scaling)
    if constants is None or kernel_map is None:
        return None
    turns: Any = (None, None)
    pairs, move = NO_PAIRS, mechanism.move_to_sinks(query, positions)
    if mechanism.shift is not None:
        turn = mechanism.shift.table(-positions)
        is_same = line.position is inputs.positions
        turns = turn, turn if is_same else mechanism.shift.table(-cast(Tensor, line.position))
        pairs = mechanism.shift.pairs
    to_sinks, sink_pairs = None, NO_PAIRS
    if move is not None and mechanism.to_sinks is not None:
        to_sinks, sink_pairs = mechanism.to_sinks.table(move), mechanism.to_sinks.pairs
    maps: Any = (*cast(Any, kernel_map.key), cast(Any, kernel_map.query).weight)
    log_decay = None if mechanism.decay is None else mechanism.decay()
    how: Any = (kernel_map.function, mechanism.window_size, scaling, pairs, sink_pairs)
    tensors: Any = (query, line.key, line.value, visible, *sinks, seen, *turns, to_sinks, log_decay, sums)
    given: list[Any] = [*tensors, *maps, *constants, *how]
    output, _, _, sums = OPERATORS.joint_attention(*given)
    return output.transpose(1, 2), sums


def _joint(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = Given(*arguments)
    features = check_joint(given)
    refuse_without_library(*given[:3], *given[4:6], given.key_weight)
    output, size, total, state = _new_results(given, features)
    kv_heads, (first, num_far) = given.key.shape[1], given.ranges
    in_large_pages(output)
    scale = torch.empty_like(total)
    rows = grouped(output.transpose(1, 2), kv_heads)
    total[:, :, :, :first] = 0
    if num_far:
        results = (rows[:, :, :, first:], total[:, :, :, first:], scale[:, :, :, first:], state.unsqueeze(2))
        turned = _turned(given.query_turn, given.pairs)
        attend((features, given.function, True), (*_far_arguments(given), *results), turned)
    elif given.state is not None:
        state.copy_(given.state)
    else:
        state.zero_()
        state[..., -1] = EMPTY_MAXIMUM
    near = (*_window_arguments(given.scaling, *given[:7], None, given.sink_turn), total, scale, rows, size, None)
    how = (given.window, given.sink_key.shape[2], True)
    run_attention("window_forward", how, near, turned=_turned(given.sink_turn, given.sink_pairs))
    return output, size, total, state


def _fake_joint(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = Given(*arguments)
    return _new_results(given, check_joint(given))


def _new_results(given: Given, features: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, heads, length, _), kv_heads, width = given.query.shape, given.key.shape[1], given.value.shape[3]
    output = given.query.new_empty(batch, length, heads, width, dtype=accumulation_dtype(given.query))
    size = output.new_empty(batch, kv_heads, heads // kv_heads, length, 1)
    return output, size, torch.empty_like(size), output.new_empty(batch, kv_heads, features, width + 2)


def _joint_backward(grad_output: Tensor | None, grad_state: Tensor | None, *arguments: Any) -> list[Tensor]:
    *tensors, output, size, total, needed = arguments
    given = Given(*tensors)
    features = check_joint(given)
    query, key, value = (x.to("meta") for x in given[:3])
    like_output, like_size, _, like_state = _new_results(given._replace(query=query, key=key, value=value), features)
    computed = {"output": output, "log_size": size, "denominator": total}
    expected = (like_output, like_state, like_output, like_size, like_size)
    check_results(given.query, expected, grad_output=grad_output, grad_state=grad_state, **computed)
    for name, x in computed.items():
        if not x.is_contiguous():
            raise ValueError(f"`{name}` is not dense; pass it as `joint_attention` returned it.")
    check_needed(needed, TENSORS)
    refuse_without_library(*given[:3], *given[4:6], given.key_weight)
    kv_heads, (first, num_far) = given.key.shape[1], given.ranges
    grads = [in_large_pages(gradient_like(x)) for x in (given.query, given.key, given.value)]
    sink_grads = [x.new_empty(x.shape) for x in (given.sink_key, given.sink_value)]
    grads[0][:, :, :first] = 0
    grads[1][:, :, num_far:] = grads[2][:, :, num_far:] = 0
    made = [grouped(grads[0], kv_heads), *(grad.unsqueeze(2) for grad in grads[1:])]
    grad_rows = None if grad_output is None else grouped(with_rows(grad_output).transpose(1, 2), kv_heads)
    rows = grouped(output.transpose(1, 2), kv_heads)
    maps: list[Tensor | None] = [None] * 8
    if not num_far and needed[11] and given.state is not None and grad_state is not None:  # the state leaves as it came
        maps[7] = grad_state.clone().unsqueeze(2)
    if num_far:
        described = _far_arguments(given)
        # Of decay, key map, query map and state, per batch member and head.
        wanted = [needed[10], *needed[12:18], needed[11]]
        maps = memory_per_head(described[4:12], wanted)
        parts = (made[0][:, :, :, first:], *(grad[:, :, :, :num_far] for grad in made[1:]))
        incoming = None if grad_rows is None else grad_rows[:, :, :, first:]
        results = (rows[:, :, :, first:], total[:, :, :, first:], None, None)
        of_state = None if grad_state is None else grad_state.contiguous().unsqueeze(2)
        far = (*described, *results, incoming, None, of_state, *parts, *maps)
        differentiate((features, given.function, True), far, _turned(given.query_turn, given.pairs))
    described = _window_arguments(given.scaling, *given[:7], None, given.sink_turn)
    near = (*described, total, None, rows, size, None, grad_rows, None, *made)
    how = (given.window, given.sink_key.shape[2], True)
    sinks = (*(grad.unsqueeze(2) for grad in sink_grads), None)
    run_attention("window_backward", how, (*near, *sinks), turned=_turned(given.sink_turn, given.sink_pairs))
    scale, norm = (None if x is None else x.flatten(1).sum(0) for x in maps[5:7])
    norm = None if norm is None else (norm * given.scaling).to(given.norm_weight.dtype)
    scale = None if scale is None else scale.to(given.log_scale.dtype)
    shared = shared_gradients(maps, given.log_decay, given[12:16])
    return [or_nothing(x, given.query) for x in (*grads, *sink_grads, *shared, scale, norm)]


def _fake_joint_backward(grad_output: Tensor | None, grad_state: Tensor | None, *arguments: Any) -> list[Tensor]:
    needed = arguments[-1]
    given = Given(*arguments[:-4])
    check_joint(given)
    tensors: Any = [given[place] for place in DIFFERENTIABLE]
    _, num_far = given.ranges
    dense = [gradient_like(x) for x in tensors[:3]] + [x.new_empty(x.shape) for x in tensors[3:5]]
    others = [
        x.new_empty(x.shape)
        if x is not None and needed[place] and (num_far or (place == 11 and grad_state is not None))
        else None
        for x, place in zip(tensors[5:], DIFFERENTIABLE[5:])
    ]
    return [or_nothing(x, given.query) for x in (*dense, *others)]


def check_joint(given: Given) -> int:
    """Check the arguments of the operator and return F, the number of features.

    Raises:
        ValueError: for the first invalid argument.
    """
    query, key, window = given.query, given.key, given.window
    check_window(0, *given[:7], None)
    heads, length, rows = query.shape[1], query.shape[2], key.shape[2]
    if (
        window < 1
        or not length * key.numel()
        or given.before not in (0, window)
        or (given.state is not None and not given.before)
    ):
        raise ValueError(
            f"Got {length} queries, {rows} keys, a window of {window}, {'no' if given.state is None else 'a'} state; "
            "there must be a key for every query, and with a state `window` keys before them."
        )
    for name, x in (("log_scale", given.log_scale), ("norm_weight", given.norm_weight)):
        check_shape(name, x, (heads,), like=query)
    if given.function < EXP:
        raise ValueError(f"`function` = {given.function} is not one of 2 (exp) and 3 (Hedgehog).")
    _check_turn("sink_turn", given.sink_turn, length, given.sink_pairs, query)
    _check_turn("query_turn", given.query_turn, length, given.pairs, query)
    _check_turn("key_turn", given.key_turn, rows, given.pairs, query)
    widths = [None if turn is None else turn.shape[-1] for turn in (given.query_turn, given.key_turn)]
    if widths[0] != widths[1]:
        raise ValueError("`query_turn` and `key_turn` must turn the same pairs; pass both or neither.")
    return check_attention(*given.far())


def _check_turn(name: str, turn: Tensor | None, rows: int, pairs: Pairs, query: Tensor) -> None:
    if turn is None:
        return
    check_shape(name, turn, *((batch, rows, turn.shape[-1]) for batch in (1, query.shape[0])), like=query)
    count, (start, step, distance) = turn.shape[2] // 2, pairs
    is_apart = (step == 1 and distance >= count) or (step == 2 and distance == 1)
    last = start + (count - 1) * step + distance
    if turn.dtype != torch.float32 or turn.shape[2] % 2 or start < 0 or not is_apart or last >= query.shape[3]:
        raise ValueError(
            f"`{name}` is {turn.dtype} with {turn.shape[2]} columns for the pairs {tuple(pairs)} of {query.shape[3]} "
            "columns; it must be float32, with a cosine and a sine for each pair that there is."
        )


def _differentiate_joint(
    ctx: Any, grad_output: Tensor | None, _: Any, __: Any, grad_state: Tensor | None
) -> tuple[Tensor | None, ...]:
    *inputs, output, size, total = ctx.saved_tensors
    needed = [bool(need) for need in ctx.needs_input_grad[:TENSORS]]
    if torch.is_grad_enabled():
        grads = gradients_with_graph(lambda *x: plain_joint(Given(*x, *ctx.how)), inputs, (grad_output, grad_state))
    else:
        found = iter(
            OPERATORS.joint_attention_backward(grad_output, grad_state, *inputs, *ctx.how, output, size, total, needed)
        )
        grads = [next(found) if place in DIFFERENTIABLE else None for place in range(TENSORS)]
    # Without far keys there are no gradients of what belongs to them.
    grads = [
        grad if need and grad is not None and grad.shape == x.shape else None
        for grad, need, x in zip(grads, needed, inputs)
    ]
    return *grads, *(None for _ in ctx.how)


def plain_joint(given: Given) -> tuple[Tensor, Tensor]:
    """What the operator computes, in plain torch operations: the output `[B, N, H, W]` and the state."""
    before, window, kv_heads = given.before, given.window, given.key.shape[1]
    query = accumulated(given.query)
    to_sinks = None if given.sink_turn is None else _turn(query, given.sink_turn, given.sink_pairs)
    near_key, near_value = (F.pad(x, (0, 0, window - 1 - before, 0)) for x in (given.key, given.value))
    visible = F.pad(given.visible, (window - 1 - before, 0))
    sinks = given.sink_key, given.sink_value, given.seen
    output, size, _ = plain_window(query, near_key, near_value, visible, *sinks, to_sinks, given.scaling)
    far_query, far_key = query, accumulated(given.key)
    if given.query_turn is not None and given.key_turn is not None:
        far_query, far_key = (
            _turn(x, turn, given.pairs) for x, turn in ((query, given.query_turn), (far_key, given.key_turn))
        )
    length = query.shape[2]
    far_key, far_value = (
        F.pad(x, (0, 0, window - before, 0))[:, :, :length] for x in (far_key, accumulated(given.value))
    )
    mask = F.pad(given.visible, (window - before, 0))[:, :length]
    _, _, _, _, decay, state, *how = given.far()
    scale: Any  # not None, because the features are given as logarithms
    far, total, scale, state = in_torch(far_query, far_key, far_value, mask, decay, state, *how, plain=True)
    half = query.square().sum(dim=-1, keepdim=True) * (given.scaling / 2)
    log_scale, norm = (x.to(query.dtype)[:, None, None] for x in (given.log_scale, given.norm_weight))
    far_size = log_size(total, scale) + (log_scale - norm * half).unflatten(1, (kv_heads, -1))
    return join((output, size), (far, far_size))[0].flatten(1, 2).transpose(1, 2), state


def _turn(x: Tensor, turn: Tensor, pairs: Pairs) -> Tensor:
    """`x [B, heads, rows, D]` with its pairs of columns turned by `turn [B or 1, rows, 2 R]`."""
    cosine, sine = turn.detach().to(x.dtype).unsqueeze(1).chunk(2, dim=-1)
    start, step, distance = pairs
    a = start + step * torch.arange(cosine.shape[-1], dtype=torch.long, device=x.device)
    first, second = x[..., a], x[..., a + distance]
    x = x.index_copy(-1, a, first * cosine - second * sine)
    return x.index_copy(-1, a + distance, first * sine + second * cosine)


def _far_arguments(given: Given) -> list[Tensor | None]:
    """The arguments of the C kernel for far keys, up to the tables of angles."""
    *tensors, _, _ = given.far()
    norm = given.norm_weight * given.scaling
    constants = given.log_scale[:, None, None], norm[:, None, None]
    found = arguments_of_map(tensors, given.key.shape[1], constants)
    query_turn, key_turn = (_table(x, given.query, given.key.shape[1]) for x in (given.query_turn, given.key_turn))
    first, num_far = given.ranges
    if query_turn is not None and key_turn is not None:
        query_turn, key_turn = query_turn[:, :, :, first:], key_turn[:, :, :, :num_far]
    return [*found[:-2], query_turn, key_turn]


def _table(turn: Tensor | None, query: Tensor, kv_heads: int) -> Tensor | None:
    return None if turn is None else with_rows(turn)[:, None, None].expand(query.shape[0], kv_heads, -1, -1, -1)


def _turned(turn: Tensor | None, pairs: Pairs) -> tuple[int, ...]:
    """What `run_attention` has to know of the columns that are turned."""
    return (0, 0, 0, 0) if turn is None else (turn.shape[-1] // 2, *pairs)


OPERATORS_OF_HYBRID = {
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
    "hybrid_step": Operator(f"({STEP.format('Tensor[]')}) -> Tensor[]", _hybrid_step, _fake_hybrid_step),
    "hybrid_step_": Operator(
        f"({STEP.format('Tensor(a!)[]')}, Tensor? rows) -> Tensor", _hybrid_step_, _fake_hybrid_step_
    ),
    "joint_attention": Operator(
        f"({JOINT}) -> (Tensor, Tensor, Tensor, Tensor)",
        _joint,
        _fake_joint,
        _differentiate_joint,
        saving(TENSORS, outputs=3, constants=[1, 2]),
    ),
    "joint_attention_backward": Operator(
        f"(Tensor? grad_output, Tensor? grad_state, {JOINT}, Tensor output, Tensor log_size, Tensor denominator, "
        "bool[] needed) -> Tensor[]",
        _joint_backward,
        _fake_joint_backward,
    ),
}
OPERATORS = register(OPERATORS_OF_HYBRID)
