# SPDX-License-Identifier: Apache-2.0
"""`window`: exact softmax to a sliding window and to sink tokens (StreamingLLM, Xiao 2023); other keys are forgotten.

           sinks                          window
    keys   0 1 2 3 | 4 5 ......... i - w | i - w + 1 ..... i     exact: the last w real tokens and the first s

It has no parameters, and is the baseline for every mechanism with a state of the same size. `hybrid` adds linear
attention to the keys in between. In an encoder the window extends w - 1 tokens to either side, and the first s tokens
are global: they also attend to every key exactly (Longformer 2020, section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.segments import gather_tokens, inverse_order, real_first
from ..positions.rotary import RotaryShift, alibi_of
from ..torch_kernels.attention import is_eager
from ..torch_kernels.blocks import with_dtype
from ..torch_kernels.causal import is_free
from ..torch_kernels.window import NearKeys, Part, SinkKeys, exact_part
from .base import LayerShape, State
from .bidirectional_window import BidirectionalWindow, chosen_sinks
from .options import WindowOptions
from .window_keys import EMPTY, ORDINARY, SINK, Line, far_and_near, within_sequences


FEW_KEYS = 8192  # this many may exceed the longest input


class WindowState(NamedTuple):
    """The state of a window of size w with s sinks; the window is aligned to the right, with its newest token last.

    Keys are kept with their rotary position applied.
    """

    key: Tensor  # [B, Hkv, w, D]
    value: Tensor  # [B, Hkv, w, D]
    kind: Tensor  # [B, w] int8: EMPTY, ORDINARY or SINK
    sink_key: Tensor  # [B, Hkv, s, D]
    sink_value: Tensor  # [B, Hkv, s, D]
    num_seen: Tensor  # [B, 1] int64: real tokens so far
    position: Tensor | None = None  # [B, w] int32, if keys that leave the window have to be moved


class WindowAttention(WindowOptions, BidirectionalWindow):
    """Exact softmax to a sliding window and to sink (global) tokens; what is farther away is not seen."""

    # Whether the positions of the window are part of the state.
    keeps_positions = False
    # Whether the largest logit of the exact keys cancels, so that it needs no gradient.
    is_scale_constant = True

    def __init__(self, settings: Mapping[str, Any], shape: LayerShape) -> None:
        super().__init__(settings, shape)
        self.window_size, self.num_sinks = settings["window_size"], settings["num_sinks"]
        self.alibi = alibi_of(shape)
        # Beyond the trained length, slow frequencies would reverse the sign of a sink's logit; for the same reason
        # StreamingLLM (section 3.2) counts positions inside its cache.
        self.trained_length = settings["trained_length"]
        self.to_sinks = RotaryShift(shape.rotary) if shape.rotary and self.trained_length and self.num_sinks else None
        self.needs_positions = self.to_sinks is not None

    def reset_parameters(self) -> None:
        """Fill in the slopes of ALiBi; there are no other parameters."""
        if self.alibi is not None:
            self.alibi.reset_parameters()

    def prepare(self, query: Tensor, key: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Leave the rotary positions in queries and keys, because exact attention needs them."""
        return query, key, positions

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attention_mask: Tensor | None,
        scaling: float,
        is_causal: bool,
        state: State | None,
        positions: Tensor | None = None,
        in_place: bool = False,
    ) -> tuple[Tensor, State | None]:
        """Exact attention to the window and the sinks; see `AttentionMechanism.forward`."""
        numbers = None
        place: Any = None
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            self._refuse_numbers(is_causal, state)
            numbers, attention_mask = attention_mask, attention_mask > 0
        if not query.shape[2]:
            return self._nothing(query, key, value, is_causal, state)
        if not is_causal:
            return self._attend_both_ways(query, key, value, attention_mask, scaling, positions), None
        if attention_mask is None and not state and not is_free(query.shape[2]):
            output, state = self._attend_from_start(query, key, value, scaling, positions)
            return output.transpose(1, 2), state
        if attention_mask is None and state and query.shape[2] == 1:
            step = self._step(query, key, value, scaling, state, positions, in_place)
            if step is not None:
                return step
        if attention_mask is None:
            attention_mask = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
        else:  # move real tokens to the right end, in order
            place = real_first(~attention_mask)
            query, key, value = (gather_tokens(x, place) for x in (query, key, value))
            attention_mask = attention_mask.gather(1, place)
            positions = None if positions is None else positions.gather(1, place)
        if numbers is not None:
            output, state = self._attend_packed(query, key, value, numbers.gather(1, place), scaling, positions)
        else:
            is_padded = place is not None
            output, state = self._attend_back(query, key, value, attention_mask, scaling, state, positions, is_padded)
        if place is not None:
            output = gather_tokens(output.masked_fill(~attention_mask[:, None, :, None], 0.0), inverse_order(place))
        return output.transpose(1, 2).to(query.dtype), state

    def _refuse_numbers(self, is_causal: bool, state: State | None) -> None:
        """Refuse packed sequences where they are not supported.

        Raises:
            ValueError: if there are cached tokens, or in an encoder.
        """
        if state:
            raise ValueError(
                "Got packed sequences after cached tokens; linear attention takes them only with an empty cache."
            )
        if not is_causal:
            raise ValueError(
                f"{type(self).__name__} in an encoder takes a bool mask and no numbers of packed sequences; give each "
                "sequence its own row of the batch."
            )

    def _nothing(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, state: State | None
    ) -> tuple[Tensor, State | None]:
        """The result for no tokens: an empty output that depends on the inputs, and the unchanged state."""
        groups = self.shape.num_heads // self.shape.num_key_value_heads
        output = query[..., :1] * value.to(query.dtype).repeat_interleave(groups, dim=1)
        state = (state or self._packed(*self._initial_state(key, value))) if is_causal else None
        return output.transpose(1, 2), state

    def _step(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, state: State, positions: Any, in_place: bool
    ) -> tuple[Tensor, State] | None:
        """What `forward` returns for one token after others, if that can be computed in fewer operations, or None."""
        return None

    def _unpacked(self, state: State) -> tuple[Tensor | None, WindowState]:
        """The sums over the keys behind the window, if the mechanism has any, and the rest of the state."""
        return None, WindowState(*state)

    def _packed(self, sums: Tensor | None, exact: WindowState) -> State:
        return tuple(tensor for tensor in (sums, *exact) if tensor is not None)

    def _behind(
        self,
        query: Tensor,
        line: Line,
        mask: Tensor,
        scaling: float,
        positions: Any,
        sums: Tensor | None = None,
    ) -> tuple[list[Part], Tensor | None]:
        """The parts for the keys of `line` where `mask` is true, and the sums after them; query t sees slots 0 to t."""
        return [], None

    def _sums_behind(
        self, query: Tensor, line: Line, mask: Tensor, scaling: float, positions: Any, sums: Tensor | None
    ) -> Tensor | None:
        """The sums of `_behind` alone."""
        return self._behind(query, line, mask, scaling, positions, sums)[1]

    def _joined(self, exact: Part, behind: list[Part], largest: Tensor, query: Tensor, scaling: float) -> Tensor:
        """The output `[B, Hkv, G, N, D]` for the exact keys and those behind the window."""
        return exact[0]

    def sink_query(self, query: Tensor, positions: Any) -> Tensor | None:
        """The queries for the sinks, moved to within the trained length of the start; None if none has to move."""
        move = self.move_to_sinks(query, positions)
        return None if move is None or self.to_sinks is None else self.to_sinks(query, move)

    def move_to_sinks(self, query: Tensor, positions: Any) -> Tensor | None:
        """By how many positions each query moves for the sinks, `[B, N]`; None if none has to."""
        if self.to_sinks is None or self.trained_length is None:
            return None
        last = self.trained_length - 1
        if query.device.type == "cpu" and is_eager(query) and positions.numel() and int(positions.max()) <= last:
            return None
        return positions.clamp(max=last) - positions

    def _at_once(
        self,
        query: Tensor,
        line: Line,
        visible: Tensor,
        sinks: Any,
        seen: Tensor,
        scaling: float,
        positions: Any,
        sums: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """The output `[B, H, N, D]` and the sums, if one kernel computes both parts, or None.

        The slot of query t is the slot t of `line`, or the slot w + t if there are `sums`; `visible` is false where a
        slot holds no ordinary token.
        """
        return None

    def _attend_from_start(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, positions: Any
    ) -> tuple[Tensor, State]:
        """`_attend_back` for whole sequences without padding: the length alone decides what each slot holds."""
        batch, _, length, _ = key.shape
        w, s = self.window_size, self.num_sinks
        leaving, first = min(w, length), min(s, length)
        # Padding by a negative number crops and copies a tensor, so that the state does not keep the whole input alive.
        sinks: Any = tuple(F.pad(x, (0, 0, 0, s - length)) for x in (key, value))
        window = tuple(F.pad(x, (0, 0, w - length, 0)) for x in (key, value))
        seen = torch.ones(batch, length, s, dtype=torch.bool, device=key.device).tril()
        kind = key.new_full((batch, w), ORDINARY, dtype=torch.int8)
        if length < w + s:  # some slots of the window hold a sink or are empty
            kind[:, : max(0, w - length + first)] = SINK
            kind[:, : w - leaving] = EMPTY
        num_seen = torch.full((batch, 1), length, dtype=torch.long, device=key.device)
        window_position = F.pad(positions, (w - length, 0)).contiguous() if self.keeps_positions else None
        state = WindowState(window[0], window[1], kind, sinks[0], sinks[1], num_seen, window_position)
        visible = self._later(batch, length, first, key.device)
        line = Line(key, value, visible, positions if self.keeps_positions else None)
        found = self._at_once(query, line, visible, sinks, seen, scaling, positions)
        if found is None:
            found = self._in_parts(query, line, sinks, seen, scaling, positions)
        output, sums = found
        return with_dtype(output, query.dtype), self._packed(sums, state)

    def _in_parts(
        self, query: Tensor, line: Line, sinks: Any, seen: Tensor, scaling: float, positions: Any
    ) -> tuple[Tensor, Tensor | None]:
        """What `_at_once` computes, for a line without earlier slots."""
        key, value = line.key, line.value
        length, w = key.shape[2], self.window_size
        leaving = min(w, length)
        (far_key, near_key), (far_value, near_value) = (far_and_near(x, w) for x in (key, value))
        far_position = F.pad(positions, (leaving, -leaving)) if self.keeps_positions else None
        far_mask = F.pad(line.kind, (leaving, -leaving))
        far = Line(far_key, far_value, far_mask, far_position)
        behind, sums = self._behind(query, far, far_mask, scaling, positions)
        near = NearKeys(near_key, near_value, F.pad(line.kind, (w - 1, 0)), w - 1)
        position = None
        if self.alibi is not None:
            position = torch.arange(1, length + 1, dtype=torch.long, device=key.device)[None]
        to_sinks = self.sink_query(query, positions)
        return self._attend(query, near, sinks, seen, position, behind, scaling, to_sinks), sums

    def _later(self, batch: int, length: int, start: int, device: torch.device) -> Tensor:
        """bool `[B, length]`, True from `start` on."""
        start = min(start, length)
        return F.pad(torch.ones(batch, length - start, dtype=torch.bool, device=device), (start, 0))

    def _attend_back(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        scaling: float,
        state: State | None,
        positions: Any,
        is_padded: bool,
    ) -> tuple[Tensor, State]:
        """The causal form; padding is at the left end of the new tokens."""
        sums, old = self._unpacked(state) if state else self._initial_state(key, value)
        w = self.window_size
        position = old.num_seen + mask.cumsum(dim=1)  # positions of real tokens, counted from 1
        kind = self._kind(mask, position)
        line = Line(
            torch.cat((old.key, key.to(old.key.dtype)), dim=2),
            torch.cat((old.value, value.to(old.value.dtype)), dim=2),
            torch.cat((old.kind, kind), dim=1),
            None if old.position is None else torch.cat((old.position, positions), dim=1),
        )
        line = line.aligned_right() if is_padded else line
        sinks = self._collect_sinks(key, value, position, kind, old)
        seen = torch.arange(self.num_sinks, dtype=torch.long, device=key.device) < position.unsqueeze(-1)
        last = line.last(w)
        kept = WindowState(*last[:3], *sinks, position[:, -1:], last.position)
        found = self._at_once(query, line, line.kind == ORDINARY, sinks, seen, scaling, positions, sums)
        if found is not None:
            return found[0], self._packed(found[1], kept)
        to_far, to_near = line.ranges(query.shape[2], slice(1, None))
        behind, sums = self._behind(query, to_far, to_far.kind == ORDINARY, scaling, positions, sums)
        near = NearKeys(to_near.key, to_near.value, to_near.kind == ORDINARY, w - 1)
        to_sinks = self.sink_query(query, positions)
        output = self._attend(query, near, sinks, seen, position, behind, scaling, to_sinks)
        return output, self._packed(sums, kept)

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, numbers: Tensor, scaling: float, positions: Any
    ) -> tuple[Tensor, State]:
        """`_attend_back` within each packed sequence; `numbers [B, N]` counts them, and 0 is padding, on the left.

        The state is that of each row's last sequence.
        """
        w, s, length = self.window_size, self.num_sinks, query.shape[2]
        position, first = within_sequences(numbers)
        kind = self._kind(numbers > 0, position)
        line = Line(key, value, kind, positions if self.keeps_positions else None).padded(w, 0)
        line_numbers = F.pad(numbers, (w, 0))
        to_far, to_near = line.ranges(length, slice(1, None))
        # Nobody needs a key that leaves the window after the next sequence has begun.
        leaves = (to_far.kind == ORDINARY) & (line_numbers[:, :length] == numbers)
        behind, sums = self._behind(query, to_far, torch.where(leaves, numbers, -numbers), scaling, positions)
        places = first.unsqueeze(-1) + torch.arange(s, dtype=torch.long, device=key.device)  # [B, N, s]
        seen = torch.arange(s, dtype=torch.long, device=key.device) < position.unsqueeze(-1)
        places = places.clamp(max=length - 1).flatten(1)
        sinks: Any = tuple(
            gather_tokens(x, places).unflatten(2, (length, s)) for x in (key, value)
        )  # [B, Hkv, N, s, D]
        visible = to_near.kind == ORDINARY
        near = NearKeys(to_near.key, to_near.value, visible, w - 1, line_numbers[:, 1:])
        to_sinks = self.sink_query(query, positions)
        output = self._attend(query, near, sinks, seen, position, behind, scaling, to_sinks)
        last = line.last(w)
        kind = torch.where(line_numbers[:, -w:] == numbers[:, -1:], last.kind, EMPTY).to(torch.int8)
        sinks = tuple((x * seen[:, None, :, :, None])[:, :, length - 1 :].sum(dim=2) for x in sinks)
        state = WindowState(last.key, last.value, kind, sinks[0], sinks[1], position[:, -1:], last.position)
        return output, self._packed(sums, state)

    def _kind(self, mask: Tensor, position: Tensor) -> Tensor:
        """The kind of each token, `[B, N]`, from its position among the real tokens, counted from 1."""
        return torch.where(mask, torch.where(position <= self.num_sinks, SINK, ORDINARY), EMPTY).to(torch.int8)

    def _initial_state(self, key: Tensor, value: Tensor) -> tuple[Tensor | None, WindowState]:
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

    def _collect_sinks(
        self, key: Tensor, value: Tensor, position: Tensor, kind: Tensor, old: WindowState | None = None
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of the sinks, `[B, Hkv, s, D]`, including those among the new tokens."""
        places = chosen_sinks(position, kind, self.num_sinks).max(dim=-1)
        sinks: Any = tuple(
            gather_tokens(x, places.indices) * places.values[:, None, :, None].to(x.dtype) for x in (key, value)
        )
        return sinks if old is None else (old.sink_key + sinks[0], old.sink_value + sinks[1])

    def _attend(
        self,
        query: Tensor,
        near: NearKeys,
        sinks: Any,
        seen: Tensor,
        position: Any,
        behind: list[Part],
        scaling: float,
        to_sinks: Tensor | None,
    ) -> Tensor:
        """The output `[B, H, N, D]` for the exact keys and those behind the window."""
        distance = log_decay = None
        if self.alibi is not None:
            log_decay = self.alibi()
            distance = (
                position.unsqueeze(-1) - torch.arange(1, self.num_sinks + 1, dtype=torch.long, device=query.device)
            ).abs()
        sink_keys = SinkKeys(sinks[0], sinks[1], seen, distance)
        output, size, largest = exact_part(query, near, sink_keys, scaling, log_decay, self.is_scale_constant, to_sinks)
        return self._joined((output, size), behind, largest, query, scaling).flatten(1, 2)
