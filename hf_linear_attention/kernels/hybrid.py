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

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..features.maps import ExpFeatureMap
from ..mechanisms.base import MechanismInputs, State
from ..mechanisms.hybrid import SLOPE_TOKENS, HybridAttention
from ..mechanisms.window import Line, WindowState
from ..torch_kernels.attention import in_torch
from ..torch_kernels.blocks import (
    EMPTY_MAXIMUM,
    EXP,
    HEDGEHOG,
    accumulated,
    accumulation_dtype,
    is_eager,
    needs_plain,
    with_dtype,
)
from ..torch_kernels.causal import gradients_with_graph
from ..torch_kernels.exact_keys import Kept
from ..torch_kernels.window import Part, join, log_size, plain_window
from . import triton_hybrid
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
    "Tensor query, Tensor key, Tensor value, Tensor? score, Tensor? slope, Tensor? position, "
    "Tensor key_weight, Tensor? key_bias, Tensor? key_norm, Tensor query_weight, Tensor? log_decay, {} state, "
    "Tensor? log_scale, Tensor? norm_weight, float[] frequencies, int first_turned, "
    "bool is_interleaved, "
    "int trained_length, int function, float scaling"
)
# The place of the state among these arguments.
STEP_STATE = 11
# The tensors of a state in the order of C, by how many there are: with positions, exact keys, both or neither.
PLACES: dict[int, tuple[int | None, ...]] = {
    7: (*range(7), *[None] * 7),
    8: (*range(8), *[None] * 6),
    12: (0, *range(5, 11), None, 11, *range(1, 5), None),
    14: (0, *range(6, 14), *range(1, 6)),
}


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


def hybrid_step(mechanism: HybridAttention, inputs: MechanismInputs, old: WindowState) -> tuple[Tensor, State] | None:
    """One token of `hybrid` where a graph or C takes these tensors, without gradients."""
    query, key, value, _, scaling, _, positions, gates, *_ = inputs
    if triton_hybrid.takes(query, key, value, old.sink_key, *_map_of(mechanism)):
        return _step_on_cuda(mechanism, inputs, old)
    if not takes_step(query, key, value, old.key, old.value, in_graphs=True):
        return None
    state = old.stored
    # Under autocast, rotary positions make queries and keys float32, whereas values remain bfloat16.
    key, value = with_dtype(key, old.key.dtype), with_dtype(value, old.value.dtype)
    joint, kernel_map = mechanism.mix.kernel_parameters(), mechanism.feature_map.unscaled_map()
    log_decay = None if mechanism.decay is None else mechanism.decay()
    scores: Any = (None, None)
    if mechanism.score_slope is not None and gates is not None:
        scores = with_dtype(gates, torch.float32), with_dtype(mechanism.score_slope, torch.float32) / SLOPE_TOKENS
    turns = _turns_of(mechanism)
    given = (
        *(query, key, value, *scores, positions if turns[0] else None, *kernel_map.key, kernel_map.query.weight),
        *(log_decay, list(state), *joint, *turns, kernel_map.function, scaling),
    )
    if inputs.in_place:
        parts = without_dispatcher(OPERATORS.hybrid_step_, _hybrid_step_)(*given, inputs.rows)
    else:
        *new, parts = without_dispatcher(OPERATORS.hybrid_step, _hybrid_step)(*given)
        state = tuple(new)
    (batch, heads), width = query.shape[:2], value.shape[-1]
    near = parts[: batch * heads * width]
    return with_dtype(near.view(batch, 1, heads, width), query.dtype), state


def _map_of(mechanism: HybridAttention) -> tuple[Tensor, int]:
    maps = mechanism.feature_map
    return maps.key_projection, EXP if isinstance(maps, ExpFeatureMap) else HEDGEHOG


def _parameters_on_cuda(mechanism: HybridAttention) -> tuple[Tensor | None, ...]:
    """Of the feature map and the decay, as they are: to convert them would be a launch each."""
    maps, decay = mechanism.feature_map, None if mechanism.decay is None else mechanism.decay.rate
    return maps.key_projection, maps.key_bias, maps.key_norm_weight, maps.query_projection, decay


def _frequencies_on_cuda(mechanism: HybridAttention, like: Tensor) -> Tensor | None:
    if mechanism.rotation is None or not mechanism.needs_positions:
        return None
    return mechanism.rotation.frequencies(like)


def _prefill_on_cuda(
    mechanism: HybridAttention,
    inputs: MechanismInputs,
    line: Line,
    sinks: tuple[Tensor, ...],
    seen: Tensor,
    sums: Any,
) -> tuple[Tensor, Any]:
    """`hybrid` by Triton."""
    (_, first, is_interleaved, trained_length), query = _turns_of(mechanism), inputs.query
    count = mechanism.num_exact_keys
    old, kept = (sums[0], sums[1:]) if count and sums is not None else (sums, ())
    mix = mechanism.mix
    output, new_sums, new_kept = triton_hybrid.prefill(
        *(query, line.key, line.value, line.kind, *sinks, seen, line.score, inputs.positions, line.position),
        *(*_parameters_on_cuda(mechanism), old, kept, mix.far_log_scale, mix.query_norm_weight),
        _frequencies_on_cuda(mechanism, query),
        window=mechanism.window_size,
        count=count,
        first_turned=first,
        is_interleaved=is_interleaved,
        trained_length=trained_length,
        scaling=inputs.scaling,
        is_rate=True,
    )
    return output.transpose(1, 2), (new_sums, *new_kept) if count else new_sums


