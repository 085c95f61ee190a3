# SPDX-License-Identifier: Apache-2.0
"""The operator `joint_attention`: window, sinks and far keys of `hybrid` under one denominator, from start to end in C.

           sinks           far                        window
    keys   0 1 2 3 | 4 5 ......... i - w | i - w + 1 ..... i

Two kernels take turns with the same memory, in both directions: far keys leave their output where the kernel of the
window completes it, and far gradients are what those of the window are added to. Keys are read where they stand,
without padding, and rotary frequencies that the feature map must not see are taken back a block at a time.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, L rows of keys, D head_dim, F features, W
head dimension of the values, s sinks, R pairs of columns that are turned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mechanisms.base import MechanismInputs
from ..mechanisms.hybrid import HybridAttention
from ..mechanisms.window_keys import Line
from ..torch_kernels.attention import in_torch, needs_plain
from ..torch_kernels.blocks import EMPTY_MAXIMUM, EXP, accumulated, accumulation_dtype
from ..torch_kernels.causal import gradients_with_graph
from ..torch_kernels.window import join, log_size, plain_window
from .checks import check_attention, check_heads, check_results, check_shape
from .cpu import attend, differentiate, in_large_pages, run_attention
from .operators import (
    Operator,
    arguments_of_map,
    gradient_like,
    gradient_of_map,
    grouped,
    or_nothing,
    refuse_without_library,
    register,
    takes_attention,
    with_rows,
)


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
    def first(self) -> int:
        """The first query that has far keys."""
        return min(self.window - self.before, self.query.shape[2])

    @property
    def num_far(self) -> int:
        """The number of keys that are far from some query."""
        return self.query.shape[2] - self.first

    def far(self) -> tuple[Any, ...]:
        """The arguments of the operator `attention` for far keys, and the queries that have some."""
        first, num_far = self.first, self.num_far
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
    kv_heads, first = given.key.shape[1], given.first
    in_large_pages(output)
    scale = torch.empty_like(total)
    rows = grouped(output.transpose(1, 2), kv_heads)
    total[:, :, :, :first] = 0
    if given.num_far:
        results = (rows[:, :, :, first:], total[:, :, :, first:], scale[:, :, :, first:], state.unsqueeze(2))
        turned = _turned(given.query_turn, given.pairs)
        attend((features, given.function, True), (*_far_arguments(given), *results), turned)
    elif given.state is not None:
        state.copy_(given.state)
    else:
        state.zero_()
        state[..., -1] = EMPTY_MAXIMUM
    near = (*_near_arguments(given), total, scale, rows, size, None)
    how = (given.window, given.sink_key.shape[2], True)
    run_attention("window_forward", how, near, turned=_turned(given.sink_turn, given.sink_pairs))
    return output, size, total, state


def _fake_joint(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = Given(*arguments)
    return _new_results(given, check_joint(given))


def _new_results(given: Given, features: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (batch, heads, length, _), kv_heads, width = given.query.shape, given.key.shape[1], given.value.shape[3]
    output = given.query.new_empty(batch, length, heads, width, dtype=accumulation_dtype(given.query))
    size, total = (output.new_empty(batch, kv_heads, heads // kv_heads, length, 1) for _ in range(2))
    return output, size, total, output.new_empty(batch, kv_heads, features, width + 2)


def _joint_backward(grad_output: Tensor | None, grad_state: Tensor | None, *arguments: Any) -> list[Tensor]:
    *tensors, output, size, total, needed = arguments
    given = Given(*tensors)
    features = check_joint(given)
    check_joint_results(given, features, grad_output, grad_state, output, size, total, needed)
    refuse_without_library(*given[:3], *given[4:6], given.key_weight)
    kv_heads, first, num_far = given.key.shape[1], given.first, given.num_far
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
        maps = [
            torch.empty(x.shape, dtype=torch.float32, device="cpu") if need and x is not None else None
            for need, x in zip(wanted, described[4:12])
        ]
        parts = (made[0][:, :, :, first:], *(grad[:, :, :, :num_far] for grad in made[1:]))
        incoming = None if grad_rows is None else grad_rows[:, :, :, first:]
        results = (rows[:, :, :, first:], total[:, :, :, first:], None, None)
        of_state = None if grad_state is None else grad_state.contiguous().unsqueeze(2)
        far = (*described, *results, incoming, None, of_state, *parts, *maps)
        differentiate((features, given.function, True), far, _turned(given.query_turn, given.pairs))
    near = (*_near_arguments(given), total, None, rows, size, None, grad_rows, None, *made)
    how = (given.window, given.sink_key.shape[2], True)
    sinks = (*(grad.unsqueeze(2) for grad in sink_grads), None)
    run_attention("window_backward", how, (*near, *sinks), turned=_turned(given.sink_turn, given.sink_pairs))
    return [or_nothing(x, given.query) for x in (*grads, *sink_grads, *_shared_gradients(given, maps))]


def _shared_gradients(given: Given, maps: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of the tensors from `log_decay` on, from those per batch member and head."""
    decay, *affine, first_state = maps
    decay = None if decay is None or given.log_decay is None else decay.sum(0).flatten().to(given.log_decay.dtype)
    like = (given.key_weight, given.key_bias, given.key_norm, given.query_weight)
    found = [None if x is None or y is None else gradient_of_map(x, y) for x, y in zip(affine, like)]
    scale, norm = (None if x is None else x.flatten(1).sum(0) for x in affine[4:])
    norm = None if norm is None else (norm * given.scaling).to(given.norm_weight.dtype)
    scale = None if scale is None else scale.to(given.log_scale.dtype)
    return [decay, None if first_state is None else first_state.squeeze(2), *found, scale, norm]


