# SPDX-License-Identifier: Apache-2.0
"""The operator `hybrid`: window, sinks, exact and far keys under one denominator; serving and training call it.

The kernels of the parts take turns with the same memory, in both directions: far keys leave their output where the
kernel of the window completes it and that of the exact keys joins its own, and far gradients are what those of the
window are added to. Rotary frequencies that the feature map must not see are taken back a block at a time.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, L rows of keys, D head_dim, F features, W
head dimension of the values, M exact keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_kernels.blocks import EMPTY_MAXIMUM, EXP, accumulation_dtype, needs_plain
from ..torch_kernels.causal import gradients_with_graph
from ..torch_kernels.exact_keys import Kept
from .checks import check_attention, check_needed, check_results, check_shape, check_turns, check_window
from .cpu import NOT_TURNED, attend, differentiate, in_large_pages, run_attention, takes, takes_attention
from .hybrid_arguments import HybridArguments
from .hybrid_in_torch import hybrid_in_torch
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
    table_per_head,
    window_arguments,
    with_rows,
)


HYBRID = (
    "Tensor query, Tensor key, Tensor value, Tensor visible, Tensor sink_key, Tensor sink_value, Tensor seen, "
    "Tensor? log_decay, Tensor? state, Tensor key_weight, Tensor? key_bias, Tensor? key_norm, Tensor query_weight, "
    "Tensor log_scale, Tensor norm_weight, Tensor? kept_key, Tensor? kept_value, Tensor? kept_score, "
    "Tensor? kept_age, Tensor? kept_position, Tensor? score, Tensor? position, Tensor? key_position, int function, "
    "int window, float scaling, float[] frequencies, int first_turned, bool is_interleaved, int trained_length, "
    "int num_exact_keys"
)
TENSORS = 23
DIFFERENTIABLE = (0, 1, 2, 4, 5, *range(7, 17))
DECAY, STATE = 7, 8  # places among the tensors
MORE_TENSORS = 19  # of exact_keys_forward and _backward, from those that are kept after the last query on


def takes_hybrid(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, features: int) -> bool:
    """Whether `hybrid` computes for these tensors."""
    return not needs_plain(query) and takes_attention(query, key, value, visible, features)


def hybrid(arguments: Sequence[Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The operator for the `HybridArguments`, of which `takes_hybrid` is true.

    Returns:
        The output `[B, H, N, W]` in the accumulation dtype, and the new tensors of the state.

    Raises:
        ValueError: if the shapes, dtypes or devices do not match.
    """
    given = HybridArguments._make(arguments)
    output, _, _, *state = OPERATORS.hybrid(*given)
    count = 1 if given.score is None else 5 + (given.key_position is not None)
    return output.transpose(1, 2), tuple(state[:count])


def _hybrid(*arguments: Any) -> tuple[Tensor, ...]:
    """The operator.

    Returns:
        What `hybrid_in_torch` returns, whose exact keys (none or more) always have positions; after the output come the
        logarithm of its denominator `[B, Hkv, G, N, 1]`, and for the backward pass `[B, Hkv, G, N, 2]` the denominator
        in the units of far keys, and the logarithm of these units.
    """
    given = HybridArguments(*arguments)
    features = check_hybrid(given)
    results = output, size, sums, state, *kept = _new_results(given, features)
    if not _takes(given):
        size.zero_(), sums.zero_()
        for x, found in zip((output, state, *kept), hybrid_in_torch(given)):
            x.copy_(found)
        return results
    kv_heads, (first, num_far) = given.key.shape[1], given.ranges
    in_large_pages(output)
    total, scale = sums.split(1, dim=-1)
    rows = grouped(output.transpose(1, 2), kv_heads)
    total[:, :, :, :first] = 0
    if num_far:
        far, turned = _far_arguments(given, _displaced(given, kept))
        of_far = (rows[:, :, :, first:], total[:, :, :, first:], scale[:, :, :, first:], state.unsqueeze(2))
        attend((features, given.function, True), (*far, *of_far), turned)
    else:
        state.zero_()
        state[..., -1] = EMPTY_MAXIMUM
    near, how, turned = _near_arguments(given)
    run_attention("window_forward", how, (*near, total, scale, rows, size, None), turned=turned)
    if num_far and given.score is not None:
        before = size.clone()
        _run_exact(given, "exact_keys_forward", *[None] * 8, rows[:, :, :, first:], size[:, :, :, first:])
        total.mul_(before.sub_(size).neg_().exp_())  # what is joined later counts for far keys too
    return results


