# SPDX-License-Identifier: Apache-2.0
"""Lines of keys and values, which `window` and `hybrid` divide into a window and the keys behind it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.segments import gather_tokens, real_first
from ..torch_kernels.implementations import is_eager, is_free


# What a slot of a line holds.
EMPTY, ORDINARY, SINK = 0, 1, 2  # `kind_of` computes with them


def kind_of(real: Tensor | None, position: Tensor, num_sinks: int) -> Tensor:
    """The kind of each token, `[B, N]`, from its position among the real tokens, counted from 1."""
    kind = (position <= num_sinks).to(torch.int8) + ORDINARY
    return kind if real is None else kind * real


class Line(NamedTuple):
    """Keys and values in a row, both `[B, Hkv, L, D]`, with the kind and the position of each slot, both `[B, L]`."""

    key: Tensor
    value: Tensor
    kind: Tensor
    position: Tensor | None  # None if the mechanism keeps no positions

    def aligned_right(self) -> Line:
        """The line with its real tokens moved to the right end, so that the last w of them are the window."""
        place = real_first(self.kind == EMPTY)
        position = None if self.position is None else self.position.gather(1, place)
        return Line(
            gather_tokens(self.key, place), gather_tokens(self.value, place), self.kind.gather(1, place), position
        )

    def padded(self, left: int, right: int) -> Line:
        """The line with empty slots at both ends."""
        key, value = (F.pad(x, (0, 0, left, right)) for x in (self.key, self.value))
        position = None if self.position is None else F.pad(self.position, (left, right))
        return Line(key, value, F.pad(self.kind, (left, right), value=EMPTY), position)

    def followed_by(self, new: Line, is_padded: bool) -> Line:
        """The line with `new` behind it; its real tokens are at the right end even if `new` begins with padding."""
        position = None
        if self.position is not None and new.position is not None:
            position = torch.cat((self.position, new.position), dim=1)
        key, value = (torch.cat(pair, dim=2) for pair in zip(self[:2], new[:2]))
        line = Line(key, value, torch.cat((self.kind, new.kind), dim=1), position)
        return line.aligned_right() if is_padded else line

    def last(self, length: int) -> Line:
        """A copy of the last `length` slots, which does not keep the others alive; missing ones are empty."""
        if not is_free(self.kind.shape[1]):
            line = self.padded(length - self.kind.shape[1], 0)
            return line._replace(key=line.key.contiguous(), value=line.value.contiguous())
        key, value, kind, position = self.padded(length, 0)._part(slice(-length, None))
        key, value = (x.clone(memory_format=torch.contiguous_format) for x in (key, value))
        return Line(key, value, kind.clone(), None if position is None else position.clone())

    def first(self, length: int) -> Line:
        """The first `length` slots."""
        return self._part(slice(length))

    def _part(self, places: slice) -> Line:
        position = None if self.position is None else self.position[:, places]
        return Line(self.key[:, :, places], self.value[:, :, places], self.kind[:, places], position)

    def far_and_near(self, width: int, length: int) -> tuple[Line, Line]:
        """For the last `length` slots, those `width` slots behind each, and those from there up to each one itself."""
        before = self.kind.shape[1] - length
        if not before and not is_eager(self.key) and not is_free(length):  # in a graph, this takes fewer nodes
            leaving = min(width, length)
            return self.padded(leaving, -leaving), self.padded(width - 1, 0)
        return (self if before else self.padded(width, 0)).ranges(length, slice(1, None))

    def ranges(self, length: int, places: slice) -> tuple[Line, Line]:
        """The first `length` slots, and the slots `places`."""
        key, value = (_ranges(x, length, places) for x in (self.key, self.value))
        first, other = (
            self._part(part)._replace(key=k, value=v) for part, k, v in zip((slice(length), places), key, value)
        )
        return first, other

    def flipped(self) -> Line:
        """The line in the opposite order."""
        position = None if self.position is None else self.position.flip(1)
        return Line(self.key.flip(2), self.value.flip(2), self.kind.flip(1), position)


def _ranges(x: Tensor, length: int, places: slice) -> tuple[Tensor, Tensor]:
    """The first `length` slots of `x [B, Hkv, L, D]`, and the slots `places`."""
    if not torch.is_grad_enabled() or not is_eager(x):  # our own autograd function is not needed, or not traceable
        return x[:, :, :length], x[:, :, places]
    return _TwoRanges.apply(x, length, places)


class _TwoRanges(torch.autograd.Function):
    """`_ranges` with one gradient tensor; in the backward pass, two slices would allocate a tensor each."""

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
    """The position of each token within its packed sequence, from 1, and the index of its first token, both `[B, N]`.

    `numbers [B, N]` counts the sequences. Padding has the number 0, is on the left, and has position 0.
    """
    place = torch.arange(numbers.shape[1], dtype=torch.long, device=numbers.device).expand_as(numbers)
    starts = (numbers != F.pad(numbers[:, :-1], (1, 0))) & (numbers > 0)
    sequence = starts.cumsum(dim=1)
    # ONNX lacks `cummax`. Tokens that do not start a sequence are scattered to sequence 0, which does not exist.
    start_of = torch.zeros_like(F.pad(place, (1, 0))).scatter(1, sequence * starts, place)
    first = start_of.gather(1, sequence)
    return torch.where(numbers > 0, place - first + 1, 0), first
