# SPDX-License-Identifier: Apache-2.0
"""`aft`: the Attention-Free Transformer (Zhai 2021): keys weigh values channel by channel, queries only gate.

    o_td = sigmoid(q_td) sum_s exp(k_sd + w_ts) v_sd / sum_s exp(k_sd + w_ts)          no q·k anywhere

    variant   w                                            cost          causal, state
    full      learned for every pair of positions          O(N^2 D)      no
    local     learned for |t - s| < window, else 0         O(N window D) yes: sums, window of keys and values
    conv      the same, a function of t - s alone          O(N window D) yes: the same
    simple    0                                            O(N D)        yes: sums

Axes: B batch, H query heads, Hkv key/value heads, N length, D head_dim, W window, T max_length. w is per key/value
head, whose channels share it ("heads" of AFT-conv), so a state is per key/value head too. Positions count real tokens.
Every exponential is taken after a maximum; conv is no convolution with exp(w) - 1 plus global sums, as in the paper's
equation 5, because that difference cancels where w < 0: near and far keys are summed apart and then added.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init

from .kernels_torch import EMPTY_MAXIMUM
from .kernels_torch import accumulation_dtype
from .kernels import kernel_attention
from .kernels import is_eager
from .kernels import kernel_sums
from .kernels_torch import largest_visible
from .kernels_torch import normalize
from .mechanism import AttentionMechanism
from .mechanism import Option
from .segments import real_first
from .segments import take
from .segments import way_back
from .segments import without_padding


# Nats between the largest and the smallest weight that one float32 product keeps at full relative precision.
SAFE_SPREAD = 80.0
# Elements of the [B, Hkv, queries, S, D] tensor that the exact form of `full` makes at a time.
EXACT_ELEMENTS = 1 << 22


class WindowState(NamedTuple):
    """The window is aligned to the right, its newest real token last."""

    sums: torch.Tensor  # [B, Hkv D, 1, 3] float32: S, Z and m of the tokens that have left the window
    key: torch.Tensor  # [B, Hkv, W, D]
    value: torch.Tensor  # [B, Hkv, W, D]
    is_real: torch.Tensor  # [B, W] bool
    num_seen: torch.Tensor  # [B, 1] int64: real tokens so far


class AftAttention(AttentionMechanism):
    """Attention-Free Transformer: exp(k + w) weighs values per channel and sigmoid(q) gates. Not for untrained swaps.

    It computes nothing like the softmax of a pretrained q·k: a converted model has to be trained, much longer than
    after a swap to kernel attention, and `scaling` has no meaning here. w starts as 0.
    """

    options: ClassVar[dict[str, Option]] = {
        "variant": Option(
            str, "simple", "which position biases are learned", choices=("simple", "local", "conv", "full")
        ),
        "window_size": Option(
            int, 32, "W: local and conv learn biases for |t - s| < W", minimum=1, needs={"variant": ("local", "conv")}
        ),
        "position_rank": Option(
            int, 64, "rank of full's matrix of biases; 0 learns all T x T", minimum=0, needs={"variant": ("full",)}
        ),
        "max_length": Option(
            int,
            None,
            "T of full and local; by default the model's own limit",
            minimum=1,
            needs={"variant": ("local", "full")},
        ),
        "seed": Option(
            int,
            0,
            "seed of the factorised biases",
            minimum=0,
            needs={"variant": ("full",), "position_rank": range(1, sys.maxsize)},
        ),
    }
    supports_causal = supports_bidirectional = supports_padding = supports_state = supports_gqa = True
    supports_weights = False
    position_bias: torch.Tensor
    query_position: torch.Tensor
    key_position: torch.Tensor

    def __init__(self, settings, shape):
        super().__init__(settings, shape)
        self.variant, self.window_size = settings["variant"], settings["window_size"]
        self.max_length = settings["max_length"] or shape.max_length
        heads, rank, offsets = shape.num_key_value_heads, settings["position_rank"], 2 * self.window_size - 1
        sizes: dict[str, tuple[int, ...]] = {}
        if self.variant == "full" and rank:
            sizes = dict.fromkeys(("query_position", "key_position"), (heads, self.max_length, rank))
        elif self.variant == "full":
            sizes = {"position_bias": (heads, self.max_length, self.max_length)}
        elif self.variant != "simple":  # [..., s - t + W - 1]; causal models use the first W
            sizes = {"position_bias": (heads, self.max_length if self.variant == "local" else 1, offsets)}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size)))

    @classmethod
    def obstacle(cls, capability, settings):
        if settings["variant"] == "full" and capability in ("causal", "state"):
            return f"with `variant` = `full`, which would need all earlier keys at each step, has no {capability} form"
        return super().obstacle(capability, settings)

    @classmethod
    def problems(cls, settings, max_length):
        if settings["variant"] in ("full", "local") and (settings["max_length"] or max_length) is None:
            return ["`max_length` is needed: the architecture sets no limit of its own; give the longest input"]
        return []

    def reset_parameters(self):
        for name, parameter in self.named_parameters(recurse=False):
            if name == "query_position":  # one factor must differ from 0, or neither would ever get a gradient
                init.copy_(parameter, torch.randn(parameter.shape, generator=self.generator()) * 0.02)
            else:
                init.zeros_(parameter)

    def attention_weights(self, query, key, *, attention_mask, scaling, is_causal):
        raise NotImplementedError("`aft` weighs every channel by itself, so it has no matrix of weights per head.")

    def forward(self, query, key, value, *, attention_mask, scaling, is_causal, state):
        if self.variant == "simple" and not is_causal:
            output, state = _mean_by_keys(key, value, attention_mask), None
        elif self.variant == "simple":
            output, state = self._causal_simple(key, value, attention_mask, state)
        else:
            if attention_mask is not None and attention_mask.dtype != torch.bool:
                raise NotImplementedError(
                    f"`aft` with `variant` = `{self.variant}` cannot be traced for packed sequences (a forward without "
                    "a cache inside torch.compile); pass `past_key_values`, or compile the decode step only."
                )
            output, state = self._ordered(key, value, attention_mask, is_causal, state)
        gate = query.to(output.dtype).sigmoid()
        groups = self.shape.num_heads // self.shape.num_key_value_heads
        output = gate * output.repeat_interleave(groups, dim=1)
        output = without_padding(output, None if attention_mask is None else attention_mask > 0)
        return output.transpose(1, 2).to(query.dtype), state if is_causal else None

    def _causal_simple(self, key, value, mask, state):
        """Kernel attention with every channel as a head of one log feature, k, and a query that is always log 1."""
        key, value = _channels(key), _channels(value)
        output, new_state = kernel_attention(
            torch.zeros_like(key),
            key,
            value,
            log_features=True,
            is_causal=True,
            key_mask=mask,
            state=state[0] if state else None,
        )
        return output.squeeze(3).unflatten(1, (self.shape.num_key_value_heads, -1)).transpose(2, 3), (new_state,)

    def _ordered(self, key, value, mask, is_causal, state):
        """The variants to which positions matter: real tokens are moved to the right end first, in order."""
        place = None
        if not key.shape[2]:
            return key * value, tuple(state or self._initial_state(key, value))
        if mask is not None:
            place = real_first(~mask)
            key, value, mask = take(key, place), take(value, place), mask.gather(1, place)
        real = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device) if mask is None else mask
        if self.variant == "full":
            output, new_state = self._full(key, value, real), None
        elif is_causal:
            output, new_state = self._causal_window(key, value, real, state, place is not None)
        else:
            output, new_state = self._window(key, value, real), None
        if place is not None:
            output = take(output, way_back(place))
        return output, new_state

    def _positions(self, real: torch.Tensor, num_seen: torch.Tensor | int = 0) -> torch.Tensor:
        """`[B, N]`: the number of real tokens before each one.

        Raises:
            ValueError: if there are more than `max_length`.
        """
        position = (num_seen + real.cumsum(dim=1) - 1).clamp(min=0)
        knows = position.device.type != "meta" and is_eager(position) and position.numel() > 0
        if self.variant != "conv" and knows and (longest := int(position.max()) + 1) > self.max_length:
            raise ValueError(
                f"Got {longest} positions, but `aft` with `variant` = `{self.variant}` was built for at most "
                f"`max_length` = {self.max_length}; shorten the input, or convert again with a larger `--max_length`, "
                "`--variant conv` or `--variant simple`."
            )
        return position

    def _near_bias(self, position: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """w of the window, `[B or 1, Hkv, N or 1, 2 W - 1]`, of queries at `position [B, N]`."""
        bias = self.position_bias.to(dtype)
        return bias[:, position].transpose(0, 1) if self.variant == "local" else bias.unsqueeze(0)

    def _causal_window(self, key, value, real, state, is_padded):
        """Query t sees the places 1 + t .. W + t of the line (old window, then new tokens) near by, 0 .. t far away."""
        length, w, dtype = key.shape[2], self.window_size, accumulation_dtype(key)
        old = WindowState._make(state) if state else self._initial_state(key, value)
        position = self._positions(real, old.num_seen)
        key = torch.cat((old.key, key.to(old.key.dtype)), dim=2)
        value = torch.cat((old.value, value.to(old.value.dtype)), dim=2)
        num_seen = old.num_seen + real.sum(dim=1, keepdim=True)
        real = torch.cat((old.is_real, real), dim=1)
        if is_padded:
            place = real_first(~real)
            key, value, real = take(key, place), take(value, place), real.gather(1, place)
        far, sums = _far(key, value, real, length, old.sums)
        near = _near(key[:, :, 1:], value[:, :, 1:], real[:, 1:], self._near_bias(position, dtype)[..., :w])
        new = WindowState(sums, key[:, :, -w:], value[:, :, -w:], real[:, -w:], num_seen)
        return normalize(_add_scaled((far, near))).squeeze(-1), tuple(new)

    def _window(self, key, value, real):
        """Near are the keys with |t - s| < W; far ones come from one scan from each end."""
        length, w = key.shape[2], self.window_size
        bias = self._near_bias(self._positions(real), accumulation_dtype(key))
        left, _ = _far(*_padded(key, value, real, w, 0), length, None)
        right, _ = _far(*_padded(key.flip(2), value.flip(2), real.flip(1), w, 0), length, None)
        near = _near(*_padded(key, value, real, w - 1, w - 1), bias)
        return normalize(_add_scaled((left, tuple(part.flip(2) for part in right), near))).squeeze(-1)

    def _initial_state(self, key, value) -> WindowState:
        batch, heads, _, dim = key.shape
        sums = key.new_zeros(batch, heads * dim, 1, 3, dtype=accumulation_dtype(key))
        sums[..., -1] = EMPTY_MAXIMUM
        return WindowState(
            sums,
            key.new_zeros(batch, heads, self.window_size, dim),
            value.new_zeros(batch, heads, self.window_size, dim),
            torch.zeros(batch, self.window_size, dtype=torch.bool, device=key.device),
            torch.zeros(batch, 1, dtype=torch.long, device=key.device),
        )

    def _full(self, key, value, real):
        position, dtype = self._positions(real), accumulation_dtype(key)
        if self.settings["position_rank"]:
            rows, columns = (x.to(dtype)[:, position].transpose(0, 1) for x in (self.query_position, self.key_position))
            bias = rows @ columns.transpose(-1, -2)
        else:
            bias = self.position_bias.to(dtype)[:, position.unsqueeze(2), position.unsqueeze(1)].transpose(0, 1)
        bias = bias.masked_fill(~real[:, None, None, :], EMPTY_MAXIMUM)
        key = key.to(dtype).masked_fill(~real[:, None, :, None], EMPTY_MAXIMUM)
        value = value.masked_fill(~real[:, None, :, None], 0.0)
        top_bias = largest_visible(bias.transpose(2, 3), None).unsqueeze(3)
        top_key = largest_visible(key, None).unsqueeze(2)
        if (
            _spread(bias, top_bias, real[:, None, None, :]) + _spread(key, top_key, real[:, None, :, None])
            > SAFE_SPREAD
        ):
            return _exact_full(bias, key, value)
        weights = (bias - top_bias).exp() * real[:, None, None, :]
        key = (key - top_key).exp() * real[:, None, :, None]
        numerator, denominator = (weights @ torch.cat((key * value.to(dtype), key), dim=-1)).chunk(2, dim=-1)
        return numerator / denominator.masked_fill(denominator == 0, 1.0)


def _mean_by_keys(key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`simple` without an order, `[B, Hkv, 1, D]`: all queries get the same mean; arbitrary for a row without a key."""
    key = key.to(accumulation_dtype(key))
    if mask is not None:
        key, value = torch.where(mask[:, None, :, None], key, EMPTY_MAXIMUM), without_padding(value, mask)
    return (key.softmax(dim=2) * value).sum(dim=2, keepdim=True)