def _takes(given: HybridArguments) -> bool:
    return takes(given.query, given.key, given.value, given.sink_key, given.sink_value, given.key_weight)


def _fake_hybrid(*arguments: Any) -> tuple[Tensor, ...]:
    given = HybridArguments(*arguments)
    return _new_results(given, check_hybrid(given))


def _new_results(given: HybridArguments, features: int) -> tuple[Tensor, ...]:
    (batch, heads, length, _), kv_heads, width = given.query.shape, given.key.shape[1], given.value.shape[3]
    output = given.query.new_empty(batch, length, heads, width, dtype=accumulation_dtype(given.query))
    size = output.new_empty(batch, kv_heads, heads // kv_heads, length, 1)
    state = output.new_empty(batch, kv_heads, features, width + 2)
    kept: Any = Kept.nothing(given.key, given.value, given.num_exact_keys, True)
    return output, size, size.new_empty(*size.shape[:-1], 2), state, *kept


def _hybrid_backward(
    grad_output: Tensor | None,
    grad_state: Tensor | None,
    grad_kept_key: Tensor | None,
    grad_kept_value: Tensor | None,
    *arguments: Any,
) -> list[Tensor]:
    """The gradients of the arguments at `DIFFERENTIABLE`; those at the end are empty where they are not needed."""
    *others, output, size, sums, needed = arguments
    given = HybridArguments(*others)
    features = check_hybrid(given)
    grads = {"output": grad_output, "state": grad_state, "kept_key": grad_kept_key, "kept_value": grad_kept_value}
    query, key, value = (x.to("meta") for x in given[:3])
    likes = _new_results(given._replace(query=query, key=key, value=value), features)
    results = {"output": output, "log_size": size, "denominator": sums}
    named = {f"grad_{name}": x for name, x in grads.items()}
    check_results(given.query, (likes[0], *likes[3:6], *likes[:3]), **named, **results)
    for name, x in results.items():
        if not x.is_contiguous():
            raise ValueError(f"`{name}` is not dense; pass it as `hybrid` returned it.")
    check_needed(needed, TENSORS)
    # C has no gradients of exact keys after others, or beyond the trained length.
    is_beyond_c = bool(given.kept) or (given.score is not None and _is_clamped(given))
    found = _gradients_in_c if _takes(given) and not is_beyond_c else _gradients
    return found(given, list(grads.values()), (output, size, sums), needed)


def _gradients(given: HybridArguments, grads: Sequence[Tensor | None], _: Any, needed: Sequence[bool]) -> list[Tensor]:
    wanted = [place < 6 or need for place, need in enumerate(needed)]  # as C makes them
    inputs, how = given[:TENSORS], given[TENSORS:]
    found = gradients_in_torch(lambda *x: hybrid_in_torch(HybridArguments(*x, *how)), inputs, wanted, grads)
    return [found[place].contiguous() if place > 2 else found[place] for place in DIFFERENTIABLE]


def _gradients_in_c(
    given: HybridArguments, incoming: Sequence[Tensor | None], results: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor]:
    (output, size, sums), features = results, check_attention(*given.far())
    grad_output, grad_state, *grad_kept = incoming
    tensors: Any = given[:TENSORS]
    kv_heads, (first, num_far) = given.key.shape[1], given.ranges
    grads = [in_large_pages(gradient_like(x)) for x in (given.query, given.key, given.value)]
    sink_grads = [x.new_empty(x.shape) for x in (given.sink_key, given.sink_value)]
    grads[0][:, :, :first] = 0
    grads[1][:, :, num_far:] = grads[2][:, :, num_far:] = 0
    made = [grouped(grads[0], kv_heads), *(grad.unsqueeze(2) for grad in grads[1:])]
    grad_rows = None if grad_output is None else grouped(with_rows(grad_output).transpose(1, 2), kv_heads)
    rows, (total, scale) = grouped(output.transpose(1, 2), kv_heads), sums.split(1, dim=-1)
    of_far = [rows, total, scale, None, grad_rows]
    parts = [made[0][:, :, :, first:], *(grad[:, :, :, :num_far] for grad in made[1:])]
    maps: list[Tensor | None] = [None] * 8
    if num_far:
        gone = _displaced(given, _new_results(given, 1)[4:])
        far, turned = _far_arguments(given, gone)
        # Of decay, key map, query map and state, per batch member and head.
        maps = memory_per_head(far[4:12], [needed[DECAY], *needed[9:15], needed[STATE]])
        of_far = [None if x is None else x[:, :, :, first:] for x in of_far]
        of_keys = parts if gone is None else [parts[0], *(torch.empty_like(x) for x in gone[:2])]
        of_state = None if grad_state is None else grad_state.contiguous().unsqueeze(2)
        differentiate((features, given.function, True), (*far, *of_far, None, of_state, *of_keys, *maps), turned)
        if gone is not None:
            own = torch.zeros_like(parts[0])
            grads[1].zero_(), grads[2].zero_()  # C leaves those of masked keys
            kept = [None if x is None else with_rows(x).unsqueeze(2) for x in grad_kept]
            joined = (of_far[0], size[:, :, :, first:], of_far[4], None)
            _run_exact(given, "exact_keys_backward", *[None] * 8, *joined, *of_keys[1:], *kept, own, *parts[1:])
            parts[0].add_(own)
    described, how, turned = _near_arguments(given)
    near = (*described, total, None, rows, size, None, grad_rows, None, *made)
    sinks = (*(grad.unsqueeze(2) for grad in sink_grads), None)
    run_attention("window_backward", how, (*near, *sinks), turned=turned)
    constant, norm = (None if x is None else x.flatten(1).sum(0) for x in maps[5:7])
    norm = None if norm is None else (norm * given.scaling).to(given.norm_weight.dtype)
    constant = None if constant is None else constant.to(given.log_scale.dtype)
    decay, state, *affine = shared_gradients(maps, given.log_decay, tensors[9:13])
    found = (decay, state, *affine, constant, norm, None, None)
    others = [
        x.new_zeros(x.shape) if grad is None and need and x is not None else or_nothing(grad, given.query)
        for x, grad, need in zip(tensors[DECAY:17], found, needed[DECAY:17])
    ]
    return [*grads, *sink_grads, *others]


def _fake_hybrid_backward(*arguments: Any) -> list[Tensor]:
    needed, given = arguments[-1], HybridArguments(*arguments[4:-4])
    check_hybrid(given)
    tensors: Any = [given[place] for place in DIFFERENTIABLE]
    dense = [gradient_like(x) for x in tensors[:3]] + [x.new_empty(x.shape) for x in tensors[3:5]]
    others = [
        x.new_empty(x.shape) if x is not None and needed[place] else given.query.new_empty(0)
        for x, place in zip(tensors[5:], DIFFERENTIABLE[5:])
    ]
    return [*dense, *others]


def _differentiate(ctx: Any, grad_output: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, output, size, sums = ctx.saved_tensors
    incoming = grad_output, *grads[2:5]
    needed = [bool(need) for need in ctx.needs_input_grad[:TENSORS]]
    if torch.is_grad_enabled():
        found = gradients_with_graph(
            lambda *x: hybrid_in_torch(HybridArguments(*x, *ctx.how))[: len(incoming)], inputs, incoming
        )
    else:
        made = iter(OPERATORS.hybrid_backward(*incoming, *inputs, *ctx.how, output, size, sums, needed))
        found = [next(made) if place in DIFFERENTIABLE else None for place in range(TENSORS)]
    return *(grad if need else None for grad, need in zip(found, needed)), *(None for _ in ctx.how)


def _displaced(given: HybridArguments, kept: Sequence[Tensor]) -> list[Tensor] | None:
    """The keys that exact keys displace, as the map sees them, their values and ages, and whether there is one; None
    without exact keys. What is kept in the end is written to `kept`, the tensors of `Kept`.
    """
    if given.score is None:
        return None
    (batch, kv_heads), num_far = given.key.shape[:2], given.ranges[1]
    columns = given.key.shape[3], given.value.shape[3], 1
    gone = [in_large_pages(kept[2].new_empty(batch, kv_heads, 1, num_far, n)) for n in columns]
    new = [x.unsqueeze(2) for x in kept[: 4 + (given.key_position is not None)]]
    _run_exact(given, "exact_keys_forward", *new, *[None] * (5 - len(new)), *gone)
    real = given.visible[:, :num_far]
    held = 0 if given.kept_age is None else (given.kept_age[:, 0, :, 0] != 0).sum(dim=1, keepdim=True)
    is_gone = real & (real.cumsum(dim=1) + held > given.num_exact_keys)
    return [*gone, is_gone[:, None, None, :, None].expand(-1, kv_heads, -1, -1, -1)]


def _run_exact(given: HybridArguments, name: str, *others: Tensor | None) -> None:
    """Call C: `others` are its tensors from those kept after the last query on, `MORE_TENSORS` at most."""
    (batch, kv_heads), (first, num_far), score = given.key.shape[:2], given.ranges, given.score
    far, queries = slice(num_far), slice(first, None)
    rows = ((given.visible, far), (given.position, queries), (given.key_position, far))
    mask, *places = (
        None if x is None else x[:, None, None, part, None].expand(-1, kv_heads, -1, -1, -1) for x, part in rows
    )
    keys = (with_rows(x)[:, :, :num_far].unsqueeze(2) for x in (given.key, given.value, score) if x is not None)
    key, value, score = keys
    scale = score.new_full((1,) * 5, given.scaling).expand(batch, kv_heads, -1, -1, -1)
    angles = score.new_tensor(given.frequencies).expand(1, 1, 1, 1, -1)
    old = (*(x.contiguous().unsqueeze(2) for x in given.kept), *[None] * (5 - len(given.kept)))
    query, pairs = grouped(with_rows(given.query), kv_heads)[:, :, :, first:], len(given.frequencies)
    turned = (pairs, given.first_turned, *((2, 1) if given.is_interleaved else (1, pairs)))
    tensors = (query, key, value, mask, score, *places, angles, scale, *old, *others)
    missing = [None] * (MORE_TENSORS - len(others))
    run_attention(name, (given.num_exact_keys, given.trained_length, True), (*tensors, *missing), turned=turned)


def _far_arguments(given: HybridArguments, gone: Sequence[Tensor] | None) -> tuple[list[Tensor | None], Sequence[int]]:
    """The arguments of the C kernel for far keys, up to their ages, and the columns that are turned."""
    kv_heads, (first, num_far) = given.key.shape[1], given.ranges
    constants = given.log_scale[:, None, None], (given.norm_weight * given.scaling)[:, None, None]
    found = arguments_of_map(given.far()[:-2], kv_heads, constants)
    found[1:4] = found[1:4] if gone is None else [gone[0], gone[1], gone[3]]
    found[-1] = None if gone is None else gone[2]
    place, key_place, hidden = given.position, given.key_position, given.first_turned
    if hidden == len(given.frequencies) or place is None or key_place is None:
        return found, NOT_TURNED
    turn, turned = _angles(given, hidden, -place)
    found[-3] = table_per_head(turn[:, first:], given.query, kv_heads)
    if gone is None:  # others are turned when they are displaced
        key_turn = turn if key_place is place else _angles(given, hidden, -key_place)[0]
        found[-2] = table_per_head(key_turn[:, :num_far], given.query, kv_heads)
    return found, turned


def _near_arguments(given: HybridArguments) -> tuple[list[Tensor | None], Sequence[int], Sequence[int]]:
    """The arguments of the C kernel for window and sinks up to the angles of the sinks, with the rest of a call."""
    turned: Sequence[int] = NOT_TURNED
    turn, last, sinks = None, given.trained_length - 1, given.sink_key.shape[2]
    if sinks and _is_clamped(given) and given.position is not None:
        turn, turned = _angles(given, 0, given.position.clamp(max=last) - given.position)
    return window_arguments(given.scaling, *given[:7], None, turn), (given.window, sinks, True), turned


def _is_clamped(given: HybridArguments) -> bool:
    """Whether some query is beyond the trained length."""
    if not given.trained_length or not given.frequencies or given.position is None:
        return False
    return int(given.position.max()) >= given.trained_length


def _angles(given: HybridArguments, first: int, tokens: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The cosines and then the sines `[B, rows, 2 R]` of the angles of pairs from number `first` on for so many
    `tokens [B, rows]`, and the columns of these pairs, as `run_attention` wants to know them.
    """
    half = len(given.frequencies)
    angle = tokens.unsqueeze(-1).float() * tokens.new_tensor(given.frequencies[first:], dtype=torch.float32)
    columns = (2 * first, 2, 1) if given.is_interleaved else (first, 1, half)
    return torch.cat((angle.cos(), angle.sin()), dim=-1), (half - first, *columns)


def check_hybrid(given: HybridArguments) -> int:
    """Check the arguments of the operator and return F, the number of features.

    Raises:
        ValueError: for the first invalid argument.
    """
    query, key, window, count = given.query, given.key, given.window, given.num_exact_keys
    check_window(0, *given[:7], None)
    (batch, heads, length, _), (_, kv_heads, rows, dim), kept = query.shape, key.shape, given.kept
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
    if given.function < EXP:
        raise ValueError(f"`function` = {given.function} is not one of 2 (exp) and 3 (Hedgehog).")
    each = (batch, kv_heads, count)
    expected = (
        ("log_scale", given.log_scale, (heads,), None),
        ("norm_weight", given.norm_weight, (heads,), None),
        ("kept_key", given.kept_key, (*each, dim), key.dtype),
        ("kept_value", given.kept_value, (*each, given.value.shape[3]), given.value.dtype),
        ("kept_score", given.kept_score, (*each, 1), torch.float32),
        ("kept_age", given.kept_age, (*each, 1), torch.int32),
        ("kept_position", given.kept_position, (*each, 1), torch.int32),
        ("score", given.score, (batch, kv_heads, rows, 1), torch.float32),
        ("position", given.position, (batch, length), torch.int32),
        ("key_position", given.key_position, (batch, rows), torch.int32),
    )
    for name, tensor, shape, dtype in expected:
        check_shape(name, tensor, shape, like=query)
        if tensor is not None and dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"`{name}` has a tensor of {tensor.dtype}; with these tokens it must be {dtype}.")
    has_scores, has_places = given.score is not None, given.key_position is not None
    number = (4 + has_places) * (has_scores and given.state is not None)
    if count < 0 or bool(count) != has_scores or len(kept) != number:
        raise ValueError(
            f"Got {count} exact keys, {'a' if has_scores else 'no'} score and {len(kept)} tensors of kept keys; exact "
            "keys need scores, and with a state there are 4 tensors of them, or 5 with the positions of keys."
        )
    tensors = 7 + has_places if not has_scores else 12 + 2 * has_places
    turns = len(given.frequencies), given.first_turned, given.trained_length
    check_turns(dim, has_scores, given.position is not None, tensors, *turns)
    return check_attention(*given.far())


OPERATORS_OF_HYBRID = {
    "hybrid": Operator(
        f"({HYBRID}) -> ({', '.join(['Tensor'] * 9)})",
        _hybrid,
        _fake_hybrid,
        _differentiate,
        saving(TENSORS, outputs=3, constants=[1, 2, 6, 7, 8]),
    ),
    "hybrid_backward": Operator(
        f"(Tensor? grad_output, Tensor? grad_state, Tensor? grad_kept_key, Tensor? grad_kept_value, {HYBRID}, "
        "Tensor output, Tensor log_size, Tensor denominator, bool[] needed) -> Tensor[]",
        _hybrid_backward,
        _fake_hybrid_backward,
    ),
}
OPERATORS = register(OPERATORS_OF_HYBRID)
