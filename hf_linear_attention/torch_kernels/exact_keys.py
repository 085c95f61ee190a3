# SPDX-License-Identifier: Apache-2.0
"""Exact attention to few keys behind a window: those with the M largest scores among all that have left it.

Scores are given and do not change, so a key that has once been displaced never comes back, and what is kept after a
token depends on nothing that follows it. Of two equal scores the earlier key has the larger one. Each key that leaves
the window displaces one: another key that was kept, or itself.

Axes: B batch, Hkv key/value heads, G query heads per key/value head, N keys that leave the window one by one, M kept
keys, C steps of a chunk, D head dimension. Key t leaves the window before query t.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blocks import EMPTY_MAXIMUM, accumulation_dtype, is_free
from .window import Part, weights_of


# Steps whose kept keys are compared at once. All pairs of M + C keys and C queries are formed.
CHUNK = 64
NEVER = float("-inf")  # the score of a place without a key, in a choice


class Kept(NamedTuple):
    """What is kept behind the window, in the order of its tokens; zeros are places without a key."""

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
        """The keys at `places [B, Hkv, n]` of each head."""
        places, tensors = places.unsqueeze(-1), iter(self)
        found: Any = (None if x is None else x.gather(2, places.expand(-1, -1, -1, x.shape[3])) for x in tensors)
        return Kept(*found)


class Choice(NamedTuple):
    """The keys of a chunk of C steps, by score, the largest first."""

    places: Tensor  # [B, Hkv, M + C], among the kept ones and those that leave
    kept: Tensor  # bool [B, Hkv, C, M + C], what each query sees
    displaced: Tensor  # [B, Hkv, C], the place of the key that is displaced before each query
    is_displaced: Tensor  # bool [B, Hkv, C], whether there is one


def choose(score: Tensor, places: Tensor, count: int, numbers: tuple[Tensor, Tensor] | None = None) -> Choice:
    """Which of the keys at `places` are kept at each of the steps of a chunk.

    Args:
        score: `[B, Hkv, M + C]`, of the M kept keys and then of those that leave the window at each step.
        places: `[B, Hkv, M + C]`, what they are called.
        count: M.
        numbers: the packed sequences of the keys `[B, Hkv, M + C]` and of the queries `[B, C]`, or None. A key is kept
            for its own sequence alone.
    """
    steps = score.shape[2] - count
    score, order = by_score(score)
    enters = order - count  # negative where a key was kept before the chunk
    step = torch.arange(steps, dtype=torch.long, device=score.device)[:, None]
    seen = (score > NEVER).unsqueeze(2) & (enters.unsqueeze(2) <= step)
    if numbers is not None:
        seen = seen & (numbers[0].gather(2, order).unsqueeze(2) == numbers[1][:, None, :, None])
    rank = seen.cumsum(dim=3)
    kept, is_new = seen & (rank <= count), enters.unsqueeze(2) == step
    has_new = (kept & is_new).any(dim=3, keepdim=True)  # then the last of the others leaves
    leaves = (((rank == count + 1) & has_new) | (is_new & ~kept)) & seen
    places = places.gather(2, order)
    displaced = (leaves * places.unsqueeze(2)).sum(dim=3)
    return Choice(places, kept, displaced, leaves.any(dim=3))


def by_score(score: Tensor) -> tuple[Tensor, Tensor]:
    """`score [B, Hkv, n]` from the largest to the smallest, and their places; of equal ones the first comes first."""
    if is_free(score.shape[2]):  # ONNX lacks stable sorting, and its `TopK` has this order
        return score.topk(score.shape[2], dim=2)
    return score.sort(dim=2, descending=True, stable=True)


def kept_after(score: Tensor, count: int) -> Tensor:
    """The places of the `count` largest of `score [B, Hkv, n]`, in their order, `[B, Hkv, count]`."""
    return by_score(score)[1][..., :count].sort(dim=2).values


def part_of(
    query: Tensor, keys: Kept, visible: Tensor, scaling: float, far: tuple[Tensor, Tensor, Tensor] | None
) -> Part:
    """Softmax attention to the keys that each query sees.

    Args:
        query: `[B, Hkv, G, C, D]`.
        keys: n of them for each head.
        visible: bool `[B, Hkv, C, n]`.
        far: the queries and keys that are compared instead where the third, bool `[B, Hkv, C, n]`, is true; or None.
    """
    dtype, visible = accumulation_dtype(query), visible.unsqueeze(2)
    logits = _logits(query, keys.key, scaling, dtype)
    if far is not None:
        logits = torch.where(far[2].unsqueeze(2), _logits(*far[:2], scaling, dtype), logits)
    logits = logits.masked_fill(~visible, EMPTY_MAXIMUM)
    largest = logits.detach().amax(dim=-1, keepdim=True).clamp(min=EMPTY_MAXIMUM / 2)
    weights, is_empty = weights_of(logits - largest), ~visible.any(dim=-1, keepdim=True)
    total = weights.sum(dim=-1, keepdim=True).masked_fill(is_empty, 1.0)
    output = weights @ keys.value.to(dtype).unsqueeze(2) / total
    size = (largest + total.log()).masked_fill(is_empty, EMPTY_MAXIMUM)
    return output, size


def _logits(query: Tensor, key: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    return (query.to(dtype) * scaling) @ key.to(dtype).unsqueeze(2).transpose(-1, -2)


def chunks_of(length: int) -> list[slice]:
    """The steps of each chunk; a single one where the length is free, as in a graph for any."""
    if is_free(length):
        return [slice(0, length)]
    return [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]
