# SPDX-License-Identifier: Apache-2.0
"""`window`: exact softmax to a sliding window and to sink tokens (StreamingLLM, Xiao 2023); the rest is forgotten.

           sinks                          window
    keys   0 1 2 3 | 4 5 ......... i - w | i - w + 1 ..... i     exact: the last w real tokens and the first s

It learns nothing, and is what every mechanism of the same bytes has to beat. `hybrid` adds linear attention to the keys
in between. In an encoder the window reaches w - 1 tokens to both sides, and the first s tokens are global: they also
see every key exactly (Longformer 2020, section 3.1).
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from .kernels import is_eager
from .kernels_hybrid import exact_part
from .kernels_torch import EMPTY_MAXIMUM
from .kernels_torch import with_dtype
from .kernels_window import NearKeys
from .kernels_window import Part
from .kernels_window import SinkKeys
from .mechanism import AttentionMechanism
from .mechanism import Option
from .mechanism import State
from .positions import TRAINED_LENGTH_OPTION
from .positions import RotaryShift
from .positions import alibi_of
from .segments import real_first
from .segments import take
from .segments import way_back


# What a place of the window holds.
EMPTY, ORDINARY, SINK = 0, 1, 2


class WindowState(NamedTuple):
    """w is the window size, s the number of sinks; the window is aligned to the right, its newest token last.

    A key is kept once, with its rotary position.
    """

    key: torch.Tensor  # [B, Hkv, w, D]
    value: torch.Tensor  # [B, Hkv, w, D]
    kind: torch.Tensor  # [B, w] int8: EMPTY, ORDINARY or SINK
    sink_key: torch.Tensor  # [B, Hkv, s, D]
    sink_value: torch.Tensor  # [B, Hkv, s, D]
    num_seen: torch.Tensor  # [B, 1] int64: real tokens so far
    position: torch.Tensor | None = None  # [B, w] int32, where what leaves the window has to be moved


class WindowAttention(AttentionMechanism):
    """Exact softmax to a sliding window and to sink (global) tokens; what is farther away is not seen."""

    options: ClassVar[dict[str, Option]] = {
        "window_size": Option(
            int,
            64,
            "w, the newest real tokens that every query sees exactly; in encoders w - 1 to each side",
            minimum=1,
        ),
        "num_sinks": Option(
            int, 4, "s, the first real tokens, seen exactly; in encoders they also see all exactly", minimum=0
        ),
        "trained_length": TRAINED_LENGTH_OPTION,
    }
    supports_causal = supports_bidirectional = supports_padding = supports_state = True
    supports_gqa = supports_constants = supports_alibi = True
    # Whether the positions of the window are part of the state.
    keeps_positions = False
    # Whether the largest logit of exact keys cancels, so that it needs no gradient.
    is_scale_constant = True

    def __init__(self, settings, shape):
        super().__init__(settings, shape)
        self.window_size, self.num_sinks = settings["window_size"], settings["num_sinks"]
        self.alibi = alibi_of(shape)
        # Beyond the trained length slow frequencies would turn the logit of a sink over; StreamingLLM (section 3.2)
        # counts positions inside its cache for the same reason.
        self.trained_length = settings["trained_length"]
        self.to_sinks = RotaryShift(shape.rotary) if shape.rotary and self.trained_length and self.num_sinks else None
        self.needs_positions = self.to_sinks is not None

    def reset_parameters(self):
        if self.alibi is not None:
            self.alibi.reset_parameters()

    def prepare(self, query, key, positions):
        return query, key, positions

    def forward(self, query, key, value, *, attention_mask, scaling, is_causal, state, positions=None):
        numbers = None
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            self._refuse_numbers(is_causal, state)
            numbers, attention_mask = attention_mask, attention_mask > 0
        if not query.shape[2]:
            return self._nothing(query, key, value, is_causal, state)
        if attention_mask is None and is_causal and not state:
            output, state = self._attend_from_start(query, key, value, scaling, positions)
            return output.transpose(1, 2), state
        if attention_mask is None and is_causal and state and query.shape[2] == 1:
            output = self._step(query, key, value, scaling, state, positions)
            if output is not None:
                return output
        if attention_mask is None:
            attention_mask = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
            place = None
        else:  # real tokens to the right end, in order
            place = real_first(~attention_mask)
            query, key, value = (take(x, place) for x in (query, key, value))
            attention_mask = attention_mask.gather(1, place)
            positions = None if positions is None else positions.gather(1, place)
        if numbers is not None:
            output, state = self._attend_packed(query, key, value, numbers.gather(1, place), scaling, positions)
        elif is_causal:
            is_padded = place is not None
            output, state = self._attend_back(query, key, value, attention_mask, scaling, state, positions, is_padded)
        else:
            output, state = self._attend_both_ways(query, key, value, attention_mask, scaling, positions), None
        if place is not None:
            output = take(output.masked_fill(~attention_mask[:, None, :, None], 0.0), way_back(place))
        return output.transpose(1, 2).to(query.dtype), state

    def _refuse_numbers(self, is_causal, state) -> None:
        """Raises ValueError where packed sequences have no form."""
        if state:
            raise ValueError(
                "Got packed sequences after cached tokens; linear attention takes them only with an empty cache."
            )
        if not is_causal:
            raise ValueError(
                f"{type(self).__name__} in an encoder takes a bool mask and no numbers of packed sequences; give each "
                "sequence its own row of the batch."
            )

    def _nothing(self, query, key, value, is_causal, state):
        """No tokens: an empty output that hangs on its inputs, and the state as it is."""
        groups = self.shape.num_heads // self.shape.num_key_value_heads
        output = query[..., :1] * value.to(query.dtype).repeat_interleave(groups, dim=1)
        state = (state or self._packed(*self._initial_state(key, value))) if is_causal else None
        return output.transpose(1, 2), state

    def _step(self, query, key, value, scaling, state, positions) -> tuple[torch.Tensor, State] | None:
        """What `forward` returns of one token after others, where that takes fewer operations; else None."""
        return None

    def _unpacked(self, state: State) -> tuple[torch.Tensor | None, WindowState]:
        """The sums of the keys behind the window, if the mechanism has any, and the rest."""
        return None, WindowState(*state)

    def _packed(self, sums: torch.Tensor | None, exact: WindowState) -> State:
        return tuple(tensor for tensor in (sums, *exact) if tensor is not None)

    def _behind(self, query, line: Line, mask, scaling, positions, sums=None) -> tuple[list[Part], torch.Tensor | None]:
        """The parts of the keys of `line` where `mask`: query t sees its places 0..t. And the sums after them."""
        return [], None

    def _joined(self, exact: Part, behind: list[Part], largest, query, scaling) -> torch.Tensor:
        """`[B, Hkv, G, N, D]` of exact keys and those behind the window."""
        return exact[0]

    def _sink_query(self, query, positions):
        """What sinks are compared with: queries no farther from the start than the softmax model was trained."""
        if self.to_sinks is None:
            return None
        last = self.trained_length - 1
        if query.device.type == "cpu" and is_eager(query) and not (positions > last).any():
            return None
        return self.to_sinks(query, positions.clamp(max=last) - positions)

    def _attend_from_start(self, query, key, value, scaling, positions):
        """`_attend_back` of whole sequences without padding: what is where follows from the length alone."""
        batch, _, length, _ = key.shape
        w, s = self.window_size, self.num_sinks
        leaving, first = min(w, length), min(s, length)
        (far_key, near_key), (far_value, near_value) = (_far_and_near(x, w) for x in (key, value))
        far_position = F.pad(positions, (leaving, -leaving)) if self.keeps_positions else None
        far = Line(far_key, far_value, None, far_position)
        far_mask = self._later(batch, length, leaving + first, key.device)
        behind, sums = self._behind(query, far, far_mask, scaling, positions)
        visible = self._later(batch, length + w - 1, w - 1 + first, key.device)
        near = NearKeys(near_key, near_value, visible, w - 1)
        # Padded by a negative number a tensor is cropped; and copied, so that a state keeps no more than itself.
        sinks = tuple(F.pad(x, (0, 0, 0, s - length)) for x in (key, value))
        window = tuple(F.pad(x, (0, 0, w - length, 0)) for x in (key, value))
        seen = torch.ones(batch, length, s, dtype=torch.bool, device=key.device).tril()
        position = torch.arange(1, length + 1, device=key.device)[None] if self.alibi is not None else None
        to_sinks = self._sink_query(query, positions)
        output = self._attend(query, near, sinks, seen, position, behind, scaling, to_sinks)
        kind = key.new_full((batch, w), ORDINARY, dtype=torch.int8)
        if length < w + s:  # some places of the window hold a sink, or nothing
            kind[:, : max(0, w - length + first)] = SINK
            kind[:, : w - leaving] = EMPTY
        num_seen = torch.full((batch, 1), length, dtype=torch.long, device=key.device)
        window_position = F.pad(positions, (w - length, 0)).contiguous() if self.keeps_positions else None
        state = WindowState(*window, kind, *sinks, num_seen, window_position)
        return with_dtype(output, query.dtype), self._packed(sums, state)

    def _later(self, batch: int, length: int, start: int, device) -> torch.Tensor:
        """bool `[B, length]`, True from `start` on."""
        start = min(start, length)
        return F.pad(torch.ones(batch, length - start, dtype=torch.bool, device=device), (start, 0))

    def _attend_back(self, query, key, value, mask, scaling, state, positions, is_padded):
        """The causal form. Padding is at the left end of the new tokens."""
        sums, old = self._unpacked(state) if state else self._initial_state(key, value)
        w = self.window_size
        position = old.num_seen + mask.cumsum(dim=1)  # of a real token, counted from 1
        kind = self._kind(mask, position)
        line = Line(
            torch.cat((old.key, key.to(old.key.dtype)), dim=2),
            torch.cat((old.value, value.to(old.value.dtype)), dim=2),
            torch.cat((old.kind, kind), dim=1),
            torch.cat((old.position, positions), dim=1) if self.keeps_positions else None,
        )
        line = line.aligned_right() if is_padded else line
        sinks = self._collect_sinks(key, value, position, kind, old)
        to_far, to_near = line.ranges(query.shape[2], slice(1, None))
        behind, sums = self._behind(query, to_far, to_far.kind == ORDINARY, scaling, positions, sums)
        seen = torch.arange(self.num_sinks, device=key.device) < position.unsqueeze(-1)
        near = NearKeys(to_near.key, to_near.value, to_near.kind == ORDINARY, w - 1)
        to_sinks = self._sink_query(query, positions)
        output = self._attend(query, near, sinks, seen, position, behind, scaling, to_sinks)
        *window, window_position = line.last(w)
        return output, self._packed(sums, WindowState(*window, *sinks, position[:, -1:], window_position))

    def _attend_packed(self, query, key, value, numbers, scaling, positions):
        """`_attend_back` within each of the packed sequences that `numbers [B, N]` count; 0 is padding, on the left.

        The state is that of each row's last sequence.
        """
        w, s, length = self.window_size, self.num_sinks, query.shape[2]
        position, first = _within_sequences(numbers)
        kind = self._kind(numbers > 0, position)
        line = Line(key, value, kind, positions if self.keeps_positions else None).padded(w, 0)
        line_numbers = F.pad(numbers, (w, 0))
        to_far, to_near = line.ranges(length, slice(1, None))
        # A key that leaves the window when the next sequence has begun is one that nobody needs any more.
        leaves = (to_far.kind == ORDINARY) & (line_numbers[:, :length] == numbers)
        behind, sums = self._behind(query, to_far, torch.where(leaves, numbers, -numbers), scaling, positions)
        places = first.unsqueeze(-1) + torch.arange(s, device=key.device)  # [B, N, s]
        seen = torch.arange(s, device=key.device) < position.unsqueeze(-1)
        places = places.clamp(max=length - 1).flatten(1)
        sinks = tuple(take(x, places).unflatten(2, (length, s)) for x in (key, value))  # [B, Hkv, N, s, D]
        visible = to_near.kind == ORDINARY
        near = NearKeys(to_near.key, to_near.value, visible, w - 1, line_numbers[:, 1:])
        to_sinks = self._sink_query(query, positions)
        output = self._attend(query, near, sinks, seen, position, behind, scaling, to_sinks)
        window_key, window_value, window_kind, window_position = line.last(w)
        window_kind = torch.where(line_numbers[:, -w:] == numbers[:, -1:], window_kind, EMPTY).to(torch.int8)
        sinks = tuple((x * seen[:, None, :, :, None])[:, :, length - 1 :].sum(dim=2) for x in sinks)
        state = WindowState(window_key, window_value, window_kind, *sinks, position[:, -1:], window_position)
        return output, self._packed(sums, state)

    def _attend_both_ways(self, query, key, value, mask, scaling, positions):
        """The bidirectional form: one causal sweep over what lies before the window, one over what lies behind it."""
        length, w = query.shape[2], self.window_size
        position = mask.cumsum(dim=1)
        kind = self._kind(mask, position)
        line = Line(key, value, kind, positions if self.keeps_positions else None).padded(w, w)
        sinks = self._collect_sinks(key, value, position, kind)
        to_far, to_near = line.ranges(length, slice(1, length + 2 * w - 1))
        before, _ = self._behind(query, to_far, to_far.kind == ORDINARY, scaling, positions)
        after, turned = line.flipped().first(length), None if positions is None else positions.flip(1)
        behind, _ = self._behind(query.flip(2), after, after.kind == ORDINARY, scaling, turned)
        behind = [*before, *((output.flip(3), size.flip(3)) for output, size in behind)]
        near = NearKeys(to_near.key, to_near.value, to_near.kind == ORDINARY, w - 1)
        seen = (torch.arange(self.num_sinks, device=key.device) < position[:, -1:, None]).expand(-1, length, -1)
        to_sinks = self._sink_query(query, positions)
        output = self._attend(query, near, sinks, seen, position, behind, scaling, to_sinks)
        if to_sinks is not None:  # the distance counts, whichever of the two moves
            key = self.to_sinks(key, positions.clamp(max=self.trained_length - 1) - positions)
        return self._with_global_queries(output, query, key, value, mask, position, kind, scaling)

    def _kind(self, mask, position):
        """What each token is, `[B, N]`, from its position among the real ones, counted from 1."""
        return torch.where(mask, torch.where(position <= self.num_sinks, SINK, ORDINARY), EMPTY).to(torch.int8)

    def _initial_state(self, key, value) -> tuple[torch.Tensor | None, WindowState]:
        batch, heads, _, _ = key.shape
        w, s = self.window_size, self.num_sinks
        return None, WindowState(
            key.new_zeros(batch, heads, w, key.shape[-1]),
            value.new_zeros(batch, heads, w, value.shape[-1]),
            torch.zeros(batch, w, dtype=torch.int8, device=key.device),
            key.new_zeros(batch, heads, s, key.shape[-1]),
            value.new_zeros(batch, heads, s, value.shape[-1]),
            torch.zeros(batch, 1, dtype=torch.long, device=key.device),
            torch.zeros(batch, w, dtype=torch.int32, device=key.device) if self.keeps_positions else None,
        )

    def _chosen_sinks(self, position, kind, dtype):
        """`[B, 1, s, N]`: 1 where the token is the sink, 0 elsewhere."""
        wanted = torch.arange(1, self.num_sinks + 1, device=position.device)
        return ((position[:, None] == wanted[:, None]) & (kind == SINK)[:, None])[:, None].to(dtype)

    def _collect_sinks(self, key, value, position, kind, old: WindowState | None = None):
        """Keys and values of the sinks with those among the new tokens, each at its place `[B, Hkv, s, D]`."""
        place = self._chosen_sinks(position, kind, torch.int8)[:, 0].max(dim=-1)
        sinks = tuple(take(x, place.indices) * place.values[:, None, :, None].to(x.dtype) for x in (key, value))
        return sinks if old is None else (old.sink_key + sinks[0], old.sink_value + sinks[1])

    def _attend(self, query, near: NearKeys, sinks, seen, position, behind, scaling, to_sinks):
        """`[B, H, N, D]` of exact keys and those behind the window."""
        distance = log_decay = None
        if self.alibi is not None:
            log_decay = self.alibi()
            distance = (position.unsqueeze(-1) - torch.arange(1, self.num_sinks + 1, device=query.device)).abs()
        sink_keys = SinkKeys(*sinks, seen, distance)
        output, size, largest = exact_part(query, near, sink_keys, scaling, log_decay, self.is_scale_constant, to_sinks)
        return self._joined((output, size), behind, largest, query, scaling).flatten(1, 2)

    def _with_global_queries(self, output, query, key, value, mask, position, kind, scaling):
        """`output` with the rows of the first s tokens replaced by exact attention to every key."""
        if not self.num_sinks:
            return output
        chosen = self._chosen_sinks(position, kind, output.dtype)
        query, key = query.to(output.dtype), key.to(output.dtype)
        groups = query.shape[1] // key.shape[1]
        logits = scaling * (chosen @ query) @ key.repeat_interleave(groups, dim=1).transpose(-1, -2)
        weights = logits.masked_fill(~mask[:, None, None], EMPTY_MAXIMUM).softmax(dim=-1)
        exact = weights @ value.to(output.dtype).repeat_interleave(groups, dim=1)
        return torch.where((kind == SINK)[:, None, :, None], chosen.transpose(-1, -2) @ exact, output)


class Line(NamedTuple):
    """Keys and values in a row, `[B, Hkv, L, D]` twice, what is where, and its position, `[B, L]`."""

    key: torch.Tensor
    value: torch.Tensor
    kind: torch.Tensor | None  # None where a mask says it
    position: torch.Tensor | None  # where the mechanism keeps them

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
        return self._part(slice(-length, None))

    def first(self, length: int) -> Line:
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
        position = None if self.position is None else self.position.flip(1)
        return Line(self.key.flip(2), self.value.flip(2), self.kind.flip(1), position)


def _ranges(x: torch.Tensor, length: int, places: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` places of `x [B, Hkv, L, D]`, and other `places`."""
    if not torch.is_grad_enabled() or not is_eager(x):  # no place for functions of our own
        return x[:, :, :length], x[:, :, places]
    return _TwoRanges.apply(x, length, places)


def _far_and_near(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
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
    def forward(ctx, x, length, places):
        ctx.shape, ctx.length, ctx.places = x.shape, length, places
        return x[:, :, :length], x[:, :, places]

    @staticmethod
    def backward(ctx, grad_first, grad_other):
        grad = grad_first.new_empty(ctx.shape)
        grad[:, :, : ctx.length] = grad_first
        grad[:, :, ctx.length :] = 0
        grad[:, :, ctx.places] += grad_other
        return grad, None, None


def _within_sequences(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
