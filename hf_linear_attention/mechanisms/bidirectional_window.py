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
from ..torch_kernels.blocks import EMPTY_MAXIMUM, accumulated, accumulation_dtype, shown
from ..torch_kernels.implementations import is_eager, is_free
from ..torch_kernels.window import NearKeys, Part, join
from .base import MechanismInputs, OutputParts
from .window_keys import ORDINARY, SINK, Line, kind_of


# The elements of the queries of a chunk, 4 MB in float32. Of larger chunks malloc keeps more when they are freed, the
# more there are; smaller ones do not save time.
QUERIES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class SplitTokens:
    """The inputs of a mechanism, whose padding is read as if it was on the left."""

    inputs: MechanismInputs
    order: Tensor | None  # [B, N], the tokens from left to right; None as they are
    mask: Tensor  # bool [B, N], like all others below from left to right
    position: Tensor  # [B, N], of each token among the real ones, from 1
    kind: Tensor  # [B, N]

    def part(self, x: Tensor, places: slice) -> Tensor:
        """The tokens at `places` of `x [B, heads, N, D]`, from left to right."""
        return x[:, :, places] if self.order is None else gather_tokens(x, self.order[:, places])

    def positions_at(self, places: slice) -> Tensor | None:
        """The positions of the tokens at `places`, `[B, C]`, or None."""
        positions = self.inputs.positions
        if positions is None or self.order is None:
            return None if positions is None else positions[:, places]
        return positions.gather(1, self.order[:, places])

    def queries_at(self, places: slice) -> MechanismInputs:
        """The inputs with the queries and positions of the tokens at `places` only."""
        return self.inputs._replace(query=self.part(self.inputs.query, places), positions=self.positions_at(places))

    def line(self, start: int, stop: int, keeps_positions: bool) -> Line:
        """The keys of the places `start` to `stop - 1`, which are empty slots outside of the tokens."""
        length = self.kind.shape[1]
        if is_free(length):  # all tokens and a margin, whatever their number is
            first, last = 0, length
        else:
            first, last = max(0, min(start, length)), max(0, min(stop, length))
        places = slice(first, last)
        position = self.positions_at(places) if keeps_positions else None
        key, value = (self.part(x, places) for x in (self.inputs.key, self.inputs.value))
        left = max(0, -start)
        return Line(key, value, self.kind[:, places], position).padded(left, stop - start - left - (last - first))


def flipped(inputs: MechanismInputs) -> MechanismInputs:
    """The inputs with queries and positions in the opposite order."""
    positions = None if inputs.positions is None else inputs.positions.flip(1)
    return inputs._replace(query=inputs.query.flip(2), positions=positions)


def attend_both_ways(mechanism: Any, inputs: MechanismInputs) -> Tensor:
    """The output `[B, N, H, D]`: a causal sweep over the keys before the window, and one over those after it.

    Raises:
        NotImplementedError: with ALiBi, whose biases the rows of global tokens would lack.
    """
    if mechanism.alibi is not None:
        raise NotImplementedError(f"{type(mechanism).__name__} has no bidirectional form with ALiBi.")
    tokens = _ordered(inputs, mechanism.num_sinks)
    chunks = _chunks(inputs.query, mechanism.window_size)
    sinks, sink_query = _sinks_of(tokens, mechanism.num_sinks)
    sink_rows = _rows_of_sinks(mechanism, sink_query, tokens, chunks) if mechanism.num_sinks else None
    # The sums of the keys after the window of each chunk's last query, from the last chunk to the first.
    after: list[Tensor | None] = [None]
    for chunk in reversed(chunks[1:]):
        w = mechanism.window_size
        line = tokens.line(chunk.start + w, chunk.stop + w, mechanism.keeps_positions).flipped()
        turned = flipped(tokens.queries_at(chunk))
        after.append(mechanism.sums_behind(turned, line, line.kind == ORDINARY, after[-1]))
    before: Tensor | None = None
    excess = _excess(mechanism, tokens)
    outputs = OutputParts(inputs.query, tokens.order)
    for chunk, sums in zip(chunks, reversed(after)):
        output, before = _attend_chunk(mechanism, tokens, chunk, sinks, before, sums, excess)
        if sink_rows is not None:
            places = (tokens.position[:, chunk] - 1).clamp(0, mechanism.num_sinks - 1)
            is_sink = (tokens.kind[:, chunk] == SINK)[:, None, :, None]
            output = torch.where(is_sink, gather_tokens(sink_rows.to(output.dtype), places), output)
        if tokens.order is not None:
            output = output.masked_fill(~tokens.mask[:, None, chunk, None], 0.0)
        outputs.append(output.transpose(1, 2))
    return outputs.joined()


