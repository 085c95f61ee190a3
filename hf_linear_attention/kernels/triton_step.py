# SPDX-License-Identifier: Apache-2.0
"""One decoding step of `hybrid` on CUDA, in three launches of Triton and without waiting for the device.

The places of window and exact keys are divided into splits of `SPLIT` places, a program each. Every place takes what
the next one held, so a program would read one row that its neighbour overwrites:

    _begin     one program per key/value head: the far sums and their output, the sinks, which exact key is displaced,
               and for each split a copy (`edge`) of the row that follows it
    _attend    one program per split: moves its places, and attends to what they hold then
    _finish    one program per query head: joins the splits and the far keys; one of them moves what heads share

**No races in place.** `_begin` writes the sums, which it alone reads, and the sinks, which are read after it. `_attend`
reads and writes its own places alone; it takes them from left to right, so that what a round reads was written by no
earlier one, and a barrier is between the reads of a round and its writes. What the heads share (kinds and positions of
the window, the count) is only read until `_finish`, where one program per sequence reads it, waits, and writes it.

Axes: B sequences, H query heads, Hkv key/value heads, G = H / Hkv, D head_dim, W columns of values, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor


EMPTY = tl.constexpr(-1e30)  # EMPTY_MAXIMUM
TINY = tl.constexpr(1.1754944e-38)
ORDINARY, SINK = tl.constexpr(1), tl.constexpr(2)
SCORES_AT_ONCE = tl.constexpr(1024)
MOST_SPLITS = 32
# Programs of a launch that fill a large GPU twice.
ENOUGH_PROGRAMS = 264


@triton.jit
def _pair(c, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The other column of each column's rotary pair, the number of the pair, and the sign of the sine."""
    if INTERLEAVED:
        other, number, first = c ^ 1, c // 2, c % 2 == 0
    else:
        first = c < PAIRS
        other, number = tl.where(first, c + PAIRS, c - PAIRS), tl.where(first, c, c - PAIRS)
    turns = c < 2 * PAIRS
    return tl.where(turns, other, c), tl.where(turns, number, 0), tl.where(first, -1.0, 1.0)