def _step_on_cuda(mechanism: HybridAttention, inputs: MechanismInputs, old: WindowState) -> tuple[Tensor, State]:
    """`hybrid_step` by Triton."""
    query, key, value, _, scaling, _, positions, gates, *_ = inputs
    _, first, is_interleaved, trained_length = _turns_of(mechanism)
    state = old.stored
    turns = _frequencies_on_cuda(mechanism, query)
    output, new = triton_hybrid.step(
        *(query, with_dtype(key, old.key.dtype), with_dtype(value, old.value.dtype)),
        *(gates if mechanism.score_slope is not None else None, mechanism.score_slope, positions),
        *(*_parameters_on_cuda(mechanism), state),
        *(mechanism.mix.far_log_scale, mechanism.mix.query_norm_weight, turns, inputs.rows),
        first_turned=first,
        is_interleaved=is_interleaved,
        trained_length=trained_length,
        scaling=scaling,
        slope_scale=1 / SLOPE_TOKENS,
        is_rate=True,
        in_place=inputs.in_place,
    )
    return output, tuple(new)


def _turns_of(mechanism: HybridAttention) -> tuple[Sequence[float], int, bool, int]:
    """The rotary frequencies, how many of them the map sees, whether pairs are interleaved, and the trained length."""
    rotary = mechanism.shape.rotary if mechanism.needs_positions else None
    frequencies = () if rotary is None else rotary.inverse_frequencies
    first = len(frequencies) if mechanism.shift is None else min(mechanism.shift.first, len(frequencies))
    return frequencies, first, rotary is not None and rotary.is_interleaved, mechanism.trained_length or 0


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
    """One new real token of `hybrid`; the oldest token of the window moves to the exact keys or to the far sums.

    The state is that of the mechanism. With exact keys the score of token n (counted from 1) is `score [B, 1, Hkv]` +
    n `slope [Hkv]`. Per position (`position [B, 1]`, int32, of the token), rotary embedding has turned the pairs of
    columns by `frequencies`; the feature map does not see the turns from `first_turned` on. From `trained_length` on
    (0: never), sinks and exact keys are compared as far away as at most there. The map consists of `function` (`EXP` or
    `HEDGEHOG`) and the tensors of `KernelMap`, one matrix per head, for inputs scaled by sqrt(scaling).

    Returns:
        The tensors of the new state, then one float32 tensor `[B H (2 W + 3)]`: for each query the near output (joined
        with the far one if `log_scale` and `norm_weight` were given), its log size and its largest logit, the far
        output and its log size.
    """
    state = [x.contiguous() for x in given[STEP_STATE]]
    new_state = [torch.empty_like(x) for x in state]
    return [*new_state, _run_hybrid_step((*given[:STEP_STATE], state, *given[STEP_STATE + 1 :]), new_state)]


def _hybrid_step_(*arguments: Any) -> Tensor:
    """`_hybrid_step` in place, in the blocks `rows` of the state if they are given, else sequence b in block b."""
    *given, rows = arguments
    return _run_hybrid_step(given, given[STEP_STATE], None if rows is None else rows.contiguous())


