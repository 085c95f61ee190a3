# SPDX-License-Identifier: Apache-2.0
"""Exact attention to few keys behind a window: those with the M largest scores among all that have left it.

Scores are given and do not change, so a key that has once been displaced never comes back, and what is kept after a
token depends on nothing that follows it. Of two equal scores the earlier key has the larger one. Each key that leaves
the window displaces one: another key that was kept, or itself.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N keys that leave the window one by one, M kept keys, K
chunks of C steps, D head dimension. Key t leaves the window before query t.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import EMPTY_MAXIMUM, accumulated, accumulation_dtype, is_eager, is_free, needs_plain
from .causal import gradients_with_graph
from .window import FLUSHED, LOWEST_EXPONENT, Part, weights_of


# Steps whose kept keys are compared at once. All pairs of M + C keys and C queries are formed.
CHUNK = 64
NEVER = float("-inf")  # the score of a place without a key, in a choice


class Kept(NamedTuple):
    """What is kept behind the window, in the order of its tokens; zeros are places without a key.

    All heads of a sequence have as many.
    """

    key: Tensor  # [B, Hkv, M, D]
    value: Tensor  # [B, Hkv, M, D]
    score: Tensor  # [B, Hkv, M, 1] float32
    age: Tensor  # [B, Hkv, M, 1] int32, keys that have left the window since this one, with itself
    position: Tensor | None = None  # [B, Hkv, M, 1] int32, if keys have to be moved

    @classmethod
    def nothing(cls, key: Tensor, value: Tensor, count: int, has_position: bool) -> Kept:
        """No keys, for new ones like `key` and `value`."""
        size = (*key.shape[:2], count)
        score, number = (key.new_zeros(*size, 1, dtype=dtype) for dtype in (torch.float32, torch.int32))
        position = number.clone() if has_position else None
        return cls(key.new_zeros(*size, key.shape[3]), value.new_zeros(*size, value.shape[3]), score, number, position)

    def followed_by(self, new: Kept) -> Kept:
        """Both, one behind the other."""
        pairs: Any = zip(self, new)
        found: Any = (None if old is None else torch.cat((old, x.to(old.dtype)), dim=2) for old, x in pairs)
        return Kept(*found)

    def at(self, places: Tensor) -> Kept:
        """The keys at `places [B, Hkv, ...]` of each head, of the same axes and a last one."""
        batch, heads, count = self.score.shape[:3]
        first = torch.arange(batch * heads, dtype=torch.long, device=places.device) * count
        first = first.view(batch, heads, *(1,) * (places.ndim - 2))
        rows = (first + places).flatten()  # whole rows: `gather` would read a place for every number
        found: Any = (
            None if x is None else x.flatten(0, 2).index_select(0, rows).view(*places.shape, x.shape[3]) for x in self
        )
        return Kept(*found)


class Choice(NamedTuple):
    """The keys of K chunks of C steps each, by score, the largest first."""

    places: Tensor  # [B, Hkv, K, M + C], among the kept ones and those that leave
    kept: Tensor  # bool [B, Hkv, K, C, M + C], what each query sees
    displaced: Tensor  # [B, Hkv, K, C], the place of the key that is displaced before each query
    is_displaced: Tensor  # bool [B, Hkv, K, C], whether there is one


def choose(score: Tensor, places: Tensor, count: int, numbers: tuple[Tensor, Tensor] | None = None) -> Choice:
    """Which of the keys at `places` are kept at each of the steps of a chunk; `count` is M.

    `score` and `places`, `[B, Hkv, K, M + C]`, are those of the M kept keys and then of those that leave the window at
    each step. With `numbers`, the packed sequences of the keys `[B, Hkv, K, M + C]` and of the queries `[B, 1, K, C]`,
    a key is kept for its own sequence alone.
    """
    steps = score.shape[-1] - count
    score, order = by_score(score)
    enters = order - count  # negative where a key was kept before the chunk
    step = torch.arange(steps, dtype=torch.long, device=score.device)[:, None]
    seen = (score > NEVER).unsqueeze(-2) & (enters.unsqueeze(-2) <= step)
    if numbers is not None:
        seen = seen & (numbers[0].gather(-1, order).unsqueeze(-2) == numbers[1].unsqueeze(-1))
    rank = seen.cumsum(dim=-1, dtype=torch.int32)
    first = rank <= count
    index = torch.arange(order.shape[-1], dtype=torch.long, device=score.device).expand_as(order)
    new = torch.zeros_like(order).scatter(-1, order, index)[..., count:]  # where the key of each step is
    is_seen, new_rank = (x.gather(-1, new.unsqueeze(-1)).squeeze(-1) for x in (seen, rank))
    # A key that is among the first displaces the one behind the last of them; another one displaces itself.
    displaced = torch.where(new_rank <= count, first.sum(dim=-1).clamp(max=order.shape[-1] - 1), new)
    places = places.gather(-1, order)
    return Choice(places, seen & first, places.gather(-1, displaced), is_seen & (rank[..., -1] > count))


def by_score(score: Tensor) -> tuple[Tensor, Tensor]:
    """`score [..., n]` from the largest to the smallest, and their places; of equal ones the first comes first."""
    if is_free(score.shape[-1]):  # ONNX lacks stable sorting, and its `TopK` has this order
        return score.topk(score.shape[-1], dim=-1)
    return score.sort(dim=-1, descending=True, stable=True)


def kept_at_chunks(score: Tensor, count: int, size: int, numbers: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The places, in their order, of the keys that are kept before each chunk and after the last, `[B, Hkv, K + 1, M]`.

    The first M of `score [B, Hkv, M + K C]` are those of the kept keys, `count` is M and `size` is C. With `numbers`,
    the packed sequences of the keys `[B, Hkv, M + K C]` and of the query behind each chunk `[B, K]`, only keys of that
    query's sequence are kept. It is a scan: what 1, 2, 4, .. chunks leave is found for all chunks at once.
    """
    places = torch.arange(score.shape[-1], dtype=torch.long, device=score.device).expand_as(score)
    old_score, old_place = (x[:, :, None, :count] for x in (score, places))
    score, place = (x[..., count:].unflatten(2, (-1, size)) for x in (score, places))

    def of_own(score: Tensor, place: Tensor, first: int) -> Tensor:
        if numbers is None:
            return score
        number = numbers[0].gather(2, place.flatten(2)).unflatten(2, place.shape[2:])
        return score.masked_fill(number != numbers[1][:, None, first:, None], NEVER)

    score, step = of_own(score, place, 0), 1
    if place.shape[2] > 1 and size > count:
        score, place = _best(score, place, count)
    while step < place.shape[2]:
        before, own = ([x[:, :, part] for x in (score, place)] for part in (slice(-step), slice(step, None)))
        before[0] = of_own(before[0], before[1], step)
        both = [torch.cat(pair, dim=-1) for pair in zip(before, own)]
        both = _best(both[0], both[1], count) if both[0].shape[-1] > count else both
        missing = both[0].shape[-1] - score.shape[-1]
        first = (F.pad(x[:, :, :step], (0, missing), value=fill) for x, fill in ((score, NEVER), (place, 0)))
        score, place = (torch.cat(pair, dim=2) for pair in zip(first, both))
        step *= 2
    pairs = ((old_score, score), (old_place, place))
    both = [torch.cat((first.expand(-1, -1, x.shape[2], -1), x), dim=-1) for first, x in pairs]
    return torch.cat((old_place, _best(both[0], both[1], count)[1].sort(dim=-1).values), dim=2)


