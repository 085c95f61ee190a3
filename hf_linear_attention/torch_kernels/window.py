# SPDX-License-Identifier: Apache-2.0
"""Exact softmax attention to near keys and to sink tokens in torch, and its combination with far keys in `hybrid`.

A part is a pair `(output [B, Hkv, G, N, W], log_size [B, Hkv, G, N, 1])`: the weighted average over some keys and the
logarithm of its denominator, which is EMPTY_MAXIMUM if no key is visible. Averages are joined by their sizes, so the
result stays in the range of the values.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, w width, s sinks, c queries in a block.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import EMPTY_MAXIMUM, accumulation_dtype, is_free, joined, with_dtype, with_ones
from .causal import incomplete
from .implementations import implemented


Part = tuple[Tensor, Tensor]
# Logits per step on a CPU: 1 MB in float32, which fits into its cache.
LOGITS_IN_CACHE = 1 << 18
# On a CPU exp of less than -87 is 60 times slower, and so are products with its result. exp(-60) = 9e-27 vanishes
# beside the weight 1 of the largest logit, even in float64, so all smaller weights are set to 0.
LOWEST_EXPONENT = -60.0
FLUSHED = 1.01 * math.exp(LOWEST_EXPONENT), 0.0  # a weight that is not larger, and what it becomes

# Queries of a block of `window_in_blocks`: fewer do not fill the fused kernel's own blocks.
SMALLEST_BLOCK = 64


class NearKeys(NamedTuple):
    """Consecutive keys, padded before the first query: query t sees the keys t .. t + width - 1."""

    key: Tensor  # [B, Hkv, N + width - 1, D]
    value: Tensor  # [B, Hkv, N + width - 1, D]
    visible: Tensor  # [B, N + width - 1] bool
    centre: int  # the key t + centre is that of query t itself
    numbers: Tensor | None = None  # [B, N + width - 1]: query t sees places of its own packed sequence alone


class SinkKeys(NamedTuple):
    """Keys that every later query sees; their shape is `[B, Hkv, N, s, D]` if each query has its own sinks."""

    key: Tensor  # [B, Hkv, s, D]
    value: Tensor  # [B, Hkv, s, D]
    seen: Tensor  # [B, N, s] bool
    distance: Tensor | None  # [B, N, s] real tokens between sink and query, needed by a decay


def exact_part(
    query: Tensor,
    near: NearKeys,
    sinks: SinkKeys,
    scaling: float,
    log_decay: Tensor | None = None,
    sink_query: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Exact softmax over a window and sinks, with the results of `plain_window`; invalid arguments raise ValueError."""
    given = (query, near.key, near.value, near.visible, sinks.key, sinks.value, sinks.seen, sink_query)
    if near.numbers is not None:
        return packed_window(query, near, sinks, scaling, log_decay, sink_query)
    found = implemented("window", given, scaling, log_decay)
    if found is not None:
        return found
    options: dict[str, Any] = {"centre": near.centre, "distance": sinks.distance}
    return plain_window(*given, scaling, log_decay=log_decay, **options)


