"""`hybrid`: linear attention to far keys, exact softmax to a sliding window and to sink tokens, under ONE denominator.

    o_i = ( sum_exact exp(scaling q_i·k_j) v_j + c_i sum_far phi(q_i)·phi(k_j) v_j ) / ( the same with v = 1 )

           sinks           far                        window
    keys   0 1 2 3 | 4 5 ......... i - w | i - w + 1 ..... i     exact: the last w real tokens and the first s
           exact      S, Z, m (constant)         exact

Both parts share one log-sum-exp, so the far part need not learn the softmax normaliser (LoLCATs 2024, equation 7, has
one denominator too, but takes the window's maximum out of the window alone). c_i = exp(b - a scaling |q_i|^2 / 2) with
b and a learned per head: constants of the query do not cancel here.
"""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .attention_kernels import EMPTY_MAXIMUM
from .attention_kernels import accumulation_dtype
from .attention_kernels import kernel_sums
from .attention_kernels import normalize
from .attention_kernels import with_ones
from .attention_mechanism import AttentionMechanism
from .attention_mechanism import Option
from .feature_maps import FEATURE_MAPS
from .feature_maps import half_squared_norm
from .learned_decay import DECAY_OPTION
from .learned_decay import decay_of


# What a place of the window holds.
EMPTY, FAR_LATER, SINK = 0, 1, 2


class HybridState(NamedTuple):
    """w is the window size, s the number of sinks; the window is aligned to the right, its newest token last."""

    sums: torch.Tensor  # [B, Hkv, F, D + 2] float32: S, Z and m of the tokens that have left the window
    window_key: torch.Tensor  # [B, Hkv, w, D]
    window_value: torch.Tensor  # [B, Hkv, w, D]
    window_kind: torch.Tensor  # [B, w] int8: EMPTY, FAR_LATER or SINK
    sink_key: torch.Tensor  # [B, Hkv, s, D]
    sink_value: torch.Tensor  # [B, Hkv, s, D]
    num_seen: torch.Tensor  # [B, 1] int64: real tokens so far


