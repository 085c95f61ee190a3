# SPDX-License-Identifier: Apache-2.0
"""`aft`: the Attention-Free Transformer (Zhai 2021), where keys weigh values per channel and queries only gate.

    o_td = sigmoid(q_td) sum_s exp(k_sd + w_ts) v_sd / sum_s exp(k_sd + w_ts)          no q·k anywhere

    variant   w                                            cost          causal, state
    full      learned for every pair of positions          O(N^2 D)      no
    local     learned for |t - s| < window, else 0         O(N window D) yes: sums, window of keys and values
    conv      the same, a function of t - s alone          O(N window D) yes: the same
    simple    0                                            O(N D)        yes: sums

Axes: B batch, H query heads, Hkv key/value heads, N length, D head_dim, W window, T max_length. w is per key/value head
and shared by its channels (the "heads" of AFT-conv), so the state is per key/value head too. Positions count real
tokens. Every exponential is taken after subtracting a maximum. `conv` does not use the paper's equation 5, a
convolution with exp(w) - 1 plus global sums, because that difference cancels where w < 0; near and far keys are summed
separately instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..torch_kernels.attention import kernel_attention, map_attention
from ..torch_kernels.blocks import (
    EMPTY_MAXIMUM,
    EXP,
    KernelMap,
    accumulated,
    accumulation_dtype,
    is_eager,
    largest_visible,
    normalize,
)
from .base import (
    AttentionMechanism,
    LayerShape,
    MechanismInputs,
    OutputParts,
    State,
    gather_tokens,
    inverse_order,
    mask_chunks,
    real_first,
    without_padding,
)
from .settings import AftOptions


# The range of weights, in nats, within which one float32 product keeps full relative precision.
SAFE_SPREAD = 80.0
# The largest number of elements of the tensor [B, Hkv, queries, S, D] in the exact form of `full`.
EXACT_ELEMENTS = 1 << 22
# The elements of a part of the tokens in `simple`: 4 MB in float32.
PART_ELEMENTS = 1 << 20

# Sums and their log scale: the sums are to be multiplied by exp(log scale).
Scaled = tuple[Tensor, Tensor]


class AftState(NamedTuple):
    """The state of `local` and `conv`; the window is right-aligned, with its newest real token last."""

    sums: Tensor  # [B, Hkv D, 1, 3] float32: S, Z and m of the tokens that have left the window
    key: Tensor  # [B, Hkv, W, D]
    value: Tensor  # [B, Hkv, W, D]
    is_real: Tensor  # [B, W] bool
    num_seen: Tensor  # [B, 1] int64: real tokens so far


class AftAttention(AftOptions, AttentionMechanism):
    """Attention-Free Transformer: exp(k + w) weighs values per channel and sigmoid(q) gates. Not for untrained swaps.

    It computes nothing like the softmax of pretrained queries and keys. A converted model has to be trained, for much
    longer than after a conversion to kernel attention, and `scaling` has no effect. w starts as 0.
    """

    position_bias: Tensor
    query_position: Tensor
    key_position: Tensor

    def __init__(self, settings: Mapping[str, Any], shape: LayerShape):
        super().__init__(settings, shape)
        self.variant, self.window_size = settings["variant"], settings["window_size"]
        self.max_length = settings["max_length"] or shape.max_length or 0  # 0 only if unused
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

    def reset_parameters(self) -> None:
        """Start with w = 0."""
        for name, parameter in self.named_parameters(recurse=False):
            if name == "query_position":  # if both factors were 0, neither would ever get a gradient
                drawn = torch.randn(parameter.shape, generator=self.generator(), dtype=torch.float32, device="cpu")
                init.copy_(parameter, drawn * 0.02)
            else:
                init.zeros_(parameter)

    def forward(self, inputs: MechanismInputs, state: State | None = None) -> tuple[Tensor, State | None]:
        """Weigh the values per channel and gate them; see `AttentionMechanism.forward`.

        ValueError for more than `max_length` positions (`full` and `local`); NotImplementedError for packed sequences
        in a traced graph (`local`, `conv` and `full`).
        """
        query, key, value, attention_mask, _, is_causal, *_ = inputs
        if self.variant == "simple" and not is_causal:
            mean, tokens = _mean_by_keys(key, value, attention_mask), _tokens_at_a_time(query)
            outputs, masks = OutputParts(query), mask_chunks(attention_mask, tokens, query)
            for part, mask in zip(query.split(tokens, dim=2), masks):
                outputs.append(self._gated(part, mean, mask))
            return outputs.joined(), None
        if self.variant == "simple":
            output, state = self._causal_simple(key, value, attention_mask, state)
        else:
            if attention_mask is not None and attention_mask.dtype != torch.bool:
                raise NotImplementedError(
                    f"`aft` with `variant` = `{self.variant}` cannot be traced for packed sequences (a forward without "
                    "a cache inside torch.compile). Pass `past_key_values`, or compile only the decoding step."
                )
            output, state = self._ordered(key, value, attention_mask, is_causal, state)
        return self._gated(query, output, attention_mask).to(query.dtype), state if is_causal else None

    def _gated(self, query: Tensor, output: Tensor, mask: Tensor | None) -> Tensor:
        """The gate of every query times `output [B, Hkv, N or 1, D]`: `[B, N, H, D]`, with 0 at padding."""
        gate = query.to(output.dtype).sigmoid()
        groups = self.shape.num_heads // self.shape.num_key_value_heads
        output = gate * output.repeat_interleave(groups, dim=1)
        return without_padding(output, None if mask is None else mask > 0).transpose(1, 2)

    def _causal_simple(
        self, key: Tensor, value: Tensor, mask: Tensor | None, state: State | None
    ) -> tuple[Tensor, State]:
        """Kernel attention in which every channel is a head with one log feature, k, and the query feature is log 1."""
        key, value = _channels(key), _channels(value)
        options: dict[str, Any] = {"is_causal": True, "key_mask": mask, "state": state[0] if state else None}
        output, new_state = kernel_attention(torch.zeros_like(key), key, value, log_features=True, **options)
        return output.squeeze(3).unflatten(1, (self.shape.num_key_value_heads, -1)).transpose(2, 3), (new_state,)

    def _ordered(
        self, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, state: State | None
    ) -> tuple[Tensor, State | None]:
        """The variants that depend on positions; real tokens are first moved to the right end, in order."""
        place = None
        if not key.shape[2]:
            return key * value, tuple(state or self._initial_state(key, value))
        if mask is not None:
            place = real_first(~mask)
            key, value, mask = gather_tokens(key, place), gather_tokens(value, place), mask.gather(1, place)
        real = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device) if mask is None else mask
        if self.variant == "full":
            output, new_state = self._full(key, value, real), None
        elif is_causal:
            output, new_state = self._causal_window(key, value, real, state, place is not None)
        else:
            output, new_state = self._window(key, value, real), None
        if place is not None:
            output = gather_tokens(output, inverse_order(place))
        return output, new_state

    def _positions(self, real: Tensor, num_seen: Tensor | int = 0) -> Tensor:
        """The number of real tokens before each token, `[B, N]`.

        ValueError if there are more than `max_length`; behind a state that is on a GPU, an assertion of the device.
        """
        position = (num_seen + real.cumsum(dim=1) - 1).clamp(min=0)
        knows = position.device.type != "meta" and is_eager(position) and position.numel() > 0
        begins = isinstance(num_seen, int)
        if self.variant == "conv" or not knows or (begins and num_seen + real.shape[1] <= self.max_length):
            return position
        advice = (
            f"but `aft` with `variant` = `{self.variant}` was built for at most `max_length` = {self.max_length}; "
            "shorten the input, or convert again with a larger `--max_length`, `--variant conv` or `--variant simple`."
        )
        if position.device.type != "cpu" and not begins:  # a decoding step does not wait for the number
            torch._assert_async(position.max() < self.max_length, f"Got more positions, {advice}")
        elif (longest := int(position.max()) + 1) > self.max_length:
            raise ValueError(f"Got {longest} positions, {advice}")
        return position

    def _near_bias(self, position: Tensor, dtype: torch.dtype) -> Tensor:
        """w within the window, `[B or 1, Hkv, N or 1, 2 W - 1]`, for queries at `position [B, N]`."""
        bias = self.position_bias.to(dtype)
        return bias[:, position].transpose(0, 1) if self.variant == "local" else bias.unsqueeze(0)

    def _causal_window(
        self, key: Tensor, value: Tensor, real: Tensor, state: State | None, is_padded: bool
    ) -> tuple[Tensor, State]:
        """Attend to the old window followed by the new tokens: query t sees 1 + t .. W + t near and 0 .. t far."""
        length, w, dtype = key.shape[2], self.window_size, accumulation_dtype(key)
        old = AftState._make(state) if state else self._initial_state(key, value)
        position = self._positions(real, old.num_seen)
        key = torch.cat((old.key, key.to(old.key.dtype)), dim=2)
        value = torch.cat((old.value, value.to(old.value.dtype)), dim=2)
        num_seen = old.num_seen + real.sum(dim=1, keepdim=True)
        real = torch.cat((old.is_real, real), dim=1)
        if is_padded:
            place = real_first(~real)
            key, value, real = gather_tokens(key, place), gather_tokens(value, place), real.gather(1, place)
        far, sums = _far(key, value, real, length, old.sums)
        near = _near(key[:, :, 1:], value[:, :, 1:], real[:, 1:], self._near_bias(position, dtype)[..., :w])
        # copies, because views would keep all keys and values alive
        last_key, last_value = (x[:, :, -w:].clone(memory_format=torch.contiguous_format) for x in (key, value))
        new = AftState(sums, last_key, last_value, real[:, -w:].clone(), num_seen)
        return normalize(_add_scaled((far, near))).squeeze(-1), tuple(new)

    def _window(self, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
        """Attend to near keys, |t - s| < W, and to far keys, which are summed by one scan from each end."""
        length, w = key.shape[2], self.window_size
        bias = self._near_bias(self._positions(real), accumulation_dtype(key))
        left, _ = _far(*_padded(key, value, real, w, 0), length, None)
        right, _ = _far(*_padded(key.flip(2), value.flip(2), real.flip(1), w, 0), length, None)
        near = _near(*_padded(key, value, real, w - 1, w - 1), bias)
        return normalize(_add_scaled((left, (right[0].flip(2), right[1].flip(2)), near))).squeeze(-1)

    def _initial_state(self, key: Tensor, value: Tensor) -> AftState:
        batch, heads, _, dim = key.shape
        sums = key.new_zeros(batch, heads * dim, 1, 3, dtype=accumulation_dtype(key))
        sums[..., -1] = EMPTY_MAXIMUM
        return AftState(
            sums,
            key.new_zeros(batch, heads, self.window_size, dim),
            value.new_zeros(batch, heads, self.window_size, dim),
            torch.zeros(batch, self.window_size, dtype=torch.bool, device=key.device),
            torch.zeros(batch, 1, dtype=torch.long, device=key.device),
        )

    def _full(self, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
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
        spread = _spread(bias, top_bias, real[:, None, None, :]) + _spread(key, top_key, real[:, None, :, None])
        if spread > SAFE_SPREAD:
            return _exact_full(bias, key, value)
        weights = (bias - top_bias).exp() * real[:, None, None, :]
        key = (key - top_key).exp() * real[:, None, :, None]
        numerator, denominator = (weights @ torch.cat((key * value.to(dtype), key), dim=-1)).chunk(2, dim=-1)
        return numerator / denominator.masked_fill(denominator == 0, 1.0)


def _mean_by_keys(key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Bidirectional `simple`, `[B, Hkv, 1, D]`: all queries get the same mean, which is arbitrary without keys.

    The keys are taken in parts, each with the mean and the logarithm of the sum of its own weights, so that no copy of
    all of them exists.
    """
    tokens, means, sizes = _tokens_at_a_time(key), [], []
    parts = list(zip(key.split(tokens, dim=2), value.split(tokens, dim=2), mask_chunks(mask, tokens, key)))
    for k, v, kept in parts:
        k = k.to(accumulation_dtype(k))
        if kept is not None:
            k, v = torch.where(kept[:, None, :, None], k, EMPTY_MAXIMUM), without_padding(v, kept)
        means.append((k.softmax(dim=2) * v).sum(dim=2, keepdim=True))
        if len(parts) == 1:
            return means[0]
        sizes.append(k.logsumexp(dim=2, keepdim=True))
    return (torch.cat(sizes, dim=2).softmax(dim=2) * torch.cat(means, dim=2)).sum(dim=2, keepdim=True)


