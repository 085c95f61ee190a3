"""Poisoned memory between guards: what is written beside a tensor, read beside it or never written is seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


POISON = 0xFF  # in every byte: nan in each floating dtype, and none that arithmetic makes
GUARD = 24  # numbers, more than a vector


class PoisonedMemory:
    """Allocates tensors inside larger poisoned buffers, and finds out what was written where it should not be."""

    def __init__(self, guard: int = GUARD):
        self.guard = guard
        self.allocations: list[tuple[str, torch.Tensor, torch.Tensor, slice | None]] = []

    def place(
        self,
        name: str,
        x: torch.Tensor,
        order: Sequence[int] | None = None,
        steps: Sequence[int] | None = None,
        expanded: Sequence[int] = (),
    ) -> torch.Tensor:
        """A copy of `x` that nobody may change. Its axes lie in memory in this `order`, the innermost last.

        An axis with step n uses every n-th number of its memory; an `expanded` one has stride 0 and repeats its first.
        """
        order, steps = order or range(x.ndim), steps or [1] * x.ndim
        strides, size = [0] * x.ndim, 1
        for axis in reversed(order):
            if axis not in expanded:
                strides[axis] = size * steps[axis]
                size *= max(1, x.shape[axis] * steps[axis])
        buffer = self._buffer(size, x.dtype, x.device)
        once = [min(1, n) if axis in expanded else n for axis, n in enumerate(x.shape)]
        first = x[tuple(slice(0, n) for n in once)]
        buffer.as_strided(once, strides, self.guard).copy_(first)
        self._remember(name, buffer, None)
        return buffer.as_strided(x.shape, strides, self.guard)

    def new(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int]) -> torch.Tensor:
        """Poisoned memory that may be written, as torch.empty gives it."""
        size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides)) if 0 not in shape else 0
        buffer = self._buffer(size, dtype, "cpu")
        self._remember("an output", buffer, slice(self.guard * dtype.itemsize, (self.guard + size) * dtype.itemsize))
        return buffer.as_strided(shape, strides, self.guard)

    def _buffer(self, size: int, dtype: torch.dtype, device) -> torch.Tensor:
        buffer = ORIGINALS["empty"](size + 2 * self.guard, dtype=dtype, device=device)
        buffer.view(torch.uint8).fill_(POISON)
        return buffer

    def _remember(self, name: str, buffer: torch.Tensor, writable: slice | None) -> None:
        contents = buffer.view(torch.uint8)
        self.allocations.append((name, contents, contents.clone(), writable))

    def check(self) -> None:
        """Refuse any change of an input or of a guard."""
        for name, buffer, before, writable in self.allocations:
            if writable is not None:
                before[writable] = buffer[writable]
            if not torch.equal(buffer, before):
                place = "outside of it" if writable is not None else "in it or outside of it"
                raise AssertionError(f"memory of {name} was written {place}")
        self.allocations.clear()


ORIGINALS = {"empty": torch.empty, "empty_like": torch.empty_like, "new_empty": torch.Tensor.new_empty}


@contextmanager
def poisoned_allocations(guard: int = GUARD) -> Iterator[PoisonedMemory]:
    """While it lasts, torch.empty and its kin called from Python give poisoned memory between guards."""
    memory = PoisonedMemory(guard)

    def replaced(x: torch.Tensor) -> torch.Tensor:
        is_ours = type(x) is torch.Tensor and x.device.type == "cpu" and not x.requires_grad
        return memory.new(x.shape, x.dtype, x.stride()) if is_ours else x

    torch.empty = lambda *given, **options: replaced(ORIGINALS["empty"](*given, **options))
    torch.empty_like = lambda *given, **options: replaced(ORIGINALS["empty_like"](*given, **options))
    torch.Tensor.new_empty = lambda *given, **options: replaced(ORIGINALS["new_empty"](*given, **options))
    try:
        yield memory
    finally:
        torch.empty, torch.empty_like = ORIGINALS["empty"], ORIGINALS["empty_like"]
        torch.Tensor.new_empty = ORIGINALS["new_empty"]