def _fake_joint_backward(grad_output: Tensor | None, grad_state: Tensor | None, *arguments: Any) -> list[Tensor]:
    needed = arguments[-1]
    given = Given(*arguments[:-4])
    check_joint(given)
    tensors: Any = [given[place] for place in DIFFERENTIABLE]
    dense = [gradient_like(x) for x in tensors[:3]] + [x.new_empty(x.shape) for x in tensors[3:5]]
    others = [
        x.new_empty(x.shape)
        if x is not None and needed[place] and (given.num_far or (place == 11 and grad_state is not None))
        else None
        for x, place in zip(tensors[5:], DIFFERENTIABLE[5:])
    ]
    return [or_nothing(x, given.query) for x in (*dense, *others)]


def _save_joint(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    ctx.how = inputs[TENSORS:]
    ctx.save_for_backward(*inputs[:TENSORS], *output[:3])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1], output[2])


def check_joint(given: Given) -> int:
    """Check the arguments of the operator and return F, the number of features.

    Raises:
        ValueError: for the first invalid argument.
    """
    query, key, value, window = given.query, given.key, given.value, given.window
    batch, heads, kv_heads = check_heads(query, key, value)
    length, rows, sinks = query.shape[2], key.shape[2], given.sink_key.shape[2] if given.sink_key.ndim == 4 else None
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
    check_shape("query", query, (batch, heads, length, key.shape[3]), like=query)
    check_shape("visible", given.visible, (batch, rows), like=query)
    check_shape("sink_key", given.sink_key, (batch, kv_heads, None, key.shape[3]), like=query)
    check_shape("sink_value", given.sink_value, (batch, kv_heads, sinks, value.shape[3]), like=query)
    check_shape("seen", given.seen, (batch, length, sinks), like=query)
    if given.visible.dtype != torch.bool or given.seen.dtype != torch.bool:
        raise ValueError(f"`visible` and `seen` are {given.visible.dtype} and {given.seen.dtype}; both must be bool.")
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
    check_shape(name, turn, *((batch, rows, None) for batch in (1, query.shape[0])), like=query)
    count, (start, step, distance) = turn.shape[2] // 2, pairs
    is_apart = (step == 1 and distance >= count) or (step == 2 and distance == 1)
    last = start + (count - 1) * step + distance
    if turn.dtype != torch.float32 or turn.shape[2] % 2 or start < 0 or not is_apart or last >= query.shape[3]:
        raise ValueError(
            f"`{name}` is {turn.dtype} with {turn.shape[2]} columns for the pairs {tuple(pairs)} of {query.shape[3]} "
            "columns; it must be float32, with a cosine and a sine for each pair that there is."
        )