@triton.jit
def _frequency(frequencies, c, FIRST: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """By how much each column turns per position, from the pair `FIRST` on."""
    other, number, sign = _pair(c, PAIRS, INTERLEAVED)
    return tl.load(frequencies + number, mask=(c < 2 * PAIRS) & (number >= FIRST), other=0.0)


@triton.jit
def _turned(x, other, sign, angle):
    """`x`, whose other columns of pairs are `other`, turned by `angle`."""
    return x * tl.cos(angle) + sign * other * tl.sin(angle)


@triton.jit
def _log_decay(log_decay, h, IS_RATE: tl.constexpr):
    """The logarithm of the decay per token of a head, which is -softplus of a learned rate."""
    if log_decay is None:
        found = 0.0
    else:
        found = tl.load(log_decay + h).to(tl.float32)
        if IS_RATE:
            # log(1 + x) = 2 artanh(x / (2 + x)) by its series: 1 + x has lost most digits of a slow decay's x.
            x = tl.exp(-tl.abs(found))
            z = x / (2.0 + x)
            w = z * z
            series = 1 + w * (1 / 3 + w * (1 / 5 + w * (1 / 7 + w * (1 / 9 + w * (1 / 11 + w / 13)))))
            found = -tl.maximum(found, 0.0) - 2.0 * z * series
    return found


@triton.jit
def _row(rows, b):
    if rows is None:
        found = b.to(tl.int64)
    else:
        found = tl.load(rows + b)
    return found


@triton.jit
def _begin(
    query, key, value, score, slope, position, frequencies,
    key_weight, key_bias, key_norm, query_weight, log_decay, rows,
    sums, window_key, window_value, kind, sink_key, sink_value, seen, window_position, window_score,
    kept_key, kept_value, kept_score, kept_age, kept_position,
    new_sums, new_sink_key, new_sink_value,
    edge_key, edge_value, edge_score, edge_number, choice, far, far_size,
    sums_block, window_key_block, window_value_block, kind_block, sink_key_block, sink_value_block, seen_block,
    window_position_block, window_score_block, kept_key_block, kept_value_block, kept_score_block, kept_age_block,
    kept_position_block,
    position_stride, root, slope_scale,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VB: tl.constexpr,
    F: tl.constexpr, FP: tl.constexpr, W: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, M: tl.constexpr,
    SPLIT: tl.constexpr, NW: tl.constexpr, NE: tl.constexpr, NEP: tl.constexpr, GP: tl.constexpr,
    PAIRS: tl.constexpr, FIRST: tl.constexpr, INTERLEAVED: tl.constexpr, IS_RATE: tl.constexpr,
    IN_PLACE: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0), tl.program_id(1)
    r, bh = _row(rows, b), b * HKV + h
    c, cv, f = tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, FP)
    count = tl.load(seen + r * seen_block) + 1
    window_key += r * window_key_block + h * W * D
    window_value += r * window_value_block + h * W * V
    is_far = tl.load(kind + r * kind_block) == ORDINARY
    # The exact key with the smallest score, the latest of several, makes room if the one that comes has a larger one.
    takes = False
    place = 0
    if M > 0:
        window_score += r * window_score_block + h * W
        kept_key += r * kept_key_block + h * M * D
        kept_value += r * kept_value_block + h * M * V
        kept_score += r * kept_score_block + h * M
        kept_age += r * kept_age_block + h * M
        smallest = float("inf")
        for start in range(0, M, SCORES_AT_ONCE):
            j = start + tl.arange(0, SCORES_AT_ONCE)
            own = tl.load(kept_score + j, mask=j < M, other=float("inf"))
            own = tl.where(tl.load(kept_age + j, mask=j < M, other=1) > 0, own, float("-inf"))
            least = tl.min(own, 0)
            last = tl.max(tl.where(own == least, tl.minimum(j, M - 1), -1), 0)
            place = tl.where(least <= smallest, last, place)
            smallest = tl.minimum(least, smallest)
        takes = is_far & (tl.load(window_score) > smallest)
        tl.store(choice + bh, tl.where(takes, place, M))
    # The key that becomes a far one: the displaced one, or else the one that leaves the window.
    other, number, sign = _pair(c, PAIRS, INTERLEAVED)
    here = c < D
    gone, gone_other = (
        tl.load(window_key + c, mask=here, other=0.0).to(tl.float32),
        tl.load(window_key + other, mask=here, other=0.0).to(tl.float32),
    )
    age, goes = 0, is_far
    if M > 0:
        gone = tl.where(takes, tl.load(kept_key + place * D + c, mask=here, other=0.0).to(tl.float32), gone)
        gone_other = tl.where(
            takes, tl.load(kept_key + place * D + other, mask=here, other=0.0).to(tl.float32), gone_other
        )
        age = tl.where(takes, tl.load(kept_age + place), 0)
        goes = tl.where(takes, age > 0, is_far)
    if FIRST < PAIRS:
        gone_position = tl.load(window_position + r * window_position_block)
        if M > 0:
            kept_position += r * kept_position_block + h * M
            gone_position = tl.where(takes, tl.load(kept_position + place), gone_position)
        turn = _frequency(frequencies, c, FIRST, PAIRS, INTERLEAVED)
        gone = _turned(gone, gone_other, sign, -gone_position.to(tl.float32) * turn)
    gone *= root
    lam = _log_decay(log_decay, h, IS_RATE)
    at = c[:, None] * F + f[None, :]
    inside = here[:, None] & (f < F)[None, :]
    exponent = tl.sum(gone[:, None] * tl.load(key_weight + h * D * F + at, mask=inside, other=0.0).to(tl.float32), 0)
    if key_bias is not None:
        exponent += tl.load(key_bias + h * F + f, mask=f < F, other=0.0).to(tl.float32)
    if key_norm is not None:
        exponent -= tl.load(key_norm + h).to(tl.float32) / 2 * tl.sum(gone * gone, 0)
    exponent += lam * age
    sums += r * sums_block + h * F * (V + 2)
    new_sums += r * sums_block + h * F * (V + 2)
    total = tl.load(sums + f * (V + 2) + V, mask=f < F, other=0.0)
    before = tl.load(sums + f * (V + 2) + V + 1, mask=f < F, other=EMPTY) + tl.where(goes, lam, 0.0)
    largest = tl.where(goes, tl.maximum(before, exponent), before)
    keep, weight = tl.exp(before - largest), tl.where(goes, tl.exp(exponent - largest), 0.0)
    total = total * keep + weight
    # The exponents of the queries of this head.
    rows_of_g = tl.arange(0, GP)
    features = tl.zeros([GP, FP], tl.float32)
    for g in range(G):
        head = h * G + g
        x = tl.load(query + (b * HKV * G + head) * D + c, mask=here, other=0.0).to(tl.float32)
        if FIRST < PAIRS:
            x_other = tl.load(query + (b * HKV * G + head) * D + other, mask=here, other=0.0).to(tl.float32)
            turn = _frequency(frequencies, c, FIRST, PAIRS, INTERLEAVED)
            x = _turned(x, x_other, sign, -tl.load(position + b * position_stride).to(tl.int32).to(tl.float32) * turn)
        own = tl.load(query_weight + head * D * F + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.sum((root * x)[:, None] * own, 0)
        features = tl.where((rows_of_g == g)[:, None], u[None, :], features)
    features = tl.where((f < F)[None, :], features + largest[None, :], 2 * EMPTY)
    top = tl.max(features, 1)
    features = tl.exp(features - top[:, None])
    size = tl.sum(features * total[None, :], 1)
    heads = bh * G + rows_of_g
    log_size = tl.where(size < TINY, EMPTY, top + tl.log(tl.maximum(size, TINY)))
    tl.store(far_size + heads, log_size, mask=rows_of_g < G)
    for start in tl.static_range(0, V, VB):
        column = start + tl.arange(0, VB)
        inside = (f < F)[:, None] & (column < V)[None, :]
        at = f[:, None] * (V + 2) + column[None, :]
        gone_value = tl.load(window_value + column, mask=column < V, other=0.0).to(tl.float32)
        if M > 0:
            of_place = tl.load(kept_value + place * V + column, mask=column < V, other=0.0).to(tl.float32)
            gone_value = tl.where(takes, of_place, gone_value)
        state = tl.load(sums + at, mask=inside, other=0.0)
        tl.debug_barrier()  # every thread has read its part; several may read one number
        state = state * keep[:, None] + weight[:, None] * gone_value[None, :]
        tl.store(new_sums + at, state, mask=inside)
        output = tl.dot(features, state, input_precision="ieee") / tl.maximum(size, TINY)[:, None]
        tl.store(
            far + heads[:, None] * V + column[None, :], output, mask=(rows_of_g < G)[:, None] & (column < V)[None, :]
        )
    tl.store(new_sums + f * (V + 2) + V, total, mask=f < F)
    tl.store(new_sums + f * (V + 2) + V + 1, largest, mask=f < F)
    # One of the first tokens is a sink.
    if S > 0:
        js = tl.arange(0, SP)
        is_new = js == count - 1
        writes = js < S
        if IN_PLACE:
            writes = is_new & (js < S)
        keys = tl.load(
            sink_key + r * sink_key_block + (h * S + js)[:, None] * D + c[None, :],
            mask=((js < S) & (js != count - 1))[:, None] & here[None, :], other=0.0,
        )  # fmt: skip
        keys = tl.where(is_new[:, None], tl.load(key + bh * D + c, mask=here, other=0.0)[None, :], keys)
        values = tl.load(
            sink_value + r * sink_value_block + (h * S + js)[:, None] * V + cv[None, :],
            mask=((js < S) & (js != count - 1))[:, None] & (cv < V)[None, :], other=0.0,
        )  # fmt: skip
        values = tl.where(is_new[:, None], tl.load(value + bh * V + cv, mask=cv < V, other=0.0)[None, :], values)
        tl.debug_barrier()
        at = new_sink_key + r * sink_key_block + (h * S + js)[:, None] * D + c[None, :]
        tl.store(at, keys, mask=writes[:, None] & here[None, :])
        at = new_sink_value + r * sink_value_block + (h * S + js)[:, None] * V + cv[None, :]
        tl.store(at, values, mask=writes[:, None] & (cv < V)[None, :])
    # What follows each split: the next one's first row; the new token behind the window, and behind the exact keys what
    # leaves the window.
    e = tl.arange(0, NEP)
    is_new, of_window = e == NW - 1, (e < NW - 1) | (e == NE - 1)
    if M == 0:
        of_window = e < NW - 1
    slot = tl.where(e < NW - 1, (e + 1) * SPLIT, 0)
    kept_slot, of_kept = (e - NW + 1) * SPLIT, (e >= NW) & (e < NE - 1)
    row = bh * NE + e
    inside = (e < NE)[:, None] & here[None, :]
    found = tl.load(window_key + slot[:, None] * D + c[None, :], mask=inside & of_window[:, None], other=0.0)
    new = tl.load(key + bh * D + c, mask=here, other=0.0)
    found = tl.where(is_new[:, None], new[None, :], found)
    if M > 0:
        kept = tl.load(kept_key + kept_slot[:, None] * D + c[None, :], mask=inside & of_kept[:, None], other=0.0)
        found = tl.where(of_kept[:, None], kept, found)
    tl.store(edge_key + row[:, None] * D + c[None, :], found, mask=inside)
    inside = (e < NE)[:, None] & (cv < V)[None, :]
    found = tl.load(window_value + slot[:, None] * V + cv[None, :], mask=inside & of_window[:, None], other=0.0)
    new = tl.load(value + bh * V + cv, mask=cv < V, other=0.0)
    found = tl.where(is_new[:, None], new[None, :], found)
    if M > 0:
        kept = tl.load(kept_value + kept_slot[:, None] * V + cv[None, :], mask=inside & of_kept[:, None], other=0.0)
        found = tl.where(of_kept[:, None], kept, found)
    tl.store(edge_value + row[:, None] * V + cv[None, :], found, mask=inside)
    if M > 0:
        of_new = tl.load(score + bh).to(tl.float32) + count.to(tl.float32) * (
            tl.load(slope + h).to(tl.float32) * slope_scale
        )
        found = tl.load(window_score + slot, mask=of_window, other=0.0)
        found = tl.where(is_new, of_new, found)
        found = tl.where(of_kept, tl.load(kept_score + kept_slot, mask=of_kept, other=0.0), found)
        tl.store(edge_score + row, found, mask=e < NE)
        found = tl.load(kept_age + kept_slot, mask=of_kept, other=0)
        tl.store(edge_number + 2 * row, found, mask=e < NE)
        if kept_position is not None:
            if FIRST >= PAIRS:
                kept_position += r * kept_position_block + h * M
            found = tl.load(window_position + r * window_position_block + slot, mask=of_window, other=0)
            found = tl.where(of_kept, tl.load(kept_position + kept_slot, mask=of_kept, other=0), found)
            tl.store(edge_number + 2 * row + 1, found, mask=e < NE)


@triton.jit
def _softmax(total, top, output, logits, seen, values, T: tl.constexpr):
    """Add keys to running sums, `[GP]`, `[GP]` and `[GP, VP]`."""
    logits = tl.where(seen, logits, EMPTY)
    new = tl.maximum(top, tl.max(logits, 1))
    weights = tl.where(seen, tl.exp(logits - new[:, None]), 0.0)
    fade = tl.exp(top - new)
    output = output * fade[:, None] + tl.dot(weights.to(T), values.to(T), input_precision="ieee")
    return total * fade + tl.sum(weights, 1), new, output


@triton.jit
def _attend(
    query, position, frequencies, rows, kind, seen,
    window_key, window_value, window_score, kept_key, kept_value, kept_score, kept_age, kept_position,
    new_window_key, new_window_value, new_window_score,
    new_kept_key, new_kept_value, new_kept_score, new_kept_age, new_kept_position, sink_key, sink_value,
    edge_key, edge_value, edge_score, edge_number, choice, near, near_size,
    window_key_block, window_value_block, kind_block, sink_key_block, sink_value_block, seen_block,
    window_score_block, kept_key_block, kept_value_block, kept_score_block, kept_age_block, kept_position_block,
    position_stride, scaling, trained,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, W: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, M: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK: tl.constexpr, NW: tl.constexpr, NE: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    CLAMPS: tl.constexpr, IN_PLACE: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    bh, split = tl.program_id(0), tl.program_id(1)
    b, h = bh // HKV, bh % HKV
    r = _row(rows, b)
    c, cv, g = tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, GP)
    other, number, sign = _pair(c, PAIRS, INTERLEAVED)
    here = (g < G)[:, None] & (c < D)[None, :]
    heads = bh * G + g
    q = tl.load(query + heads[:, None] * D + c[None, :], mask=here, other=0.0)
    count = tl.load(seen + r * seen_block) + 1
    total, top, output = tl.zeros([GP], tl.float32), tl.zeros([GP], tl.float32) + EMPTY, tl.zeros([GP, VP], tl.float32)
    edge = bh * NE + split
    last_key = tl.load(edge_key + edge * D + c, mask=c < D, other=0.0)
    last_value = tl.load(edge_value + edge * V + cv, mask=cv < V, other=0.0)
    if split < NW:
        if S > 0:
            if split == 0:
                js = tl.arange(0, SP)
                moved = q
                if CLAMPS:
                    p = tl.load(position + b * position_stride).to(tl.int32)
                    angle = (tl.minimum(p, trained - 1) - p).to(tl.float32) * _frequency(
                        frequencies, c, 0, PAIRS, INTERLEAVED
                    )
                    q_other = tl.load(query + heads[:, None] * D + other[None, :], mask=here, other=0.0)
                    moved = _turned(q.to(tl.float32), q_other.to(tl.float32), sign[None, :], angle[None, :]).to(q.dtype)
                keys = tl.load(
                    sink_key + r * sink_key_block + (h * S + js)[:, None] * D + c[None, :],
                    mask=(js < S)[:, None] & (c < D)[None, :], other=0.0,
                )  # fmt: skip
                values = tl.load(
                    sink_value + r * sink_value_block + (h * S + js)[:, None] * V + cv[None, :],
                    mask=(js < S)[:, None] & (cv < V)[None, :], other=0.0,
                )  # fmt: skip
                logits = scaling * tl.dot(moved.to(T), tl.trans(keys.to(T)), input_precision="ieee")
                seen_sinks = ((js < S) & (js < count))[None, :] & (g < G)[:, None]
                total, top, output = _softmax(total, top, output, logits, seen_sinks, values, T)
        window_key += r * window_key_block + h * W * D
        window_value += r * window_value_block + h * W * V
        new_window_key += r * window_key_block + h * W * D
        new_window_value += r * window_value_block + h * W * V
        kind += r * kind_block
        stop = tl.minimum((split + 1) * SPLIT, W)
        for start in range(split * SPLIT, stop, BLOCK):
            j = start + tl.arange(0, BLOCK)
            own, inner = j < stop, j + 1 < stop
            at, at_value = j[:, None] * D + c[None, :], j[:, None] * V + cv[None, :]
            mask, mask_value = own[:, None] & (c < D)[None, :], own[:, None] & (cv < V)[None, :]
            keys = tl.load(window_key + at + D, mask=mask & inner[:, None], other=0.0)
            values = tl.load(window_value + at_value + V, mask=mask_value & inner[:, None], other=0.0)
            keys = tl.where((j + 1 == stop)[:, None], last_key[None, :], keys)
            values = tl.where((j + 1 == stop)[:, None], last_value[None, :], values)
            kinds = tl.load(kind + j + 1, mask=own & (j < W - 1), other=0).to(tl.int32)
            kinds = tl.where(j == W - 1, tl.where(count <= S, SINK, ORDINARY), kinds)
            if M > 0:
                scores = tl.load(window_score + r * window_score_block + h * W + j + 1, mask=inner, other=0.0)
                scores = tl.where(j + 1 == stop, tl.load(edge_score + edge), scores)
            tl.debug_barrier()  # every thread has read its part of these rows
            tl.store(new_window_key + at, keys, mask=mask)
            tl.store(new_window_value + at_value, values, mask=mask_value)
            if M > 0:
                tl.store(new_window_score + r * window_score_block + h * W + j, scores, mask=own)
            logits = scaling * tl.dot(q.to(T), tl.trans(keys.to(T)), input_precision="ieee")
            visible = (own & (kinds == ORDINARY))[None, :] & (g < G)[:, None]
            total, top, output = _softmax(total, top, output, logits, visible, values, T)
    else:
        if M > 0:
            place = tl.load(choice + bh)
            is_far = tl.load(kind + r * kind_block) == ORDINARY
            kept_key += r * kept_key_block + h * M * D
            kept_value += r * kept_value_block + h * M * V
            new_kept_key += r * kept_key_block + h * M * D
            new_kept_value += r * kept_value_block + h * M * V
            kept_score += r * kept_score_block + h * M
            new_kept_score += r * kept_score_block + h * M
            kept_age += r * kept_age_block + h * M
            new_kept_age += r * kept_age_block + h * M
            moved, p = q, 0
            if CLAMPS:
                p = tl.load(position + b * position_stride).to(tl.int32)
                turn = _frequency(frequencies, c, 0, PAIRS, INTERLEAVED)
                q_other = tl.load(query + heads[:, None] * D + other[None, :], mask=here, other=0.0).to(tl.float32)
                angle = (trained - 1 - p).to(tl.float32) * turn
                moved = _turned(q.to(tl.float32), q_other, sign[None, :], angle[None, :]).to(q.dtype)
            stop = tl.minimum((split - NW + 1) * SPLIT, M)
            for start in range((split - NW) * SPLIT, stop, BLOCK):
                j = start + tl.arange(0, BLOCK)
                own, moves = j < stop, j >= place
                source = tl.where(moves, j + 1, j)
                inner, follows = own & (source < stop), own & (source == stop)
                writes = own
                if IN_PLACE:
                    writes = own & moves
                at, at_value = source[:, None] * D + c[None, :], source[:, None] * V + cv[None, :]
                mask, mask_value = inner[:, None] & (c < D)[None, :], inner[:, None] & (cv < V)[None, :]
                keys = tl.load(kept_key + at, mask=mask, other=0.0)
                values = tl.load(kept_value + at_value, mask=mask_value, other=0.0)
                keys = tl.where(follows[:, None], last_key[None, :], keys)
                values = tl.where(follows[:, None], last_value[None, :], values)
                scores = tl.load(kept_score + source, mask=inner, other=0.0)
                scores = tl.where(follows, tl.load(edge_score + edge), scores)
                ages = tl.load(kept_age + source, mask=inner, other=0)
                ages = tl.where(follows, tl.load(edge_number + 2 * edge), ages)
                ages = tl.where(is_far & (ages > 0), ages + 1, ages)
                ages = tl.where((j == M - 1) & (place < M), 1, ages)
                if kept_position is not None:
                    of_position = r * kept_position_block + h * M
                    places = tl.load(kept_position + of_position + source, mask=inner, other=0)
                    places = tl.where(follows, tl.load(edge_number + 2 * edge + 1), places)
                if CLAMPS:
                    keys_other = keys
                    if p >= trained:
                        at_other = source[:, None] * D + other[None, :]
                        last_other = tl.load(edge_key + edge * D + other, mask=c < D, other=0.0)
                        keys_other = tl.load(kept_key + at_other, mask=mask, other=0.0)
                        keys_other = tl.where(follows[:, None], last_other[None, :], keys_other)
                tl.debug_barrier()  # every thread has read its part of these rows
                at, at_value = j[:, None] * D + c[None, :], j[:, None] * V + cv[None, :]
                tl.store(new_kept_key + at, keys, mask=writes[:, None] & (c < D)[None, :])
                tl.store(new_kept_value + at_value, values, mask=writes[:, None] & (cv < V)[None, :])
                tl.store(new_kept_score + j, scores, mask=writes)
                tl.store(new_kept_age + j, ages, mask=own)
                if kept_position is not None:
                    tl.store(new_kept_position + of_position + j, places, mask=writes)
                logits = tl.dot(q.to(T), tl.trans(keys.to(T)), input_precision="ieee")
                if CLAMPS:
                    if p >= trained:
                        back = -places.to(tl.float32)[:, None] * turn[None, :]
                        turned = _turned(keys.to(tl.float32), keys_other.to(tl.float32), sign[None, :], back)
                        distant = tl.dot(moved.to(T), tl.trans(turned.to(T)), input_precision="ieee")
                        logits = tl.where((p - places >= trained)[None, :], distant, logits)
                visible = (own & (ages > 0))[None, :] & (g < G)[:, None]
                total, top, output = _softmax(total, top, output, scaling * logits, visible, values, T)
    row = heads * NE + split
    tl.store(near + row[:, None] * V + cv[None, :], output, mask=(g < G)[:, None] & (cv < V)[None, :])
    tl.store(near_size + 2 * row, total, mask=g < G)
    tl.store(near_size + 2 * row + 1, top, mask=g < G)


@triton.jit
def _finish(
    query, position, rows, kind, seen, window_position, new_kind, new_seen, new_window_position,
    log_scale, norm_weight, near, near_size, far, far_size, out, kind_block, seen_block, window_position_block,
    position_stride, scaling,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, W: tl.constexpr,
    WP: tl.constexpr, S: tl.constexpr, NE: tl.constexpr, NEP: tl.constexpr,
):  # fmt: skip
    b, head = tl.program_id(0), tl.program_id(1)
    c, cv, e = tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, NEP)
    row = (b * H + head) * NE + e
    total = tl.load(near_size + 2 * row, mask=e < NE, other=0.0)
    top = tl.load(near_size + 2 * row + 1, mask=e < NE, other=EMPTY)
    largest = tl.max(top, 0)
    fade = tl.exp(top - largest)
    size = tl.sum(total * fade, 0)
    parts = tl.load(near + row[:, None] * V + cv[None, :], mask=(e < NE)[:, None] & (cv < V)[None, :], other=0.0)
    found = tl.sum(parts * fade[:, None], 0) / size
    q = tl.load(query + (b * H + head) * D + c, mask=c < D, other=0.0).to(tl.float32)
    add = tl.load(log_scale + head).to(tl.float32)
    add -= tl.load(norm_weight + head).to(tl.float32) * (scaling / 2) * tl.sum(q * q, 0)
    behind = tl.load(far_size + b * H + head) + add - (largest + tl.log(size))
    share = 1 / (1 + tl.exp(-behind))
    behind = tl.load(far + (b * H + head) * V + cv, mask=cv < V, other=0.0)
    tl.store(out + (b * H + head) * V + cv, (found + share * (behind - found)).to(out.dtype.element_ty), mask=cv < V)
    if head == 0:
        r, j = _row(rows, b), tl.arange(0, WP)
        count = tl.load(seen + r * seen_block) + 1
        kinds = tl.load(kind + r * kind_block + j + 1, mask=j < W - 1, other=0).to(tl.int32)
        kinds = tl.where(j == W - 1, tl.where(count <= S, SINK, ORDINARY), kinds)
        if window_position is not None:
            places = tl.load(window_position + r * window_position_block + j + 1, mask=j < W - 1, other=0)
            places = tl.where(j == W - 1, tl.load(position + b * position_stride).to(tl.int32), places)
        tl.debug_barrier()  # all of it has been read
        tl.store(new_kind + r * kind_block + j, kinds.to(tl.int8), mask=j < W)
        tl.store(new_seen + r * seen_block, count)
        if window_position is not None:
            tl.store(new_window_position + r * window_position_block + j, places, mask=j < W)