def _run_hybrid_step(given: Sequence[Any], new_state: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
    """Write the new state, and return the parts of the output."""
    state, log_scale, norm_weight, frequencies, *_, scaling = given[STEP_STATE:]
    shape, strides, places, is_dense = _layout_of(given, rows)
    tensors = (*given[:STEP_STATE], log_scale, norm_weight)
    dense = tensors if is_dense else [None if x is None else x.contiguous() for x in tensors]
    tokens = [0 if x is None else x.data_ptr() for x in dense]
    size, width, angles = 4 * shape[0] * shape[2] * shape[3], shape[8], _floats(tuple(frequencies))
    parts = _fake_hybrid_step_(*given)
    results = [parts.data_ptr() + size * columns for columns in (0, width, width + 1, width + 2, 2 * width + 2)]
    addresses = [*tokens[:6], ctypes.addressof(angles), *tokens[6:], 0, *results]  # no beta
    for each in (state, new_state):
        addresses += [0 if place is None else each[place].data_ptr() for place in places]
    run_step("hybrid_step", shape, addresses, strides, rows, scaling)
    return parts


class StepLayout(NamedTuple):
    """What follows from the shapes, strides and types of the tensors of a step."""

    shape: tuple[int, ...]  # those of csrc/linear_attention.h
    strides: bytes
    places: tuple[int | None, ...]
    is_dense: bool  # whether all tensors but the state are


# Every layout is checked once, because that takes a quarter of the time of a step of six heads.
LAYOUTS: dict[tuple[Any, ...], StepLayout] = {}
MOST_LAYOUTS = 1024


def _layout_of(given: Sequence[Any], rows: Tensor | None) -> StepLayout:
    """The layout of a step, checked.

    Raises:
        ValueError: for the first invalid argument.
        NotImplementedError: without C kernels for these tensors.
    """
    state, log_scale, norm_weight, frequencies, *others = given[STEP_STATE:]
    tensors = (*given[:STEP_STATE], log_scale, norm_weight)
    described = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in (*tensors, *state, rows)]
    known = (*described, tuple(frequencies), *others)
    if (found := LAYOUTS.get(known)) is not None:
        return found
    arguments = [*given, rows]
    check_hybrid_step(*arguments)
    check_blocks(*state)
    (*turns, function, _), (query, key, value) = others, given[:3]
    refuse_without_library(query, key, value)
    (batch, heads), kv_heads, width, places = query.shape[:2], key.shape[1], value.shape[3], PLACES[len(state)]
    window, sinks = (state[cast(int, places[number])] for number in (1, 4))
    shape = (
        *(batch, state[0].shape[0], kv_heads, heads // kv_heads, window.shape[2], sinks.shape[2]),
        *(key.shape[3], state[0].shape[2], width, function),
        *(query.element_size(), key.element_size(), value.element_size()),
        *(0 if given[3] is None else state[1].shape[2], len(frequencies), *turns),
    )
    strides = tuple(0 if place is None else state[place].stride(0) * state[place].element_size() for place in places)
    is_dense = all(x is None or x.is_contiguous() for x in tensors)
    if len(LAYOUTS) == MOST_LAYOUTS:
        LAYOUTS.clear()
    found = LAYOUTS[known] = StepLayout(shape, _strides(shape[2:13], strides), places, is_dense)
    return found


@functools.lru_cache
def _floats(numbers: tuple[float, ...]) -> Any:
    return (ctypes.c_float * len(numbers))(*numbers)


@functools.lru_cache
def _strides(shape: tuple[int, ...], states: tuple[int, ...]) -> bytes:
    """The strides of `hybrid_step` in bytes, with those of its state."""
    kv_heads, groups, _, _, dim, _, width, _, query_bytes, key_bytes, value_bytes = shape
    heads = kv_heads * groups
    query, key, value = query_bytes * heads * dim, key_bytes * kv_heads * dim, value_bytes * kv_heads * width
    results = (4 * heads * width, 4 * heads, 4 * heads, 4 * heads * width, 4 * heads)
    return STEP_NUMBERS.pack(query, key, value, 4 * kv_heads, 0, 4, *[0] * 9, *results, *states, *states)


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
    query: Tensor, key: Tensor, value: Tensor, score: Tensor | None, slope: Tensor | None, position: Tensor | None,
    key_weight: Tensor, key_bias: Tensor | None, key_norm: Tensor | None, query_weight: Tensor,
    log_decay: Tensor | None, state: Sequence[Tensor], log_scale: Tensor | None, norm_weight: Tensor | None,
    frequencies: Sequence[float], first_turned: int, is_interleaved: bool, trained_length: int, function: int,
    scaling: float, rows: Tensor | None = None,
) -> None:  # fmt: skip
    """Check the arguments of the operator `hybrid_step_`.

    Raises:
        ValueError: for the first invalid argument.
    """
    if not query.ndim == key.ndim == value.ndim == 4 or query.shape[1] % (key.shape[1] or 1) or not key.shape[1]:
        check_heads(query, key, value)
    (batch, heads), kv_heads, device = query.shape[:2], key.shape[1], query.device
    dim, columns = key.shape[3], key_weight.shape[-1] if key_weight.ndim else 0
    expected = (
        ("query", query, (batch, heads, 1, dim), None),
        ("key", key, (batch, kv_heads, 1, dim), None),
        ("value", value, (batch, kv_heads, 1, value.shape[3]), None),
        ("score", score, (batch, 1, kv_heads), torch.float32),
        ("slope", slope, (kv_heads,), torch.float32),
        ("position", position, (batch, 1), torch.int32),
        ("key_weight", key_weight, (kv_heads, dim, columns), torch.float32),
        ("key_bias", key_bias, (kv_heads, 1, columns), torch.float32),
        ("key_norm", key_norm, (kv_heads, 1, 1), torch.float32),
        ("query_weight", query_weight, (heads, dim, columns), torch.float32),
        ("log_decay", log_decay, (kv_heads,), torch.float32),
        ("log_scale", log_scale, (heads,), torch.float32),
        ("norm_weight", norm_weight, (heads,), torch.float32),
        *_expected_state(key, value, state, columns * (1 + (function == HEDGEHOG)), query, rows),
    )
    for name, tensor, shape, dtype in expected:
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.device != device:
            check_shape(name, tensor, shape, like=query)
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"`{name}` has a tensor of {tensor.dtype}; with these tokens it must be {dtype}.")
    has_scores = score is not None
    if (log_scale is None) != (norm_weight is None) or (slope is not None) != has_scores:
        raise ValueError("`log_scale` and `norm_weight`, `score` and `slope` belong together; pass both or neither.")
    if function not in (EXP, HEDGEHOG) or (function == HEDGEHOG and not (key_bias is None and key_norm is None)):
        raise ValueError(f"Got `function` = {function}; it must be 2 (exp), or 3 (Hedgehog) without bias and norm.")
    if not dim or not columns:
        raise ValueError(f"Got keys of {dim} and weights of {columns} columns; none may be 0.")
    _check_turns(dim, has_scores, position is not None, len(state), len(frequencies), first_turned, trained_length)


