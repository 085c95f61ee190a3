# SPDX-License-Identifier: Apache-2.0
"""The operator `hybrid`: window, sinks, exact and far keys under one denominator; serving and training call it.

On CUDA it runs the kernels of triton_hybrid.py, and where neither C nor Triton takes the tensors, hybrid_in_torch.py.

In C the kernels of the parts take turns with the same memory, in both directions: far keys leave their output where the
kernel of the window completes it and that of the exact keys joins its own, and far gradients are what those of the
window are added to. Rotary frequencies that the feature map must not see are taken back a block at a time.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, L rows of keys, D head_dim, F features, W
head dimension of the values, M exact keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_kernels.blocks import EMPTY_MAXIMUM, EXP, accumulation_dtype, is_tracing, needs_plain
from ..torch_kernels.causal import gradients_with_graph
from . import fla, triton_hybrid
from .checks import check_attention, check_needed, check_results, check_shape, check_turns, check_window
from .cpu import MOST_COLUMNS, NOT_TURNED, attend, differentiate, in_large_pages, run_attention, takes, takes_attention
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
    "Tensor? kept_age, Tensor? kept_position, Tensor? score, Tensor? position, Tensor? key_position, "
    "Tensor? frequencies, Tensor? spans, int function, int window, float scaling, int first_turned, "
    "bool is_interleaved, int trained_length, int num_exact_keys, bool is_rate"
)
TENSORS = 25
DIFFERENTIABLE = (0, 1, 2, 4, 5, *range(7, 17))
DECAY, STATE = 7, 8  # places among the tensors
MORE_TENSORS = 19  # of exact_keys_forward and _backward, from those that are kept after the last query on


def takes_hybrid(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, sink_key: Tensor, key_weight: Tensor, function: int
) -> bool:
    """Whether `hybrid` computes for these tensors."""
    if fla.is_on_cuda(query):
        has_before = key.shape[2] != query.shape[2]  # of which Triton has no gradients
        is_for_kernel = not (has_before and torch.is_grad_enabled())
        return is_for_kernel and triton_hybrid.takes(query, key, value, sink_key, key_weight, function)
    return not needs_plain(query) and takes_attention(query, key, value, visible, key_weight.shape[-1])


def hybrid(arguments: Sequence[Any]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The operator for the `HybridArguments`, of which `takes_hybrid` is true.

    Returns:
        The output `[B, H, N, W]`, in the accumulation dtype on a CPU, and the new tensors of the state.

    Raises:
        ValueError: if the shapes, dtypes or devices do not match.
    """
    given = HybridArguments(*arguments)
    output, _, _, _, *state = OPERATORS.hybrid(*given)
    count = 1 if given.score is None else 5 + (given.key_position is not None)
    return output.transpose(1, 2), tuple(state[:count])


