# SPDX-License-Identifier: Apache-2.0
"""`window`: exact softmax to a sliding window and to sink tokens (StreamingLLM, Xiao 2023); other keys are forgotten.

           sinks                          window
    keys   0 1 2 3 | 4 5 ......... i - w | i - w + 1 ..... i     exact: the last w real tokens and the first s

It has no parameters, and is the baseline for every mechanism with a state of the same size. `hybrid` adds linear
attention to the keys in between. In an encoder the window extends w - 1 tokens to either side, and the first s tokens
are global: they also attend to every key exactly (Longformer 2020, section 3.1).

    keys     0 1 2 3 | 4 5 ... i - w | i - w + 1 ... i ... i + w - 1 | i + w ... N - 1
             global       before                window                    after

Queries of an encoder take turns in chunks, so that no intermediate result is as long as the input. What is behind the
window of a chunk comes from sums: a pass from the end keeps those of the keys after each chunk, and the pass that
computes the outputs carries those of the keys before it.

The softmax model never had more keys than its trained length. In an input of N real tokens, more than that, the far
keys of an encoder weigh trained_length / N of what they would: together as much as in an input of the trained length.
Otherwise their sum would grow with N and drown the window.

Axes: B batch, H query heads, Hkv key/value heads, N length, D head dimension, s sinks, w window size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..positions.rotary import RotaryShift, alibi_of
from ..torch_kernels.blocks import (
    EMPTY_MAXIMUM,
    accumulated,
    accumulation_dtype,
    is_eager,
    is_free,
    is_on_cuda,
    needs_plain,
    with_dtype,
    zero_where_masked,
)
from ..torch_kernels.implementations import implemented
from ..torch_kernels.window import NearKeys, Part, SinkKeys, dense_attention, exact_part, join, window_in_blocks
from .base import (
    AttentionMechanism,
    LayerShape,
    MechanismInputs,
    OutputParts,
    State,
    gather_tokens,
    inverse_order,
    real_first,
)
from .settings import WindowOptions


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
    score: Tensor | None = None  # [B, Hkv, L, 1], of mechanisms with exact keys behind the window

    def map(self, function: Callable[[Tensor, int], Tensor]) -> Line:
        """`function(tensor, axis of the slots)` of each tensor."""
        key, value, kind, position, score = self
        position = None if position is None else function(position, 1)
        score = None if score is None else function(score, 2)
        return Line(function(key, 2), function(value, 2), function(kind, 1), position, score)

    def padded(self, left: int, right: int) -> Line:
        """The line with empty slots at both ends."""
        return self.map(lambda x, axis: F.pad(x, (0, 0) * (axis - 1) + (left, right)))  # EMPTY is 0

    def followed_by(self, new: Line, is_padded: bool) -> Line:
        """The line with `new` behind it; its real tokens are at the right end even if `new` begins with padding."""
        position = None
        if self.position is not None and new.position is not None:
            position = torch.cat((self.position, new.position), dim=1)
        key, value = (torch.cat(pair, dim=2) for pair in zip(self[:2], new[:2]))
        score = None if self.score is None or new.score is None else torch.cat((self.score, new.score), dim=2)
        line = Line(key, value, torch.cat((self.kind, new.kind), dim=1), position, score)
        if not is_padded:
            return line
        place = real_first(line.kind == EMPTY)  # so that the last w tokens are the window
        return line.map(lambda x, axis: gather_tokens(x, place) if axis == 2 else x.gather(1, place))

    def last(self, length: int) -> Line:
        """A copy of the last `length` slots, which does not keep the others alive; missing ones are empty."""
        if is_free(self.kind.shape[1]):
            line = self.padded(length, 0).at(slice(-length, None))
            return line.map(lambda x, _: x.clone(memory_format=torch.contiguous_format))
        line = self.padded(length - self.kind.shape[1], 0)
        return line._replace(key=line.key.contiguous(), value=line.value.contiguous())

    def at(self, places: slice) -> Line:
        """The slots `places`."""
        return self.map(lambda x, axis: x[:, places] if axis == 1 else x[:, :, places])

    def far_and_near(self, width: int, length: int) -> tuple[Line, ...]:
        """For the last `length` slots, those `width` slots behind each, and those from there up to each one itself."""
        before = self.kind.shape[1] - length
        if not before and not is_eager(self.key) and not is_free(length):  # in a graph, this takes fewer nodes
            leaving = min(width, length)
            return self.padded(leaving, -leaving), self.padded(width - 1, 0)
        return (self if before else self.padded(width, 0)).ranges(length, slice(1, None))

    def ranges(self, length: int, places: slice) -> tuple[Line, ...]:
        """The first `length` slots, and the slots `places`."""
        key, value = (_ranges(x, length, places) for x in (self.key, self.value))
        return tuple(self.at(part)._replace(key=k, value=v) for part, k, v in zip((slice(length), places), key, value))

    def flipped(self) -> Line:
        """The line in the opposite order."""
        return self.map(lambda x, axis: x.flip(axis))


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


class WindowState(NamedTuple):
    """The state of a window of size w with s sinks; the window is aligned to the right, with its newest token last.

    Keys are kept with their rotary position applied. A state is stored without what is None.
    """

    # [B, Hkv, F, D + 2]: S, Z and m of the tokens behind the window, if a mechanism has any; before what else it has
    sums: Tensor | State | None
    key: Tensor  # [B, Hkv, w, D]
    value: Tensor  # [B, Hkv, w, D]
    kind: Tensor  # [B, w] int8: EMPTY, ORDINARY or SINK
    sink_key: Tensor  # [B, Hkv, s, D]
    sink_value: Tensor  # [B, Hkv, s, D]
    num_seen: Tensor  # [B, 1] int64: real tokens so far
    position: Tensor | None = None  # [B, w] int32, if keys that leave the window have to be moved
    score: Tensor | None = None  # [B, Hkv, w, 1] float32, if few keys behind the window are kept

    @property
    def stored(self) -> State:
        """The tensors in their order."""
        sums: Any = self.sums if isinstance(self.sums, tuple) else (self.sums,)
        return tuple(tensor for tensor in (*sums, *self[1:]) if tensor is not None)


Slots = tuple[Line, Line, tuple[Tensor, ...], Tensor, Tensor | None, Tensor]
"""The line of keys and values, its kind false where a slot holds no ordinary token; the window of the state; the sinks
and which of them each query sees; the position of each token among the real ones, from 1; how many there are."""


class WindowAttention(WindowOptions, AttentionMechanism):
    """Exact softmax to a sliding window and to sink (global) tokens; what is farther away is not seen."""

    # Whether there are sums over the keys behind the window, and whether the state has the positions of the window.
    has_sums = keeps_positions = False
    num_exact_keys = 0  # that are kept behind the window

    def __init__(self, settings: Mapping[str, Any], shape: LayerShape) -> None:
        super().__init__(settings, shape)
        self.window_size, self.num_sinks = settings["window_size"], settings["num_sinks"]
        self.alibi = alibi_of(shape)
        # Beyond the trained length, slow frequencies would reverse the sign of a sink's logit; for the same reason
        # StreamingLLM (section 3.2) counts positions inside its cache.
        self.trained_length = settings["trained_length"]
        self.rotation = RotaryShift(shape.rotary) if shape.rotary else None
        self.to_sinks = self.rotation if self.trained_length and self.num_sinks else None
        self.needs_positions = self.to_sinks is not None

    def reset_parameters(self) -> None:
        """Fill in the slopes of ALiBi; there are no other parameters."""
        if self.alibi is not None:
            self.alibi.reset_parameters()

    def forward(self, inputs: MechanismInputs, state: State | None = None) -> tuple[Tensor, State | None]:
        """See `AttentionMechanism.forward`; ValueError with exact keys, without gates."""
        query = inputs.query
        if self.num_exact_keys and inputs.gates is None:
            raise ValueError("`num_exact_keys` needs `gates`; compute them with the method of that name.")
        if inputs.attention_mask is not None and inputs.is_packed:
            self._refuse_numbers(inputs.is_causal, state)
        if not query.shape[2]:
            return self._nothing(inputs, state)
        if not inputs.is_causal:
            return attend_both_ways(self, inputs), None
        if state and inputs.attention_mask is None and query.shape[2] == 1:
            step = self._step(inputs, state)
            if step is not None:
                return step
        old = self.read(state) if state else None
        if inputs.attention_mask is None:
            output, new = self._attend_causally(inputs, old)
            return with_dtype(output.transpose(1, 2), query.dtype), new.stored
        places = real_first(inputs.attention_mask <= 0)  # move real tokens to the right end, in order
        query, key, value = (gather_tokens(x, places) for x in inputs[:3])
        mask = inputs.attention_mask.gather(1, places)
        positions = None if inputs.positions is None else inputs.positions.gather(1, places)
        inputs = inputs._replace(query=query, key=key, value=value, attention_mask=mask, positions=positions)
        if inputs.gates is not None:
            inputs = inputs._replace(gates=gather_tokens(inputs.gates.unsqueeze(1), places).squeeze(1))
        output, new = self._attend_causally(inputs, old)
        output = gather_tokens(output.masked_fill((mask <= 0)[:, None, :, None], 0.0), inverse_order(places))
        return with_dtype(output.transpose(1, 2), query.dtype), new.stored

    def read(self, state: State) -> WindowState:
        """The state from its tensors."""
        return WindowState(*state) if self.has_sums else WindowState(None, *state)

    def scores(self, inputs: MechanismInputs, position: Tensor | None) -> Tensor | None:
        """What decides which keys are kept behind the window, `[B, Hkv, N, 1]`; None if none is.

        `position [B or 1, N]` counts the real tokens of each sequence from 1.
        """
        return None

    def _refuse_numbers(self, is_causal: bool, state: State | None) -> None:
        """Raise ValueError for packed sequences after cached tokens, or in an encoder."""
        if state:
            raise ValueError(
                "Got packed sequences after cached tokens; linear attention takes them only with an empty cache."
            )
        if not is_causal:
            raise ValueError(
                f"{type(self).__name__} in an encoder takes a bool mask and no numbers of packed sequences; give each "
                "sequence its own row of the batch."
            )

    def _nothing(self, inputs: MechanismInputs, state: State | None) -> tuple[Tensor, State | None]:
        """The result for no tokens: an empty output that depends on the inputs, and the state, that of one padded token
        at the start."""
        groups = self.shape.num_heads // self.shape.num_key_value_heads
        output = inputs.query[..., :1] * inputs.value.to(inputs.query.dtype).repeat_interleave(groups, dim=1)
        if inputs.is_causal and not state:
            query, key, value = (F.pad(x, (0, 0, 0, 1)) for x in inputs[:3])
            mask = torch.zeros(key.shape[0], 1, dtype=torch.bool, device=key.device)
            positions = None if inputs.positions is None else F.pad(inputs.positions, (0, 1))
            gates = None if inputs.gates is None else F.pad(inputs.gates, (0, 0, 0, 1))
            padded = MechanismInputs(query, key, value, mask, inputs.scaling, True, positions, gates)
            state = WindowAttention.forward(self, padded)[1]
        return output.transpose(1, 2), state if inputs.is_causal else None

    def _step(self, inputs: MechanismInputs, state: State) -> tuple[Tensor, State] | None:
        """What `forward` returns for one token after others, if that can be computed in fewer operations, or None."""
        return None

    def _attend_causally(self, inputs: MechanismInputs, old: WindowState | None) -> tuple[Tensor, WindowState]:
        """The output `[B, H, N, D]` and the new state; padding is at the left end of the tokens.

        Slot t of the line of keys leaves the window of query t, which sees the w slots after it. If the mask numbers
        packed sequences, everything is within them, and the state is that of each row's last one.
        """
        numbers, length, w = inputs.attention_mask if inputs.is_packed else None, inputs.key.shape[2], self.window_size
        if old is not None:
            inputs = inputs._replace(key=inputs.key.to(old.key.dtype), value=inputs.value.to(old.value.dtype))
        if inputs.positions is not None:
            inputs = inputs._replace(positions=with_dtype(inputs.positions, torch.int32))
        is_whole = inputs.attention_mask is None and old is None and not is_free(length)
        slots = self._slots_of_whole_input(inputs) if is_whole else self._slots(inputs, old)
        line, last, sinks, seen, position, num_seen = slots
        sums: Any = None if old is None else old.sums
        found = self._at_once(inputs, line, sinks, seen, sums) if numbers is None else None
        output, sums = found or self._in_parts(inputs, line, sinks, seen, position, sums)
        if numbers is not None:
            kind = torch.where(F.pad(numbers, (w, 0))[:, -w:] == numbers[:, -1:], last.kind, EMPTY).to(torch.int8)
            last = last._replace(kind=kind)
            sinks = tuple((x * seen[:, None, :, :, None])[:, :, length - 1 :].sum(dim=2) for x in sinks)
        kept = WindowState(sums, last.key, last.value, last.kind, sinks[0], sinks[1], num_seen, *last[3:])
        return output, kept

    def _slots(self, inputs: MechanismInputs, old: WindowState | None) -> Slots:
        """What the queries see and the state keeps of these tokens and those before them."""
        length = inputs.key.shape[2]
        mask = inputs.key_mask
        first: Any  # the place of the first token of each token's sequence, before the new tokens if negative
        if inputs.is_packed:
            position, first = within_sequences(cast(Tensor, inputs.attention_mask))
        elif mask is None:
            batch, device = inputs.key.shape[0], inputs.key.device
            position = torch.arange(1, length + 1, dtype=torch.long, device=device).expand(batch, -1)
            first = 0
        else:
            position = mask.cumsum(dim=1)
            first = length - position[:, -1:]
        if old is not None:
            position, first = position + old.num_seen, first - old.num_seen
        placed = inputs.positions if self.keeps_positions else None
        line = Line(
            inputs.key, inputs.value, kind_of(mask, position, self.num_sinks), placed, self.scores(inputs, position)
        )
        if old is not None:
            line = Line(old.key, old.value, old.kind, old.position, old.score).followed_by(line, mask is not None)
        sinks, seen = self._sinks(inputs, position, first, old)
        last, num_seen = line.last(self.window_size), position[:, -1:]
        return line._replace(kind=line.kind == ORDINARY), last, sinks, seen, position, num_seen

    def _slots_of_whole_input(self, inputs: MechanismInputs) -> Slots:
        """`_slots` without padding and earlier tokens: the length alone decides what each slot holds.

        From positions, the forward graph of a compiled layer would have 65 nodes instead of 60 (without C kernels).
        """
        (batch, _, length, _), w, s, device = inputs.key.shape, self.window_size, self.num_sinks, inputs.key.device
        first = min(s, length)
        ordinary = F.pad(torch.ones(batch, length - first, dtype=torch.bool, device=device), (first, 0))
        placed = inputs.positions if self.keeps_positions else None
        # Positions of scores, which are computed in float32.
        place = torch.arange(1, length + 1, dtype=torch.float32, device=device)[None] if self.num_exact_keys else None
        line = Line(inputs.key, inputs.value, ordinary, placed, self.scores(inputs, place))
        kind = inputs.key.new_full((batch, w), ORDINARY, dtype=torch.int8)
        if length < w + s:  # some slots of the window hold a sink or are empty
            kind[:, : max(0, w - length + first)] = SINK
            kind[:, : max(0, w - length)] = EMPTY
        # Padding by a negative number crops and copies, so that the state does not keep all keys alive.
        key, value = (F.pad(x, (0, 0, w - length, 0)) for x in (inputs.key, inputs.value))
        kept_place = None if line.position is None else F.pad(line.position, (w - length, 0)).contiguous()
        sinks = tuple(F.pad(x, (0, 0, 0, s - length)) for x in (inputs.key, inputs.value))
        seen = torch.ones(batch, length, s, dtype=torch.bool, device=device).tril()
        position = None if self.alibi is None else torch.arange(1, length + 1, dtype=torch.long, device=device)[None]
        num_seen = torch.full((batch, 1), length, dtype=torch.long, device=device)
        score = None if line.score is None else F.pad(line.score, (0, 0, w - length, 0)).contiguous()
        return line, Line(key, value, kind, kept_place, score), sinks, seen, position, num_seen

    def _sinks(
        self, inputs: MechanismInputs, position: Tensor, first: Tensor, old: WindowState | None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The keys and values of the sinks, `[B, Hkv, s, D]` (`[B, Hkv, N, s, D]` in packed sequences), and which of
        them each query sees, `[B, N, s]`.

        `first`, `[B, 1]` or `[B, N]`, is the place of the first token of each token's sequence.
        """
        s, length = self.num_sinks, position.shape[1]
        numbers = torch.arange(s, dtype=torch.long, device=position.device)
        seen = numbers < position.unsqueeze(-1)
        if inputs.is_packed:
            places = (first.unsqueeze(-1) + numbers).clamp(max=length - 1).flatten(1)
            found = (gather_tokens(x, places).unflatten(2, (length, s)) for x in (inputs.key, inputs.value))
            return tuple(found), seen
        places = first + numbers
        is_new = (numbers < position[:, -1:]) & (numbers >= (0 if old is None else old.num_seen))
        places = places.clamp(0, length - 1)
        sinks = [gather_tokens(x, places) * is_new[:, None, :, None].to(x.dtype) for x in (inputs.key, inputs.value)]
        if old is not None:
            sinks = [old.sink_key + sinks[0], old.sink_value + sinks[1]]
        return tuple(sinks), seen

    def _in_parts(
        self,
        inputs: MechanismInputs,
        line: Line,
        sinks: tuple[Tensor, ...],
        seen: Tensor,
        position: Tensor | None,
        sums: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """The output and the sums of `_attend_causally` from those of exact and of far keys."""
        length, w = inputs.key.shape[2], self.window_size
        to_far, to_near = line.far_and_near(w, length)
        far, of_line = to_far.kind, None
        if inputs.is_packed:
            numbers = cast(Tensor, inputs.attention_mask)
            of_line = F.pad(numbers, (w, 0))
            # Nobody needs a key that leaves the window after the next sequence has begun.
            far = torch.where(far & (of_line[:, :length] == numbers), numbers, -numbers)
            of_line = of_line[:, 1:]
        behind, sums = self.parts_behind(inputs, to_far, far, sums)
        near = NearKeys(to_near.key, to_near.value, to_near.kind, w - 1, of_line)
        return self.attend_near_and_far(inputs, near, sinks, seen, position, behind), sums

    def _at_once(
        self, inputs: MechanismInputs, line: Line, sinks: tuple[Tensor, ...], seen: Tensor, sums: Tensor | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """The output `[B, H, N, D]` and the sums, if one kernel computes both parts, or None.

        The slot of query t is the slot t of `line`, or the slot w + t if the line is that much longer; the kind is
        false where a slot holds no ordinary token.
        """
        if not is_on_cuda(inputs.query) or self.alibi is not None:
            return None
        shift, near = self.to_sinks, (inputs.query, line.key, line.value, line.kind, *sinks, seen)
        frequencies = None if shift is None else shift.frequencies(inputs.query)
        how = self.window_size, inputs.scaling, shift is not None and shift.rotary.is_interleaved
        found = implemented("window_on_cuda", near, inputs.positions, frequencies, *how, self.trained_length or 0)
        return None if found is None else (found, None)

    def parts_behind(
        self, inputs: MechanismInputs, line: Line, mask: Tensor, sums: Tensor | None = None
    ) -> tuple[list[Part], Tensor | None]:
        """The parts for the keys of `line` where `mask` is true, and the sums after them; query t sees slots 0 to t."""
        return [], None

    def sums_behind(self, inputs: MechanismInputs, line: Line, mask: Tensor, sums: Tensor | None) -> Tensor | None:
        """The sums of `parts_behind` alone."""
        return self.parts_behind(inputs, line, mask, sums)[1]

    def attend_near_and_far(
        self,
        inputs: MechanismInputs,
        near: NearKeys,
        sinks: tuple[Tensor, ...],
        seen: Tensor,
        position: Tensor | None,
        behind: list[Part],
    ) -> Tensor:
        """The output `[B, H, N, D]` for the exact keys and those behind the window."""
        distance = log_decay = None
        if self.alibi is not None:
            log_decay = self.alibi()
            place = cast(Tensor, position)
            numbers = torch.arange(1, self.num_sinks + 1, dtype=torch.long, device=place.device)
            distance = (place.unsqueeze(-1) - numbers).abs()
        sink_keys = SinkKeys(sinks[0], sinks[1], seen, distance)
        to_sinks = self.sink_query(inputs)
        output, size, _ = exact_part(inputs.query, near, sink_keys, inputs.scaling, log_decay, to_sinks)
        return self._joined((output, size), behind, inputs).flatten(1, 2)

    def _joined(self, exact: Part, behind: list[Part], inputs: MechanismInputs) -> Tensor:
        """The output `[B, Hkv, G, N, D]` for the exact keys and those behind the window."""
        return exact[0]

    def sink_query(self, inputs: MechanismInputs) -> Tensor | None:
        """The queries for the sinks, moved to within the trained length of the start; None if none has to move."""
        move = self.move_to_sinks(inputs.query, inputs.positions)
        return None if move is None or self.to_sinks is None else self.to_sinks(inputs.query, move)

    def move_to_sinks(self, query: Tensor, positions: Any) -> Tensor | None:
        """By how many positions each query moves for the sinks, `[B, N]`; None if none has to."""
        if self.to_sinks is None or self.trained_length is None:
            return None
        last = self.trained_length - 1
        if query.device.type == "cpu" and is_eager(query) and positions.numel() and int(positions.max()) <= last:
            return None
        return positions.clamp(max=last) - positions


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


# The elements of the queries of a chunk, 4 MB in float32. Of larger chunks malloc keeps more when they are freed, the
# more there are; smaller ones do not save time.
QUERIES_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class SplitTokens:
    """The inputs of a mechanism, whose padding is read as if it was not between tokens."""

    inputs: MechanismInputs
    order: Tensor | None  # [B, N], the tokens from left to right; None as they are
    mask: Tensor  # bool [B, N], like all others below from left to right
    position: Tensor  # [B, N], of each token among the real ones, from 1
    kind: Tensor  # [B, N]

    def sees(self, num_sinks: int) -> Tensor:
        """Which of the first global tokens there are, `[B, 1, s]`."""
        numbers = torch.arange(num_sinks, dtype=torch.long, device=self.position.device)
        return numbers < self.position[:, -1:, None]

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

    NotImplementedError with ALiBi, whose biases the rows of global tokens would lack.
    """
    if mechanism.alibi is not None:
        raise NotImplementedError(f"{type(mechanism).__name__} has no bidirectional form with ALiBi.")
    length, is_plain = inputs.query.shape[2], _is_plain(mechanism, inputs)
    if is_plain and length <= 2 * mechanism.window_size:
        return _attend_to_all(mechanism, inputs)
    tokens = _ordered(inputs, mechanism.num_sinks)
    places, is_there = _places_of_sinks(tokens, mechanism.num_sinks)
    sink_query, *sinks = (gather_tokens(x, places) * is_there[:, None, :, None].to(x.dtype) for x in inputs[:3])
    outputs = OutputParts(inputs.query, tokens.order)
    whole = None if mechanism.has_sums else _attend_at_once(mechanism, tokens, tuple(sinks))
    if whole is None and is_plain and length <= 4 * mechanism.window_size:
        return _attend_to_all(mechanism, inputs)
    chunks = _chunks(inputs.query, mechanism.window_size) if whole is None else []
    if whole is not None:
        outputs.append(_without_padding(whole, tokens, slice(None)))
    excess = _excess(mechanism, tokens)
    before: Tensor | None = None
    for chunk, after in zip(chunks, _sums_after(mechanism, tokens, chunks)):
        output, before = _attend_chunk(mechanism, tokens, chunk, tuple(sinks), before, after, excess)
        outputs.append(_without_padding(output.transpose(1, 2), tokens, chunk))
    output = outputs.joined()
    if not sink_query.shape[2]:
        return output
    rows = _rows_of_sinks(mechanism, sink_query, tokens)
    rows = (rows * is_there[:, None, :, None]).transpose(1, 2).to(output.dtype)
    # Of bfloat16, `scatter` would take all of the output to float32 and back.
    index = torch.arange(places.shape[0], dtype=torch.long, device=places.device)[:, None], places
    return output.index_put(index, rows) if torch.is_grad_enabled() else output.index_put_(index, rows)


def _is_plain(mechanism: Any, inputs: MechanismInputs) -> bool:
    """Whether torch's fused softmax, with a mask, can compute the window and the global keys.

    It is the fastest way for inputs of at most two windows, and where no kernel of ours runs, of at most four.
    """
    query = inputs.query
    if mechanism.has_sums or needs_plain(query) or is_free(query.shape[2]):
        return False
    return mechanism.move_to_sinks(query, inputs.positions) is None


def _attend_to_all(mechanism: Any, inputs: MechanismInputs) -> Tensor:
    """The output `[B, N, H, D]` from the weights of all pairs of tokens."""
    query, key, value, mask = inputs[:4]
    length, w, visible = query.shape[2], mechanism.window_size, None
    if mask is not None:
        key, value = (zero_where_masked(x, mask) for x in (key, value))
        visible = (mask | ~mask.any(dim=1, keepdim=True))[:, None, None]
    if length > w:
        band = _band(mechanism, mask, query)
        visible = band if visible is None else band & visible
    output = dense_attention(query, key, value, visible, inputs.scaling).transpose(1, 2)
    return output if mask is None else output.masked_fill(~mask[:, :, None, None], 0.0)


def _band(mechanism: Any, mask: Tensor | None, query: Tensor) -> Tensor:
    """Which tokens see which: bool `[B, 1, N, N]`, or without padding the addend of their logits, `[1, 1, N, N]`."""
    length, w, s = query.shape[2], mechanism.window_size, mechanism.num_sinks
    if mask is None:
        diagonals = query.new_zeros(2 * length - 1)
        diagonals[: length - w] = diagonals[length + w - 1 :] = float("-inf")
        band = diagonals.unfold(0, length, 1).flip(0)
        band[:s] = band[:, :s] = 0.0
        return band[None, None]
    position = mask.cumsum(dim=1, dtype=torch.int32)
    is_global = position <= s
    near = (position.unsqueeze(2) - position.unsqueeze(1)).abs_() < w
    return (near | is_global.unsqueeze(1) | is_global.unsqueeze(2)).unsqueeze(1)


def _attend_at_once(mechanism: Any, tokens: SplitTokens, sinks: tuple[Tensor, ...]) -> Tensor | None:
    """The output `[B, N, H, D]` for the window and the global keys, if one kernel computes it, or None."""
    query = tokens.inputs.query
    if not is_eager(query):
        return None
    length = query.shape[2]
    inputs = tokens.queries_at(slice(0, length))
    key, value = (tokens.part(x, slice(0, length)) for x in tokens.inputs[1:3])
    seen = tokens.sees(sinks[0].shape[2]).expand(-1, length, -1)
    given = inputs.query, key, value, tokens.kind == ORDINARY, *sinks, seen, mechanism.sink_query(inputs)
    return implemented("window_both_ways", given, inputs.scaling, mechanism.window_size)


def _without_padding(output: Tensor, tokens: SplitTokens, chunk: slice) -> Tensor:
    """The output `[B, C, H, D]` with 0 for padding."""
    if tokens.inputs.attention_mask is None:
        return output
    return output.masked_fill(~tokens.mask[:, chunk, None, None], 0.0)


def _sums_after(mechanism: Any, tokens: SplitTokens, chunks: list[slice]) -> list[Tensor | None]:
    """The sums of the keys after the window of each chunk's last query, which are found from the last chunk on."""
    after: list[Tensor | None] = [None]
    w = mechanism.window_size
    for chunk in reversed(chunks[1:]):
        if not mechanism.has_sums:
            return [None] * len(chunks)
        line = tokens.line(chunk.start + w, chunk.stop + w, mechanism.keeps_positions).flipped()
        turned = flipped(tokens.queries_at(chunk))
        after.append(mechanism.sums_behind(turned, line, line.kind == ORDINARY, after[-1]))
    return after[::-1]


def _ordered(inputs: MechanismInputs, num_sinks: int) -> SplitTokens:
    mask, key = inputs.attention_mask, inputs.key
    order = None if mask is None or _is_in_one_piece(mask) else real_first(~mask)
    if mask is None:
        mask = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    elif order is not None:
        mask = mask.gather(1, order)
    position = mask.cumsum(dim=1)
    return SplitTokens(inputs, order, mask, position, kind_of(mask, position, num_sinks))


def _is_in_one_piece(mask: Tensor) -> bool:
    """Whether no padding is between tokens, so that they can stay where they are; False where asking costs too much."""
    if mask.device.type != "cpu" or not is_eager(mask):
        return False
    starts = (mask[:, 1:] & ~mask[:, :-1]).sum(dim=1) + mask[:, 0]
    return bool((starts <= 1).all())


def _chunks(query: Tensor, window_size: int) -> list[slice]:
    """The places of the queries of each chunk; only one in a graph, which would unroll the loop, and for gradients, for
    which everything has to be kept anyway."""
    batch, heads, length, width = query.shape
    if torch.is_grad_enabled() or not is_eager(query):
        return [slice(0, length)]
    size = max(2, QUERIES_AT_ONCE // max(1, batch * heads * width * window_size)) * window_size
    return [slice(start, min(length, start + size)) for start in range(0, length, size)]


def _excess(mechanism: Any, tokens: SplitTokens) -> Tensor | None:
    """The logarithm of N / trained_length of each row, at least 0, `[B, 1, 1, 1, 1]`; None if all are 0."""
    length = tokens.kind.shape[1]
    if mechanism.trained_length is None or not (is_free(length) or length > mechanism.trained_length):
        return None
    count = tokens.position[:, -1:].to(accumulation_dtype(tokens.inputs.query))
    return (count / mechanism.trained_length).clamp(min=1).log()[:, :, None, None, None]


def _places_of_sinks(tokens: SplitTokens, num_sinks: int) -> tuple[Tensor, Tensor]:
    """The places of the global tokens among the inputs, and whether each is there, both `[B, s]`.

    The place of one that is missing is that of some padding. There are no more of them than tokens.
    """
    length = tokens.kind.shape[1]
    s = torch.sym_min(num_sinks, length) if is_free(length) else min(num_sinks, length)
    numbers = torch.arange(s, dtype=torch.long, device=tokens.position.device)
    is_there = numbers < tokens.position[:, -1:]
    first = tokens.mask.to(torch.int8).argmax(dim=1, keepdim=True)
    places = first + numbers
    places = torch.where(places < length, places, places - length)  # ONNX has no remainder of a free length
    return places if tokens.order is None else tokens.order.gather(1, places), is_there


def _rows_of_sinks(mechanism: Any, query: Tensor, tokens: SplitTokens) -> Tensor:
    """Exact attention of the global tokens `[B, H, s, D]` to every key, `[B, H, s, W]`."""
    found: list[Part] = []
    inputs = tokens.inputs
    is_plain = inputs.attention_mask is None and not torch.is_grad_enabled()
    if is_plain and mechanism.move_to_sinks(inputs.key, inputs.positions) is None:
        return dense_attention(query, inputs.key, inputs.value, None, inputs.scaling)
    rows = accumulated(query).unflatten(1, (inputs.key.shape[1], -1)).flatten(2, 3) * inputs.scaling  # [B, Hkv, G s, D]
    for chunk in _chunks(inputs.query, mechanism.window_size):
        key, value = (accumulated(tokens.part(x, chunk)) for x in (inputs.key, inputs.value))
        mask = tokens.mask[:, chunk]
        # Keys move instead of these queries, because only the distance matters.
        move = mechanism.move_to_sinks(key, tokens.positions_at(chunk))
        key = key if move is None else mechanism.to_sinks(key, move)
        logits = rows @ zero_where_masked(key, mask).transpose(-1, -2)
        logits = logits.masked_fill(~mask[:, None, None], EMPTY_MAXIMUM)
        part = logits.softmax(dim=-1) @ zero_where_masked(value, mask), logits.logsumexp(dim=-1, keepdim=True)
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
    behind: list[Part] = []
    if mechanism.has_sums:
        behind, before = mechanism.parts_behind(inputs, to_far, to_far.kind == ORDINARY, before)
        later = line.flipped().at(slice(length))
        ahead, _ = mechanism.parts_behind(flipped(inputs), later, later.kind == ORDINARY, after)
        behind = [*behind, *((output.flip(3), size.flip(3)) for output, size in ahead)]
    if excess is not None:
        behind = [(output, size - excess) for output, size in behind]
    near = NearKeys(to_near.key, to_near.value, to_near.kind == ORDINARY, w - 1)
    seen = tokens.sees(sinks[0].shape[2]).expand(-1, length, -1)
    if _is_plain(mechanism, inputs):
        if tokens.inputs.attention_mask is not None:
            near = near._replace(
                key=zero_where_masked(near.key, near.visible), value=zero_where_masked(near.value, near.visible)
            )
        keys = SinkKeys(sinks[0], sinks[1], seen, None)
        return window_in_blocks(inputs.query, near, keys, inputs.scaling), before
    position = tokens.position[:, chunk]
    return mechanism.attend_near_and_far(inputs, near, sinks, seen, position, behind), before