def _channels(x: torch.Tensor) -> torch.Tensor:
    """`[B, Hkv, N, D]` -> `[B, Hkv D, N, 1]`."""
    return x.transpose(2, 3).flatten(1, 2).unsqueeze(-1)


def _padded(key, value, real, before: int, after: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty places around the tokens."""
    return F.pad(key, (0, 0, before, after)), F.pad(value, (0, 0, before, after)), F.pad(real, (before, after))


def _far(key, value, real, length: int, state):
    """Sums with w = 0 over the places 0 .. t of the line for t < length: `((sums, log scale), state)`, see `_near`."""
    heads = key.shape[1]
    key, value = _channels(key[:, :, :length]), _channels(value[:, :, :length])
    parts: tuple[Any, ...] = kernel_sums(
        torch.zeros_like(key),
        key,
        value,
        log_features=True,
        is_causal=True,
        key_mask=real[:, :length],
        state=state,
    )
    *scaled, state = parts
    return tuple(x.squeeze(2).unflatten(1, (heads, -1)).transpose(2, 3) for x in scaled), state


def _near(key, value, real, bias):
    """Sums of exp(k + w) [v, 1] over a window that starts at t: `(sums [B, Hkv, N, D, 2], log scale [..., 1])`.

    key, value `[B, Hkv, N + span - 1, D]`, bias `[B or 1, Hkv, N or 1, span]`. Numerator and denominator are
    exp(log scale) times larger than they stand there.
    """
    span, dtype = bias.shape[-1], accumulation_dtype(key)
    windows = key.to(dtype).unfold(2, span, 1)  # [B, Hkv, N, D, span]
    visible = real.unfold(1, span, 1)[:, None, :, None]
    logits = (windows + bias.unsqueeze(3)).masked_fill(~visible, EMPTY_MAXIMUM)
    scale = logits.detach().amax(dim=-1, keepdim=True)
    weights = (logits - scale).exp() * visible
    numerator = (weights * value.to(dtype).unfold(2, span, 1)).sum(dim=-1)
    return torch.stack((numerator, weights.sum(dim=-1)), dim=-1), scale


def _add_scaled(parts) -> torch.Tensor:
    """The sum of `sums * exp(scale)` over the parts, divided by what makes the largest denominator 1.

    By the denominators and not by the scales: the scale of a part that sees no key means nothing.
    """
    sizes = [torch.where(s[..., -1:] > 0, scale + s.detach()[..., -1:].log(), EMPTY_MAXIMUM) for s, scale in parts]
    largest = torch.stack(sizes).amax(dim=0)
    return torch.stack(
        [s * torch.where(size > EMPTY_MAXIMUM, scale - largest, 0.0).exp() for (s, scale), size in zip(parts, sizes)]
    ).sum(dim=0)


def _spread(x: torch.Tensor, top: torch.Tensor, real: torch.Tensor) -> float:
    """The largest distance of a visible entry to the maximum of its row or column."""
    if not is_eager(x) or x.device.type == "meta" or not x.numel():  # no number to look at: the exact form
        return SAFE_SPREAD + 1
    return (top - x.detach()).masked_fill(~real, 0.0).max().item()


def _exact_full(bias, key, value):
    """A maximum for each query and channel; some queries at a time, because the logits are `[B, Hkv, n, S, D]`."""
    step = max(1, EXACT_ELEMENTS // max(1, key.numel()))
    outputs = []
    for rows in bias.split(step, dim=2):
        weights = (rows.unsqueeze(-1) + key.unsqueeze(2)).softmax(dim=3)
        outputs.append((weights * value.to(weights.dtype).unsqueeze(2)).sum(dim=3))
    return torch.cat(outputs, dim=2)