def _best(score: Tensor, place: Tensor, count: int) -> list[Tensor]:
    score, order = by_score(score)
    return [score[..., :count], place.gather(-1, order[..., :count])]


class Leaving(NamedTuple):
    """Queries, and the keys of which one leaves the window before each of them."""

    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, Hkv, N, D]
    value: Tensor  # [B, Hkv, N, D]
    score: Tensor  # [B, Hkv, N, 1]
    real: Tensor  # bool [B, N], False where no key leaves
    position: Tensor | None = None  # [B, N] of queries
    key_position: Tensor | None = None  # [B, N]
    numbers: Tensor | None = None  # [B, N], the packed sequences of queries, see `MechanismInputs.attention_mask`

    def in_whole_chunks(self) -> Leaving:
        """With padding at the right end, so that chunks of exact keys have one size."""
        length = self.query.shape[2]
        missing = 0 if is_free(length) else -length % chunk_size(length)
        if not missing:
            return self
        rows = (F.pad(x, (0, 0, 0, missing)) for x in self[:4])
        return Leaving(*rows, *(None if x is None else F.pad(x, (0, missing)) for x in self[4:]))  # type: ignore


class Displaced(NamedTuple):
    """The key that is displaced before each query; it is far from then on."""

    key: Tensor  # [B, Hkv, N, D], as the feature map sees it
    value: Tensor  # [B, Hkv, N, D]
    age: Tensor  # [B, Hkv, N, 1], how many keys have left the window since
    is_there: Tensor  # bool [B, N]