class HybridAttention(AttentionMechanism):
    """Linear attention to far keys, exact softmax to a sliding window and to sink tokens, under one denominator."""

    options: ClassVar[dict[str, Option]] = {
        "window_size": Option(int, 64, "w, the newest real tokens that every query sees exactly", minimum=1),
        "num_sinks": Option(int, 4, "s, the first real tokens that every query sees exactly", minimum=0),
        "feature_map": Option(str, "exp", "phi of far queries and keys", choices=("exp", "hedgehog")),
        "num_features": Option(int, None, "features per head; by default what the feature map suggests", minimum=1),
        "decay": DECAY_OPTION,
    }
    supports_causal = supports_padding = supports_state = supports_gqa = supports_constants = True

    def __init__(self, settings, shape):
        super().__init__(settings, shape)
        self.window_size, self.num_sinks = settings["window_size"], settings["num_sinks"]
        feature_map = FEATURE_MAPS[settings["feature_map"]]
        self.feature_map = feature_map(
            shape.num_heads, shape.num_key_value_heads, shape.head_dim, settings["num_features"]
        )
        self.far_log_scale = nn.Parameter(torch.empty(shape.num_heads))
        self.query_norm_weight = nn.Parameter(torch.empty(shape.num_heads))
        self.decay = decay_of(settings, shape.num_key_value_heads)

    @classmethod
    def problems(cls, settings, max_length):
        if settings["num_features"] is None:
            return []
        problem = FEATURE_MAPS[settings["feature_map"]].check_num_features(settings["num_features"])
        return [f"`num_features` = {settings['num_features']} {problem}"] if problem else []

    def reset_parameters(self):
        self.feature_map.reset_parameters(self.generator())
        # With the norm terms of the softmax kernel's random features on both sides, and the mean over F features, the
        # expected weight of a far key starts at most at exp(scaling q·k): the difference is (c^2 - 1) |q + k|^2 / 2 in
        # the exponent, with c the initial scale of W.
        init.constant_(self.far_log_scale, -math.log(self.feature_map.num_features))
        init.ones_(self.query_norm_weight)
        if self.decay is not None:
            self.decay.reset_parameters()
        if isinstance(norm_weight := getattr(self.feature_map, "key_norm_weight", None), torch.Tensor):
            init.ones_(norm_weight)

    def forward(self, query, key, value, *, attention_mask, scaling, is_causal, state):
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            raise NotImplementedError(
                "`hybrid` cannot be traced for packed sequences (a forward without a cache inside torch.compile); pass "
                "`past_key_values`, or compile the decode step only."
            )
        old = HybridState._make(state) if state else self._initial_state(key, value)
        length = query.shape[2]
        if attention_mask is None:
            attention_mask, place = torch.ones(key.shape[0], length, dtype=torch.bool, device=key.device), None
        else:  # real tokens to the right end, in order
            place = attention_mask.to(torch.uint8).argsort(dim=1, stable=True)
            query, key, value = (_reorder(x, place) for x in (query, key, value))
            attention_mask = attention_mask.gather(1, place)
        position = old.num_seen + attention_mask.cumsum(dim=1)  # of a real token, counted from 1
        kind = torch.where(attention_mask, torch.where(position <= self.num_sinks, SINK, FAR_LATER), EMPTY).to(
            torch.int8
        )
        line = _Line(
            torch.cat((old.window_key, key.to(old.window_key.dtype)), dim=2),
            torch.cat((old.window_value, value.to(old.window_value.dtype)), dim=2),
            torch.cat((old.window_kind, kind), dim=1),
        )
        line = line.aligned_right() if place is not None else line
        sinks: _Sinks = self._collect_sinks(old, key, value, position, kind)
        far, far_scale, sums = self._far(query, line, scaling, length, old.sums)
        near, near_scale = self._near(query, line, sinks, position, scaling, length)
        output = normalize(_add_scaled(far, far_scale, near, near_scale)).flatten(1, 2)
        output = output.masked_fill(~attention_mask[:, None, :, None], 0.0)
        if place is not None:
            output = _reorder(output, place.argsort(dim=1))
        w = self.window_size
        window = (line.key[:, :, -w:], line.value[:, :, -w:], line.kind[:, -w:])
        new = HybridState(sums, *window, *sinks, position[:, -1:])
        return output.transpose(1, 2).to(query.dtype), tuple(new)

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
        )

    def _collect_sinks(self, old, key, value, position, kind):
        """The sinks with those among the new tokens, each at its place `[B, Hkv, s, D]`."""
        wanted = torch.arange(1, self.num_sinks + 1, device=key.device)
        chosen = ((position[:, None] == wanted[:, None]) & (kind == SINK)[:, None])[:, None].to(key.dtype)
        return old.sink_key + chosen @ key, old.sink_value + chosen @ value

    def _far(self, query, line, scaling, length, state):
        """The part of the keys that have left the window: query t sees the places 0..t of the line."""
        key, value = line.key[:, :, :length], line.value[:, :, :length]
        sums, scale, state = kernel_sums(
            self.feature_map.forward_queries(query, scaling),
            self.feature_map.forward_keys(key, scaling),
            value,
            log_features=True,
            is_causal=True,
            key_mask=line.kind[:, :length] == FAR_LATER,
            state=state,
            log_decay=self.decay() if self.decay is not None else None,
        )
        weights = (self.far_log_scale, self.query_norm_weight)
        log_scale, norm_weight = (w.to(sums.dtype).unflatten(0, (key.shape[1], -1))[:, :, None, None] for w in weights)
        norm = half_squared_norm(query, scaling).unflatten(1, (key.shape[1], -1))
        # Its detached value goes into the scale, so that exp sees numbers near 0 alone; its gradient stays.
        exponent = log_scale - norm_weight * norm
        return sums * (exponent - exponent.detach()).exp(), scale + exponent.detach(), state

    def _near(self, query, line, sinks, position, scaling, length):
        """The exact part: `(numerator and denominator [B, Hkv, G, N, D + 1], log scale [B, Hkv, G, N, 1])`."""
        dtype = accumulation_dtype(query)
        query = (query.to(dtype) * scaling).unflatten(1, (line.key.shape[1], -1))
        key, value, visible = self._windows(line, dtype, length)
        blocks = F.pad(query, (0, 0, 0, -length % visible.shape[-2])).unflatten(3, (-1, visible.shape[-2]))
        logits = blocks @ key.unsqueeze(2).transpose(-1, -2)
        sink_key, sink_values = sinks[0].to(dtype), with_ones(sinks[1], dtype)
        sink_logits = blocks @ sink_key[:, :, None, None].transpose(-1, -2)
        seen = torch.arange(self.num_sinks, device=query.device) < position.unsqueeze(-1)  # [B, N, s]
        seen = F.pad(seen, (0, 0, 0, -length % visible.shape[-2])).unflatten(1, (-1, visible.shape[-2]))
        seen, visible = seen[:, None, None], visible[:, None, None]
        scale = _masked_maximum(logits, visible)
        if self.num_sinks:
            scale = torch.maximum(scale, _masked_maximum(sink_logits, seen))
        sums = _masked_exp(logits, visible, scale) @ with_ones(value, dtype).unsqueeze(2)
        sums = sums + _masked_exp(sink_logits, seen, scale) @ sink_values[:, :, None, None]
        return sums.flatten(3, 4)[:, :, :, :length], scale.flatten(3, 4)[:, :, :, :length]

    def _windows(self, line, dtype, length):
        """Keys and values of the windows of blocks of queries: `[B, Hkv, blocks, w + c - 1, D]`, and who sees whom.

        Block b holds queries b c .. b c + c - 1; query t sees the places t + 1 .. t + w of the line.
        """
        w, c = self.window_size, min(length, self.window_size)
        span, pad = w + c - 1, -length % c
        key, value = (
            F.pad(x[:, :, 1:].to(dtype), (0, 0, 0, pad)).unfold(2, span, c).transpose(-1, -2)
            for x in (line.key, line.value)
        )
        exact = F.pad(line.kind[:, 1:] == FAR_LATER, (0, pad)).unfold(1, span, c)
        offset = torch.arange(span, device=key.device) - torch.arange(c, device=key.device)[:, None]
        return key, value, exact[:, :, None] & (offset >= 0) & (offset < w)