def _check_turns(
    dim: int, has_scores: bool, has_position: bool, tensors: int, pairs: int, first: int, trained_length: int
) -> None:
    """Check that a state of so many tensors has the positions with which keys are turned back.

    Raises:
        ValueError: if it has not, or there are more frequencies than pairs of columns.
    """
    turns_keys = first < pairs or (pairs and trained_length and has_scores)
    if (
        tensors not in ((12, 14) if has_scores else (7, 8))
        or not (has_position or (not pairs and tensors in (7, 12)))
        or (turns_keys and tensors in (7, 12))
        or not 0 <= first <= pairs <= dim // 2
        or trained_length < 0
    ):
        raise ValueError(
            f"Got a state of {tensors} tensors {'with' if has_scores else 'without'} scores, "
            f"{'a' if has_position else 'no'} position, {pairs} frequencies for {dim} columns, of which the map sees "
            f"{first}, and a trained length of {trained_length}. A state has 7 tensors, and 5 more with scores; where "
            "keys are turned back, which needs a position, it has the position of each key too. There is one frequency "
            "for a pair of columns at most."
        )


def _expected_state(
    key: Tensor, value: Tensor, state: Sequence[Tensor], features: int, query: Tensor, rows: Tensor | None
) -> list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of a state.

    Raises:
        ValueError: if there is no such number of tensors, or a window or exact keys of 0 places.
    """
    if len(state) not in PLACES:
        raise ValueError(f"Got a state of {len(state)} tensors; a state of `hybrid` has 7, 8, 12 or 14.")
    tensors = [None if place is None else state[place] for place in PLACES[len(state)]]
    window, sinks, kept = (
        x.shape[2] if x is not None and x.ndim == 4 else 0 for x in (tensors[1], tensors[4], tensors[9])
    )
    if not window or (tensors[9] is not None and not kept):
        raise ValueError(f"Got a state with a window of {window} and {kept} exact keys; none may be 0.")
    blocks, dim, width = check_rows(rows, state[0], query), key.shape[3], value.shape[3]
    heads = blocks, key.shape[1]
    number, place = torch.float32, torch.int32
    shapes = (
        ((*heads, features, width + 2), number),
        ((*heads, window, dim), key.dtype),
        ((*heads, window, width), value.dtype),
        ((blocks, window), torch.int8),
        ((*heads, sinks, dim), key.dtype),
        ((*heads, sinks, width), value.dtype),
        ((blocks, 1), torch.int64),
        ((blocks, window), place),
        ((*heads, window, 1), number),
        ((*heads, kept, dim), key.dtype),
        ((*heads, kept, width), value.dtype),
        ((*heads, kept, 1), number),
        ((*heads, kept, 1), place),
        ((*heads, kept, 1), place),
    )
    return [("state", x, shape, dtype) for x, (shape, dtype) in zip(tensors, shapes)]


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


class HybridArguments(NamedTuple):
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
    sums: Any,
) -> tuple[Tensor, Any] | None:
    """The operator for the keys of `line` (see `WindowAttention._at_once`), at once or in a graph, where C takes them.

    With exact keys, that is without gradients only.

    Returns:
        The output `[B, H, N, W]` in the accumulation dtype, and the state after the keys that have left the window.

    Raises:
        ValueError: if the shapes, dtypes or devices do not match.
    """
    query, scaling, positions = inputs.query, inputs.scaling, cast(Tensor, inputs.positions)
    visible, features = line.kind, mechanism.feature_map.num_features
    if triton_hybrid.takes(query, line.key, line.value, sinks[0], *_map_of(mechanism)):
        return _prefill_on_cuda(mechanism, inputs, line, sinks, seen, sums)
    if needs_plain(query) or not takes_attention(query, line.key, line.value, visible, features):
        return None
    if line.score is not None and torch.is_grad_enabled():
        return None
    constants, kernel_map = mechanism.mix.kernel_parameters(), mechanism.feature_map.kernel_map(scaling)
    if kernel_map is None:
        return None
    turns: Any = (None, None)
    pairs, move = NO_PAIRS, mechanism.move_to_sinks(query, positions)
    if mechanism.shift is not None:
        turn = mechanism.shift.table(-positions)
        key_turn = turn
        if line.score is not None:  # the kernel turns the keys that are displaced
            key_turn = None
        elif line.position is not inputs.positions:
            key_turn = mechanism.shift.table(-cast(Tensor, line.position))
        turns = turn, key_turn
        pairs = mechanism.shift.pairs
    to_sinks, sink_pairs = None, NO_PAIRS
    if move is not None and mechanism.to_sinks is not None:
        to_sinks, sink_pairs = mechanism.to_sinks.table(move), mechanism.to_sinks.pairs
    maps: Any = (*cast(Any, kernel_map.key), cast(Any, kernel_map.query).weight)
    log_decay = None if mechanism.decay is None else mechanism.decay()
    how: Any = (kernel_map.function, mechanism.window_size, scaling, pairs, sink_pairs)
    far_sums, kept = (sums, ()) if line.score is None or sums is None else (sums[0], sums[1:])
    tensors: Any = (query, line.key, line.value, visible, *sinks, seen, *turns, to_sinks, log_decay, far_sums)
    given: list[Any] = [*tensors, *maps, *constants, *how]
    if line.score is None:
        output, _, _, sums = OPERATORS.joint_attention(*given)
        return output.transpose(1, 2), sums
    of_keys = line.score, positions, line.position, *_turns_of(mechanism), list(kept), mechanism.num_exact_keys
    output, *new = OPERATORS.exact_attention(*given, *of_keys)
    return output.transpose(1, 2), tuple(new)


def _joint(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = HybridArguments(*arguments)
    features = check_joint(given)
    refuse_without_library(*given[:3], *given[4:6], given.key_weight)
    output, size, sums, state = _new_results(given, features)
    kv_heads, (first, num_far) = given.key.shape[1], given.ranges
    in_large_pages(output)
    total, scale = sums.split(1, dim=-1)
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
    return output, size, sums, state


def _fake_joint(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = HybridArguments(*arguments)
    return _new_results(given, check_joint(given))


def _new_results(given: HybridArguments, features: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, heads, length, _), kv_heads, width = given.query.shape, given.key.shape[1], given.value.shape[3]
    output = given.query.new_empty(batch, length, heads, width, dtype=accumulation_dtype(given.query))
    size = output.new_empty(batch, kv_heads, heads // kv_heads, length, 1)
    sums = size.new_empty(*size.shape[:-1], 2)  # the far denominators and the logarithms of their units
    return output, size, sums, output.new_empty(batch, kv_heads, features, width + 2)


def _joint_backward(grad_output: Tensor | None, grad_state: Tensor | None, *arguments: Any) -> list[Tensor]:
    *tensors, output, size, sums, needed = arguments
    given = HybridArguments(*tensors)
    features = check_joint(given)
    query, key, value = (x.to("meta") for x in given[:3])
    likes = _new_results(given._replace(query=query, key=key, value=value), features)
    computed = {"output": output, "log_size": size, "denominator": sums}
    expected = (likes[0], likes[3], *likes[:3])
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
    rows, (total, scale) = grouped(output.transpose(1, 2), kv_heads), sums.split(1, dim=-1)
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
        results = (rows[:, :, :, first:], total[:, :, :, first:], scale[:, :, :, first:], None)
        of_state = None if grad_state is None else grad_state.contiguous().unsqueeze(2)
        far = (*described, *results, incoming, None, of_state, *parts, *maps)
        differentiate((features, given.function, True), far, _turned(given.query_turn, given.pairs))
    described = _window_arguments(given.scaling, *given[:7], None, given.sink_turn)
    near = (*described, total, None, rows, size, None, grad_rows, None, *made)
    how = (given.window, given.sink_key.shape[2], True)
    sinks = (*(grad.unsqueeze(2) for grad in sink_grads), None)
    run_attention("window_backward", how, (*near, *sinks), turned=_turned(given.sink_turn, given.sink_pairs))
    constant, norm = (None if x is None else x.flatten(1).sum(0) for x in maps[5:7])
    norm = None if norm is None else (norm * given.scaling).to(given.norm_weight.dtype)
    constant = None if constant is None else constant.to(given.log_scale.dtype)
    shared = shared_gradients(maps, given.log_decay, given[12:16])
    return [or_nothing(x, given.query) for x in (*grads, *sink_grads, *shared, constant, norm)]


def _fake_joint_backward(grad_output: Tensor | None, grad_state: Tensor | None, *arguments: Any) -> list[Tensor]:
    needed = arguments[-1]
    given = HybridArguments(*arguments[:-4])
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


MORE_TENSORS = 19  # of C, behind those of `Exact`


class Exact(NamedTuple):
    """The further arguments of the operator with exact keys; see `_hybrid_step` for those of rotary embedding."""

    score: Tensor  # [B, Hkv, L, 1]
    position: Tensor | None  # [B, N] int32, of queries
    key_position: Tensor | None  # [B, L] int32
    frequencies: Sequence[float]
    first_turned: int
    is_interleaved: bool
    trained_length: int
    kept: Sequence[Tensor]  # the tensors of `Kept`; none without a state
    number: int  # M

    def run(self, given: HybridArguments, *others: Tensor | None, name: str = "exact_keys_forward") -> None:
        """Call C: `others` are its tensors from those kept after the last query on, `MORE_TENSORS` at most."""
        batch, kv_heads, (first, num_far) = given.key.shape[0], given.key.shape[1], given.ranges
        far, queries = slice(num_far), slice(first, None)
        rows = ((given.visible, far), (self.position, queries), (self.key_position, far))
        mask, *places = (
            None if x is None else x[:, None, None, part, None].expand(-1, kv_heads, -1, -1, -1) for x, part in rows
        )
        scale = self.score.new_full((1,) * 5, given.scaling).expand(batch, kv_heads, -1, -1, -1)
        angles = self.score.new_tensor(self.frequencies).expand(1, 1, 1, 1, -1)
        keys = (with_rows(x)[:, :, :num_far].unsqueeze(2) for x in (given.key, given.value, self.score))
        key, value, score = keys
        old = (*(x.contiguous().unsqueeze(2) for x in self.kept), *[None] * (5 - len(self.kept)))
        query = grouped(with_rows(given.query), kv_heads)[:, :, :, first:]
        pairs = len(self.frequencies)
        turned = (pairs, self.first_turned, *((2, 1) if self.is_interleaved else (1, pairs)))
        missing = [None] * (MORE_TENSORS - len(others))
        tensors = (query, key, value, mask, score, *places, angles, scale, *old, *others, *missing)
        run_attention(name, (self.number, self.trained_length, True), tensors, turned=turned)


def _exact(*arguments: Any) -> list[Tensor]:
    """`_joint` with exact keys, without gradients: the output, the far sums, and the tensors of `Kept`."""
    given, exact = HybridArguments(*arguments[: -len(Exact._fields)]), Exact(*arguments[-len(Exact._fields) :])
    features = check_exact(given, exact)
    refuse_without_library(*given[:3], *given[4:6], given.key_weight)
    output, size, sums, state = _new_results(given, features)
    kept = [
        x for x in Kept.nothing(given.key, given.value, exact.number, exact.key_position is not None) if x is not None
    ]
    (batch, kv_heads), (first, num_far), (total, scale) = given.key.shape[:2], given.ranges, sums.split(1, dim=-1)
    rows = grouped(output.transpose(1, 2), kv_heads)
    total[:, :, :, :first] = 0
    state.zero_()
    state[..., -1] = EMPTY_MAXIMUM
    if num_far:
        gone = [
            in_large_pages(output.new_empty(batch, kv_heads, 1, num_far, n))
            for n in (given.key.shape[3], given.value.shape[3], 1)
        ]
        new = [x.unsqueeze(2) for x in kept] + [None] * (5 - len(kept))
        exact.run(given, *new, *gone, None, None)
        real = given.visible[:, :num_far]
        held = (exact.kept[3][:, 0, :, 0] != 0).sum(dim=1, keepdim=True) if exact.kept else 0
        is_gone = real & (real.cumsum(dim=1) + held > exact.number)
        far = _far_arguments(given)
        far[1], far[2], far[3], far[-1] = (
            *gone[:2],
            is_gone[:, None, None, :, None].expand(-1, kv_heads, -1, -1, -1),
            gone[2],
        )
        results = (rows[:, :, :, first:], total[:, :, :, first:], scale[:, :, :, first:], state.unsqueeze(2))
        attend((features, given.function, True), (*far, *results), _turned(given.query_turn, given.pairs))
    near = (*_window_arguments(given.scaling, *given[:7], None, given.sink_turn), total, scale, rows, size, None)
    how = (given.window, given.sink_key.shape[2], True)
    run_attention("window_forward", how, near, turned=_turned(given.sink_turn, given.sink_pairs))
    if num_far:
        exact.run(given, *[None] * 8, rows[:, :, :, first:], size[:, :, :, first:])
    return [output, state, *kept]


def _fake_exact(*arguments: Any) -> list[Tensor]:
    given, exact = HybridArguments(*arguments[: -len(Exact._fields)]), Exact(*arguments[-len(Exact._fields) :])
    output, _, _, state = _new_results(given, check_exact(given, exact))
    kept = Kept.nothing(given.key, given.value, exact.number, exact.key_position is not None)
    return [output, state, *(x for x in kept if x is not None)]


def check_exact(given: HybridArguments, exact: Exact) -> int:
    """Check the arguments of the operator with exact keys and return F, the number of features.

    Raises:
        ValueError: for the first invalid argument.
    """
    features = check_joint(given, turns_keys=False)
    (batch, kv_heads, rows, dim), query, count = given.key.shape, given.query, exact.number
    heads, kept = (batch, kv_heads, count), exact.kept
    expected = (
        ("score", exact.score, (batch, kv_heads, rows, 1), torch.float32),
        ("position", exact.position, (batch, query.shape[2]), torch.int32),
        ("key_position", exact.key_position, (batch, rows), torch.int32),
        *zip(
            ["kept"] * 5,
            kept,
            ((*heads, dim), (*heads, given.value.shape[3]), *[(*heads, 1)] * 3),
            (given.key.dtype, given.value.dtype, torch.float32, torch.int32, torch.int32),
        ),
    )
    for name, tensor, shape, dtype in expected:
        check_shape(name, tensor, shape, like=query)
        if tensor is not None and tensor.dtype != dtype:
            raise ValueError(f"`{name}` has a tensor of {tensor.dtype}; with these tokens it must be {dtype}.")
    has_positions = exact.key_position is not None
    if count < 1 or len(kept) != (0 if given.state is None else 4 + has_positions):
        raise ValueError(
            f"Got {count} exact keys and {len(kept)} tensors of a state; there must be a key, and with a state 4 "
            "tensors, or 5 with the positions of keys."
        )
    tensors = 14 if has_positions else 12
    pairs = len(exact.frequencies)
    _check_turns(dim, True, exact.position is not None, tensors, pairs, exact.first_turned, exact.trained_length)
    return features


KEYS = (
    "Tensor query, Tensor key, Tensor value, Tensor visible, Tensor score, Tensor? position, float[] frequencies, "
    "int first_turned, bool is_interleaved, int count, float scaling"
)


def exact_keys(mechanism: HybridAttention, inputs: MechanismInputs, line: Line, mask: Tensor) -> tuple[Any, ...] | None:
    """What `mechanism.exact_in_torch` returns, with gradients, where C takes these tensors and no state comes before.

    Raises:
        ValueError: if the shapes, dtypes or devices do not match.
    """
    query, positions = inputs.query, inputs.positions
    if needs_plain(query) or not is_eager(query) or not takes_attention(query, line.key, line.value, mask, 1):
        return None
    if positions is not None and mechanism.move_to_kept(positions) is not None:
        return None
    score, position = cast(Tensor, line.score).detach(), line.position
    turns = _turns_of(mechanism)[:3] if position is not None else ((), 0, False)
    others = mask, score, position, *turns, mechanism.num_exact_keys, inputs.scaling

    def plain(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        part, key, value, _, _, last = mechanism.exact_in_torch(
            inputs._replace(query=query), line._replace(key=key, value=value), mask
        )
        return [*part, key, value, *last[:2]]

    output, size, key, value, age, *kept = _ExactKeys.apply(query, line.key, line.value, others, plain)
    far = mask & (mask.cumsum(dim=1) > mechanism.num_exact_keys)
    return (output, size), key, value, age, far, tuple(kept)


class _ExactKeys(torch.autograd.Function):
    """`apply(query, key, value, others, plain)`: the operator, and in `plain` what a second derivative goes through."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, others: Sequence[Any], plain: Any
    ) -> tuple[Tensor, ...]:
        found = OPERATORS.exact_keys(query, key, value, *others)
        ctx.others, ctx.plain = others, plain
        ctx.save_for_backward(query, key, value, *found[:2])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found[4], *found[7:])
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, output, size = ctx.saved_tensors
        grads = [*grad_outputs[:4], *grad_outputs[5:7]]
        if torch.is_grad_enabled():
            return *gradients_with_graph(ctx.plain, inputs, grads), None, None
        return *OPERATORS.exact_keys_backward(*grads, *inputs, *ctx.others, output, size), None, None


