# SPDX-License-Identifier: Apache-2.0
"""Kernel attention in torch: phi(q)·S / phi(q)·Z with S = sum phi(k) v^T and Z = sum phi(k).

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, S keys, W head dimension of the values,
F features, C tokens in a block. All sums are computed in float32 (float64 for float64 inputs) whatever the dtype of the
input, because a bfloat16 sum Z of ones stops growing at 256.

The state is one tensor per layer. It holds S and Z side by side and, for log features, the running maximum m:

              W columns      1    1 (log features only)
           +-------------+-----+-----+
    F rows |      S      |  Z  |  m  |        [B, Hkv, F, W + 1 or W + 2]
           +-------------+-----+-----+

Log features: exponential feature maps return exponents. S and Z are then stored divided by exp(m), where m is the
running maximum of the key exponents per feature, and a query with exponents u uses exp(u + m - max(u + m)). Hence no
epsilon is needed and nothing overflows. Each maximum is a constant that cancels between the numerator and the
denominator, so it needs no gradient.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


# The functions of a feature map: identity, elu(x) + 1, exp of exponents, and the exponents of Hedgehog.
PLAIN, ELU_PLUS_ONE, EXP, HEDGEHOG = 0, 1, 2, 3

# The running maximum of an empty state: far below any real exponent, yet finite, because -inf - -inf is NaN.
EMPTY_MAXIMUM = -1e30
# Candidate block lengths for log features, in tokens; the first one whose features cannot underflow is taken.
BLOCK_SIZES = (4096, 1024, 256, 64, 16, 4, 1)
# Tokens per block. Long blocks need fewer calls of torch, short ones fewer scores; 32 to 96 tokens differ by less than
# a tenth on one CPU thread.
BLOCK_SIZE = 64

Parts = tuple[Tensor, Tensor, "Tensor | None", Tensor]


class Affine(NamedTuple):
    """The affine map x W + b - norm |x|^2 / 2. Each tensor holds one matrix for all heads, or one per head."""

    weight: Tensor  # [heads, D, F]
    bias: Tensor | None = None  # [heads, 1, F]
    norm: Tensor | None = None  # [heads, 1, 1]


class KernelMap(NamedTuple):
    """A feature map that the kernels implement: a function of the elements of x, or of an affine image of x.

    `function` is `PLAIN` (the inputs are the features), `ELU_PLUS_ONE`, `EXP` (the inputs are exponents) or `HEDGEHOG`
    (the exponents are [log softmax(u), log softmax(-u)]). Queries have no bias and no norm, because both would cancel.
    """

    function: int
    query: Affine | None = None
    key: Affine | None = None

    @property
    def log_features(self) -> bool:
        """Whether the map returns exponents, the logarithms of features."""
        return self.function >= EXP

    def features(self, x: Tensor, affine: Affine | None) -> Tensor:
        """Map `[B, heads, N, D]` to features or exponents `[B, heads, N, F]` in the accumulation dtype."""
        x = accumulated(x)
        if affine is not None:
            bias, norm = (None if part is None else part.to(x.dtype) for part in affine[1:])
            image = project_heads(x, affine.weight.to(x.dtype))
            image = image if bias is None else image + bias
            x = image if norm is None else image - norm / 2 * x.square().sum(dim=-1, keepdim=True)
        if self.function == ELU_PLUS_ONE:
            return torch.where(x > 0, x + 1, x.clamp(max=0).exp())
        return torch.cat((x.log_softmax(dim=-1), (-x).log_softmax(dim=-1)), dim=-1) if self.function == HEDGEHOG else x


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of the sums: float64 for float64 inputs (gradient checks need it), float32 for all others."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def project_heads(x: Tensor, weight: Tensor) -> Tensor:
    """The rows of each head times its matrix: `[B, H, N, D]` and `[H, D, F]` to `[B, H, N, F]`.

    For one token of each sequence that is one product per head; `@` would copy the matrices for each sequence.
    """
    if x.shape[2] == 1 < x.shape[0]:
        return (x[:, :, 0].transpose(0, 1) @ weight).transpose(0, 1).unsqueeze(2)
    return x @ weight


def with_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)` without the cost of the call if the dtype already matches."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def accumulated(tensor: Tensor) -> Tensor:
    """`tensor` in its accumulation dtype."""
    return with_dtype(tensor, accumulation_dtype(tensor))


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_features: bool,
    is_causal: bool,
    key_mask: Tensor | None = None,
    state: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Parts:
    """`kernel_attention` of features (arguments as there) in plain operations, with no branch on data.

    torch.export and ONNX trace this function, and second derivatives are computed through it. Packed sequences are for
    the causal form only (else ValueError).

    Returns:
        The output `[B, Hkv, G, N, W]`, the denominator and the log scale `[B, Hkv, G, N, 1]` (a constant; None for
        plain features), and the state, all in the accumulation dtype.
    """
    dtype = accumulation_dtype(value)
    query = with_dtype(query, dtype).unflatten(1, (key.shape[1], -1))
    key, values = with_dtype(key, dtype), with_ones(value, dtype)
    segments = None
    if key_mask is not None and key_mask.dtype != torch.bool:
        if not is_causal:
            raise ValueError(
                f"`key_mask` is {key_mask.dtype} and numbers packed sequences, which only causal attention accepts. "
                "Pass a bool mask and put each sequence into its own row of the batch."
            )
        segments, key_mask = key_mask.abs(), key_mask > 0
    mask = None if key_mask is None else key_mask[:, None, :, None]
    sums, maximum = unpack_state(state, log_features)
    if not key.shape[2] and is_causal:
        return _nothing(query, values, sums, maximum, log_features)
    if not is_causal:
        return _both_ways(query, key, values, mask, sums, maximum, log_features)
    within: Any = (None, None)
    if log_features:
        numbers = None if segments is None else with_padding_counted(segments)
        within = attend_within(query, key, values, mask, numbers, log_decay)
    given = [query, key, values, mask, *within]
    parts = [itertools.repeat(None) if x is None else x.split(BLOCK_SIZE, dim=-2) for x in given]
    together = itertools.repeat(None) if segments is None else _sequence_masks(segments, BLOCK_SIZE)
    blocks: list[tuple[Tensor, Any]] = []
    for q, k, v, m, own, size, same in zip(*parts, together):
        decay = None if log_decay is None else BlockDecay(log_decay.to(dtype), k, m)
        if log_features:
            output, scale, sums, maximum = attend_log_block(q, k, v, m, (own, size), sums, maximum, same, decay)
        else:
            scale, (output, sums) = None, attend_block(q, k, v, m, sums, same, decay)
        blocks.append((output, scale))
    output = joined([part for part, _ in blocks])
    scale = joined([part for _, part in blocks]) if log_features else None
    return normalize(output), output[..., -1:], scale, pack_state(sums, maximum)


def _both_ways(
    query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None, sums: Any, maximum: Any, log_features: bool
) -> Parts:
    """`plain_attention` where every query sees all keys."""
    scale = None
    if log_features:
        query, scale, key, sums, maximum = exponentiate(query, key, mask, sums, maximum)
    sums = _add(sums, (key if mask is None else key * mask).transpose(-1, -2) @ values)
    output = (query.flatten(2, 3) @ sums).unflatten(2, query.shape[2:4])
    return normalize(output), output[..., -1:], scale, pack_state(sums, maximum)


def _nothing(query: Tensor, values: Tensor, sums: Tensor | None, maximum: Tensor | None, log_features: bool) -> Parts:
    """Results of the causal form for no tokens; the state stays as it is."""
    batch, kv_heads, _, _, features = query.shape
    if sums is None:
        sums = values.new_zeros(batch, kv_heads, features, values.shape[-1])
        maximum = values.new_full(sums.shape[:3], EMPTY_MAXIMUM) if log_features else None
    output, scale = query[..., :1] * values[:, :, None], query[..., :1]
    return output[..., :-1], output[..., -1:], scale if log_features else None, pack_state(sums, maximum)


def joined(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    """Concatenate blocks `[B, Hkv, G, C, X]` along the tokens."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)