def _tokens_at_a_time(x: Tensor) -> int:
    """The tokens in a part of `x [B, heads, N, D]`: all of them in a graph, where lengths are not known."""
    return PART_ELEMENTS // max(1, x.shape[0] * x.shape[1] * x.shape[3]) + 1 if is_eager(x) else max(1, x.shape[2])


def _channels(x: Tensor) -> Tensor:
    """`[B, Hkv, N, D]` -> `[B, Hkv D, N, 1]`."""
    return x.transpose(2, 3).flatten(1, 2).unsqueeze(-1)


def _padded(key: Tensor, value: Tensor, real: Tensor, before: int, after: int) -> tuple[Tensor, Tensor, Tensor]:
    """Add `before` and `after` empty positions around the tokens."""
    return F.pad(key, (0, 0, before, after)), F.pad(value, (0, 0, before, after)), F.pad(real, (before, after))


def _far(key: Tensor, value: Tensor, real: Tensor, length: int, state: Tensor | None) -> tuple[Scaled, Tensor]:
    """Sums with w = 0 over the positions 0 .. t for each t < length, as in `_near`, and their state."""
    heads = key.shape[1]
    key, value = _channels(accumulated(key[:, :, :length])), _channels(value[:, :, :length])
    options: dict[str, Any] = {"is_causal": True, "key_mask": real[:, :length], "state": state}
    found: tuple[Any, ...] = map_attention(KernelMap(EXP), torch.zeros_like(key), key, value, **options)
    output, denominator, scale, state = found
    sums = torch.cat((output.transpose(1, 2).unsqueeze(2) * denominator, denominator), dim=-1)
    sums, scale = (x.squeeze(2).unflatten(1, (heads, -1)).transpose(2, 3) for x in (sums, scale))
    return (sums, scale), state


