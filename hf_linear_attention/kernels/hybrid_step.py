# SPDX-License-Identifier: Apache-2.0
"""The operator `hybrid_step`: one decoding step of `hybrid`, out of place or in place, of sequences in any blocks.

Axes: B batch, H query heads, Hkv key/value heads, D head_dim, F features, W head dimension of the values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..mechanisms.hybrid_step import StepArguments, logarithm_of
from ..mechanisms.hybrid_step import hybrid_step as hybrid_step_in_torch
from ..mechanisms.window import WindowState
from ..torch_kernels.blocks import EXP, HEDGEHOG, with_dtype
from . import fla, triton_hybrid
from .checks import check_blocks, check_heads, check_rows, check_shape, check_turns
from .cpu import STEP_NUMBERS, run_step, takes, takes_step, without_dispatcher
from .operators import Operator, register


STEP = (
    "Tensor query, Tensor key, Tensor value, Tensor? score, Tensor? slope, Tensor? position, "
    "Tensor key_weight, Tensor? key_bias, Tensor? key_norm, Tensor query_weight, Tensor? log_decay, {} state, "
    "Tensor log_scale, Tensor norm_weight, Tensor? frequencies, int first_turned, bool is_interleaved, "
    "int trained_length, int function, float scaling, float slope_scale, bool is_rate"
)
POSITION, STEP_STATE = 5, 11  # places among these arguments
# The tensors of a state in the order of C, by how many there are: with positions, exact keys, both or neither.
PLACES: dict[int, tuple[int | None, ...]] = {
    7: (*range(7), *[None] * 7),
    8: (*range(8), *[None] * 6),
    12: (0, *range(5, 11), None, 11, *range(1, 5), None),
    14: (0, *range(6, 14), *range(1, 6)),
}
# What the kernels convert.
CONVERTED = {torch.float32: (torch.float16, torch.bfloat16, torch.float64), torch.int32: (torch.int64,)}


def takes_hybrid_step(
    query: Tensor, key: Tensor, value: Tensor, state: WindowState, key_weight: Tensor, function: int
) -> bool:
    """Whether `hybrid_step` computes a step for these tensors, without gradients only."""
    if fla.is_on_cuda(query):
        sizes = query, key, value, state.sink_key, key_weight, function
        return not torch.is_grad_enabled() and triton_hybrid.takes(*sizes)
    return takes_step(query, key, value, state.key, state.value, in_graphs=True)


def hybrid_step(given: Sequence[Any], in_place: bool, rows: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output `[B, 1, H, W]` and the new state for `StepArguments`, of which `takes_hybrid_step` is true."""
    state = given[STEP_STATE]
    if in_place:
        output = without_dispatcher(OPERATORS.hybrid_step_, _hybrid_step_)(*given, rows)
    else:
        output, *state = without_dispatcher(OPERATORS.hybrid_step, _hybrid_step)(*given)
    return with_dtype(output, given[0].dtype), tuple(state)


def _hybrid_step(*arguments: Any) -> list[Tensor]:
    """The operator: the output `[B, 1, H, W]`, float32 on a CPU, and the tensors of the new state."""
    state = [x.contiguous() for x in arguments[STEP_STATE]]
    given = StepArguments(*arguments)._replace(state=state)
    if fla.is_on_cuda(given.query):
        check_hybrid_step(given, None)
        new_state = [torch.empty_like(x) for x in state]
        return [triton_hybrid.step(given, _in_order(state), _in_order(new_state), None), *new_state]
    layout = _layout_of(given, None)
    if not layout.is_for_c:
        output, new_state = hybrid_step_in_torch(given)
        return [output, *(x.contiguous() for x in new_state)]
    new_state = [torch.empty_like(x) for x in state]
    return [_run_hybrid_step(given, layout, new_state), *new_state]


def _hybrid_step_(*arguments: Any) -> Tensor:
    """The operator in place, in the blocks `rows` of the state if they are given, else sequence b in block b."""
    given, rows = StepArguments._make(arguments[:-1]), arguments[-1]
    if fla.is_on_cuda(given.query):
        check_hybrid_step(given, rows)
        check_blocks(*given.state)
        state = _in_order(given.state)
        return triton_hybrid.step(given, state, state, None if rows is None else rows.contiguous())
    layout = _layout_of(given, rows)
    if layout.is_for_c:
        return _run_hybrid_step(given, layout, given.state, None if rows is None else rows.contiguous())
    old = given.state if rows is None else [x.index_select(0, rows) for x in given.state]
    output, new_state = hybrid_step_in_torch(given._replace(state=old))
    for x, new in zip(given.state, new_state):
        x.copy_(new) if rows is None else x.index_copy_(0, rows, new)
    return output