def check_joint_results(
    given: Given,
    features: int,
    grad_output: Tensor | None,
    grad_state: Tensor | None,
    output: Tensor,
    log_size: Tensor,
    denominator: Tensor,
    needed: Sequence[bool],
) -> None:
    """Check what the operator `joint_attention_backward` takes in addition to the arguments of `joint_attention`.

    Raises:
        ValueError: for the first invalid argument.
    """
    (batch, heads, length, _), kv_heads, width = given.query.shape, given.key.shape[1], given.value.shape[3]
    by_head, per_query = (batch, length, heads, width), (batch, kv_heads, heads // kv_heads, length, 1)
    dtype = accumulation_dtype(given.query)
    check_results(
        given.query,
        grad_output=(grad_output, by_head, dtype),
        grad_state=(grad_state, (batch, kv_heads, features, width + 2), dtype),
        output=(output, by_head, dtype),
        log_size=(log_size, per_query, dtype),
        denominator=(denominator, per_query, dtype),
    )
    for name, x in (("output", output), ("log_size", log_size), ("denominator", denominator)):
        if not x.is_contiguous():
            raise ValueError(f"`{name}` is not dense; pass it as `joint_attention` returned it.")
    if len(needed) != TENSORS:
        raise ValueError(f"`needed` has {len(needed)} entries; it must have one for each of the {TENSORS} tensors.")


def _differentiate_joint(
    ctx: Any, grad_output: Tensor | None, _: Any, __: Any, grad_state: Tensor | None
) -> tuple[Tensor | None, ...]:
    *inputs, output, size, total = ctx.saved_tensors
    needed = [bool(need) for need in ctx.needs_input_grad[:TENSORS]]
    if torch.is_grad_enabled():

        def plain(*leaves: Any) -> tuple[Tensor, Tensor]:
            return plain_joint(Given(*leaves, *ctx.how))

        grads = gradients_with_graph(plain, inputs, (grad_output, grad_state))
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
    turns = (
        None if x is None else _table(x, given.query, given.key.shape[1])[:, :, :, rows]
        for x, rows in ((given.query_turn, slice(given.first, None)), (given.key_turn, slice(0, given.num_far)))
    )
    return [*found[:-2], *turns]


def _near_arguments(given: Given) -> list[Tensor | None]:
    """The arguments of the C kernel for the window and the sinks, up to the angles of the sinks."""
    query, kv_heads = given.query, given.key.shape[1]
    numbers = given.visible[:, None, None, :, None], given.seen[:, None, None], query.new_full((1,) * 5, given.scaling,
        dtype=torch.float32)  # fmt: skip
    visible, seen, scaling = (with_rows(x).expand(query.shape[0], kv_heads, -1, -1, -1) for x in numbers)
    key, value, *sinks = (with_rows(x).unsqueeze(2) for x in (given.key, given.value, given.sink_key, given.sink_value))
    turn = None if given.sink_turn is None else _table(given.sink_turn, query, kv_heads)
    return [grouped(with_rows(query), kv_heads), key, value, visible, *sinks, seen, None, scaling, turn]


def _table(turn: Tensor, query: Tensor, kv_heads: int) -> Tensor:
    return with_rows(turn)[:, None, None].expand(query.shape[0], kv_heads, -1, -1, -1)


def _turned(turn: Tensor | None, pairs: Pairs) -> tuple[int, ...]:
    """What `run_attention` has to know of the columns that are turned."""
    return (0, 0, 0, 0) if turn is None else (turn.shape[-1] // 2, *pairs)


OPERATORS_OF_JOINT = {
    "joint_attention": Operator(
        f"({JOINT}) -> (Tensor, Tensor, Tensor, Tensor)", _joint, _fake_joint, _differentiate_joint, _save_joint
    ),
    "joint_attention_backward": Operator(
        f"(Tensor? grad_output, Tensor? grad_state, {JOINT}, Tensor output, Tensor log_size, Tensor denominator, "
        "bool[] needed) -> Tensor[]",
        _joint_backward,
        _fake_joint_backward,
    ),
}
OPERATORS = register(OPERATORS_OF_JOINT)