def window_in_blocks(query: Tensor, near: NearKeys, sinks: SinkKeys, scaling: float) -> Tensor:
    """The output `[B, H, N, W]` of `plain_window` alone, by torch's fused kernel, without ALiBi and packed sequences.

    Rows of blocks of queries compare with the keys of a whole block, as in Longformer (2020, appendix A). Rows that see
    no key have any finite value. Hidden keys and values must be finite.
    """
    batch, _, length, width = *query.shape[:3], near.key.shape[2] - query.shape[2] + 1
    size = min(length, max(SMALLEST_BLOCK, near.centre + 1))
    span, missing = width + size - 1, incomplete(length, size)
    place, row = (torch.arange(n, dtype=torch.long, device=query.device) for n in (span, size))
    offset = place - row[:, None]
    visible = _spans(near.visible, 1, span, size, missing)[:, :, None] & (offset >= 0) & (offset < width)
    visible = visible | (offset == near.centre)  # that of the query itself: no row may be empty
    seen = _query_blocks(sinks.seen.expand(batch, length, -1), 1, size)
    visible = torch.cat((seen, visible), dim=3)
    count = visible.shape[1]
    key, value = (
        torch.cat((sink.unsqueeze(2).expand(-1, -1, count, -1, -1), _spans(x, 2, span, size, missing)), dim=3)
        for x, sink in ((near.key, sinks.key), (near.value, sinks.value))
    )
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (_query_blocks(query, 2, size), key, value))
    output = dense_attention(query, key, value, visible.flatten(0, 1).unsqueeze(1), scaling)
    return output.unflatten(0, (batch, count)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def plain_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    seen: Tensor,
    sink_query: Tensor | None,
    scaling: float,
    *,
    log_decay: Tensor | None = None,
    centre: int = 0,
    distance: Tensor | None = None,
    numbers: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax output `[B, Hkv, G, N, W]`, its log denominator and largest logit `[B, Hkv, G, N, 1]`, in O(N width).

    Args:
        query: `[B, H, N, D]`.
        key, value, visible: see `NearKeys`, and `SinkKeys` for `sink_key`, `sink_value`, `seen` and `distance`.
        sink_query: `[B, H, N, D]`, compared with the sinks; None for the queries themselves.
        log_decay: `[Hkv]`, ALiBi's addend per token between query and key, or None; requires `centre`, `distance`.
        numbers: see `NearKeys`; they require `centre`.
    """
    dtype, length = accumulation_dtype(query), query.shape[2]
    kv_heads, width = key.shape[1], key.shape[2] - length + 1
    if not query.shape[0] * length:
        return _empty_window(query.to(dtype), kv_heads, value.shape[3])
    key, value = (x.masked_fill(~visible[:, None, :, None], 0.0) for x in (key, value))
    size = torch.sym_min(length, width) if is_free(length) else max(1, min(length, width))
    place, row = (torch.arange(n, dtype=torch.long, device=query.device) for n in (width + size - 1, size))
    offset = place - row[:, None]  # places that each key of a block lies after the first key of each query
    given = (query,) if sink_query is None else (query, sink_query)
    queries = [_query_blocks((x.to(dtype) * scaling).unflatten(1, (kv_heads, -1)), 3, size) for x in given]
    query, to_sinks = queries[0], queries[-1]
    span, missing = width + size - 1, incomplete(length, size)
    key, value = (_spans(x.to(dtype), 2, span, size, missing) for x in (key, value))
    visible = _spans(visible, 1, span, size, missing)[:, :, None] & (offset >= 0) & (offset < width)
    if numbers is not None:
        visible = visible & _of_own_sequence(numbers, centre, length, width, size)
    visible = visible[:, None, None]
    seen, distance = (_query_blocks(x, 1, size)[:, None, None] for x in (seen, seen if distance is None else distance))
    slope = None if log_decay is None else log_decay.to(dtype)[:, None, None, None, None]
    sink_key = sink_key.to(dtype)[:, :, None, None].transpose(-1, -2)
    sink_values = with_ones(sink_value, dtype)[:, :, None, None]
    results = []
    count = _blocks_at_a_time(query, key)
    parts = ((query, 3), (to_sinks, 3), (key, 2), (value, 2), (visible, 3), (seen, 3), (distance, 3))
    split = zip(*(x.split(count, dim=dim) if count else (x,) for x, dim in parts))
    for query, to_sinks, key, value, visible, seen, distance in split:
        logits = query @ key.unsqueeze(2).transpose(-1, -2), to_sinks @ sink_key
        if slope is not None:
            logits = logits[0] + slope * (offset - centre).abs(), logits[1] + slope * distance
        values = with_ones(value, dtype).unsqueeze(2), sink_values
        results.append(_softmax(logits, (visible, seen), values))
    output, log_size, scale = (joined(part).flatten(3, 4)[:, :, :, :length] for part in zip(*results))
    return output, log_size, scale


def _empty_window(query: Tensor, kv_heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The results for no queries, which depend on them."""
    size = query.sum(dim=-1, keepdim=True).unflatten(1, (kv_heads, -1))
    return size.expand(*size.shape[:4], width), size, size


def _of_own_sequence(numbers: Tensor, centre: int, length: int, width: int, size: int) -> Tensor:
    """Whether a place of a block's window belongs to the packed sequence of its query."""
    own = _query_blocks(numbers[:, centre : centre + length], 1, size).unsqueeze(3)
    return _spans(numbers, 1, width + size - 1, size, incomplete(length, size)).unsqueeze(2) == own


def _query_blocks(x: Tensor, dim: int, size: int) -> Tensor:
    """Pad the N of `dim` to whole blocks of `size` and split it into them."""
    return _padded(x, dim, incomplete(x.shape[dim], size)).unflatten(dim, (-1, size))


def _padded(x: Tensor, dim: int, missing: int) -> Tensor:
    """`x` with so many more at the end of `dim`; padding by 0 would copy."""
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if is_free(missing) or missing else x


def _softmax(
    logits: tuple[Tensor, Tensor], seen: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The output of blocks of queries, its log denominator and largest logit.

    Of keys in the window, then of sinks: logits, which of them are seen, and values with a last column of 1.
    """
    near, sinks = (x.masked_fill_(~visible, EMPTY_MAXIMUM) for x, visible in zip(logits, seen))
    scale = _maximum((near, sinks))
    shift = scale.clamp(min=EMPTY_MAXIMUM / 2)
    sums = weights_of(near - shift) @ values[0] + weights_of(sinks - shift) @ values[1]
    numerator, denominator = sums.split_with_sizes((sums.shape[-1] - 1, 1), dim=-1)
    is_empty = scale == EMPTY_MAXIMUM  # no visible key: all weights are 0
    denominator = denominator.masked_fill(is_empty, 1.0)
    log_size = (shift + denominator.log()).masked_fill(is_empty, EMPTY_MAXIMUM)
    return numerator / denominator, log_size, scale


def packed_window(
    query: Tensor,
    near: NearKeys,
    sinks: SinkKeys,
    scaling: float,
    log_decay: Tensor | None,
    sink_query: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`plain_window` within packed sequences, where every query has the sinks of its own sequence."""
    none = (x.new_empty(*x.shape[:2], 0, x.shape[-1]) for x in (sinks.key, sinks.value))
    options: dict[str, Any] = {"log_decay": log_decay, "centre": near.centre, "numbers": near.numbers}
    given: tuple[Any, ...] = (query, near.key, near.value, near.visible, *none, sinks.seen[..., :0], None, scaling)
    output, size, largest = plain_window(*given, **options)
    if not sinks.seen.shape[-1]:
        return output, size, largest
    to_sinks = query if sink_query is None else sink_query
    rows = (to_sinks.to(output.dtype) * scaling).unflatten(1, (near.key.shape[1], -1)).transpose(2, 3)
    logits = (rows @ sinks.key.to(output.dtype).transpose(-1, -2)).transpose(2, 3)  # [B, Hkv, G, N, s]
    if log_decay is not None and sinks.distance is not None:
        logits = logits + log_decay.to(output.dtype)[:, None, None, None] * sinks.distance[:, None, None]
    logits = logits.masked_fill(~sinks.seen[:, None, None], EMPTY_MAXIMUM)
    average = (logits.softmax(dim=-1).transpose(2, 3) @ sinks.value.to(output.dtype)).transpose(2, 3)
    sink_size = logits.logsumexp(dim=-1, keepdim=True)
    sink_size = sink_size.masked_fill(~sinks.seen.any(dim=-1)[:, None, None, :, None], EMPTY_MAXIMUM)
    largest = torch.maximum(largest, _maximum((logits,)))
    return *join((output, size), (average, sink_size)), largest


def weights_of(logits: Tensor) -> Tensor:
    """exp of numbers of at most 0, and exactly 0 below `LOWEST_EXPONENT`."""
    weights = logits.clamp(min=LOWEST_EXPONENT).exp()
    return F.threshold(weights, *FLUSHED)


def _blocks_at_a_time(query: Tensor, key: Tensor) -> int | None:
    """The number of blocks per step: on a CPU, as many as keep their logits in the cache; elsewhere all, None."""
    if query.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    per_block = query.shape[0] * query.shape[1] * query.shape[2] * query.shape[4] * key.shape[3]
    return max(1, LOGITS_IN_CACHE // max(1, per_block))


def _maximum(logits: tuple[Tensor, ...]) -> Tensor:
    """The maximum over the last axis of all logits, `[..., 1]`, without a gradient; an empty tensor is skipped."""
    largest = [x.detach().amax(dim=-1, keepdim=True) for x in logits if x.shape[-1]]
    return torch.maximum(*largest) if len(largest) == 2 else largest[0]


def _spans(x: Tensor, dim: int, span: int, size: int, missing: int) -> Tensor:
    """The `span` tokens from every `size`-th on, `[.., blocks, span, ..]`, of those at `dim` and `missing` more."""
    x = _padded(x, dim, missing)
    if not is_free(size):
        return x.unfold(dim, span, size).movedim(-1, dim + 1)
    blocks = (x.shape[dim] - span) // size + 1
    first, place = (torch.arange(n, dtype=torch.long, device=x.device) for n in (blocks, span))
    return x.index_select(dim, (first[:, None] * size + place).flatten()).unflatten(dim, (blocks, span))


def join(*parts: Part) -> Part:
    """Join parts into one over all of their keys; without gradients the first part's memory is overwritten."""
    sizes = [size for _, size in parts]
    # The second derivative of `logaddexp` is NaN where one part has no keys.
    return joined_output(*parts), torch.cat(sizes, dim=-1).logsumexp(dim=-1, keepdim=True)


def joined_output(*parts: Part) -> Tensor:
    """The output of `join` alone."""
    output, size = parts[0]
    lerp = torch.lerp if torch.is_grad_enabled() else torch.Tensor.lerp_
    for place, (other, other_size) in enumerate(parts[1:], start=2):
        output = lerp(output, other, (other_size - size).sigmoid())
        if place < len(parts):
            size = torch.cat((size, other_size), dim=-1).logsumexp(dim=-1, keepdim=True)
    return output


def log_size(denominator: Tensor, log_scale: Tensor) -> Tensor:
    """log(denominator) + log_scale, and EMPTY_MAXIMUM where the denominator is 0."""
    is_empty = denominator < torch.finfo(denominator.dtype).tiny
    # Not the logarithm of a tiny number, whose second derivative would be infinite.
    return (denominator.masked_fill(is_empty, 1.0).log() + log_scale).masked_fill(is_empty, EMPTY_MAXIMUM)


def slot_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float) -> Tensor:
    """softmax(scaling q k^T) v, `[B, H, N, W]`; 0 for a row that sees no key. Hidden keys may hold any value.

    `query` is `[B, H, N, D]`, `key` and `value` are `[B, Hkv, S, D]` and `[B, Hkv, S, W]`, and `visible` is bool
    `[B or 1, Hkv or 1, S]` or None for all keys; ValueError for others.
    """
    if (found := implemented("slot_attention", query, key, value, visible, scaling)) is not None:
        return found
    if visible is not None:
        key, value = (torch.where(visible.unsqueeze(3), x, 0.0) for x in (key, value))
        visible = (visible | ~visible.any(dim=-1, keepdim=True)).unsqueeze(2)
    return dense_attention(query, key, value, visible, scaling)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scaling: float) -> Tensor:
    """softmax(scaling q k^T) v, `[B, H, N, W]`, by torch's fused kernel. Hidden keys and values must be finite.

    Args:
        query: `[B, H, N, D]`.
        key, value: `[B, Hkv, S, D]` and `[B, Hkv, S, W]`.
        visible: bool `[B or 1, Hkv or 1, N or 1, S]`, True at least once in every row, or the addend of the logits,
            whose dtype is the query's; None for all keys.
    """
    groups, dtype = query.shape[1] // key.shape[1], query.dtype
    if not dtype == key.dtype == value.dtype:
        wide = functools.reduce(torch.promote_types, (key.dtype, value.dtype), dtype)
        query, key, value = (with_dtype(x, wide) for x in (query, key, value))
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        if visible is not None and visible.shape[1] > 1:
            visible = visible.repeat_interleave(groups, dim=1)
    if torch._C._functorch.maybe_current_level() is None:
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
        return with_dtype(output, dtype)
    logits = (query * scaling) @ key.transpose(-1, -2)  # the fused kernel has no forward derivatives
    if visible is not None:
        is_bool = visible.dtype == torch.bool
        logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min) if is_bool else logits + visible
    return with_dtype(logits.softmax(dim=-1) @ value, dtype)