def _ordered(inputs: MechanismInputs, num_sinks: int) -> SplitTokens:
    mask, key = inputs.attention_mask, inputs.key
    order = None if mask is None else real_first(~mask)
    if mask is None or order is None:
        mask = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    else:
        mask = mask.gather(1, order)
    position = mask.cumsum(dim=1)
    return SplitTokens(inputs, order, mask, position, kind_of(mask, position, num_sinks))


def _chunks(query: Tensor, window_size: int) -> list[slice]:
    """The places of the queries of each chunk; only one in a graph, which would unroll the loop, and for gradients, for
    which everything has to be kept anyway."""
    batch, heads, length, width = query.shape
    if torch.is_grad_enabled() or not is_eager(query):
        return [slice(0, length)]
    size = max(2 * window_size, QUERIES_AT_ONCE // max(1, batch * heads * width))
    return [slice(start, min(length, start + size)) for start in range(0, length, size)]


def _excess(mechanism: Any, tokens: SplitTokens) -> Tensor | None:
    """The logarithm of N / trained_length of each row, at least 0, `[B, 1, 1, 1, 1]`; None if all are 0."""
    length = tokens.kind.shape[1]
    if mechanism.trained_length is None or not (is_free(length) or length > mechanism.trained_length):
        return None
    count = tokens.position[:, -1:].to(accumulation_dtype(tokens.inputs.query))
    return (count / mechanism.trained_length).clamp(min=1).log()[:, :, None, None, None]


def _sinks_of(tokens: SplitTokens, num_sinks: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """The keys and values of the global tokens, `[B, Hkv, s, D]`, and their queries `[B, H, s, D]`."""
    numbers = torch.arange(num_sinks, dtype=torch.long, device=tokens.position.device)
    length, count = tokens.position.shape[1], tokens.position[:, -1:]
    places = (length - count + numbers).clamp(max=length - 1)
    places = places if tokens.order is None else tokens.order.gather(1, places)
    is_there = (numbers < count)[:, None, :, None]
    query, key, value = (gather_tokens(x, places) * is_there.to(x.dtype) for x in tokens.inputs[:3])
    return (key, value), query


def _rows_of_sinks(mechanism: Any, query: Tensor, tokens: SplitTokens, chunks: list[slice]) -> Tensor:
    """Exact attention of the global tokens `[B, H, s, D]` to every key, `[B, H, s, W]`."""
    found: list[Part] = []
    inputs = tokens.inputs
    rows = accumulated(query).unflatten(1, (inputs.key.shape[1], -1)).flatten(2, 3) * inputs.scaling  # [B, Hkv, G s, D]
    for chunk in chunks:
        key, value = (accumulated(tokens.part(x, chunk)) for x in (inputs.key, inputs.value))
        mask = tokens.mask[:, chunk]
        # Keys move instead of these queries, because only the distance matters.
        move = mechanism.move_to_sinks(key, tokens.positions_at(chunk))
        key = key if move is None else mechanism.to_sinks(key, move)
        logits = rows @ shown(key, mask).transpose(-1, -2)
        logits = logits.masked_fill(~mask[:, None, None], EMPTY_MAXIMUM)
        part = logits.softmax(dim=-1) @ shown(value, mask), logits.logsumexp(dim=-1, keepdim=True)
        found = [join(*found, part)]
    return found[0][0].reshape(*query.shape[:3], inputs.value.shape[3])


def _attend_chunk(
    mechanism: Any,
    tokens: SplitTokens,
    chunk: slice,
    sinks: tuple[Tensor, ...],
    before: Tensor | None,
    after: Tensor | None,
    excess: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The output `[B, H, C, D]` of the queries of a chunk, and the sums of the keys before the next one's windows.

    Args:
        before, after: the sums of the keys before the window of the first query, and after that of the last one.
        excess: what `_excess` returns.
    """
    length, w, inputs = chunk.stop - chunk.start, mechanism.window_size, tokens.queries_at(chunk)
    line = tokens.line(chunk.start - w, chunk.stop + w, mechanism.keeps_positions)
    to_far, to_near = line.ranges(length, slice(1, length + 2 * w - 1))
    behind, before = mechanism.parts_behind(inputs, to_far, to_far.kind == ORDINARY, before)
    later = line.flipped().first(length)
    ahead, _ = mechanism.parts_behind(flipped(inputs), later, later.kind == ORDINARY, after)
    behind = [*behind, *((output.flip(3), size.flip(3)) for output, size in ahead)]
    if excess is not None:
        behind = [(output, size - excess) for output, size in behind]
    near = NearKeys(to_near.key, to_near.value, to_near.kind == ORDINARY, w - 1)
    numbers = torch.arange(mechanism.num_sinks, dtype=torch.long, device=tokens.position.device)
    seen = (numbers < tokens.position[:, -1:, None]).expand(-1, length, -1)
    position = tokens.position[:, chunk]
    return mechanism.attend_near_and_far(inputs, near, sinks, seen, position, behind), before