def _in_order(state: Sequence[Tensor]) -> list[Tensor | None]:
    return [None if place is None else state[place] for place in PLACES[len(state)]]


def _run_hybrid_step(
    given: StepArguments, layout: StepLayout, new_state: Sequence[Tensor], rows: Tensor | None = None
) -> Tensor:
    """Write the new state, and return the output."""
    shape, strides, places, is_ready, _ = layout
    slope = None if given.slope is None else given.slope * given.slope_scale
    position = None if given.position is None else given.position.to(torch.int32)
    decay = logarithm_of(given.log_decay, given.is_rate)
    tensors: Any = (*given[:4], slope, position, *given[POSITION + 1 : STEP_STATE - 1], decay)
    tensors = (*tensors, given.log_scale, given.norm_weight)
    dense = tensors if is_ready else [_for_c(place, x) for place, x in enumerate(tensors)]
    tokens = [0 if x is None else x.data_ptr() for x in dense]
    rows_of_output, width = shape[0] * shape[2] * shape[3], shape[8]
    frequencies = None if given.frequencies is None else given.frequencies.contiguous()
    angles = 0 if frequencies is None else frequencies.data_ptr()
    # C needs memory for the sizes, the largest logits, and the far part, too.
    memory = given.state[0].new_empty(rows_of_output * (2 * width + 3))
    first, size = memory.data_ptr(), 4 * rows_of_output
    results = [first + size * columns for columns in (0, width, width + 1, width + 2, 2 * width + 2)]
    addresses = [*tokens[:6], angles, *tokens[6:], 0, *results]  # no beta
    for each in (given.state, new_state):
        addresses += [0 if place is None else each[place].data_ptr() for place in places]
    run_step("hybrid_step", shape, addresses, strides, rows, given.scaling)
    return memory[: rows_of_output * width].view(shape[0], 1, shape[2] * shape[3], width)


def _for_c(place: int, x: Tensor | None) -> Tensor | None:
    """The argument at this place, dense and in the dtype that C reads; queries, keys and values keep theirs."""
    if x is None:
        return None
    return (x if place < 3 or place == POSITION else with_dtype(x, torch.float32)).contiguous()


class StepLayout(NamedTuple):
    """What follows from the shapes, strides and types of the tensors of a step."""

    shape: tuple[int, ...]  # those of csrc/linear_attention.h
    strides: bytes
    places: tuple[int | None, ...]
    is_ready: bool  # whether all tensors but the state are dense, and as C reads them
    is_for_c: bool


# Every layout is checked once, because that takes a quarter of the time of a step of six heads.
LAYOUTS: dict[tuple[Any, ...], StepLayout] = {}
MOST_LAYOUTS = 1024


