# SPDX-License-Identifier: Apache-2.0
"""The bidirectional form of `window` and `hybrid`: a window to either side, and the first tokens are global.

    keys     0 1 2 3 | 4 5 ... i - w | i - w + 1 ... i ... i + w - 1 | i + w ... N - 1
             global       before                window                    after

The queries take turns in chunks, so that no intermediate result is as long as the input. What is behind the window of a
chunk comes from sums: a pass from the end keeps those of the keys after each chunk, and the pass that computes the
outputs carries those of the keys before it.

The softmax model never had more keys than its trained length. In an input of N real tokens, more than that, the far
keys weigh trained_length / N of what they would: together as much as in an input of the trained length. Otherwise
their sum would grow with N and drown the window.

Axes: B batch, H query heads, Hkv key/value heads, N length, D head dimension, s sinks, w window size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention.segments import gather_tokens, real_first
from ..torch_kernels.attention import is_eager
from ..torch_kernels.blocks import EMPTY_MAXIMUM, accumulated, accumulation_dtype, shown
from ..torch_kernels.causal import is_free
from ..torch_kernels.window import NearKeys, Part, join
from .base import AttentionMechanism, OutputParts
from .window_keys import ORDINARY, SINK, Line


# The elements of the queries of a chunk, 4 MB in float32. Of larger chunks malloc keeps more when they are freed, the
# more there are; smaller ones do not save time.
QUERIES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class SplitTokens:
    """Queries `[B, H, N, D]`, keys and values `[B, Hkv, N, D]`, whose padding is read as if it was on the left."""

    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor | None  # [B, N]
    order: Tensor | None  # [B, N], the tokens from left to right; None as they are
    mask: Tensor  # bool [B, N], like all others below from left to right
    position: Tensor  # [B, N], of each token among the real ones, from 1
    kind: Tensor  # [B, N]

    def part(self, x: Tensor, places: slice) -> Tensor:
        """The tokens at `places` of `x [B, heads, N, D]`, from left to right."""
        return x[:, :, places] if self.order is None else gather_tokens(x, self.order[:, places])

    def positions_at(self, places: slice) -> Tensor | None:
        """The positions of the tokens at `places`, `[B, C]`, or None."""
        if self.positions is None or self.order is None:
            return None if self.positions is None else self.positions[:, places]
        return self.positions.gather(1, self.order[:, places])

    def line(self, start: int, stop: int, keeps_positions: bool) -> Line:
        """The keys of the places `start` to `stop - 1`, which are empty slots outside of the tokens."""
        length = self.kind.shape[1]
        if is_free(length):  # all tokens and a margin, whatever their number is
            first, last = 0, length
        else:
            first, last = max(0, min(start, length)), max(0, min(stop, length))
        places = slice(first, last)
        position = self.positions_at(places) if keeps_positions else None
        line = Line(self.part(self.key, places), self.part(self.value, places), self.kind[:, places], position)
        left = max(0, -start)
        return line.padded(left, stop - start - left - (last - first))


class BidirectionalWindow(AttentionMechanism):
    """Base class of `window`, which says what the keys behind the window are worth."""

    window_size: int
    num_sinks: int
    trained_length: int | None
    keeps_positions: bool
    to_sinks: Any
    alibi: Any
    # The methods of `window`.
    _attend: Any
    _behind: Any
    _kind: Any
    move_to_sinks: Any
    sink_query: Any
    _sums_behind: Any

    def _attend_both_ways(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, positions: Any
    ) -> Tensor:
        """The output `[B, N, H, D]`: a causal sweep over the keys before the window, and one over those after it.

        Raises:
            NotImplementedError: with ALiBi, whose biases the rows of global tokens would lack.
        """
        if self.alibi is not None:
            raise NotImplementedError(f"{type(self).__name__} has no bidirectional form with ALiBi.")
        tokens = self._ordered(query, key, value, mask, positions)
        chunks = self._chunks(query)
        sinks, sink_query = self._sinks_of(tokens)
        sink_rows = self._rows_of_sinks(sink_query, tokens, chunks, scaling) if self.num_sinks else None
        # The sums of the keys after the window of each chunk's last query, from the last chunk to the first.
        after: list[Tensor | None] = [None]
        for chunk in reversed(chunks[1:]):
            after.append(self._sums_after(tokens, chunk, scaling, after[-1]))
        before: Tensor | None = None
        excess = self._excess(tokens)
        outputs = OutputParts(query, tokens.order)
        for chunk, sums in zip(chunks, reversed(after)):
            output, before = self._attend_chunk(tokens, chunk, sinks, scaling, before, sums, excess)
            if sink_rows is not None:
                rows = chosen_sinks(tokens.position[:, chunk], tokens.kind[:, chunk], self.num_sinks)
                rows = rows.unsqueeze(1).to(output.dtype).transpose(-1, -2) @ sink_rows
                output = torch.where((tokens.kind[:, chunk] == SINK)[:, None, :, None], rows, output)
            if tokens.order is not None:
                output = output.masked_fill(~tokens.mask[:, None, chunk, None], 0.0)
            outputs.append(output.transpose(1, 2))
        return outputs.joined()

    def _ordered(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, positions: Any) -> SplitTokens:
        order = None if mask is None else real_first(~mask)
        if mask is None or order is None:
            mask = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
        else:
            mask = mask.gather(1, order)
        position = mask.cumsum(dim=1)
        return SplitTokens(query, key, value, positions, order, mask, position, self._kind(mask, position))

    def _chunks(self, query: Tensor) -> list[slice]:
        """The places of the queries of each chunk; only one in a graph, which would unroll the loop, and for gradients,
        for which everything has to be kept anyway."""
        batch, heads, length, width = query.shape
        if torch.is_grad_enabled() or not is_eager(query):
            return [slice(0, length)]
        size = max(2 * self.window_size, QUERIES_AT_ONCE // max(1, batch * heads * width))
        return [slice(start, min(length, start + size)) for start in range(0, length, size)]

    def _excess(self, tokens: SplitTokens) -> Tensor | None:
        """The logarithm of N / trained_length of each row, at least 0, `[B, 1, 1, 1, 1]`; None if all are 0."""
        length = tokens.kind.shape[1]
        if self.trained_length is None or not (is_free(length) or length > self.trained_length):
            return None
        count = tokens.position[:, -1:].to(accumulation_dtype(tokens.query))
        return (count / self.trained_length).clamp(min=1).log()[:, :, None, None, None]

    def _sinks_of(self, tokens: SplitTokens) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The keys and values of the global tokens, `[B, Hkv, s, D]`, and their queries `[B, H, s, D]`."""
        found = chosen_sinks(tokens.position, tokens.kind, self.num_sinks).max(dim=-1)
        places = found.indices if tokens.order is None else tokens.order.gather(1, found.indices)
        key, value, query = (
            gather_tokens(x, places) * found.values[:, None, :, None].to(x.dtype)
            for x in (tokens.key, tokens.value, tokens.query)
        )
        return (key, value), query

    def _rows_of_sinks(self, query: Tensor, tokens: SplitTokens, chunks: list[slice], scaling: float) -> Tensor:
        """Exact attention of the global tokens `[B, H, s, D]` to every key, `[B, H, s, W]`."""
        found: list[Part] = []
        rows = accumulated(query).unflatten(1, (tokens.key.shape[1], -1)).flatten(2, 3) * scaling  # [B, Hkv, G s, D]
        for chunk in chunks:
            key, value = (accumulated(tokens.part(x, chunk)) for x in (tokens.key, tokens.value))
            mask = tokens.mask[:, chunk]
            # Keys move instead of these queries, because only the distance matters.
            move = self.move_to_sinks(key, tokens.positions_at(chunk))
            key = key if move is None else self.to_sinks(key, move)
            logits = rows @ shown(key, mask).transpose(-1, -2)
            logits = logits.masked_fill(~mask[:, None, None], EMPTY_MAXIMUM)
            part = logits.softmax(dim=-1) @ shown(value, mask), logits.logsumexp(dim=-1, keepdim=True)
            found = [join(*found, part)]
        return found[0][0].reshape(*query.shape[:3], tokens.value.shape[3])

    def _attend_chunk(
        self,
        tokens: SplitTokens,
        chunk: slice,
        sinks: Any,
        scaling: float,
        before: Tensor | None,
        after: Tensor | None,
        excess: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The output `[B, H, C, D]` of the queries of a chunk, and the sums of the keys before the next one's windows.

        Args:
            before, after: the sums of the keys before the window of the first query, and after that of the last one.
            excess: what `_excess` returns.
        """
        length, w = chunk.stop - chunk.start, self.window_size
        query, positions = tokens.part(tokens.query, chunk), tokens.positions_at(chunk)
        line = tokens.line(chunk.start - w, chunk.stop + w, self.keeps_positions)
        to_far, to_near = line.ranges(length, slice(1, length + 2 * w - 1))
        behind, before = self._behind(query, to_far, to_far.kind == ORDINARY, scaling, positions, before)
        later, turned = line.flipped().first(length), None if positions is None else positions.flip(1)
        ahead, _ = self._behind(query.flip(2), later, later.kind == ORDINARY, scaling, turned, after)
        behind = [*behind, *((output.flip(3), size.flip(3)) for output, size in ahead)]
        if excess is not None:
            behind = [(output, size - excess) for output, size in behind]
        near = NearKeys(to_near.key, to_near.value, to_near.kind == ORDINARY, w - 1)
        seen = (
            torch.arange(self.num_sinks, dtype=torch.long, device=query.device) < tokens.position[:, -1:, None]
        ).expand(-1, length, -1)
        to_sinks = self.sink_query(query, positions)
        position = tokens.position[:, chunk]
        return self._attend(query, near, sinks, seen, position, behind, scaling, to_sinks), before

    def _sums_after(self, tokens: SplitTokens, chunk: slice, scaling: float, sums: Tensor | None) -> Tensor | None:
        """The sums of `_attend_chunk` after the windows of the chunk before this one, from those after its own."""
        w, positions = self.window_size, tokens.positions_at(chunk)
        line = tokens.line(chunk.start + w, chunk.stop + w, self.keeps_positions).flipped()
        query, turned = tokens.part(tokens.query, chunk).flip(2), None if positions is None else positions.flip(1)
        return self._sums_behind(query, line, line.kind == ORDINARY, scaling, turned, sums)


def chosen_sinks(position: Tensor, kind: Tensor, count: int) -> Tensor:
    """int8 `[B, s, N]`: 1 where the token is that one of `count` sinks, 0 elsewhere."""
    wanted = torch.arange(1, count + 1, dtype=torch.long, device=position.device)
    return ((position[:, None] == wanted[:, None]) & (kind == SINK)[:, None]).to(torch.int8)