def wide(size: int, least: int = 16) -> int:
    """The number of columns of a block with this many: a power of 2, and of enough for `tl.dot`."""
    return max(least, triton.next_power_of_2(size))


def split_of(places: int, programs: int, block: int) -> int:
    """Places of each split, so that there are enough programs and at most `MOST_SPLITS` splits."""
    wanted = min(max(1, ENOUGH_PROGRAMS // max(1, programs)), MOST_SPLITS - 1)
    return -(-places // (wanted * block)) * block


def run(
    query: Tensor, key: Tensor, value: Tensor, score: Tensor | None, slope: Tensor | None, position: Tensor | None,
    key_weight: Tensor, key_bias: Tensor | None, key_norm: Tensor | None, query_weight: Tensor,
    log_decay: Tensor | None, old: Sequence[Tensor | None], new: Sequence[Tensor | None], log_scale: Tensor,
    norm_weight: Tensor, frequencies: Tensor | None, first_turned: int, is_interleaved: bool, trained_length: int,
    scaling: float, *, slope_scale: float, is_rate: bool, rows: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Write the state `new` after the state `old` and one more token, and the output `out [B, 1, H, W]`.

    The states have 14 tensors, None where there is none, in the order of `hybrid_step.PLACES`; both may be the same.
    See `StepArguments` for the others, of which `frequencies` is on the device here, `slope_scale` multiplies `slope`,
    and with `is_rate` the decay is -softplus(`log_decay`). Parameters have any dtype, and only `position [B, 1]` may
    have other strides than dense ones.
    """
    (batch, heads, _, dim), kv_heads, width = query.shape, key.shape[1], value.shape[3]
    sums, window_key, window_value, kind, sink_key, sink_value, seen, window_position, window_score, *kept = old
    new_sums, new_window_key, new_window_value, new_kind, new_sink_key, new_sink_value, new_seen = new[:7]
    new_window_position, new_window_score, *new_kept = new[7:]
    features, window, sinks = (cast(Tensor, x).shape[2] for x in (sums, window_key, sink_key))
    count = 0 if kept[0] is None else kept[0].shape[2]
    pairs = 0 if frequencies is None else frequencies.shape[0]
    columns, value_columns = wide(dim), wide(width)
    # Of the 255 registers of a thread, blocks of 64 rows of 64 columns, or of 32 of 256, take more than there are.
    block = 16 if columns * key.element_size() > 256 else 32
    split = split_of(window + count, batch * kv_heads, block)
    of_window, of_kept = -(-window // split), -(-count // split)
    edges = of_window + of_kept
    device, number = query.device, torch.float32
    edge_key = torch.empty(batch * kv_heads, edges, dim, dtype=key.dtype, device=device)
    edge_value = torch.empty(batch * kv_heads, edges, width, dtype=value.dtype, device=device)
    edge_score = torch.empty(batch * kv_heads, edges, dtype=number, device=device)
    edge_number = torch.empty(batch * kv_heads, edges, 2, dtype=torch.int32, device=device)
    choice = torch.empty(batch * kv_heads, dtype=torch.int32, device=device)
    far = torch.empty(batch * heads, width, dtype=number, device=device)
    far_size = torch.empty(batch * heads, dtype=number, device=device)
    near = torch.empty(batch * heads, edges, width, dtype=number, device=device)
    near_size = torch.empty(batch * heads, edges, 2, dtype=number, device=device)
    blocks = [0 if x is None else x.stride(0) for x in old]
    position_stride = 0 if position is None else position.stride(0)
    how: dict[str, Any] = {"PAIRS": pairs, "INTERLEAVED": is_interleaved}
    common = {"D": dim, "DP": columns, "V": width, "VP": value_columns, "W": window, "S": sinks, "NE": edges}
    of_heads = {"HKV": kv_heads, "G": heads // kv_heads, "GP": wide(heads // kv_heads)}
    places = {"M": count, "SPLIT": split, "NW": of_window, "SP": wide(sinks)}
    rounded = triton.next_power_of_2(edges)
    _begin[(batch, kv_heads)](
        query, key, value, score, slope, position, frequencies,
        key_weight, key_bias, key_norm, query_weight, log_decay, rows,
        *old, new_sums, new_sink_key, new_sink_value,
        edge_key, edge_value, edge_score, edge_number, choice, far, far_size, *blocks,
        position_stride, scaling**0.5, slope_scale,
        F=features, FP=wide(features), VB=min(value_columns, 64), NEP=rounded, FIRST=first_turned, IS_RATE=is_rate,
        IN_PLACE=new_sums is sums, num_warps=8, **common, **of_heads, **places, **how,
    )  # fmt: skip
    exact = query.dtype if query.dtype == key.dtype == value.dtype else number
    _attend[(batch * kv_heads, edges)](
        query, position, frequencies, rows, kind, seen,
        window_key, window_value, window_score, *kept,
        new_window_key, new_window_value, new_window_score, *new_kept, new_sink_key, new_sink_value,
        edge_key, edge_value, edge_score, edge_number, choice, near, near_size,
        *blocks[1:7], *blocks[8:],
        position_stride, scaling, trained_length,
        BLOCK=block, CLAMPS=bool(pairs and trained_length and position is not None), IN_PLACE=new_sums is sums,
        T=TYPES[exact], num_warps=4 if block == 32 else 8, **common, **of_heads, **places, **how,
    )  # fmt: skip
    _finish[(batch, heads)](
        query, position, rows, kind, seen, window_position, new_kind, new_seen, new_window_position,
        log_scale, norm_weight, near, near_size, far, far_size, out, blocks[3], blocks[6], blocks[7],
        position_stride, scaling,
        H=heads, WP=triton.next_power_of_2(window), NEP=rounded, num_warps=4,
        **{name: common[name] for name in ("D", "DP", "V", "VP", "W", "S", "NE")},
    )  # fmt: skip


TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