# Moves keys to other positions, as `positions.rotary.RotaryShift` does.
Shift = Callable[[Tensor, Tensor], Tensor]


def attend_to_kept(
    tokens: Leaving,
    old: Sequence[Tensor],
    count: int,
    scaling: float,
    shift: Shift | None = None,
    to_kept: Shift | None = None,
    trained_length: int = 0,
) -> tuple[Part, Displaced, Kept]:
    """The part of the exact keys, those that they displace, and what is kept in the end.

    Args:
        old: the tensors of `Kept` before the first query; none for no keys.
        count: M.
        shift: takes back what the feature map must not see, by minus the position of a key.
        to_kept: moves queries and keys; those farther away than `trained_length` are compared at that distance.
    """
    length, heads = tokens.query.shape[2], tokens.key.shape[1]
    tokens = tokens.in_whole_chunks()
    kept = Kept(*old) if old else Kept.nothing(tokens.key, tokens.value, count, tokens.key_position is not None)
    real = tokens.real[:, None, :, None]
    order = tokens.real.cumsum(dim=1)[:, None, :, None].expand(-1, heads, -1, -1).int()
    position = tokens.key_position
    position = None if position is None else position[:, None, :, None].expand_as(order).int()
    score = tokens.score.masked_fill(~real, NEVER)
    # Ages become the order of leaving, which does not change.
    kept = kept._replace(age=1 - kept.age, score=kept.score.masked_fill(kept.age == 0, NEVER))
    keys = kept.followed_by(Kept(tokens.key, tokens.value, score, order, position))
    starts, choice = _choice_of(tokens, keys.score.squeeze(-1), count, length)
    output, size = _kept_part(tokens, keys.at(choice.places), choice.kept, scaling, to_kept, trained_length)
    displaced, is_displaced = (x.flatten(2)[:, :, :length] for x in (choice.displaced, choice.is_displaced))
    last = keys.at(starts[:, :, -1])
    taken, is_there, order = keys.at(displaced), is_displaced[:, 0], order[:, :, :length]
    age, key = (order - taken.age).masked_fill(~is_there[:, None, :, None], 0), taken.key
    if shift is not None:
        key = shift(accumulated(key), -cast(Tensor, taken.position).squeeze(-1))
    is_empty, ages = last.score == NEVER, order[:, :, -1:] - last.age + 1
    last = last._replace(score=last.score.masked_fill(is_empty, 0.0), age=ages.masked_fill(is_empty, 0))
    part = output[:, :, :, :length], size[:, :, :, :length]
    return part, Displaced(key, taken.value, age, is_there), last


def _choice_of(tokens: Leaving, score: Tensor, count: int, length: int) -> tuple[Tensor, Choice]:
    """What `kept_at_chunks` returns, and the choice in each chunk, of `score [B, Hkv, M + K C]` of `length` queries."""
    size, own, numbers, real = chunk_size(length), None, tokens.numbers, tokens.real
    batch, heads, total = score.shape
    if numbers is not None:
        own = F.pad(torch.where(real, numbers, 0), (count, 0))[:, None].expand(-1, heads, -1)
        following = torch.cat((numbers[:, size::size], numbers[:, length - 1 : length]), dim=1)
    starts = kept_at_chunks(score, count, size, None if own is None else (own, following))
    new = torch.arange(count, total, dtype=torch.long, device=real.device).view(1, 1, -1, size)
    found = torch.cat((starts[:, :, :-1], new.expand(batch, heads, -1, -1)), dim=3)
    packed = None
    if own is not None and numbers is not None:
        packed = own.gather(2, found.flatten(2)).view_as(found), numbers[:, None].unflatten(2, (-1, size))
    return starts, choose(score.gather(2, found.flatten(2)).view_as(found), found, count, packed)


