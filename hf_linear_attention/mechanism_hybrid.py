# SPDX-License-Identifier: Apache-2.0
"""`hybrid`: linear attention to far keys, exact softmax to a sliding window and to sink tokens.

    o_i = ( sum_exact exp(scaling q_i·k_j) v_j + c_i sum_far phi(q_i)·phi(k_j) v_j ) / ( the same with v = 1 )

           sinks           far                        window
    keys   0 1 2 3 | 4 5 ......... i - w | i - w + 1 ..... i     exact: the last w real tokens and the first s
           exact      S, Z, m (constant)         exact

c_i = exp(b - a scaling |q_i|^2 / 2) with b and a learned per head: constants of the query do not cancel here. The
setting `normalization` has two other forms, with which published hybrids can be compared.

In an encoder the window reaches w - 1 tokens to both sides, far keys lie before and behind it, and the first s tokens
are global: they also see every key exactly (Longformer 2020, section 3.1).
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from .kernels_torch import EMPTY_MAXIMUM
from .kernels_torch import accumulated
from .kernels_torch import accumulation_dtype
from .kernels import kernel_sums
from .kernels_torch import normalize
from .kernels_torch import sized_step
from .kernels_torch import with_dtype
from .mechanism import AttentionMechanism
from .mechanism import Option
from .features import FEATURE_MAPS
from .features import half_squared_norm
from .kernels_hybrid import exact_part
from .kernels import is_eager
from .kernels import makes_features
from .kernels import map_attention
from .kernels import takes_step
from .kernels_hybrid import step_parts
from .kernels_hybrid import hybrid_step
from .kernels_window import NORMALIZATIONS
from .kernels_window import NearKeys
from .kernels_window import SinkKeys
from .kernels_window import log_size
from .positions import DECAY_OPTION
from .positions import ROPE_OPTIONS
from .positions import LearnedDecay
from .positions import RotaryShift
from .positions import alibi_of
from .positions import decay_of
from .positions import taken_back
from .segments import real_first
from .segments import take
from .segments import way_back


# What a place of the window holds.
EMPTY, FAR_LATER, SINK = 0, 1, 2


class HybridState(NamedTuple):
    """w is the window size, s the number of sinks; the window is aligned to the right, its newest token last.

    A key is kept once, with its rotary position. Where the feature map does not see all of that, the positions of the
    window are kept too, and what it must not see is taken back when the key leaves the window.
    """

    sums: torch.Tensor  # [B, Hkv, F, D + 2] float32: S, Z and m of the tokens that have left the window
    window_key: torch.Tensor  # [B, Hkv, w, D]
    window_value: torch.Tensor  # [B, Hkv, w, D]
    window_kind: torch.Tensor  # [B, w] int8: EMPTY, FAR_LATER or SINK
    sink_key: torch.Tensor  # [B, Hkv, s, D]
    sink_value: torch.Tensor  # [B, Hkv, s, D]
    num_seen: torch.Tensor  # [B, 1] int64: real tokens so far
    window_position: torch.Tensor | None = None  # [B, w] int32


class HybridAttention(AttentionMechanism):
    """Linear attention to far keys, exact softmax to a sliding window and to sink (global) tokens, in one sum."""

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
        "feature_map": Option(str, "exp", "phi of far queries and keys", choices=("exp", "hedgehog")),
        "num_features": Option(int, None, "features per head; by default what the feature map suggests", minimum=1),
        "normalization": Option(
            str,
            "joint",
            "joint: one denominator; separate: two, mixed by a learned weight per head; window_maximum: LoLCATs' form",
            choices=tuple(NORMALIZATIONS),
        ),
        "decay": DECAY_OPTION,
        **ROPE_OPTIONS,
        "trained_length": Option(
            int,
            None,
            "tokens that the softmax model was trained on: farther away, sinks are seen as at this distance",
            minimum=1,
        ),
    }
    supports_causal = supports_bidirectional = supports_padding = supports_state = True
    supports_gqa = supports_constants = supports_alibi = True

    def __init__(self, settings, shape):
        super().__init__(settings, shape)
        self.window_size, self.num_sinks = settings["window_size"], settings["num_sinks"]
        feature_map = FEATURE_MAPS[settings["feature_map"]]
        self.feature_map = feature_map(
            shape.num_heads, shape.num_key_value_heads, shape.head_dim, settings["num_features"]
        )
        self.mix = NORMALIZATIONS[settings["normalization"]](shape.num_heads)
        self.alibi = alibi_of(shape)
        decay = decay_of(settings, shape)
        self.decay = decay if isinstance(decay, LearnedDecay) else None
        self.shift = taken_back(settings, shape, self.layer_setting("rope_frequencies"))
        # Beyond the trained length slow frequencies would turn the logit of a sink over (StreamingLLM 2023, section 3.2,
        # counts positions inside its cache for the same reason).
        self.trained_length = settings["trained_length"]
        self.to_sinks = RotaryShift(shape.rotary) if shape.rotary and self.trained_length and self.num_sinks else None
        self.needs_positions = self.shift is not None or self.to_sinks is not None
        self.uses_far = True  # False leaves window and sinks alone, to measure what the far part is worth

    @classmethod
    def problems(cls, settings, max_length):
        if settings["num_features"] is None:
            return []
        problem = FEATURE_MAPS[settings["feature_map"]].check_num_features(settings["num_features"])
        return [f"`num_features` = {settings['num_features']} {problem}"] if problem else []

    def reset_parameters(self):
        self.feature_map.reset_parameters(self.generator())
        self.mix.reset_parameters(self.feature_map)
        for decay in (self.alibi, self.decay):
            if decay is not None:
                decay.reset_parameters()

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
        if self._is_step(query, attention_mask, is_causal, state):
            if takes_step(query, key, value, *state[1:3]):
                return self._step(query, key, value, scaling, state, positions)
            if is_eager(query) and query.device.type == "cpu" and bool((state[3] == FAR_LATER).all()):
                return self._step_in_torch(query, key, value, scaling, state, positions)
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
                "`hybrid` in an encoder takes a bool mask and no numbers of packed sequences; give each sequence its "
                "own row of the batch."
            )

    def _nothing(self, query, key, value, is_causal, state):
        """No tokens: an empty output that hangs on its inputs, and the state as it is."""
        groups = self.shape.num_heads // self.shape.num_key_value_heads
        output = query[..., :1] * value.to(query.dtype).repeat_interleave(groups, dim=1)
        state = (state or _without_none(self._initial_state(key, value))) if is_causal else None
        return output.transpose(1, 2), state

    def _is_step(self, query, mask, is_causal, state) -> bool:
        """One token after others, without padding and gradients."""
        is_one = mask is None and is_causal and bool(state) and query.shape[2] == 1
        return is_one and self.alibi is None and self.uses_far and not torch.is_grad_enabled()

    def _without_slow(self, x, positions):
        """Queries or keys `[B, heads, N, D]` as the feature map sees them."""
        return x if self.shift is None else self.shift(x, -positions)

    def _sink_query(self, query, positions):
        """What sinks are compared with: queries no farther from the start than the softmax model was trained."""
        if self.to_sinks is None:
            return None
        last = self.trained_length - 1
        if query.device.type == "cpu" and is_eager(query) and not (positions > last).any():
            return None
        return self.to_sinks(query, positions.clamp(max=last) - positions)

    def _step(self, query, key, value, scaling, state, positions):
        """`_attend_back` of one token in few operations: at this size each costs more than its sums."""
        old = HybridState(*state)
        # Under autocast rotary positions make queries and keys float32 where values stay bfloat16.
        key, value = with_dtype(key, old.window_key.dtype), with_dtype(value, old.window_value.dtype)
        exponents = self._exponents_of_step(query, old, scaling, positions)
        joint = self.mix.kernel_parameters()
        log_decay = None if self.decay is None else self.decay()
        *new, parts = hybrid_step(
            *(query, key, value, self._sink_query(query, positions), None if self.shift is None else positions),
            *(*exponents, log_decay, list(_without_none(old)), *(joint or (None, None)), self.shape.head_dim, scaling),
        )
        (batch, heads), width = query.shape[:2], value.shape[-1]
        if joint is not None:
            near = parts[: batch * heads * width]
        else:
            near, near_size, largest, far, far_size = step_parts(parts, query, key, width)
            norm = half_squared_norm(query, scaling).view(largest.shape)
            near = self.mix((near, near_size), [(far, far_size)], largest, norm)
        return with_dtype(near.view(batch, 1, heads, width), query.dtype), tuple(new)

    def _exponents_of_step(self, query, old: HybridState, scaling, positions):
        """Of the query, and of the key that leaves the window."""
        leaving, position = old.window_key[:, :, :1], None
        if old.window_position is not None:
            position = old.window_position[:, :1]
        return (
            self.feature_map.forward_queries(self._without_slow(query, positions), scaling),
            self.feature_map.forward_keys(self._without_slow(leaving, position), scaling),
        )

    def _step_in_torch(self, query, key, value, scaling, state, positions):
        """`_step` where torch computes and every place of the window holds a token that is no sink."""
        old, dtype = HybridState(*state), state[0].dtype
        (batch, heads), kv_heads, width = query.shape[:2], key.shape[1], value.shape[-1]
        key, value = with_dtype(key, old.window_key.dtype), with_dtype(value, old.window_value.dtype)
        far, far_size, sums = sized_step(
            *self._exponents_of_step(query, old, scaling, positions),
            *(old.window_value[:, :, :1], old.sums, True, None if self.decay is None else self.decay()),
        )
        windows = [
            torch.cat((x[:, :, 1:], new), dim=2) for x, new in ((old.window_key, key), (old.window_value, value))
        ]
        to_sinks = self._sink_query(query, positions)
        queries = (query, query if to_sinks is None else to_sinks)
        rows = [(x.to(dtype) * scaling).reshape(batch * kv_heads, -1, self.shape.head_dim) for x in queries]
        keys = [x.to(dtype).flatten(0, 1).transpose(1, 2) for x in (windows[0], old.sink_key)]
        logits = torch.cat([torch.bmm(*pair) for pair in zip(rows, keys)], dim=2)
        weights = logits.softmax(dim=-1).split_with_sizes((self.window_size, self.num_sinks), dim=2)
        values = [x.to(dtype).flatten(0, 1) for x in (windows[1], old.sink_value)]
        near = torch.bmm(weights[0], values[0]).baddbmm_(weights[1], values[1])
        shape = (batch, kv_heads, heads // kv_heads, 1, -1)
        parts = [x.view(shape) for x in (near, logits.logsumexp(dim=-1, keepdim=True), far, far_size)]
        largest = logits.amax(dim=-1, keepdim=True).view(shape)
        norm = half_squared_norm(query, scaling).view(shape)
        output = self.mix(tuple(parts[:2]), [tuple(parts[2:])], largest, norm).view(batch, 1, heads, width)
        new_state = (sums, *windows, old.window_kind, old.sink_key, old.sink_value, old.num_seen + 1)
        if old.window_position is not None:
            new_state += (torch.cat((old.window_position[:, 1:], positions), dim=1),)
        return with_dtype(output, query.dtype), new_state

    def _attend_from_start(self, query, key, value, scaling, positions):
        """`_attend_back` of whole sequences without padding: what is where follows from the length alone."""
        batch, _, length, _ = key.shape
        w, s = self.window_size, self.num_sinks
        leaving, first = min(w, length), min(s, length)
        (far_key, near_key), (far_value, near_value) = (_far_and_near(x, w) for x in (key, value))
        if self.shift is not None:
            far_key = F.pad(self.shift(key, -positions), (0, 0, leaving, -leaving))
        far_mask = self._later(batch, length, leaving + first, key.device)
        far, sums = self._far(self._without_slow(query, positions), far_key, far_value, far_mask, scaling)
        visible = self._later(batch, length + w - 1, w - 1 + first, key.device)
        near = NearKeys(near_key, near_value, visible, w - 1)
        # Padded by a negative number a tensor is cropped; and copied, so that a state keeps no more than itself.
        sinks = tuple(F.pad(x, (0, 0, 0, s - length)) for x in (key, value))
        window = tuple(F.pad(x, (0, 0, w - length, 0)) for x in (key, value))
        seen = torch.ones(batch, length, s, dtype=torch.bool, device=key.device).tril()
        position = torch.arange(1, length + 1, device=key.device)[None] if self.alibi is not None else None
        to_sinks = self._sink_query(query, positions)
        output = self._mixed(query, near, sinks, seen, position, [far], scaling, to_sinks)
        kind = key.new_full((batch, w), FAR_LATER, dtype=torch.int8)
        if length < w + s:  # some places of the window hold a sink, or nothing
            kind[:, : max(0, w - length + first)] = SINK
            kind[:, : w - leaving] = EMPTY
        num_seen = torch.full((batch, 1), length, dtype=torch.long, device=key.device)
        state = HybridState(sums, *window, kind, *sinks, num_seen)
        if self.shift is not None:
            state = state._replace(window_position=F.pad(positions, (w - length, 0)).contiguous())
        return with_dtype(output, query.dtype), _without_none(state)

    def _later(self, batch: int, length: int, start: int, device) -> torch.Tensor:
        """bool `[B, length]`, True from `start` on."""
        start = min(start, length)
        return F.pad(torch.ones(batch, length - start, dtype=torch.bool, device=device), (start, 0))

    def _attend_back(self, query, key, value, mask, scaling, state, positions, is_padded):
        """The causal form. Padding is at the left end of the new tokens."""
        old = HybridState(*state) if state else self._initial_state(key, value)
        w = self.window_size
        position = old.num_seen + mask.cumsum(dim=1)  # of a real token, counted from 1
        kind = self._kind(mask, position)
        line = _Line(
            torch.cat((old.window_key, key.to(old.window_key.dtype)), dim=2),
            torch.cat((old.window_value, value.to(old.window_value.dtype)), dim=2),
            torch.cat((old.window_kind, kind), dim=1),
            None if self.shift is None else torch.cat((old.window_position, positions), dim=1),
        )
        line = line.aligned_right() if is_padded else line
        sinks = self._collect_sinks(key, value, position, kind, old)
        to_far, to_near = line.ranges(query.shape[2], slice(1, None))
        far_query, far_key = self._without_slow(query, positions), self._without_slow(to_far.key, to_far.position)
        far, sums = self._far(far_query, far_key, to_far.value, to_far.kind == FAR_LATER, scaling, old.sums)
        seen = torch.arange(self.num_sinks, device=key.device) < position.unsqueeze(-1)
        near = NearKeys(to_near.key, to_near.value, to_near.kind == FAR_LATER, w - 1)
        to_sinks = self._sink_query(query, positions)
        output = self._mixed(query, near, sinks, seen, position, [far], scaling, to_sinks)
        *window, window_position = line.last(w)
        return output, _without_none(HybridState(sums, *window, *sinks, position[:, -1:], window_position))

    def _attend_packed(self, query, key, value, numbers, scaling, positions):
        """`_attend_back` within each of the packed sequences that `numbers [B, N]` count; 0 is padding, on the left.

        The state is that of each row's last sequence.
        """
        w, s, length = self.window_size, self.num_sinks, query.shape[2]
        position, first = _within_sequences(numbers)
        kind = self._kind(numbers > 0, position)
        line = _Line(key, value, kind, None if self.shift is None else positions).padded(w, 0)
        line_numbers = F.pad(numbers, (w, 0))
        to_far, to_near = line.ranges(length, slice(1, None))
        # A key that leaves the window when the next sequence has begun is one that nobody needs any more.
        leaves = (to_far.kind == FAR_LATER) & (line_numbers[:, :length] == numbers)
        far_query, far_key = self._without_slow(query, positions), self._without_slow(to_far.key, to_far.position)
        far, sums = self._far(far_query, far_key, to_far.value, torch.where(leaves, numbers, -numbers), scaling)
        places = first.unsqueeze(-1) + torch.arange(s, device=key.device)  # [B, N, s]
        seen = torch.arange(s, device=key.device) < position.unsqueeze(-1)
        places = places.clamp(max=length - 1).flatten(1)
        sinks = tuple(take(x, places).unflatten(2, (length, s)) for x in (key, value))  # [B, Hkv, N, s, D]
        visible = to_near.kind == FAR_LATER
        near = NearKeys(to_near.key, to_near.value, visible, w - 1, line_numbers[:, 1:])
        to_sinks = self._sink_query(query, positions)
        output = self._mixed(query, near, sinks, seen, position, [far], scaling, to_sinks)
        window_key, window_value, window_kind, window_position = line.last(w)
        window_kind = torch.where(line_numbers[:, -w:] == numbers[:, -1:], window_kind, EMPTY).to(torch.int8)
        sinks = tuple((x * seen[:, None, :, :, None])[:, :, length - 1 :].sum(dim=2) for x in sinks)
        state = HybridState(sums, window_key, window_value, window_kind, *sinks, position[:, -1:], window_position)
        return output, _without_none(state)

    def _attend_both_ways(self, query, key, value, mask, scaling, positions):
        """The bidirectional form: one causal sweep over what lies before the window, one over what lies behind it."""
        length, w = query.shape[2], self.window_size
        position = mask.cumsum(dim=1)
        kind = self._kind(mask, position)
        line = _Line(key, value, kind, None if self.shift is None else positions).padded(w, w)
        sinks = self._collect_sinks(key, value, position, kind)
        to_far, to_near = line.ranges(length, slice(1, length + 2 * w - 1))
        far_query, far_key = self._without_slow(query, positions), self._without_slow(to_far.key, to_far.position)
        before, _ = self._far(far_query, far_key, to_far.value, to_far.kind == FAR_LATER, scaling)
        after = line.flipped().first(length)
        far_key = self._without_slow(after.key, after.position)
        behind, _ = self._far(far_query.flip(2), far_key, after.value, after.kind == FAR_LATER, scaling)
        far = [before, tuple(x.flip(3) for x in behind)]
        near = NearKeys(to_near.key, to_near.value, to_near.kind == FAR_LATER, w - 1)
        seen = (torch.arange(self.num_sinks, device=key.device) < position[:, -1:, None]).expand(-1, length, -1)
        to_sinks = self._sink_query(query, positions)
        output = self._mixed(query, near, sinks, seen, position, far, scaling, to_sinks)
        if to_sinks is not None:  # the distance counts, whichever of the two moves
            key = self.to_sinks(key, positions.clamp(max=self.trained_length - 1) - positions)
        return self._with_global_queries(output, query, key, value, mask, position, kind, scaling)

    def _kind(self, mask, position):
        return torch.where(mask, torch.where(position <= self.num_sinks, SINK, FAR_LATER), EMPTY).to(torch.int8)

    def _initial_state(self, key, value) -> HybridState:
        batch, heads, _, _ = key.shape
        w, s = self.window_size, self.num_sinks
        sums = key.new_zeros(
            batch, heads, self.feature_map.num_features, value.shape[-1] + 2, dtype=accumulation_dtype(key)
        )
        sums[..., -1] = EMPTY_MAXIMUM
        return HybridState(
            sums,
            key.new_zeros(batch, heads, w, key.shape[-1]),
            value.new_zeros(batch, heads, w, value.shape[-1]),
            torch.zeros(batch, w, dtype=torch.int8, device=key.device),
            key.new_zeros(batch, heads, s, key.shape[-1]),
            value.new_zeros(batch, heads, s, value.shape[-1]),
            torch.zeros(batch, 1, dtype=torch.long, device=key.device),
            None if self.shift is None else torch.zeros(batch, w, dtype=torch.int32, device=key.device),
        )

    def _chosen_sinks(self, position, kind, dtype):
        """`[B, 1, s, N]`: 1 where the token is the sink, 0 elsewhere."""
        wanted = torch.arange(1, self.num_sinks + 1, device=position.device)
        return ((position[:, None] == wanted[:, None]) & (kind == SINK)[:, None])[:, None].to(dtype)

    def _collect_sinks(self, key, value, position, kind, old: HybridState | None = None):
        """Keys and values of the sinks with those among the new tokens, each at its place `[B, Hkv, s, D]`."""
        place = self._chosen_sinks(position, kind, torch.int8)[:, 0].max(dim=-1)
        sinks = tuple(take(x, place.indices) * place.values[:, None, :, None].to(x.dtype) for x in (key, value))
        return sinks if old is None else (old.sink_key + sinks[0], old.sink_value + sinks[1])

    def _far(self, query, key, value, mask, scaling, state=None):
        """The part of the keys at least w tokens back, and its state: query t sees the places 0..t of these."""
        decay = self.decay or self.alibi
        query = accumulated(query)
        options = {"is_causal": True, "state": state, "log_decay": None if decay is None else decay()}
        fuses = makes_features(query, key, value, mask, self.feature_map.num_features)
        kernel_map = self.feature_map.kernel_map(scaling) if fuses else None
        scale: Any  # never None: these are logarithms
        if kernel_map is not None:
            output, denominator, scale, state = map_attention(kernel_map, query, key, value, key_mask=mask, **options)
            output = output.transpose(1, 2).unflatten(1, denominator.shape[1:3])
        else:
            features = self.feature_map.forward_queries(query, scaling), self.feature_map.forward_keys(key, scaling)
            sums, scale, state = kernel_sums(*features, value, log_features=True, key_mask=mask, **options)
            output, denominator = normalize(sums), sums[..., -1:]
        if self.alibi is not None:  # the decay counts from where the window ends
            scale = scale + self.window_size * self.alibi().to(scale.dtype)[:, None, None, None]
        return (output, log_size(denominator, scale)), state

    def _mixed(self, query, near: NearKeys, sinks, seen, position, far, scaling, to_sinks):
        """`[B, H, N, D]` of near and far keys together."""
        distance = log_decay = None
        if self.alibi is not None:
            log_decay = self.alibi()
            distance = (position.unsqueeze(-1) - torch.arange(1, self.num_sinks + 1, device=query.device)).abs()
        sink_keys = SinkKeys(*sinks, seen, distance)
        *exact, largest = exact_part(query, near, sink_keys, scaling, log_decay, self.mix.is_scale_constant, to_sinks)
        if not self.uses_far:
            return exact[0].flatten(1, 2)
        norm = half_squared_norm(query, scaling).unflatten(1, (near.key.shape[1], -1))
        return self.mix(exact, far, largest, norm).flatten(1, 2)

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


class _Line(NamedTuple):
    """Keys and values in a row, `[B, Hkv, L, D]` twice, what is where, and its position, `[B, L]`."""

    key: torch.Tensor
    value: torch.Tensor
    kind: torch.Tensor
    position: torch.Tensor | None

    def aligned_right(self) -> _Line:
        """Real tokens moved to the right end, so that a window is the last w of them."""
        place = real_first(self.kind == EMPTY)
        position = None if self.position is None else self.position.gather(1, place)
        return _Line(take(self.key, place), take(self.value, place), self.kind.gather(1, place), position)

    def padded(self, left: int, right: int) -> _Line:
        """With empty places at both ends."""
        key, value = (F.pad(x, (0, 0, left, right)) for x in (self.key, self.value))
        position = None if self.position is None else F.pad(self.position, (left, right))
        return _Line(key, value, F.pad(self.kind, (left, right), value=EMPTY), position)

    def last(self, length: int) -> _Line:
        return self._part(slice(-length, None))

    def first(self, length: int) -> _Line:
        return self._part(slice(length))

    def _part(self, places: slice) -> _Line:
        position = None if self.position is None else self.position[:, places]
        return _Line(self.key[:, :, places], self.value[:, :, places], self.kind[:, places], position)

    def ranges(self, length: int, places: slice) -> tuple[_Line, _Line]:
        """The first `length` places, and other `places`."""
        key, value = (_ranges(x, length, places) for x in (self.key, self.value))
        first, other = (
            self._part(part)._replace(key=k, value=v) for part, k, v in zip((slice(length), places), key, value)
        )
        return first, other

    def flipped(self) -> _Line:
        position = None if self.position is None else self.position.flip(1)
        return _Line(self.key.flip(2), self.value.flip(2), self.kind.flip(1), position)


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


def _without_none(state: HybridState) -> tuple[torch.Tensor, ...]:
    return tuple(tensor for tensor in state if tensor is not None)
