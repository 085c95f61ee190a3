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
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.segments import gather_tokens, inverse_order, real_first
from ..positions.rotary import RotaryShift, alibi_of
from ..torch_kernels.blocks import with_dtype
from ..torch_kernels.implementations import is_eager, is_free
from ..torch_kernels.window import NearKeys, Part, SinkKeys, exact_part
from .base import AttentionMechanism, LayerShape, MechanismInputs, State
from .bidirectional_window import attend_both_ways  # of encoders
from .options import WindowOptions
from .window_keys import EMPTY, ORDINARY, SINK, Line, kind_of, within_sequences


class WindowState(NamedTuple):
    """The state of a window of size w with s sinks; the window is aligned to the right, with its newest token last.

    Keys are kept with their rotary position applied. A state is stored without what is None.
    """

    sums: (
        Tensor | None
    )  # [B, Hkv, F, D + 2]: S, Z and m of the tokens that have left the window, if a mechanism has any
    key: Tensor  # [B, Hkv, w, D]
    value: Tensor  # [B, Hkv, w, D]
    kind: Tensor  # [B, w] int8: EMPTY, ORDINARY or SINK
    sink_key: Tensor  # [B, Hkv, s, D]
    sink_value: Tensor  # [B, Hkv, s, D]
    num_seen: Tensor  # [B, 1] int64: real tokens so far
    position: Tensor | None = None  # [B, w] int32, if keys that leave the window have to be moved

    @property
    def stored(self) -> State:
        """The tensors in their order."""
        tensors: Any = self if self.sums is not None else self[1:]
        return tuple(tensors if self.position is not None else tensors[:-1])


Slots = tuple[Line, Line, tuple[Tensor, ...], Tensor, Tensor | None, Tensor]
"""The line of keys and values, its kind false where a slot holds no ordinary token; the window of the state; the sinks
and which of them each query sees; the position of each token among the real ones, from 1; how many there are."""


class WindowAttention(WindowOptions, AttentionMechanism):
    """Exact softmax to a sliding window and to sink (global) tokens; what is farther away is not seen."""

    # Whether there are sums over the keys behind the window, and whether the state has the positions of the window.
    has_sums = keeps_positions = False
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

    def forward(self, inputs: MechanismInputs, state: State | None = None) -> tuple[Tensor, State | None]:
        """Exact attention to the window and the sinks; see `AttentionMechanism.forward`."""
        query = inputs.query
        if inputs.attention_mask is not None and inputs.is_packed:
            self._refuse_numbers(inputs.is_causal, state)
        if not query.shape[2]:
            return self._nothing(inputs, state)
        if not inputs.is_causal:
            return attend_both_ways(self, inputs), None
        old = None
        if state:
            old = WindowState(*state) if self.has_sums else WindowState(None, *state)
            if inputs.attention_mask is None and query.shape[2] == 1:
                step = self._step(inputs, old)
                if step is not None:
                    return step
        if inputs.attention_mask is None:
            output, new = self._attend_causally(inputs, old)
            return with_dtype(output.transpose(1, 2), query.dtype), new.stored
        places = real_first(inputs.attention_mask <= 0)  # move real tokens to the right end, in order
        query, key, value = (gather_tokens(x, places) for x in inputs[:3])
        mask = inputs.attention_mask.gather(1, places)
        positions = None if inputs.positions is None else inputs.positions.gather(1, places)
        inputs = inputs._replace(query=query, key=key, value=value, attention_mask=mask, positions=positions)
        output, new = self._attend_causally(inputs, old)
        output = gather_tokens(output.masked_fill((mask <= 0)[:, None, :, None], 0.0), inverse_order(places))
        return with_dtype(output.transpose(1, 2), query.dtype), new.stored

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

    def _nothing(self, inputs: MechanismInputs, state: State | None) -> tuple[Tensor, State | None]:
        """The result for no tokens: an empty output that depends on the inputs, and the state, that of one padded token
        at the start."""
        groups = self.shape.num_heads // self.shape.num_key_value_heads
        output = inputs.query[..., :1] * inputs.value.to(inputs.query.dtype).repeat_interleave(groups, dim=1)
        if inputs.is_causal and not state:
            query, key, value = (F.pad(x, (0, 0, 0, 1)) for x in inputs[:3])
            mask = torch.zeros(key.shape[0], 1, dtype=torch.bool, device=key.device)
            positions = None if inputs.positions is None else F.pad(inputs.positions, (0, 1))
            padded = MechanismInputs(query, key, value, mask, inputs.scaling, True, positions)
            state = WindowAttention.forward(self, padded)[1]
        return output.transpose(1, 2), state if inputs.is_causal else None

    def _step(self, inputs: MechanismInputs, old: WindowState) -> tuple[Tensor, State] | None:
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
        line, last, sinks, seen, position, num_seen = self._slots(inputs, old)
        sums = None if old is None else old.sums
        found = self._at_once(inputs, line, sinks, seen, sums) if numbers is None else None
        output, sums = found or self._in_parts(inputs, line, sinks, seen, position, sums)
        if numbers is not None:
            kind = torch.where(F.pad(numbers, (w, 0))[:, -w:] == numbers[:, -1:], last.kind, EMPTY).to(torch.int8)
            last = last._replace(kind=kind)
            sinks = tuple((x * seen[:, None, :, :, None])[:, :, length - 1 :].sum(dim=2) for x in sinks)
        kept = WindowState(sums, last.key, last.value, last.kind, sinks[0], sinks[1], num_seen, last.position)
        return output, kept

    def _slots(self, inputs: MechanismInputs, old: WindowState | None) -> Slots:
        """What the queries see and the state keeps of these tokens and those before them."""
        mask, length = inputs.key_mask, inputs.key.shape[2]
        if inputs.attention_mask is None and old is None and not is_free(length):
            return self._slots_of_whole_input(inputs)
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
        line = Line(inputs.key, inputs.value, kind_of(mask, position, self.num_sinks), placed)
        if old is not None:
            line = Line(old.key, old.value, old.kind, old.position).followed_by(line, mask is not None)
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
        line = Line(inputs.key, inputs.value, ordinary, inputs.positions if self.keeps_positions else None)
        kind = inputs.key.new_full((batch, w), ORDINARY, dtype=torch.int8)
        if length < w + s:  # some slots of the window hold a sink or are empty
            kind[:, : max(0, w - length + first)] = SINK
            kind[:, : max(0, w - length)] = EMPTY
        # Padding by a negative number crops and copies, so that the state does not keep all keys alive.
        key, value = (F.pad(x, (0, 0, w - length, 0)) for x in (inputs.key, inputs.value))
        place = None if line.position is None else F.pad(line.position, (w - length, 0)).contiguous()
        sinks = tuple(F.pad(x, (0, 0, 0, s - length)) for x in (inputs.key, inputs.value))
        seen = torch.ones(batch, length, s, dtype=torch.bool, device=device).tril()
        position = None if self.alibi is None else torch.arange(1, length + 1, dtype=torch.long, device=device)[None]
        num_seen = torch.full((batch, 1), length, dtype=torch.long, device=device)
        return line, Line(key, value, kind, place), sinks, seen, position, num_seen

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
        return None

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
        options: Any = {"log_decay": log_decay, "is_scale_constant": self.is_scale_constant}
        options["sink_query"] = self.sink_query(inputs)
        output, size, largest = exact_part(inputs.query, near, sink_keys, inputs.scaling, **options)
        return self._joined((output, size), behind, largest, inputs).flatten(1, 2)

    def _joined(self, exact: Part, behind: list[Part], largest: Tensor, inputs: MechanismInputs) -> Tensor:
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