def _near(key: Tensor, value: Tensor, real: Tensor, bias: Tensor) -> Scaled:
    """Sums of exp(k + w) [v, 1] over a window that starts at t: `(sums [B, Hkv, N, D, 2], log scale [..., 1])`.

    key and value are `[B, Hkv, N + span - 1, D]`, and bias is `[B or 1, Hkv, N or 1, span]`.
    """
    span, dtype = bias.shape[-1], accumulation_dtype(key)
    windows = key.to(dtype).unfold(2, span, 1)  # [B, Hkv, N, D, span]
    visible = real.unfold(1, span, 1)[:, None, :, None]
    logits = (windows + bias.unsqueeze(3)).masked_fill(~visible, EMPTY_MAXIMUM)
    scale = logits.detach().amax(dim=-1, keepdim=True)
    weights = (logits - scale).exp() * visible
    numerator = (weights * value.to(dtype).unfold(2, span, 1)).sum(dim=-1)
    return torch.stack((numerator, weights.sum(dim=-1)), dim=-1), scale


def _add_scaled(parts: Sequence[Scaled]) -> Tensor:
    """Add `sums * exp(scale)` over the parts, divided by a factor that makes the largest denominator 1.

    The factor follows from the denominators, because the scale of a part without visible keys is meaningless.
    """
    sizes = [torch.where(s[..., -1:] > 0, scale + s.detach()[..., -1:].log(), EMPTY_MAXIMUM) for s, scale in parts]
    largest = torch.stack(sizes).amax(dim=0)
    return torch.stack(
        [s * torch.where(size > EMPTY_MAXIMUM, scale - largest, 0.0).exp() for (s, scale), size in zip(parts, sizes)]
    ).sum(dim=0)


def _spread(x: Tensor, top: Tensor, real: Tensor) -> float:
    """The largest distance of a visible entry from the maximum of its row or column."""
    if not is_eager(x) or x.device.type == "meta" or not x.numel():  # unknown values require the exact form
        return SAFE_SPREAD + 1
    return (top - x.detach()).masked_fill(~real, 0.0).max().item()


def _exact_full(bias: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`full` with one maximum per query and channel; the logits are `[B, Hkv, n, S, D]` for n queries at a time."""
    step = max(1, EXACT_ELEMENTS // max(1, key.numel()))
    outputs = []
    for rows in bias.split(step, dim=2):
        weights = (rows.unsqueeze(-1) + key.unsqueeze(2)).softmax(dim=3)
        outputs.append((weights * value.to(weights.dtype).unsqueeze(2)).sum(dim=3))
    return torch.cat(outputs, dim=2)