def _exact_keys(*arguments: Any) -> list[Tensor]:
    """Attention to the kept keys alone, which nothing precedes: `part_of`, and what is displaced before each query.

    Returns:
        The output `[B, Hkv, G, N, W]` and its log size, the displaced keys as the feature map sees them, their values
        and ages `[B, Hkv, N, D, W or 1]`, and the tensors of `Kept`.
    """
    given, exact = _of_keys(*arguments)
    found = _new_parts(given, exact)
    output, size, *gone = found[:5]
    output.zero_()
    size.fill_(EMPTY_MAXIMUM)
    new = [x.unsqueeze(2) for x in found[5:]] + [None] * (10 - len(found))
    exact.run(given, *new, *(x.unsqueeze(2) for x in gone), output, size)
    return found


def _new_parts(given: HybridArguments, exact: Exact) -> list[Tensor]:
    query, key, value, dtype = given.query, given.key, given.value, accumulation_dtype(given.query)
    rows = (*key.shape[:2], query.shape[1] // key.shape[1], query.shape[2])
    results = [query.new_empty(*rows, columns, dtype=dtype) for columns in (value.shape[3], 1)]
    gone = [key.new_empty(*key.shape[:3], columns, dtype=dtype) for columns in (key.shape[3], value.shape[3], 1)]
    kept = Kept.nothing(key, value, exact.number, exact.key_position is not None)
    return [*results, *gone, *(x for x in kept if x is not None)]


def _fake_exact_keys(*arguments: Any) -> list[Tensor]:
    return _new_parts(*_of_keys(*arguments))


def _exact_keys_backward(*arguments: Any) -> list[Tensor]:
    """The gradients of queries, keys and values."""
    grads, (*rest, output, size) = arguments[:6], arguments[6:]
    given, exact = _of_keys(*rest)
    query, key, value = (x.to("meta") for x in given[:3])
    made = given._replace(query=query, key=key, value=value)
    like_output, like_size, key, value, _, *kept = _new_parts(made, exact)
    expected = (like_output, like_size, key, value, *kept[:2], like_output, like_size)
    names = ("output", "log_size", "gone_key", "gone_value", "kept_key", "kept_value")
    incoming = {f"grad_{name}": x for name, x in zip(names, grads)}
    check_results(given.query, expected, **incoming, output=output, log_size=size)
    found = [x.new_zeros(x.shape) for x in given[:3]]
    of_parts = [x if x is None or x.ndim == 5 else x.unsqueeze(2) for x in map(or_rows, grads)]
    own = (grouped(found[0], given.key.shape[1]), *(x.unsqueeze(2) for x in found[1:]))
    exact.run(given, *[None] * 8, output, size, *of_parts, *own, name="exact_keys_backward")
    return found


def or_rows(x: Tensor | None) -> Tensor | None:
    """`with_rows`, or None."""
    return None if x is None else with_rows(x)


def _fake_exact_keys_backward(*arguments: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in arguments[6:9]]


def _of_keys(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, score: Tensor, position: Tensor | None, *how: Any
) -> tuple[HybridArguments, Exact]:
    """The checked arguments of the operator, in which key t leaves the window before query t.

    Raises:
        ValueError: for the first invalid argument.
    """
    *turns, count, scaling = how
    batch, _, kv_heads = check_heads(query, key, value)
    rows = query.shape[2]
    expected = (
        ("query", query, (*query.shape[:3], key.shape[3]), query.dtype),
        ("key", key, (batch, kv_heads, rows, key.shape[3]), key.dtype),
        ("visible", visible, (batch, rows), torch.bool),
        ("score", score, (batch, kv_heads, rows, 1), torch.float32),
        ("position", position, (batch, rows), torch.int32),
    )
    for name, tensor, shape, dtype in expected:
        check_shape(name, tensor, shape, like=query)
        if tensor is not None and tensor.dtype != dtype:
            raise ValueError(f"`{name}` has a tensor of {tensor.dtype}; with these tokens it must be {dtype}.")
    if count < 1:
        raise ValueError(f"Got {count} exact keys; there must be one.")
    has_position, pairs = position is not None, len(turns[0])
    _check_turns(key.shape[3], True, has_position, 14 if has_position else 12, pairs, turns[1], 0)
    refuse_without_library(query, key, value)
    tensors: Any = (query, key, value, visible, *[None] * 14, EXP, 0, scaling, NO_PAIRS, NO_PAIRS)
    others: Any = (score, None, position, *turns, 0, (), count)
    return HybridArguments(*tensors), Exact(*others)


def check_joint(given: HybridArguments, turns_keys: bool = True) -> int:
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
    if widths[turns_keys] != widths[0]:
        raise ValueError("`query_turn` and `key_turn` must turn the same pairs; pass both or neither.")
    return check_attention(*given.far())


def _check_turn(name: str, turn: Tensor | None, rows: int, pairs: Pairs, query: Tensor) -> None:
    if turn is None:
        return
    check_shape(name, turn, *((batch, rows, *turn.shape[-1:]) for batch in (1, query.shape[0])), like=query)
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
    *inputs, output, size, sums = ctx.saved_tensors
    needed = [bool(need) for need in ctx.needs_input_grad[:TENSORS]]
    if torch.is_grad_enabled():
        grads = gradients_with_graph(
            lambda *x: plain_joint(HybridArguments(*x, *ctx.how)), inputs, (grad_output, grad_state)
        )
    else:
        found = iter(
            OPERATORS.joint_attention_backward(grad_output, grad_state, *inputs, *ctx.how, output, size, sums, needed)
        )
        grads = [next(found) if place in DIFFERENTIABLE else None for place in range(TENSORS)]
    # Without far keys there are no gradients of what belongs to them.
    grads = [
        grad if need and grad is not None and grad.shape == x.shape else None
        for grad, need, x in zip(grads, needed, inputs)
    ]
    return *grads, *(None for _ in ctx.how)


def plain_near(given: HybridArguments) -> Part:
    """The part of window and sinks, in plain torch operations."""
    before, window, query = given.before, given.window, accumulated(given.query)
    to_sinks = None if given.sink_turn is None else _turn(query, given.sink_turn, given.sink_pairs)
    near_key, near_value = (F.pad(x, (0, 0, window - 1 - before, 0)) for x in (given.key, given.value))
    visible = F.pad(given.visible, (window - 1 - before, 0))
    sinks = given.sink_key, given.sink_value, given.seen
    output, size, _ = plain_window(query, near_key, near_value, visible, *sinks, to_sinks, given.scaling)
    return output, size


def plain_joint(given: HybridArguments) -> tuple[Tensor, Tensor]:
    """What the operator computes, in plain torch operations: the output `[B, N, H, W]` and the state."""
    before, window, kv_heads = given.before, given.window, given.key.shape[1]
    query = accumulated(given.query)
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
    return join(plain_near(given), (far, far_size))[0].flatten(1, 2).transpose(1, 2), state


def _turn(x: Tensor, turn: Tensor, pairs: Pairs) -> Tensor:
    """`x [B, heads, rows, D]` with its pairs of columns turned by `turn [B or 1, rows, 2 R]`."""
    cosine, sine = turn.detach().to(x.dtype).unsqueeze(1).chunk(2, dim=-1)
    start, step, distance = pairs
    a = start + step * torch.arange(cosine.shape[-1], dtype=torch.long, device=x.device)
    first, second = x[..., a], x[..., a + distance]
    x = x.index_copy(-1, a, first * cosine - second * sine)
    return x.index_copy(-1, a + distance, first * sine + second * cosine)


def _far_arguments(given: HybridArguments) -> list[Tensor | None]:
    """The arguments of the C kernel for far keys, up to their ages."""
    *tensors, _, _ = given.far()
    norm = given.norm_weight * given.scaling
    constants = given.log_scale[:, None, None], norm[:, None, None]
    found = arguments_of_map(tensors, given.key.shape[1], constants)
    query_turn, key_turn = (_table(x, given.query, given.key.shape[1]) for x in (given.query_turn, given.key_turn))
    first, num_far = given.ranges
    query_turn = None if query_turn is None else query_turn[:, :, :, first:]
    key_turn = None if key_turn is None else key_turn[:, :, :, :num_far]
    return [*found[:-3], query_turn, key_turn, None]


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
    "exact_attention": Operator(
        f"({JOINT}, Tensor score, Tensor? position, Tensor? key_position, float[] frequencies, int first_turned, "
        "bool is_interleaved, int trained_length, Tensor[] kept, int count) -> Tensor[]",
        _exact,
        _fake_exact,
    ),
    "exact_keys": Operator(f"({KEYS}) -> Tensor[]", _exact_keys, _fake_exact_keys),
    "exact_keys_backward": Operator(
        "(Tensor? grad_output, Tensor? grad_log_size, Tensor? grad_gone_key, Tensor? grad_gone_value, "
        f"Tensor? grad_kept_key, Tensor? grad_kept_value, {KEYS}, Tensor output, Tensor log_size) -> Tensor[]",
        _exact_keys_backward,
        _fake_exact_keys_backward,
    ),
    "joint_attention_backward": Operator(
        f"(Tensor? grad_output, Tensor? grad_state, {JOINT}, Tensor output, Tensor log_size, Tensor denominator, "
        "bool[] needed) -> Tensor[]",
        _joint_backward,
        _fake_joint_backward,
    ),
}
OPERATORS = register(OPERATORS_OF_HYBRID)