def sized_step(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, log_features: bool, log_decay: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One new token in few operations, because at this size each operation costs more than its arithmetic.

    `query [B, H, 1, F]`, `key [B, Hkv, 1, F]` and `value [B, Hkv, 1, W]` give the output `[B, H, 1, W]`, the
    denominator `[B Hkv, G, 1]` (its logarithm for log features) and the state.
    """
    (batch, heads, _, features), kv_heads = query.shape, key.shape[1]
    width = value.shape[-1]
    rows = with_dtype(query, state.dtype).reshape(batch * kv_heads, heads // kv_heads, features)
    key = with_dtype(key, state.dtype).transpose(-1, -2)
    decay = None if log_decay is None else log_decay.to(state.dtype)[:, None, None]
    values = torch.constant_pad_nd(with_dtype(value, state.dtype), (0, state.shape[-1] - width), 1.0)
    if log_features:
        maximum = state[..., -1:]
        maximum = maximum if decay is None else maximum + decay
        new_maximum = torch.maximum(maximum.detach(), key.detach())
        state = (state * (maximum - new_maximum).exp()).addcmul_((key - new_maximum).exp_(), values)
        state = torch.cat((state[..., :-1], new_maximum), dim=-1)
        exponents = rows + new_maximum.reshape(batch * kv_heads, 1, features)
        # Softmax also divides by a constant of the query, which cancels as the maximum does.
        rows = exponents.softmax(dim=-1)
    else:
        state = torch.addcmul(state if decay is None else state * decay.exp(), key, values)
    sizes = (width, 1, 1) if log_features else (width, 1)
    numerator, denominator, *_ = torch.bmm(rows, state.flatten(0, 1)).split_with_sizes(sizes, dim=-1)
    if not log_features:  # numerator and denominator may both be 0; with log features Z is at least 1 in every feature
        denominator = denominator.clamp(min=torch.finfo(state.dtype).tiny)
    output = (numerator / denominator).view(batch, heads, 1, width)
    size = exponents.logsumexp(dim=-1, keepdim=True) + denominator.log() if log_features else denominator
    return output, size, state


def read_state(query_features: Tensor, state: Tensor, log_features: bool) -> Tensor:
    """Output `[B, H, N, W]` of query features `[B, H, N, F]` that all see exactly the keys in this state."""
    sums, maximum = unpack_state(state, log_features)
    query = with_dtype(query_features, state.dtype).unflatten(1, (state.shape[1], -1))
    if maximum is not None:
        query = query + maximum.detach()[:, :, None, None]
        query = query.sub_(query.detach().amax(dim=-1, keepdim=True)).exp_()
    return normalize((query.flatten(2, 3) @ sums).unflatten(2, query.shape[2:4])).flatten(1, 2)


def with_ones(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Append a column of ones, `[..., S, W + 1]`, so that one product yields the numerator and the denominator."""
    return F.pad(value.to(dtype), (0, 1), value=1.0)


def normalize(sums: Tensor) -> Tensor:
    """Divide numerator by denominator, `[..., W + 1]` -> `[..., W]`; 0, with gradient 0, where the latter is 0."""
    numerator, denominator = sums.split_with_sizes((sums.shape[-1] - 1, 1), dim=-1)
    return numerator / denominator.masked_fill(denominator == 0, torch.inf)


def unpack_state(state: Tensor | None, log_features: bool) -> tuple[Tensor | None, Tensor | None]:
    """Split the state of the cache into S and Z `[B, Hkv, F, W + 1]` and m `[B, Hkv, F]` (None for plain features)."""
    if state is None or not log_features:
        return state, None
    return state[..., :-1], state[..., -1]


def zero_where_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x [B, heads, S, X]` with 0 where the mask `[B, S]` is 0, because a hidden NaN times 0 would still be NaN."""
    return x if mask is None else x.masked_fill((mask == 0)[:, None, :, None], 0.0)


def pack_state(sums: Any, maximum: Tensor | None) -> Tensor:
    """The inverse of `unpack_state`."""
    return sums if maximum is None else torch.cat((sums, maximum.unsqueeze(-1)), dim=-1)


class BlockDecay:
    """The log decay within a block: of weights, log_decay times the real tokens between key and query."""

    def __init__(self, log_decay: Tensor, key: Tensor, mask: Tensor | None):
        self.log_decay, self.count = log_decay[None, :, None], _count(key, mask)  # [1, Hkv, 1], [B or 1, 1, C]

    @property
    def pairs(self) -> Tensor:
        """The factors between the tokens of a block, `[B or 1, Hkv, 1, C, C]`."""
        distance = (self.count.unsqueeze(3) - self.count.unsqueeze(2)).clamp(min=0)
        return (self.log_decay.unsqueeze(3) * distance).exp().unsqueeze(2)

    @property
    def from_carried(self) -> Tensor:
        """The exponents between the last token before the block and each of its tokens, `[B or 1, Hkv, C, 1]`."""
        return (self.log_decay * self.count).unsqueeze(3)

    @property
    def to_last(self) -> Tensor:
        """The exponents between each token and the last one, `[B or 1, Hkv, C, 1]`."""
        return (self.log_decay * (self.count[:, :, -1:] - self.count)).unsqueeze(3)

    @property
    def carried_to_last(self) -> Tensor:
        """The exponents between the last token before the block and its last one, `[B or 1, Hkv, 1]`."""
        return self.log_decay * self.count[:, :, -1:]


def attend_block(
    query: Tensor,
    key: Tensor,
    values: Tensor,
    mask: Tensor | None,
    sums: Tensor | None,
    together: Together | None,
    decay: BlockDecay | None,
) -> tuple[Tensor, Tensor]:
    """The output and the sums after one block of features, causal.

    The arguments are `query [B, Hkv, G, C, F]`, `key [B, Hkv, C, F]`, `values [B, Hkv, C, W + 1]`, `mask [B, 1, C, 1]`.
    """
    if mask is not None:
        key = key * mask
    rows, group = query.flatten(2, 3), query.shape[2:4]
    scores = (rows @ key.transpose(-1, -2)).unflatten(2, group).tril()
    carried = (rows @ sums).unflatten(2, group) if sums is not None else None
    if decay is not None:
        scores = scores * decay.pairs
        carried = None if carried is None else carried * decay.from_carried.exp().unsqueeze(2)
        sums = None if sums is None else sums * decay.carried_to_last.exp().unsqueeze(3)
        key = key * decay.to_last.exp()
    if together is not None:
        scores = scores * together.pairs
        carried = carried * together.with_carried if carried is not None else None
        sums = sums * together.carried_stays if sums is not None else None
        key = key * together.key_stays
    output = _add(carried, (scores.flatten(2, 3) @ values).unflatten(2, group))
    return output, _add(sums, key.transpose(-1, -2) @ values)


def attend_log_block(
    query: Tensor,
    key: Tensor,
    values: Tensor,
    mask: Tensor | None,
    within: tuple[Tensor, Tensor],
    sums: Tensor | None,
    maximum: Tensor | None,
    together: Together | None,
    decay: BlockDecay | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`attend_block` of log features, with what `attend_within` gave for this block."""
    (output, scale), stays = within, mask
    if together is not None:
        stays = together.key_stays if mask is None else mask & together.key_stays
    if sums is not None and maximum is not None:
        exponent = query + maximum[:, :, None, None]
        exponent = exponent if decay is None else exponent + decay.from_carried.unsqueeze(2)
        part, size = _weighed(exponent, sums.unsqueeze(2))
        sees = None if together is None else together.with_carried
        output, scale = _joined_parts((output, scale), (part, size), sees)
        maximum = maximum if decay is None else maximum + decay.carried_to_last
        if together is not None:
            sums = sums * together.carried_stays
            maximum = maximum.masked_fill(~together.carried_stays.squeeze(3), EMPTY_MAXIMUM)
    key = key if decay is None else key + decay.to_last
    new = largest_visible(key, stays)
    if sums is not None and maximum is not None:
        new = torch.maximum(new, maximum.detach())
        sums = sums * (maximum - new).exp().unsqueeze(3)
    return output, scale, _add(sums, _shifted_exp(key, new, stays).transpose(-1, -2) @ values), new


def attend_within(
    query: Tensor, key: Tensor, values: Tensor, mask: Tensor | None, numbers: Tensor | None, log_decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The sums `[B, Hkv, G, N, W + 1]` over the keys up to each query within its block, divided by exp(second result).

    A token first sees itself. Then the second half of every 2, 4, 8, .. tokens sees all of the first half, which has
    one maximum per feature: that of keys which every one of these queries sees. One maximum for the whole block would
    let the weights of an early query underflow before a large key. `numbers [B, N]` are those of packed sequences.
    """
    length = key.shape[2]
    block = min(BLOCK_SIZE, 1 << (length - 1).bit_length())
    missing = -length % block  # these tokens come last, so that no other query sees them

    def halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """The first and second halves `[..., pairs, size, X]` of every 2 size tokens of `[..., N, X]`."""
        first, second = x.unflatten(-2, (-1, 2, size)).unbind(-3)
        return first, second

    count = None
    if log_decay is not None:
        log_decay = log_decay.to(query.dtype)[:, None, None, None]
        count = _count(key, mask).unsqueeze(-1)
    given = (query, key, values, mask, None if numbers is None else numbers[:, None, :, None], count)
    padded: Any = [F.pad(x, (0, 0, 0, missing)) if missing and x is not None else x for x in given]
    query, key, values, mask, numbers, count = padded
    exponent = query + key.unsqueeze(2)
    scale = exponent.detach().amax(dim=-1, keepdim=True)
    sums = (exponent - scale).exp().sum(dim=-1, keepdim=True) * values.unsqueeze(2)
    if mask is not None:
        sums, scale = sums * mask.unsqueeze(2), scale.masked_fill(~mask.unsqueeze(2), EMPTY_MAXIMUM)
    for size in (1 << level for level in range(block.bit_length() - 1)):
        (earlier, _), (_, later) = halves(key, size), halves(query, size)
        visible, sees = None if mask is None else halves(mask, size)[0], None
        if log_decay is not None and count is not None:
            passed, passing = halves(count, size)
            last = passed[..., -1:, :]
            earlier, later = earlier + log_decay * (last - passed), later + (log_decay * (passing - last)).unsqueeze(2)
        if numbers is not None:
            number, other = halves(numbers, size)
            last = number[..., -1:, :]  # a sequence is contiguous: who sees any of the first half is of this one
            visible = number == last if visible is None else visible & (number == last)
            sees = (other == last).unsqueeze(2)
        largest = largest_visible(earlier, visible)
        weights = _shifted_exp(earlier, largest, visible).unsqueeze(2).transpose(-1, -2)
        part, part_scale = _weighed(later + largest[:, :, None, :, None], weights)
        part = part @ halves(values, size)[0].unsqueeze(2)
        before, now = zip(halves(sums, size), halves(scale, size))
        now = _joined_parts(now, (part, part_scale), sees)
        sums, scale = (torch.stack(x, dim=-3).flatten(-4, -2) for x in zip(before, now))
    return sums[..., :length, :], scale[..., :length, :]


def _count(key: Tensor, mask: Tensor | None) -> Tensor:
    """The number of real tokens up to each one, `[B or 1, 1, N]`, of `key [B, Hkv, N, F]` and `mask [B, 1, N, 1]`."""
    if mask is not None:
        return mask[..., 0].cumsum(dim=2)
    return torch.arange(1, key.shape[2] + 1, dtype=torch.long, device=key.device)[None, None]


def _weighed(exponent: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """exp(exponent) @ sums, divided by the largest exp of a row, and the logarithm of that, a constant."""
    scale = exponent.detach().amax(dim=-1, keepdim=True)
    return (exponent - scale).exp() @ sums, scale


def _joined_parts(
    first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], sees: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The sum of two pairs of sums and log scale; only where `sees` is true is there a second part."""
    part, size = second
    if sees is not None:
        part, size = part * sees, size.masked_fill(~sees, EMPTY_MAXIMUM)
    scale = torch.maximum(first[1], size)
    return first[0] * (first[1] - scale).exp() + part * (size - scale).exp(), scale


def _shifted_exp(exponent: Tensor, maximum: Tensor, mask: Tensor | None) -> Tensor:
    """exp(`exponent [..., S, F]` - `maximum [..., F]`), and 0 where `mask` is false."""
    exponent = exponent - maximum.unsqueeze(-2)
    return exponent.exp() if mask is None else _masked_exp(exponent, mask) * mask


def merge_states(first: Tensor, second: Tensor, log_features: bool, log_decay: Tensor | None = None) -> Tensor:
    """The state of the keys of two states `[B, Hkv, F, W + 1 or W + 2]`.

    `log_decay [B or 1, Hkv, 1]` is the decay of the first state over the tokens of the second.
    """
    sums, other = (state[..., :-1] if log_features else state for state in (first, second))
    if not log_features:
        return (sums if log_decay is None else sums * log_decay.exp().unsqueeze(3)) + other
    maximum = first[..., -1] if log_decay is None else first[..., -1] + log_decay
    new = torch.maximum(maximum, second[..., -1]).detach()
    sums, other = (x * (m - new).exp().unsqueeze(3) for x, m in ((sums, maximum), (other, second[..., -1])))
    return pack_state(sums + other, new)


def _add(carried: Tensor | None, new: Tensor) -> Tensor:
    return new if carried is None else carried + new


class Together(NamedTuple):
    """Which tokens of a block belong to the same packed sequence; every mask broadcasts over heads."""

    pairs: Tensor  # [B, 1, 1, C, C] query and key
    with_carried: Tensor  # [B, 1, 1, C, 1] query and the last token before the block
    carried_stays: Tensor  # [B, 1, 1, 1] the last token of the block and the last before it
    key_stays: Tensor  # [B, 1, C, 1] key and the last token of the block


def _sequence_masks(segments: Tensor, size: int) -> list[Together]:
    blocks = with_padding_counted(segments).split(size, dim=1)
    return [sequence_masks(block, before[:, -1:]) for block, before in zip(blocks, (blocks[0][:, :1], *blocks))]


def with_padding_counted(segments: Tensor) -> Tensor:
    """`segments [B, S]` with padding (0) counted with the sequence before it; its keys are masked anyway."""
    rank = (segments > 0).cumsum(dim=1)  # ONNX lacks `cummax`
    number_of = torch.zeros_like(F.pad(segments, (1, 0))).scatter(1, rank * (segments > 0), segments)
    return number_of.gather(1, rank)


def sequence_masks(block: Tensor, before: Tensor) -> Together:
    """The masks of a block `[B, C]` after the token `before [B, 1]`; the state is of the sequence of its last token."""
    last = block[:, -1:]
    return Together(
        (block[:, :, None] == block[:, None, :])[:, None, None],
        (block == before)[:, None, None, :, None],
        (last == before)[:, None, None],
        (block == last)[:, None, :, None],
    )


def exponentiate(
    query: Tensor, key: Tensor, mask: Tensor | None, sums: Any, maximum: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Any, Tensor]:
    """Turn exponents into features in [0, 1] and rescale the carried sums to the new running maximum, a constant."""
    new_maximum = largest_visible(key, mask)
    if maximum is not None:
        new_maximum = torch.maximum(new_maximum, maximum.detach())
        sums = sums * (maximum - new_maximum).exp().unsqueeze(-1)
    key = key - new_maximum.unsqueeze(2)
    key = key.exp_() if mask is None else _masked_exp(key, mask)
    query = query + new_maximum[:, :, None, None]
    scale = query.detach().amax(dim=-1, keepdim=True)
    return query.sub_(scale).exp_(), scale, key, sums, new_maximum


def largest_visible(key: Tensor, mask: Tensor | None) -> Tensor:
    """The maximum of `key [..., S, F]` over S where `mask` is true, as a constant; EMPTY_MAXIMUM without keys."""
    visible = key.detach() if mask is None else key.detach().masked_fill(~mask, EMPTY_MAXIMUM)
    if not visible.shape[-2]:
        return visible.new_full((*visible.shape[:-2], visible.shape[-1]), EMPTY_MAXIMUM)
    return visible.amax(dim=-2)


def _masked_exp(exponent: Tensor, mask: Tensor) -> Tensor:
    """exp where `mask` is true, and 1 elsewhere, because the exponent of a padded key might overflow."""
    return exponent.masked_fill(~mask, 0.0).exp()


def safe_block_size(key: Tensor, mask: Tensor | None, maximum: Tensor | None) -> int:
    """The longest block in which the features of an early query cannot underflow.

    A block is stabilised by the maximum over all of its keys. A query before a very large key therefore sees its own
    keys scaled down by exp(maximum of the block - maximum so far). Up to 60 nats (600 in float64) float32 keeps full
    relative precision, since exp(-60) times its last digit is a normal number.
    """
    if key.shape[2] <= 1 or not key.numel() or key.device.type == "meta":  # meta tensors have no values to underflow
        return max(1, key.shape[2])
    limit = 600.0 if key.dtype == torch.float64 else 60.0
    key = key.detach() if mask is None else key.detach().masked_fill(~mask, EMPTY_MAXIMUM)
    sizes = (size for size in BLOCK_SIZES if size == 1 or _largest_drop(key, maximum, min(size, key.shape[2])) <= limit)
    return next(sizes)


def _largest_drop(key: Tensor, maximum: Tensor | None, size: int) -> float:
    """Upper bound, over blocks and features, of the maximum of the block minus the maximum that its first query sees.

    The first query sees the first key; if that is hidden, the carried state; without a state, the first visible key.
    """
    if missing := -key.shape[2] % size:  # padding by 0 would copy
        key = F.pad(key, (0, 0, 0, missing), value=EMPTY_MAXIMUM)
    blocks = key.unflatten(2, (-1, size))
    largest = blocks.amax(dim=3)
    seen = largest.cummax(dim=2).values.roll(1, dims=2)
    seen[:, :, 0] = EMPTY_MAXIMUM if maximum is None else maximum.detach()
    if maximum is not None:
        seen = torch.maximum(seen, maximum.detach().unsqueeze(2))
    first = (blocks[..., :1] > EMPTY_MAXIMUM).to(torch.uint8).argmax(dim=3, keepdim=True)
    before = torch.maximum(blocks.take_along_dim(first, dim=3).squeeze(3), seen)
    before = torch.where((first.squeeze(3) > 0) & (seen > EMPTY_MAXIMUM / 2), seen, before)
    return (torch.maximum(largest, before) - before).max().item()


def is_tracing() -> bool:
    """Whether a graph is being built (torch.compile, torch.export, ONNX), in which no branch may depend on data."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def needs_plain(tensor: Tensor) -> bool:
    """Whether only plain torch operations will do: in exported graphs, under torch.func, for tensor subclasses."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        return True
    if torch.compiler.is_compiling():
        return False
    return type(tensor) is not Tensor or torch._C._functorch.maybe_current_level() is not None


def is_eager(tensor: Tensor) -> bool:
    """Whether the computation runs immediately and on a plain tensor, so that code tuned for eager mode pays off."""
    return not torch.compiler.is_compiling() and not needs_plain(tensor)


def is_on_cuda(tensor: Tensor) -> bool:
    """Whether this is a real tensor on CUDA; fake tensors have no memory."""
    return tensor.device.type == "cuda" and type(tensor) is Tensor


def is_free(length: int) -> bool:
    """Whether a graph is being exported in which this length is a variable, so that nothing may depend on it."""
    return isinstance(length, torch.SymInt)