def _layout_of(given: StepArguments, rows: Tensor | None) -> StepLayout:
    """The layout of a step, checked.

    Raises:
        ValueError: for the first invalid argument.
    """
    arguments: tuple[Any, ...] = given
    state, log_scale, norm_weight, frequencies, *others = arguments[STEP_STATE:]
    tensors: Any = (*given[:STEP_STATE], log_scale, norm_weight, frequencies)
    described = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in (*tensors, *state, rows)]
    known = (*described, *others)
    if (found := LAYOUTS.get(known)) is not None:
        return found
    check_hybrid_step(given, rows)
    check_blocks(*state)
    (*turns, function, _, _, _), (query, key, value) = others, given[:3]
    (batch, heads), kv_heads, width, places = query.shape[:2], key.shape[1], value.shape[3], PLACES[len(state)]
    window, sinks = (state[cast(int, places[number])] for number in (1, 4))
    shape = (
        *(batch, state[0].shape[0], kv_heads, heads // kv_heads, window.shape[2], sinks.shape[2]),
        *(key.shape[3], state[0].shape[2], width, function),
        *(query.element_size(), key.element_size(), value.element_size()),
        *(0 if given[3] is None else state[1].shape[2], 0 if frequencies is None else len(frequencies), *turns),
    )
    strides = tuple(0 if place is None else state[place].stride(0) * state[place].element_size() for place in places)
    is_ready = all(
        x is None or (x.is_contiguous() and (place < 3 or place == POSITION or x.dtype == torch.float32))
        for place, x in enumerate(tensors)
    )
    if len(LAYOUTS) == MOST_LAYOUTS:
        LAYOUTS.clear()
    found = LAYOUTS[known] = StepLayout(
        shape, _strides(shape[2:13], strides), places, is_ready, takes(query, key, value)
    )
    return found


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
    return [_fake_hybrid_step_(*given), *new_state]


def _fake_hybrid_step_(*given: Any) -> Tensor:
    query, _, value, *_ = given
    like = query if query.device.type == "cuda" else given[STEP_STATE][0]
    return like.new_empty(query.shape[0], 1, query.shape[1], value.shape[-1])


def check_hybrid_step(given: StepArguments, rows: Tensor | None) -> None:
    """Check the arguments of the operator `hybrid_step_`.

    Raises:
        ValueError: for the first invalid argument.
    """
    query, key, value, key_weight, function = *given[:3], given.key_weight, given.function
    if not query.ndim == key.ndim == value.ndim == 4 or query.shape[1] % (key.shape[1] or 1) or not key.shape[1]:
        check_heads(query, key, value)
    (batch, heads), kv_heads, device = query.shape[:2], key.shape[1], query.device
    dim, columns, number = key.shape[3], key_weight.shape[-1] if key_weight.ndim else 0, torch.float32
    shapes: Any = (
        ((batch, heads, 1, dim), None),
        ((batch, kv_heads, 1, dim), None),
        ((batch, kv_heads, 1, value.shape[3]), None),
        ((batch, 1, kv_heads), number),
        ((kv_heads,), number),
        ((batch, 1), torch.int32),
        ((kv_heads, dim, columns), number),
        ((kv_heads, 1, columns), number),
        ((kv_heads, 1, 1), number),
        ((heads, dim, columns), number),
        ((kv_heads,), number),
        ((heads,), number),
        ((heads,), number),
    )
    tensors: Any = (*given[:STEP_STATE], given.log_scale, given.norm_weight)
    names = (*given._fields[:STEP_STATE], "log_scale", "norm_weight")
    features = columns * (1 + (function == HEDGEHOG))
    expected = [(*pair, *of) for *pair, of in zip(names, tensors, shapes)]
    for name, tensor, shape, dtype in (*expected, *_expected_state(key, value, given.state, features, query, rows)):
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.device != device:
            check_shape(name, tensor, shape, like=query)
        also = CONVERTED[dtype] if dtype is not None and name != "state" else ()
        if dtype is not None and tensor.dtype != dtype and tensor.dtype not in also:
            raise ValueError(f"`{name}` has a tensor of {tensor.dtype}; with these tokens it must be {dtype}.")
    has_scores = given.score is not None
    if (given.slope is not None) != has_scores:
        raise ValueError("`score` and `slope` belong together; pass both or neither.")
    has_bias = given.key_bias is not None or given.key_norm is not None
    if function not in (EXP, HEDGEHOG) or (function == HEDGEHOG and has_bias):
        raise ValueError(f"Got `function` = {function}; it must be 2 (exp), or 3 (Hedgehog) without bias and norm.")
    if not dim or not columns:
        raise ValueError(f"Got keys of {dim} and weights of {columns} columns; none may be 0.")
    pairs = 0
    if (frequencies := given.frequencies) is not None:
        pairs = frequencies.numel()
        check_shape("frequencies", frequencies, (pairs,), like=query)
        if frequencies.dtype != torch.float32:
            raise ValueError(f"`frequencies` has a tensor of {frequencies.dtype}; it must be torch.float32.")
    turns = pairs, given.first_turned, given.trained_length
    check_turns(dim, has_scores, given.position is not None, len(given.state), *turns)


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


OPERATORS_OF_STEP = {
    "hybrid_step": Operator(f"({STEP.format('Tensor[]')}) -> Tensor[]", _hybrid_step, _fake_hybrid_step),
    "hybrid_step_": Operator(
        f"({STEP.format('Tensor(a!)[]')}, Tensor? rows) -> Tensor", _hybrid_step_, _fake_hybrid_step_
    ),
}
OPERATORS = register(OPERATORS_OF_STEP)