def spans_of(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The `spans` of packed sequences that `numbers [B, N]` tell apart, and the position of each token in its own."""
    place = torch.arange(numbers.shape[1], dtype=torch.int32, device=numbers.device)
    changes = numbers[:, 1:] != numbers[:, :-1]
    starts = torch.where(F.pad(changes, (1, 0), value=True), place, 0).cummax(dim=1).values
    ends = torch.where(F.pad(changes, (0, 1), value=True), place + 1, len(place))
    ends = ends.flip(1).cummin(dim=1).values.flip(1)
    return torch.stack((starts, ends)), place - starts


def sinks_as_exact_keys(
    key: Tensor, score: Tensor | None, position: Tensor | None, is_sink: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Positions and scores of packed sequences, of which a sink is an exact key with the largest score.

    No other key displaces it in its sequence. Beyond the trained length, queries see exact keys at the last trained
    distance and sinks from the last trained position: the same, if sinks stand at position 0.
    """
    if score is None:
        score = key.new_zeros(*key.shape[:3], 1, dtype=torch.float32)
    score = score.masked_fill(is_sink[:, None, :, None], torch.finfo(torch.float32).max)
    return None if position is None else position.masked_fill(is_sink, 0), score


def window_on_cuda(
    near: Sequence[Tensor], position: Tensor | None, frequencies: Tensor | None, window: int, scaling: float,
    is_interleaved: bool, trained_length: int,
) -> Tensor | None:  # fmt: skip
    """The output `[B, H, N, W]` of a causal window and its sinks, if Triton takes these tensors: that of `hybrid` with
    far keys of one feature, which weigh nothing.

    Args:
        near: query, key, value, visible, sink key, sink value and seen, as in `HybridArguments`.
    """
    query, key, value, visible, sink_key, *_ = near
    if not fla.is_on_cuda(query) or is_tracing():
        return None
    weight = query.new_zeros(query.shape[1], query.shape[3], 1, dtype=torch.float32)
    of_keys, nothing = weight[: key.shape[1]], weight[:, 0, 0]
    if not takes_hybrid(query, key, value, visible, sink_key, of_keys, EXP):
        return None
    maps = of_keys, None, None, weight, nothing + EMPTY_MAXIMUM, nothing
    turns = 0 if frequencies is None else len(frequencies), is_interleaved, trained_length
    others: Any = (*[None] * 6, position, None, frequencies, None)
    return hybrid((*near, None, None, *maps, *others, EXP, window, scaling, *turns))[0]


def _hybrid(*arguments: Any) -> tuple[Tensor, ...]:
    """The operator.

    Returns:
        What `hybrid_in_torch` returns, whose exact keys (none or more) always have positions; after the output come the
        logarithm of its denominator `[B, Hkv, G, N, 1]`, and two tensors for the backward pass: from C
        `[B, Hkv, G, N, 2]`, the denominator in the units of far keys and the logarithm of these units, and nothing;
        from Triton what `triton_prefill.choose` writes.
    """
    given = HybridArguments(*arguments)
    features = check_hybrid(given)
    on_cuda = fla.is_on_cuda(given.query)
    results = output, size, sums, _, state, *kept = _new_results(given, features, on_cuda)
    if on_cuda:
        chosen = triton_hybrid.forward(given, output, size, state, kept)
        return output, size, *chosen, state, *kept
    for x in kept:
        x.zero_()
    if not _takes(given):
        size.zero_(), sums.zero_()
        for x, found in zip((output, state, *kept), hybrid_in_torch(given)):
            x.copy_(found)
        return results
    given, kv_heads = given.scaled(), given.key.shape[1]
    first, num_far = given.ranges
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
    is_for_c = given.spans is None and given.key_weight.shape[-1] <= MOST_COLUMNS
    return is_for_c and takes(given.query, given.key, given.value, given.sink_key, given.sink_value)


def _fake_hybrid(*arguments: Any) -> tuple[Tensor, ...]:
    given = HybridArguments(*arguments)
    return _new_results(given, check_hybrid(given), given.query.device.type == "cuda")


def _new_results(given: HybridArguments, features: int, on_cuda: bool) -> tuple[Tensor, ...]:
    query, key, value, count, number = *given[:3], given.num_exact_keys, accumulation_dtype(given.query)
    (batch, heads, length, _), (_, kv_heads, _, dim), width = query.shape, key.shape, value.shape[3]
    output = query.new_empty(batch, length, heads, width, dtype=query.dtype if on_cuda else number)
    size = query.new_empty(batch, kv_heads, heads // kv_heads, length, 1, dtype=number)
    state, rows = size.new_empty(batch, kv_heads, features, width + 2), (batch, kv_heads, count)
    kept = [key.new_empty(*rows, dim), value.new_empty(*rows, width)]
    kept += [key.new_empty(*rows, 1, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.int32)]
    if not on_cuda:
        return output, size, size.new_empty(*size.shape[:-1], 2), size.new_empty(0), state, *kept
    lengths = (count + length, length) if count else ()
    chosen = [key.new_empty(batch * kv_heads, n, dtype=torch.int32) for n in lengths]
    chosen = chosen or [key.new_empty(0, dtype=torch.int32) for _ in range(2)]
    return output, size, *chosen, state, *kept


def _hybrid_backward(
    grad_output: Tensor | None,
    grad_state: Tensor | None,
    grad_kept_key: Tensor | None,
    grad_kept_value: Tensor | None,
    *arguments: Any,
) -> list[Tensor]:
    """The gradients of the arguments at `DIFFERENTIABLE`; those at the end are empty where they are not needed."""
    *others, output, size, first, second, needed = arguments
    given = HybridArguments(*others)
    features, on_cuda = check_hybrid(given), fla.is_on_cuda(given.query)
    grads = {"output": grad_output, "state": grad_state, "kept_key": grad_kept_key, "kept_value": grad_kept_value}
    query, key, value = (x.to("meta") for x in given[:3])
    likes = _new_results(given._replace(query=query, key=key, value=value), features, on_cuda)
    results = {"output": output, "log_size": size, "first": first, "second": second}
    named = {f"grad_{name}": x for name, x in grads.items()}
    check_results(given.query, (likes[0], *likes[4:7], *likes[:4]), **named, **results)
    for name, x in results.items():
        if not x.is_contiguous():
            raise ValueError(f"`{name}` is not dense; pass it as `hybrid` returned it.")
    check_needed(needed, TENSORS)
    incoming = list(grads.values())
    if on_cuda:
        # Triton has gradients of outputs alone, where nothing comes before.
        is_for_kernel = grad_output is not None and not given.before and all(x is None for x in incoming[1:])
        kernel: Any = triton_hybrid.gradients
    else:
        # C has no gradients of exact keys after others, or beyond the trained length.
        is_beyond_c = bool(given.kept) or (given.score is not None and _is_clamped(given))
        is_for_kernel, kernel = _takes(given) and not is_beyond_c, _gradients_in_c
    return (kernel if is_for_kernel else _gradients)(given, incoming, (output, size, first, second), needed)


def _gradients(
    given: HybridArguments, grads: Sequence[Tensor | None], results: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor]:
    wanted = [place < 6 or need for place, need in enumerate(needed)]  # as C makes them
    inputs, how = given[:TENSORS], (*given[TENSORS:], results[0].dtype)
    found = gradients_in_torch(lambda *x: _plain(*x, *how), inputs, wanted, grads)
    return [found[place].contiguous() if place > 2 else found[place] for place in DIFFERENTIABLE]


def _plain(*given: Any) -> list[Tensor]:
    """`hybrid_in_torch` of all arguments but the last, which is the dtype of the output."""
    *arguments, dtype = given
    output, *state = hybrid_in_torch(HybridArguments(*arguments))
    return [output.to(dtype), *state]


def _gradients_in_c(
    raw: HybridArguments, incoming: Sequence[Tensor | None], results: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor]:
    (output, size, sums, _), features, given = results, check_attention(*raw.far()), raw.scaled()
    grad_output, grad_state, *grad_kept = incoming
    tensors: Any = raw[:TENSORS]
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
        gone = _displaced(given, _new_results(given, 1, False)[5:])
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
    decay, state, *affine = shared_gradients(maps, given.log_decay, given[9:13])
    if decay is not None and raw.is_rate:
        decay = decay * -cast(Tensor, raw.log_decay).float().sigmoid()
    root = given.scaling**0.5
    factors, likes = (1, 1, root, 1, given.scaling, root), tensors[DECAY:13]
    scaled = [None if x is None else (x * by).to(y.dtype) for x, by, y in zip((decay, state, *affine), factors, likes)]
    found = (*scaled, constant, norm, None, None)
    others = [
        x.new_zeros(x.shape) if grad is None and need and x is not None else or_nothing(grad, given.query)
        for x, grad, need in zip(tensors[DECAY:17], found, needed[DECAY:17])
    ]
    return [*grads, *sink_grads, *others]


def _fake_hybrid_backward(*arguments: Any) -> list[Tensor]:
    needed, given = arguments[-1], HybridArguments(*arguments[4:-5])
    check_hybrid(given)
    tensors: Any = [given[place] for place in DIFFERENTIABLE]
    dense = [gradient_like(x) for x in tensors[:3]] + [x.new_empty(x.shape) for x in tensors[3:5]]
    others = [
        x.new_empty(x.shape) if x is not None and needed[place] else given.query.new_empty(0)
        for x, place in zip(tensors[5:], DIFFERENTIABLE[5:])
    ]
    return [*dense, *others]


def _differentiate(ctx: Any, grad_output: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, output, size, first, second = ctx.saved_tensors
    incoming = grad_output, *grads[3:6]
    needed = [bool(need) for need in ctx.needs_input_grad[:TENSORS]]
    if torch.is_grad_enabled():
        found = gradients_with_graph(lambda *x: _plain(*x, *ctx.how, output.dtype)[: len(incoming)], inputs, incoming)
    else:
        made = iter(OPERATORS.hybrid_backward(*incoming, *inputs, *ctx.how, output, size, first, second, needed))
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
    angles = score.new_empty(0) if given.frequencies is None else with_rows(given.frequencies)
    angles = angles.expand(1, 1, 1, 1, -1)
    old = (*(x.contiguous().unsqueeze(2) for x in given.kept), *[None] * (5 - len(given.kept)))
    query, pairs = grouped(with_rows(given.query), kv_heads)[:, :, :, first:], given.pairs
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
    if hidden == given.pairs or place is None or key_place is None:
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
    if not given.trained_length or not given.pairs or given.position is None:
        return False
    return int(given.position.max()) >= given.trained_length


def _angles(given: HybridArguments, first: int, tokens: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The cosines and then the sines `[B, rows, 2 R]` of the angles of pairs from number `first` on for so many
    `tokens [B, rows]`, and the columns of these pairs, as `run_attention` wants to know them.
    """
    half = given.pairs
    angle = tokens.unsqueeze(-1).float() * cast(Tensor, given.frequencies)[first:]
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
    each, columns = (batch, kv_heads, count), given.key_weight.shape[-1] if given.key_weight.ndim else 0
    expected = (
        ("key_weight", given.key_weight, (kv_heads, dim, columns), None),
        ("key_bias", given.key_bias, (kv_heads, 1, columns), None),
        ("key_norm", given.key_norm, (kv_heads, 1, 1), None),
        ("query_weight", given.query_weight, (heads, dim, columns), None),
        ("frequencies", given.frequencies, (given.pairs,), torch.float32),
        ("spans", given.spans, (2, batch, length), torch.int32),
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
    turns = given.pairs, given.first_turned, given.trained_length
    check_turns(dim, has_scores, given.position is not None, tensors, *turns)
    if given.spans is not None and (given.before or given.sink_key.shape[2] or not count):
        raise ValueError("Packed sequences have no keys before them, no sinks, and at least one exact key.")
    return check_attention(*given.far())


OPERATORS_OF_HYBRID = {
    "hybrid": Operator(
        f"({HYBRID}) -> ({', '.join(['Tensor'] * 10)})",
        _hybrid,
        _fake_hybrid,
        _differentiate,
        saving(TENSORS, outputs=4, constants=[1, 2, 3, 7, 8, 9]),
    ),
    "hybrid_backward": Operator(
        f"(Tensor? grad_output, Tensor? grad_state, Tensor? grad_kept_key, Tensor? grad_kept_value, {HYBRID}, "
        "Tensor output, Tensor log_size, Tensor first, Tensor second, bool[] needed) -> Tensor[]",
        _hybrid_backward,
        _fake_hybrid_backward,
    ),
}
OPERATORS = register(OPERATORS_OF_HYBRID)
