# SPDX-License-Identifier: Apache-2.0
"""Keys and values in a row, as `window` and `hybrid` cut them into a window and into what lies behind it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels import is_eager
from .segments import real_first
from .segments import take


# What a place holds.
EMPTY, ORDINARY, SINK = 0, 1, 2


class Line(NamedTuple):
    """Keys and values in a row, `[B, Hkv, L, D]` twice, what is where, and its position, `[B, L]`."""

    key: Tensor
    value: Tensor
    kind: Tensor
    position: Tensor | None  # where the mechanism keeps them

    def aligned_right(self) -> Line:
        """Real tokens moved to the right end, so that a window is the last w of them."""
        place = real_first(self.kind == EMPTY)
        position = None if self.position is None else self.position.gather(1, place)
        return Line(take(self.key, place), take(self.value, place), self.kind.gather(1, place), position)

    def padded(self, left: int, right: int) -> Line:
        """With empty places at both ends."""
        key, value = (F.pad(x, (0, 0, left, right)) for x in (self.key, self.value))
        position = None if self.position is None else F.pad(self.position, (left, right))
        return Line(key, value, F.pad(self.kind, (left, right), value=EMPTY), position)

    def last(self, length: int) -> Line:
        """The last `length` places."""
        return self._part(slice(-length, None))

    def first(self, length: int) -> Line:
        """The first `length` places."""
        return self._part(slice(length))

    def _part(self, places: slice) -> Line:
        position = None if self.position is None else self.position[:, places]
        return Line(self.key[:, :, places], self.value[:, :, places], self.kind[:, places], position)

    def ranges(self, length: int, places: slice) -> tuple[Line, Line]:
        """The first `length` places, and other `places`."""
        key, value = (_ranges(x, length, places) for x in (self.key, self.value))
        first, other = (
            self._part(part)._replace(key=k, value=v) for part, k, v in zip((slice(length), places), key, value)
        )
        return first, other

    def flipped(self) -> Line:
        """The places in the opposite order."""
        position = None if self.position is None else self.position.flip(1)
        return Line(self.key.flip(2), self.value.flip(2), self.kind.flip(1), position)


def _ranges(x: Tensor, length: int, places: slice) -> tuple[Tensor, Tensor]:
    """The first `length` places of `x [B, Hkv, L, D]`, and other `places`."""
    if not torch.is_grad_enabled() or not is_eager(x):  # no place for functions of our own
        return x[:, :, :length], x[:, :, places]
    return _TwoRanges.apply(x, length, places)


def far_and_near(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`x [B, Hkv, N, D]` with room before the first token: as far keys, `width` places behind their query, and as near
    ones, up to it."""
    length = x.shape[2]
    if is_eager(x):
        return _ranges(F.pad(x, (0, 0, width, 0)), length, slice(1, None))
    leaving = min(width, length)  # in a graph two nodes instead of three
    return F.pad(x, (0, 0, leaving, -leaving)), F.pad(x, (0, 0, width - 1, 0))


class _TwoRanges(torch.autograd.Function):
    """`apply(x [B, Hkv, L, D], length, places)` -> the first places, others; autograd's slices make a tensor each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, length: int, places: slice) -> tuple[Tensor, Tensor]:
        ctx.shape, ctx.length, ctx.places = x.shape, length, places
        return x[:, :, :length], x[:, :, places]

    @staticmethod
    def backward(ctx: Any, grad_first: Tensor, grad_other: Tensor) -> tuple[Tensor, None, None]:
        grad = grad_first.new_empty(ctx.shape)
        grad[:, :, : ctx.length] = grad_first
        grad[:, :, ctx.length :] = 0
        grad[:, :, ctx.places] += grad_other
        return grad, None, None


def within_sequences(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token of packed sequences its position, from 1, and the place where its sequence starts, both `[B, N]`.

    `numbers [B, N]` count the sequences, with all padding, 0, on the left; its positions are 0.
    """
    place = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
    starts = (numbers != F.pad(numbers[:, :-1], (1, 0))) & (numbers > 0)
    sequence = starts.cumsum(dim=1)
    # Not `cummax`, which ONNX lacks. What does not start a sequence goes to sequence 0, which is no one's.
    start_of = torch.zeros_like(F.pad(place, (1, 0))).scatter(1, sequence * starts, place)
    first = start_of.gather(1, sequence)
    return torch.where(numbers > 0, place - first + 1, 0), first