def _kept_part(
    tokens: Leaving, keys: Kept, kept: Tensor, scaling: float, to_kept: Shift | None, trained_length: int
) -> Part:
    """The part of the keys `kept [B, Hkv, K, C, n]`."""
    heads, query, position = keys.key.shape[1], tokens.query, tokens.position
    far = None
    if to_kept is not None and position is not None and is_beyond(position, trained_length):
        place = cast(Tensor, keys.position).squeeze(-1)
        farthest = (position - trained_length)[:, None].unflatten(2, (kept.shape[2], -1)).unsqueeze(-1)
        moved = to_kept(query, trained_length - 1 - position).unflatten(1, (heads, -1))
        moved_keys = to_kept(keys.key.flatten(2, 3), -place.flatten(2)).unflatten(2, place.shape[2:])
        far = moved, moved_keys, place.unsqueeze(3) <= farthest
    return part_of(query.unflatten(1, (heads, -1)), keys, kept, scaling, far)


def is_beyond(position: Tensor, trained_length: int) -> bool:
    """Whether a query may be beyond the trained length; True where asking costs too much."""
    if position.device.type != "cpu" or not is_eager(position):
        return True
    return bool(position.numel()) and int(position.max()) >= trained_length


def part_of(
    query: Tensor, keys: Kept, visible: Tensor, scaling: float, far: tuple[Tensor, Tensor, Tensor] | None
) -> Part:
    """Softmax attention of `query [B, Hkv, G, K C, D]` to the keys that each sees, n for each head and chunk.

    The keys are `[B, Hkv, K, n, D]`, `visible` is bool `[B, Hkv, K, C, n]`. `far` are queries and keys that are
    compared instead where its third tensor, bool `[B, Hkv, K, C, n]`, is true.
    """
    dtype, visible = accumulation_dtype(query), visible.unsqueeze(3)
    logits = _logits(query, keys.key, scaling, dtype)
    if far is not None:
        logits = torch.where(far[2].unsqueeze(3), _logits(*far[:2], scaling, dtype), logits)
    value = keys.value.to(dtype)
    has_gradient = torch.is_grad_enabled() and (logits.requires_grad or value.requires_grad)
    attend = _Attention.apply if has_gradient and not needs_plain(query) else _attend
    output, size = attend(logits, value, visible)
    return output.transpose(2, 3).flatten(3, 4), size.transpose(2, 3).flatten(3, 4)


def _attend(logits: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs and log sizes of `logits [B, Hkv, K, G, C, n]`."""
    logits = logits.masked_fill(~visible, EMPTY_MAXIMUM)
    largest = logits.detach().amax(dim=-1, keepdim=True).clamp(min=EMPTY_MAXIMUM / 2)
    weights, is_empty = weights_of(logits - largest), largest <= EMPTY_MAXIMUM / 2
    total = weights.sum(dim=-1, keepdim=True).masked_fill(is_empty, 1.0)
    output = (weights.flatten(3, 4) @ value).unflatten(3, weights.shape[3:5]) / total
    return output, (largest + total.log()).masked_fill(is_empty, EMPTY_MAXIMUM)


class _Attention(torch.autograd.Function):
    """`_attend` with a backward that makes two tensors of the size of the logits; autograd would make eight."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        output, size = _attend(logits, value, visible)
        ctx.save_for_backward(logits, value, visible, output, size)
        return output, size

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_size: Tensor) -> tuple[Tensor | None, ...]:
        logits, value, visible, output, size = ctx.saved_tensors
        if torch.is_grad_enabled():
            given = (logits, value), (grad_output, grad_size)
            return *gradients_with_graph(lambda logits, value: _attend(logits, value, visible), *given), None
        size = size.clamp(min=EMPTY_MAXIMUM / 2)
        weights = F.threshold_((logits - size).clamp_(min=LOWEST_EXPONENT, max=0.0).exp_(), *FLUSHED)
        weights = weights.masked_fill_(~visible, 0.0)
        rows = grad_output.flatten(3, 4)
        pairs = (rows @ value.transpose(-1, -2)).unflatten(3, weights.shape[3:5])
        pairs = pairs.add_(grad_size - (grad_output * output).sum(dim=-1, keepdim=True)).mul_(weights)
        return pairs, weights.flatten(3, 4).transpose(-1, -2) @ rows, None


def _logits(query: Tensor, key: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """`[B, Hkv, K, G, C, n]`."""
    rows = (query.to(dtype) * scaling).unflatten(3, (key.shape[2], -1)).transpose(2, 3)
    return (rows.flatten(3, 4) @ key.to(dtype).transpose(-1, -2)).unflatten(3, rows.shape[3:5])


def chunk_size(length: int) -> int:
    """The steps of each chunk; all of them where the length is free, as in a graph for any."""
    return length if is_free(length) else min(CHUNK, length)