_Sinks = tuple[torch.Tensor, torch.Tensor]


class _Line(NamedTuple):
    """The old window and the new tokens in a row: `[B, Hkv, w + N, D]` twice, and what is where, `[B, w + N]`."""

    key: torch.Tensor
    value: torch.Tensor
    kind: torch.Tensor

    def aligned_right(self) -> _Line:
        """Real tokens moved to the right end, so that a window is the last w of them."""
        place = (self.kind != EMPTY).to(torch.uint8).argsort(dim=1, stable=True)
        return _Line(_reorder(self.key, place), _reorder(self.value, place), self.kind.gather(1, place))


def _reorder(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """`x [B, H, N, D]` with its tokens in the order `place [B, N]`."""
    return x.take_along_dim(place[:, None, :, None], dim=2)


def _masked_maximum(logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    return logits.detach().masked_fill(~visible, EMPTY_MAXIMUM).amax(dim=-1, keepdim=True)


def _masked_exp(logits: torch.Tensor, visible: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (logits - scale).masked_fill(~visible, 0.0).exp() * visible


def _add_scaled(first, first_scale, second, second_scale):
    """first exp(first_scale) + second exp(second_scale), divided by what makes the larger denominator 1.

    By the denominators and not by the scales: the scale of a query that sees no far key yet means nothing.
    """
    parts = ((first, first_scale), (second, second_scale))
    sizes = [
        torch.where(sums[..., -1:] > 0, scale + sums.detach()[..., -1:].log(), EMPTY_MAXIMUM) for sums, scale in parts
    ]
    largest = torch.maximum(*sizes)
    return sum(
        sums * torch.where(size > EMPTY_MAXIMUM, scale - largest, 0.0).exp()
        for (sums, scale), size in zip(parts, sizes)
    )
