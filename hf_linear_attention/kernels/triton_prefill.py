# SPDX-License-Identifier: Apache-2.0
"""Reading many tokens with `hybrid` on CUDA: window, sinks, exact and far keys in one softmax.

In training, triton_backward.py takes the gradients from the choice of keys and the size of each query.

Keys of the line leave the window one by one, key M + t of this numbering before query t; the first M are those that
were kept before. A key is displaced when the M-th key that is better than it (of a larger score, or an equal and older
one) has come. In the order of all scores, the worst key that is kept only moves towards better ones, so it is found
once for each group of chunks and followed from there. All of this is linear in N but the sort, of which torch makes
several launches.

    _line_up     the scores in a row, to be sorted by torch
    _bounds      which key is the worst one that is kept at the start of each chunk of queries
    _choose      for every key when it is displaced, and for every query which key is; a program per chunk
    _list        for each chunk the keys that some of its queries see, and those that are kept at the end; of many
                 chunks, first for each group
    _turn        every key as if it stood at position 0, if some query may be beyond the trained length
    _exponents   those of the displaced keys
    _states      if there are several groups of chunks, the far sums of each alone; then, a program per group, those
                 before each chunk, and those after the last token
    _outputs     a program per chunk and query head: one running softmax over all keys
    _keep        the exact keys that the next tokens find

No program writes what another one of the same launch reads. Within a chunk, a displaced key is lost beside one that
comes later and is e^80 times larger in every feature.

A row may hold packed sequences, one behind the other. Their sinks are exact keys that are better than all others of
their sequence, and every key of a sequence is better than all earlier ones, so that the choice begins anew with each.
What a query sees, and what enters the far sums, begins with the first token of its sequence.

Axes: B sequences, H query heads, Hkv key/value heads, G = H / Hkv, N queries, L keys of the line, D head_dim, W columns
of values, F features, M exact keys, K chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_step import TYPES, _frequency, _log_decay, _pair, _softmax, _turned, wide


EMPTY = tl.constexpr(-1e30)  # EMPTY_MAXIMUM
GROUP = 16  # chunks of a group
MOST_GROUPS = 64
LISTED = 1024
NO_SCORE, NO_NUMBER = float("-inf"), -(2**62)  # of what is no key


@triton.jit
def _score_of(g, score, row, visible, kept_score, kept_age, before, N, W: tl.constexpr, M: tl.constexpr):
    """The scores of keys, -inf where there is none."""
    slot = g - M + before - W
    there = (g >= M) & (slot >= 0) & (g < M + N)
    there = there & (tl.load(visible + slot, mask=there, other=0) != 0)
    found = tl.load(score + slot * row, mask=there, other=float("-inf"))
    if kept_score is not None:
        old = (g < M) & (tl.load(kept_age + g, mask=g < M, other=0) > 0)
        found = tl.where(old, tl.load(kept_score + g, mask=old, other=0.0), found)
    return found


@triton.jit
def _head_of(bh, batch, head, HKV: tl.constexpr):
    """Where the numbers of a key/value head begin, from the strides of sequences and heads."""
    return (bh // HKV).to(tl.int64) * batch + (bh % HKV).to(tl.int64) * head


@triton.jit
def _line_up(
    score, visible, kept_score, kept_age, scores, leave, gone, starts, ends, score_batch, score_head, score_row, before,
    L, N,
    HKV: tl.constexpr, W: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    bh, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    score += _head_of(bh, score_batch, score_head, HKV)
    visible += (bh // HKV).to(tl.int64) * L
    if kept_score is not None:
        kept_score += bh * M
        kept_age += bh * M
    own = _score_of(i, score, score_row, visible, kept_score, kept_age, before, N, W, M)
    own = tl.where(own == 0, 0.0, own)  # 0 and -0 are equal, and a sort may tell them apart
    is_key = own > float("-inf")
    end = N + 1
    if starts is not None:  # numbers in the order of sequences, and then of scores
        slot = (bh // HKV) * L + i - M - W
        first, end = tl.load(starts + slot, mask=is_key, other=0), tl.load(ends + slot, mask=is_key, other=0)
        bits = own.to(tl.int32, bitcast=True)
        own = (first.to(tl.int64) << 32) + tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
        own = tl.where(is_key, own, LEAST)
    tl.store(scores + bh * (M + N) + i, own, mask=i < M + N)
    at = tl.where(is_key, end, tl.maximum(i - M, 0))
    tl.store(leave + bh * (M + N) + i, at, mask=i < M + N)
    tl.store(gone + bh * N + i, tl.full([BLOCK], -1, tl.int32), mask=i < N)


@triton.jit
def _bounds(
    scores, by_score, place, bounds, N, K,
    M: tl.constexpr, C: tl.constexpr, IN_GROUP: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    bh, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * IN_GROUP
    scores += bh * (M + N)
    by_score += bh * (M + N)
    place += bh * (M + N)
    bounds += bh * (K + 1)
    step, j = tl.arange(0, BLOCK), tl.arange(0, C)
    # The M-th best of the keys before the first chunk of this program ..
    stop, count, start, bound = M + first * C, 0, 0, 0
    while (count < M) & (start < M + N):
        rank = start + step
        here = (tl.load(place + rank, mask=rank < M + N, other=M + N) < stop).to(tl.int32)
        is_last = (here > 0) & (count + tl.cumsum(here, 0) == M)
        bound = tl.maximum(bound, tl.max(tl.where(is_last, rank, 0), 0))
        count += tl.sum(here, 0)
        start += BLOCK
    tl.store(bounds + first, bound)
    # .. and from chunk to chunk as many further as there are new keys that are better.
    for k in range(first + 1, tl.minimum(first + IN_GROUP, K) + 1):
        i = M + (k - 1) * C + j
        own = tl.load(scores + i, mask=i < M + N, other=LEAST)
        missing = tl.sum((own > tl.load(by_score + bound)).to(tl.int32), 0) + 1
        stop, start = M + k * C, bound
        while (missing > 0) & (start >= 0):
            rank = start - step
            here = (tl.load(place + rank, mask=rank >= 0, other=M + N) < stop).to(tl.int32)
            is_last = (here > 0) & (tl.cumsum(here, 0) == missing)
            bound = tl.where(tl.max(is_last.to(tl.int32), 0) > 0, tl.max(tl.where(is_last, rank, 0), 0), bound)
            missing -= tl.sum(here, 0)
            start -= BLOCK
        if (k < first + IN_GROUP) | (k == K):
            tl.store(bounds + k, bound)


@triton.jit
def _choose(
    scores, by_score, place, bounds, leave, gone, starts, N, K,
    HKV: tl.constexpr, W: tl.constexpr, M: tl.constexpr, C: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    bh, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scores += bh * (M + N)
    by_score += bh * (M + N)
    place += bh * (M + N)
    leave += bh * (M + N)
    gone += bh * N
    step = tl.arange(0, C)
    first = M + k * C
    i = first + step
    own = tl.load(scores + i, mask=i < M + N, other=LEAST)
    start, stop = tl.load(bounds + bh * (K + 1) + k), tl.load(bounds + bh * (K + 1) + k + 1)
    last, last_place = tl.load(by_score + stop), tl.load(place + stop)
    # Old keys, from the worst one on: the n-th is displaced by the n-th new one that is better than it.
    count, worse = 0, tl.zeros([C], tl.int32)
    while start > stop:
        rank = start - step
        old = tl.load(place + rank, mask=rank > stop, other=M + N).to(tl.int32)
        here = (old < first).to(tl.int32)
        if tl.max(here, 0) > 0:
            score = tl.load(by_score + rank, mask=rank > stop, other=LEAST)
            number = count + tl.cumsum(here, 0)
            better = tl.cumsum((own[:, None] > score[None, :]).to(tl.int32), 0)
            at = tl.sum((better < number[None, :]).to(tl.int32), 0)
            is_key = (here > 0) & (score > LEAST) & (k * C + at < N)
            if starts is not None:  # by one of its own sequence
                is_key = is_key & (old - M - W >= tl.load(starts + (bh // HKV) * N + k * C + at, mask=is_key, other=0))
            tl.store(leave + old, k * C + at, mask=is_key)
            tl.store(gone + k * C + at, old, mask=is_key)
            worse += tl.sum(((score[None, :] < own[:, None]) & (here > 0)[None, :]).to(tl.int32), 1)
            count += tl.sum(here, 0)
        start -= C
    # A new key is displaced, or never kept, when as many better ones have come as there were old ones to displace.
    goes = (own > LEAST) & ((own < last) | ((own == last) & (i > last_place)))
    is_better = (own[:, None] > own[None, :]) | ((own[:, None] == own[None, :]) & (step[:, None] < step[None, :]))
    at = tl.sum((tl.cumsum(is_better.to(tl.int32), 0) < worse[None, :]).to(tl.int32), 0)
    at = k * C + tl.maximum(at, step)
    goes = goes & (at < N)
    if starts is not None:
        goes = goes & (i - M - W >= tl.load(starts + (bh // HKV) * N + at, mask=goes, other=0))
    tl.store(leave + i, at, mask=goes)
    tl.store(gone + at, i, mask=goes)


@triton.jit
def _list(
    leave, given, given_counts, listed, counts, N, K, EVERY, KG,
    ROOM: tl.constexpr, M: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    bh, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * EVERY
    leave += bh * (M + N)
    listed += (bh * (tl.num_programs(1)) + tl.program_id(1)) * ROOM
    first = tl.minimum(k * C, N)
    end = tl.minimum(first + C, N)
    count, begin = 0, 0
    if given is not None:  # those that the first chunk of the group sees, and then those that came after it
        group = k // GROUP
        given += (bh * KG + group) * ROOM
        begin = M + tl.minimum(group * GROUP * C + C, N)
        some = tl.load(given_counts + bh * KG + group)
        for start in range(0, some, BLOCK):
            n = start + tl.arange(0, BLOCK)
            g = tl.load(given + n, mask=n < some, other=0)
            at = tl.load(leave + g, mask=n < some, other=0)
            is_seen = ((n < some) & (at > first) & (at > g - M)).to(tl.int32)
            tl.store(listed + count + tl.cumsum(is_seen, 0) - 1, g, mask=is_seen > 0)
            count += tl.sum(is_seen, 0)
    for start in range(begin, M + end, BLOCK):
        g = start + tl.arange(0, BLOCK)
        at = tl.load(leave + g, mask=g < M + end, other=0)
        is_seen = ((at > first) & (at > g - M)).to(tl.int32)
        tl.store(listed + count + tl.cumsum(is_seen, 0) - 1, g, mask=is_seen > 0)
        count += tl.sum(is_seen, 0)
    tl.store(counts + bh * tl.num_programs(1) + tl.program_id(1), count)


@triton.jit
def _gone_at(t, gone, visible, before, N, W: tl.constexpr, M: tl.constexpr):
    """The key that is displaced before each query, -1 for none; without exact keys, the one that leaves the window."""
    if M > 0:
        found = tl.load(gone + t, mask=t < N, other=-1)
    else:
        slot = t + before - W
        there = (slot >= 0) & (t < N)
        found = tl.where(tl.load(visible + slot, mask=there, other=0) != 0, t, -1)
    return found


@triton.jit
def _order_at(t, order, before, N, W: tl.constexpr):
    """How many keys have left the window before query t, which counts from 0; none before the first key."""
    slot = tl.minimum(t, N - 1) + before - W
    return tl.load(order + slot, mask=slot >= 0, other=0)


@triton.jit
def _start_at(t, starts, N):
    """The first token of the sequence of query t, or of the last query if there are not so many."""
    return tl.load(starts + tl.minimum(t, N - 1))


@triton.jit
def _where_it_goes_on(first, last, starts, N, state, total, top):
    """Far sums, empty if the sequence of token `last` begins at `first` or later."""
    goes_on = _start_at(last, starts, N) < first
    return tl.where(goes_on, state, 0.0), tl.where(goes_on, total, 0.0), tl.where(goes_on, top, EMPTY)


@triton.jit
def _rows(g, there, column, inside, line, row, kept, before, WIDTH: tl.constexpr, W: tl.constexpr, M: tl.constexpr):
    """Columns `[C, WIDTH]` of the keys or values g, from the line or from what was kept."""
    slot = (g - M + before - W).to(tl.int64)
    mask = there[:, None] & inside[None, :]
    found = tl.load(line + slot[:, None] * row + column[None, :], mask=mask & (g >= M)[:, None], other=0.0)
    if kept is not None:
        old = tl.load(kept + g[:, None] * WIDTH + column[None, :], mask=mask & (g < M)[:, None], other=0.0)
        found = tl.where((g < M)[:, None], old, found)
    return found


@triton.jit
def _numbers(g, there, line, row, kept, before, W: tl.constexpr, M: tl.constexpr):
    """Numbers of the keys g, as `_rows` finds rows."""
    found = tl.load(line + (g - M + before - W) * row, mask=there & (g >= M), other=0)
    if kept is not None:
        found = tl.where(g < M, tl.load(kept + g, mask=there & (g < M), other=0), found)
    return found


@triton.jit
def _turn(
    key, key_position, frequencies, kept_key, kept_position, turned, key_batch, key_head, key_row, before, L, N,
    HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, W: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    bh, g, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C), tl.arange(0, DP)
    key += _head_of(bh, key_batch, key_head, HKV)
    there = (g < M + N) & (g >= M + W - before)
    if kept_key is not None:
        kept_key += bh * M * D
        kept_position += bh * M
        there = g < M + N
    other, number, sign = _pair(c, PAIRS, INTERLEAVED)
    x = _rows(g, there, c, c < D, key, key_row, kept_key, before, D, W, M)
    x_other = _rows(g, there, other, c < D, key, key_row, kept_key, before, D, W, M).to(tl.float32)
    place = _numbers(g, there, key_position + (bh // HKV) * L, 1, kept_position, before, W, M)
    angle = -place.to(tl.float32)[:, None] * _frequency(frequencies, c, 0, PAIRS, INTERLEAVED)[None, :]
    at = (bh * (M + N) + g)[:, None] * D + c[None, :]
    x = _turned(x.to(tl.float32), x_other, sign[None, :], angle)
    tl.store(turned + at, x.to(turned.dtype.element_ty), mask=(g < M + N)[:, None] & (c < D)[None, :])


@triton.jit
def _exponents(
    key, visible, order, gone, key_position, frequencies, key_weight, key_bias, key_norm, log_decay,
    kept_key, kept_age, kept_position, exponents, key_batch, key_head, key_row, before, L, N, root,
    HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr, INTERLEAVED: tl.constexpr,
    IS_RATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    bh, t = tl.program_id(0).to(tl.int64), tl.program_id(1) * C + tl.arange(0, C)
    b, h = (bh // HKV).to(tl.int64), bh % HKV
    c, f = tl.arange(0, DP), tl.arange(0, FP)
    key += _head_of(bh, key_batch, key_head, HKV)
    order += b * L
    if kept_key is not None:
        kept_key += bh * M * D
    g = _gone_at(t, gone + bh.to(tl.int64) * N, visible + b * L, before, N, W, M)
    there = g >= 0
    x = _rows(g, there, c, c < D, key, key_row, kept_key, before, D, W, M).to(tl.float32)
    if FIRST < PAIRS:
        other, number, sign = _pair(c, PAIRS, INTERLEAVED)
        x_other = _rows(g, there, other, c < D, key, key_row, kept_key, before, D, W, M).to(tl.float32)
        if kept_position is not None:
            kept_position += bh * M
        place = _numbers(g, there, key_position + b * L, 1, kept_position, before, W, M)
        turn = _frequency(frequencies, c, FIRST, PAIRS, INTERLEAVED)
        x = _turned(x, x_other, sign[None, :], -place.to(tl.float32)[:, None] * turn[None, :])
    x *= root
    inside = (c < D)[:, None] & (f < F)[None, :]
    weight = tl.load(key_weight + h * D * F + c[:, None] * F + f[None, :], mask=inside, other=0.0).to(tl.float32)
    found = tl.dot(x, weight, input_precision=PRECISION)
    if key_bias is not None:
        found += tl.load(key_bias + h * F + f, mask=f < F, other=0.0).to(tl.float32)[None, :]
    if key_norm is not None:
        found -= (tl.load(key_norm + h).to(tl.float32) / 2 * tl.sum(x * x, 1))[:, None]
    if log_decay is not None:
        came = tl.load(order + g - M + before - W, mask=there & (g >= M), other=0)
        if kept_age is not None:
            came = tl.where(g < M, 1 - tl.load(kept_age + bh * M + g, mask=there & (g < M), other=0), came)
        age = (_order_at(t, order, before, N, W) - came).to(tl.float32)
        found += (_log_decay(log_decay, h, IS_RATE) * age)[:, None]
    found = tl.where(there[:, None], found, EMPTY)
    at = (bh.to(tl.int64) * N + t)[:, None] * F + f[None, :]
    tl.store(exponents + at, found, mask=(t < N)[:, None] & (f < F)[None, :])


@triton.jit
def _add_chunk(
    state, total, top, k, t, column, f, exponents, value, value_row, kept_value, visible, order, gone, starts, lam,
    before, N,
    F: tl.constexpr, V: tl.constexpr, W: tl.constexpr, M: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The far sums after a chunk from those before it."""
    n = k * C + t
    g = _gone_at(n, gone, visible, before, N, W, M)
    end = _order_at(k * C + C - 1, order, before, N, W)
    fades = (end - _order_at(n, order, before, N, W)).to(tl.float32)
    own = tl.load(
        exponents + n.to(tl.int64)[:, None] * F + f[None, :], mask=(n < N)[:, None] & (f < F)[None, :], other=EMPTY
    )
    own += (lam * fades)[:, None]
    faded = top + lam * (end - _order_at(k * C - 1, order, before, N, W)).to(tl.float32)
    if starts is not None:  # of the sequence of the last token alone
        g = tl.where(n >= _start_at(k * C + C - 1, starts, N), g, -1)
        own = tl.where((g >= 0)[:, None], own, EMPTY)
        state, total, faded = _where_it_goes_on(k * C, k * C + C - 1, starts, N, state, total, faded)
    new = tl.maximum(faded, tl.max(own, 0))
    weight = tl.where((g >= 0)[:, None], tl.exp(own - new[None, :]), 0.0)
    keep = tl.exp(faded - new)
    values = _rows(g, g >= 0, column, column < V, value, value_row, kept_value, before, V, W, M)
    state = state * keep[:, None] + tl.dot(tl.trans(weight), values.to(tl.float32), input_precision=PRECISION)
    return state, total * keep + tl.sum(weight, 0), new


@triton.jit
def _store_sums(at, state, total, top, f, column, F: tl.constexpr, V: tl.constexpr):
    """Write S, Z and m `[F, V + 2]`; of the programs for parts of the columns, the first one writes Z and m."""
    mask = (f < F)[:, None] & (column < V)[None, :]
    tl.store(at + f[:, None] * (V + 2) + column[None, :], state, mask=mask)
    if tl.program_id(2) == 0:
        tl.store(at + f * (V + 2) + V, total, mask=f < F)
        tl.store(at + f * (V + 2) + V + 1, top, mask=f < F)


@triton.jit
def _load_sums(at, f, column, F: tl.constexpr, V: tl.constexpr):
    mask = (f < F)[:, None] & (column < V)[None, :]
    state = tl.load(at + f[:, None] * (V + 2) + column[None, :], mask=mask, other=0.0)
    total = tl.load(at + f * (V + 2) + V, mask=f < F, other=0.0)
    return state, total, tl.load(at + f * (V + 2) + V + 1, mask=f < F, other=EMPTY)


@triton.jit
def _states(
    exponents, value, kept_value, visible, order, gone, starts, log_decay, sums, group_sums, states, new_sums,
    value_batch, value_head, value_row, before, L, N, K,
    HKV: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr, VB: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, IN_GROUP: tl.constexpr, GROUPS: tl.constexpr,
    IS_RATE: tl.constexpr,
):  # fmt: skip
    """The far sums before each chunk and after the last one; without `states`, those of each group alone."""
    bh, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, f, t, column = (
        bh // HKV,
        tl.arange(0, FP),
        tl.arange(0, C),
        tl.program_id(2) * VB + tl.arange(0, VB),
    )
    lam = _log_decay(log_decay, bh % HKV, IS_RATE)
    exponents += bh * N * F
    value += _head_of(bh, value_batch, value_head, HKV)
    if kept_value is not None:
        kept_value += bh * M * V
    visible += b * L
    order += b * L
    gone += bh * N
    if starts is not None:
        starts += b * N
    state, total, top = tl.zeros([FP, VB], tl.float32), tl.zeros([FP], tl.float32), tl.zeros([FP], tl.float32) + EMPTY
    if sums is not None:
        state, total, top = _load_sums(sums + bh * F * (V + 2), f, column, F, V)
    if states is not None and GROUPS > 1:
        for earlier in range(0, group):
            first = earlier * IN_GROUP * C
            count = _order_at(first + IN_GROUP * C - 1, order, before, N, W) - _order_at(first - 1, order, before, N, W)
            at = group_sums + (bh * GROUPS + earlier) * F * (V + 2)
            own, own_total, own_top = _load_sums(at, f, column, F, V)
            faded = top + lam * count.to(tl.float32)
            if starts is not None:
                state, total, faded = _where_it_goes_on(first, first + IN_GROUP * C - 1, starts, N, state, total, faded)
            new = tl.maximum(faded, own_top)
            keep, grow = tl.exp(faded - new), tl.exp(own_top - new)
            state, total, top = state * keep[:, None] + own * grow[:, None], total * keep + own_total * grow, new
    for k in range(group * IN_GROUP, tl.minimum(group * IN_GROUP + IN_GROUP, K)):
        if states is not None:
            _store_sums(states + (bh * K + k) * F * (V + 2), state, total, top, f, column, F, V)
        state, total, top = _add_chunk(
            state, total, top, k, t, column, f, exponents, value, value_row, kept_value, visible, order, gone, starts,
            lam, before, N,
            F, V, W, M, C, PRECISION,
        )  # fmt: skip
    if states is None:
        _store_sums(group_sums + (bh * GROUPS + group) * F * (V + 2), state, total, top, f, column, F, V)
    elif group == GROUPS - 1:
        _store_sums(new_sums + bh * F * (V + 2), state, total, top, f, column, F, V)


@triton.jit
def _sink_rows(
    sink_key, sink_value, seen, b, bh, n, c, cv, key_batch, key_head, key_row, value_batch, value_head, value_row, N,
    HKV: tl.constexpr, D: tl.constexpr, V: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
):  # fmt: skip
    """The keys and values of the sinks, and which of them the queries n see."""
    j = tl.arange(0, SP)
    at = sink_key + _head_of(bh, key_batch, key_head, HKV) + j[:, None] * key_row + c[None, :]
    keys = tl.load(at, mask=(j < S)[:, None] & (c < D)[None, :], other=0.0)
    at = sink_value + _head_of(bh, value_batch, value_head, HKV) + j[:, None] * value_row + cv[None, :]
    values = tl.load(at, mask=(j < S)[:, None] & (cv < V)[None, :], other=0.0)
    inside = (n < N)[:, None] & (j < S)[None, :]
    return keys, values, tl.load(seen + (b * N + n)[:, None] * S + j[None, :], mask=inside, other=0) != 0


@triton.jit
def _window_rows(
    slot, last, n, key, value, visible, key_row, value_row, c, cv, D: tl.constexpr, V: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Keys and values of the line at these slots before `last`, and which are in the windows of queries at slots n."""
    there = slot < last
    there = there & (tl.load(visible + slot, mask=there, other=0) != 0)
    at = slot.to(tl.int64)[:, None]
    keys = tl.load(key + at * key_row + c[None, :], mask=there[:, None] & (c < D)[None, :], other=0.0)
    values = tl.load(value + at * value_row + cv[None, :], mask=there[:, None] & (cv < V)[None, :], other=0.0)
    distance = n[:, None] - slot[None, :]
    return keys, values, there[None, :] & (distance >= 0) & (distance < W)


@triton.jit
def _outputs(
    query, key, value, visible, sink_key, sink_value, seen, position, key_position, order, frequencies,
    query_weight, log_decay, log_scale, norm_weight, kept_key, kept_value, kept_position, turned,
    leave, listed, counts, gone, starts, exponents, states, out, size_of, query_batch, query_head, query_row, key_batch,
    key_head, key_row, value_batch, value_head, value_row,
    sink_key_batch, sink_key_head, sink_key_row, sink_value_batch, sink_value_head, sink_value_row,
    before, L, N, K, scaling, root, trained,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    F: tl.constexpr, FP: tl.constexpr, W: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, M: tl.constexpr,
    ROOM: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, FIRST: tl.constexpr,
    INTERLEAVED: tl.constexpr, CLAMPS: tl.constexpr, IS_RATE: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // (HKV * G)).to(tl.int64), (head % (HKV * G)) // G
    bh = (head // G).to(tl.int64)
    own_head = head % (HKV * G)
    t, c, cv, f, j = tl.arange(0, C), tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, FP), tl.arange(0, BLOCK)
    n = k * C + t
    real = n < N
    visible += b * L
    order += b * L
    key += _head_of(bh, key_batch, key_head, HKV)
    value += _head_of(bh, value_batch, value_head, HKV)
    if kept_key is not None:
        kept_key += bh * M * D
        kept_value += bh * M * V
    query += b * query_batch + own_head.to(tl.int64) * query_head + n.to(tl.int64)[:, None] * query_row
    inside = real[:, None] & (c < D)[None, :]
    q = tl.load(query + c[None, :], mask=inside, other=0.0)
    other, number, sign = _pair(c, PAIRS, INTERLEAVED)
    output, top, total = tl.zeros([C, VP], tl.float32), tl.zeros([C], tl.float32) + EMPTY, tl.zeros([C], tl.float32)
    if starts is not None:
        begin = tl.load(starts + b * N + n, mask=real, other=N)
    furthest = -1
    if CLAMPS:
        p = tl.load(position + b * N + n, mask=real, other=0)
        furthest = tl.max(p, 0)
    if S > 0:
        sinks, sink_values, sees_sinks = _sink_rows(
            sink_key, sink_value, seen, b, bh, n, c, cv, sink_key_batch, sink_key_head, sink_key_row,
            sink_value_batch, sink_value_head, sink_value_row, N, HKV, D, V, S, SP,
        )  # fmt: skip
        moved = q
        if CLAMPS:
            if furthest >= trained:
                near_turn = _frequency(frequencies, c, 0, PAIRS, INTERLEAVED)[None, :]
                near_angle = (tl.minimum(p, trained - 1) - p).to(tl.float32)[:, None] * near_turn
                near_other = tl.load(query + other[None, :], mask=inside, other=0.0).to(tl.float32)
                moved = _turned(q.to(tl.float32), near_other, sign[None, :], near_angle).to(q.dtype)
        of_sinks = scaling * tl.dot(moved.to(T), tl.trans(sinks.to(T)), input_precision="ieee")
        total, top, output = _softmax(total, top, output, of_sinks, sees_sinks, sink_values, T)
    last = before + tl.minimum(k * C + C, N)
    for start in range(tl.maximum(before + k * C - W + 1, 0), last, BLOCK):
        keys, values, sees = _window_rows(
            start + j, last, before + n, key, value, visible, key_row, value_row, c, cv, D, V, W
        )
        if starts is not None:
            sees = sees & (start + j[None, :] >= begin[:, None])
        logits = scaling * tl.dot(q.to(T), tl.trans(keys.to(T)), input_precision="ieee")
        total, top, output = _softmax(total, top, output, logits, sees, values, T)
    if M > 0:
        moved = q
        if CLAMPS:
            if furthest >= trained:
                far_turn = _frequency(frequencies, c, 0, PAIRS, INTERLEAVED)[None, :]
                far_other = tl.load(query + other[None, :], mask=inside, other=0.0).to(tl.float32)
                far_angle = (trained - 1 - p).to(tl.float32)[:, None] * far_turn
                moved = _turned(q.to(tl.float32), far_other, sign[None, :], far_angle).to(q.dtype)
            if kept_position is not None:
                kept_position += bh * M
            turned += bh * (M + N) * D
        leave += bh * (M + N)
        listed += (bh * (K + 1) + k) * ROOM
        count = tl.load(counts + bh * (K + 1) + k)
        for start in range(0, count, BLOCK):
            there = start + j < count
            g = tl.load(listed + start + j, mask=there, other=0)
            ends = tl.load(leave + g, mask=there, other=0)
            keys = _rows(g, there, c, c < D, key, key_row, kept_key, before, D, W, M)
            values = _rows(g, there, cv, cv < V, value, value_row, kept_value, before, V, W, M)
            sees = there[None, :] & (g[None, :] - M <= n[:, None]) & (n[:, None] < ends[None, :])
            logits = tl.dot(q.to(T), tl.trans(keys.to(T)), input_precision="ieee")
            if CLAMPS:
                if furthest >= trained:
                    place = _numbers(g, there, key_position + b * L, 1, kept_position, before, W, M)
                    keys = tl.load(
                        turned + g.to(tl.int64)[:, None] * D + c[None, :],
                        mask=there[:, None] & (c < D)[None, :],
                        other=0.0,
                    )
                    distant = tl.dot(moved.to(T), tl.trans(keys.to(T)), input_precision="ieee")
                    logits = tl.where(p[:, None] - place[None, :] >= trained, distant, logits)
            total, top, output = _softmax(total, top, output, scaling * logits, sees, values, T)
    # The exponents of the queries, which the far keys have in common.
    x = q.to(tl.float32)
    norm = tl.sum(x * x, 1)
    if FIRST < PAIRS:
        map_turn = _frequency(frequencies, c, FIRST, PAIRS, INTERLEAVED)[None, :]
        x_other = tl.load(query + other[None, :], mask=inside, other=0.0).to(tl.float32)
        place_of = tl.load(position + b * N + n, mask=real, other=0).to(tl.float32)
        x = _turned(x, x_other, sign[None, :], -place_of[:, None] * map_turn)
    weight = tl.load(
        query_weight + own_head * D * F + c[:, None] * F + f[None, :],
        mask=(c < D)[:, None] & (f < F)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    a = tl.dot(x * root, weight, input_precision=PRECISION)
    lam = _log_decay(log_decay, h, IS_RATE)
    add = tl.load(log_scale + own_head).to(tl.float32)
    add = add - tl.load(norm_weight + own_head).to(tl.float32) * (scaling / 2) * norm
    came = _order_at(n, order, before, N, W)
    fade = lam * (came - _order_at(k * C - 1, order, before, N, W)).to(tl.float32)
    # Those displaced before the chunk.
    at = states + (bh * K + k) * F * (V + 2)
    state, weights, largest = _load_sums(at, f, cv, F, V)
    u = tl.where((f < F)[None, :], a + largest[None, :], 2 * EMPTY)
    high = tl.max(u, 1)
    u = tl.exp(u - high[:, None])
    size = tl.sum(u * weights[None, :], 1)
    if starts is not None:
        size = tl.where(begin < k * C, size, 0.0)
    high = tl.where(size > 0, high + add + fade, EMPTY)
    new = tl.maximum(top, high)
    keep, grow = tl.exp(top - new), tl.where(size > 0, tl.exp(high - new), 0.0)
    output = output * keep[:, None] + tl.dot(u.to(T), state.to(T), input_precision="ieee") * grow[:, None]
    total, top = total * keep + size * grow, new
    # Those displaced in it.
    g = _gone_at(n, gone + bh * N, visible, before, N, W, M)
    e = tl.load(exponents + (bh * N + n)[:, None] * F + f[None, :], mask=real[:, None] & (f < F)[None, :], other=EMPTY)
    most = tl.max(e, 0)
    u = tl.where((f < F)[None, :], a + most[None, :], 2 * EMPTY)
    high = tl.max(u, 1)
    u = tl.exp(u - high[:, None])
    weights = tl.where((g >= 0)[:, None] & (f < F)[None, :], tl.exp(e - most[None, :]), 0.0)
    pairs = tl.dot(u.to(T), tl.trans(weights.to(T)), input_precision="ieee")
    pairs = pairs * tl.exp(lam * tl.maximum(came[:, None] - came[None, :], 0).to(tl.float32))
    pairs = tl.where((t[None, :] <= t[:, None]) & (g >= 0)[None, :], pairs, 0.0)
    if starts is not None:
        pairs = tl.where(n[None, :] >= begin[:, None], pairs, 0.0)
    values = _rows(g, g >= 0, cv, cv < V, value, value_row, kept_value, before, V, W, M)
    size = tl.sum(pairs, 1)
    high = tl.where(size > 0, high + add, EMPTY)
    new = tl.maximum(top, high)
    keep, grow = tl.exp(top - new), tl.where(size > 0, tl.exp(high - new), 0.0)
    output = output * keep[:, None] + tl.dot(pairs.to(T), values.to(T), input_precision="ieee") * grow[:, None]
    total = total * keep + size * grow
    output = output / tl.where(total > 0, total, 1.0)[:, None]  # padding sees no key
    if size_of is not None:
        log_size = tl.where(total > 0, new + tl.log(tl.where(total > 0, total, 1.0)), EMPTY)
        tl.store(size_of + head.to(tl.int64) * N + n, log_size, mask=real)
    at = ((b * N + n) * (HKV * G) + own_head)[:, None] * V + cv[None, :]
    tl.store(out + at, output.to(out.dtype.element_ty), mask=real[:, None] & (cv < V)[None, :])


@triton.jit
def _keep(
    key, value, score, order, key_position, listed, counts, kept_key, kept_value, kept_score, kept_age, kept_position,
    new_key, new_value, new_score, new_age, new_position, key_batch, key_head, key_row, value_batch, value_head,
    value_row, score_batch, score_head, score_row, before, L, N, K,
    HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    bh, j = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b, c, cv = bh // HKV, tl.arange(0, DP), tl.arange(0, VP)
    if kept_key is not None:
        kept_key += bh * M * D
        kept_value += bh * M * V
        kept_score += bh * M
        kept_age += bh * M
    # Places without a key come first.
    rank = j - M + tl.load(counts + bh * (K + 1) + K)
    there = (rank >= 0) & (j < M)
    g = tl.load(listed + (bh * (K + 1) + K) * ROOM + rank, mask=there, other=0)
    row = bh * M + j
    keys = _rows(g, there, c, c < D, key + _head_of(bh, key_batch, key_head, HKV), key_row, kept_key, before, D, W, M)
    tl.store(new_key + row[:, None] * D + c[None, :], keys, mask=(j < M)[:, None] & (c < D)[None, :])
    values = _rows(
        g, there, cv, cv < V, value + _head_of(bh, value_batch, value_head, HKV), value_row, kept_value, before, V, W, M
    )
    tl.store(new_value + row[:, None] * V + cv[None, :], values, mask=(j < M)[:, None] & (cv < V)[None, :])
    tl.store(
        new_score + row,
        _numbers(g, there, score + _head_of(bh, score_batch, score_head, HKV), score_row, kept_score, before, W, M),
        mask=j < M,
    )
    came = tl.load(order + b * L + g - M + before - W, mask=there & (g >= M), other=0)
    if kept_age is not None:
        came = tl.where(g < M, 1 - tl.load(kept_age + g, mask=there & (g < M), other=0), came)
    age = _order_at(N - 1, order + b * L, before, N, W) - came + 1
    tl.store(new_age + row, tl.where(there, age, 0), mask=j < M)
    if new_position is not None:
        if kept_position is not None:
            kept_position += bh * M
        tl.store(
            new_position + row, _numbers(g, there, key_position + b * L, 1, kept_position, before, W, M), mask=j < M
        )


def chunk_of(features: int, *rows: Tensor) -> int:
    """How many queries a program has, and keys at a time: with rows of up to 512 bytes, at most 99,328 bytes of shared
    memory, which all GPUs have from compute capability 8.0 on.
    """
    return 64 if features <= 64 and max(wide(x.shape[3]) * x.element_size() for x in rows) <= 256 else 32


def choose(
    score: Tensor, visible: Tensor, kept_score: Tensor | None, kept_age: Tensor | None, strides: Sequence[int], *,
    before: int, length: int, window: int, count: int, chunk: int, spans: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """When each key is displaced, and which keys that are.

    Args:
        score: `[B, Hkv, L, 1]`, with these `strides` of sequences, heads and rows.
        visible: bool `[B, L]`, of which `before` rows come before the N = `length` queries.
        kept_score, kept_age: `[B, Hkv, M, 1]` of the M = `count` exact keys from before, or None.
        chunk: see `chunk_of`.
        spans: see `run`.

    Returns:
        Each int32: `[B Hkv, M + N]`, the query from which on a key is displaced or its packed sequence has ended, N + 1
        for none; `[B Hkv, N]`, the key that is displaced before each query, -1 for none; `[B Hkv, K + 1, M + C]`, the
        keys that each chunk sees and those that are kept after the last; `[B Hkv, K + 1]`, how many of them.
    """
    (batch, kv_heads, slots, _), chunks = score.shape, -(-length // chunk)
    rows, total = batch * kv_heads, count + length
    (starts, ends), least, kind = (None, None), NO_SCORE, torch.float32
    if spans is not None:
        (starts, ends), least, kind = spans, NO_NUMBER, torch.int64
    shared: dict[str, Any] = {"M": count, "LEAST": least}

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=score.device)

    scores, leave, gone, bounds = new(total, dtype=kind), new(total), new(length), new(chunks + 1)
    _line_up[(rows, -(-total // LISTED))](
        score, visible, kept_score, kept_age, scores, leave, gone, starts, ends, *strides, before, slots, length,
        HKV=kv_heads, W=window, BLOCK=LISTED, num_warps=8, **shared,
    )  # fmt: skip
    sorted_scores = scores.sort(dim=1, descending=True, stable=True)
    of_group = max(GROUP, -(-chunks // MOST_GROUPS))
    groups = -(-chunks // of_group)
    given = scores, *sorted_scores, bounds
    _bounds[(rows, groups)](*given, length, chunks, C=chunk, IN_GROUP=of_group, BLOCK=LISTED, num_warps=8, **shared)
    _choose[(rows, chunks)](*given, leave, gone, starts, length, chunks, HKV=kv_heads, W=window, C=chunk, **shared)
    return leave, gone, *lists_of(leave, length, count, chunk)


def lists_of(leave: Tensor, length: int, count: int, chunk: int) -> tuple[Tensor, Tensor]:
    """The keys that each chunk sees and those that are kept after the last, int32 `[B Hkv, K + 1, M + C]`, and how many
    of them, `[B Hkv, K + 1]`; `leave` is what `choose` returns.
    """
    rows, chunks, room = leave.shape[0], -(-length // chunk), count + chunk
    of_group = max(GROUP, -(-chunks // MOST_GROUPS))
    groups = chunks // of_group + 1
    sizes: dict[str, Any] = {"ROOM": room, "M": count, "C": chunk, "GROUP": of_group, "BLOCK": LISTED, "num_warps": 8}
    of_groups: list[Tensor | None] = [None, None]
    if groups > 1:
        of_groups = [leave.new_empty(rows, groups, room), leave.new_empty(rows, groups)]
        _list[(rows, groups)](leave, None, None, *of_groups, length, chunks, of_group, groups, **sizes)
    listed, counts = leave.new_empty(rows, chunks + 1, room), leave.new_empty(rows, chunks + 1)
    _list[(rows, chunks + 1)](leave, *of_groups, listed, counts, length, chunks, 1, groups, **sizes)
    return listed, counts


def run(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, sink_key: Tensor, sink_value: Tensor, seen: Tensor,
    score: Tensor | None, position: Tensor | None, key_position: Tensor | None, key_weight: Tensor,
    key_bias: Tensor | None, key_norm: Tensor | None, query_weight: Tensor, log_decay: Tensor | None,
    sums: Tensor | None, kept: Sequence[Tensor], log_scale: Tensor, norm_weight: Tensor, frequencies: Tensor | None,
    spans: Tensor | None, window: int, count: int, first_turned: int, is_interleaved: bool, trained_length: int,
    scaling: float, is_rate: bool, out: Tensor, new_sums: Tensor, new_kept: Sequence[Tensor],
    size: Tensor | None = None, has_room: bool = True,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Write the output `out [B, N, H, W]`, the sums and the exact keys after the last token, and the logarithm of the
    denominator of each query, `size [B, H, N]`; returns what `_choose` writes, if there are exact keys.

    See `HybridArguments` for the arguments, and `triton_step.run` for those of the map. `spans`, int32 `[2, B, N]`, are
    the first token of each token's packed sequence and the one behind its last; nothing comes before, and there are
    exact keys and no sinks. `has_room` says whether there is shared memory for exact keys from before that are loaded
    ahead (`AFTER_KEYS`).
    """
    (batch, heads, length, dim), kv_heads, slots, width = query.shape, key.shape[1], key.shape[2], value.shape[3]
    features, sinks, device = key_weight.shape[2], sink_key.shape[2], query.device
    chunk = chunk_of(features, query, key, value)
    rows, before, chunks = batch * kv_heads, slots - length, -(-length // chunk)
    groups = -(-chunks // GROUP)
    columns, value_columns = wide(dim), wide(width)
    pairs = 0 if frequencies is None else frequencies.shape[0]

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    old: list[Tensor | None] = [*kept, *[None] * (5 - len(kept))]
    kept_key, kept_value, kept_score, kept_age, kept_position = old
    loads_ahead = has_room or kept_key is None
    made: list[Tensor | None] = [*new_kept, *[None] * (5 - len(new_kept))]
    # Of sequences, heads and rows; columns are dense.
    strides = [(0, 0, 0) if x is None else x.stride()[:3] for x in (query, key, value, score, sink_key, sink_value)]
    order = visible.cumsum(dim=1, dtype=torch.int32)
    where = {"before": before, "L": slots, "N": length}
    shared: dict[str, Any] = {"HKV": kv_heads, "W": window, "M": count}
    turns: dict[str, Any] = {"PAIRS": pairs, "INTERLEAVED": is_interleaved, "FIRST": first_turned}
    leave = listed = counts = gone = None
    starts = None if spans is None else spans[0]
    if count:
        scored: Any = (score, visible, kept_score, kept_age, strides[3])
        leave, gone, listed, counts = choose(
            *scored, before=before, length=length, window=window, count=count, chunk=chunk, spans=spans
        )
    exact = value.dtype  # under autocast, rotary positions make queries and keys float32
    # Exponents need all digits, which products of three halves have, too; those of float32 are exact.
    precision = "ieee" if exact == torch.float32 else "tf32x3"
    unused = gone if gone is not None else order
    exponents = new(rows, length, features)
    _exponents[(rows, chunks)](
        key, visible, order, unused, key_position, frequencies, key_weight, key_bias, key_norm, log_decay,
        kept_key, kept_age, kept_position, exponents, *strides[1], *where.values(), scaling**0.5,
        D=dim, DP=columns, F=features, FP=wide(features), C=chunk, IS_RATE=is_rate, PRECISION=precision, num_warps=8,
        **shared, **turns,
    )  # fmt: skip
    states, group_sums = new(rows, chunks, features, width + 2), None
    block = min(value_columns, 64)
    given = exponents, value, kept_value, visible, order, unused, starts, log_decay
    sizes = {
        **{
            "F": features,
            "FP": wide(features),
            "V": width,
            "VB": block,
            "C": chunk,
            "PRECISION": precision,
            "num_warps": 8,
            "IN_GROUP": GROUP,
        },
        **{"GROUPS": groups, "IS_RATE": is_rate, "num_stages": 3 if loads_ahead else 1},
    }
    parts = -(-width // block)
    strides_of_line = (*strides[2], *where.values(), chunks)
    if groups > 1:
        group_sums = new(rows, groups, features, width + 2)
        _states[(rows, groups - 1, parts)](*given, None, group_sums, None, None, *strides_of_line, **shared, **sizes)
    _states[(rows, groups, parts)](*given, sums, group_sums, states, new_sums, *strides_of_line, **shared, **sizes)
    clamps, turned = bool(pairs and trained_length and position is not None), None
    if clamps and count:
        turned = new(rows, count + length, dim, dtype=key.dtype)
        _turn[(rows, -(-(count + length) // chunk))](
            key, key_position, frequencies, kept_key, kept_position, turned, *strides[1], *where.values(),
            D=dim, DP=columns, C=chunk, PAIRS=pairs, INTERLEAVED=is_interleaved, num_warps=8, **shared,
        )  # fmt: skip
    _outputs[(chunks, batch * heads)](
        query, key, value, visible, sink_key, sink_value, seen, position, key_position, order, frequencies,
        query_weight, log_decay, log_scale, norm_weight, kept_key, kept_value, kept_position, turned,
        leave, listed, counts, unused, starts, exponents, states, out, size, *strides[0], *strides[1], *strides[2],
        *strides[4], *strides[5], *where.values(),
        chunks, scaling, scaling**0.5,
        trained_length,
        G=heads // kv_heads, D=dim, DP=columns, V=width, VP=value_columns, F=features, FP=wide(features), S=sinks,
        SP=wide(sinks), ROOM=count + chunk, C=chunk, BLOCK=chunk, IS_RATE=is_rate,
        CLAMPS=clamps, T=TYPES[exact], PRECISION=precision,
        num_warps=8,
        num_stages=2 if loads_ahead else 1,
        **shared, **turns,
    )  # fmt: skip
    if count:
        _keep[(rows, -(-count // 64))](
            key, value, score, order, key_position, listed, counts, *old, *made, *strides[1], *strides[2], *strides[3],
            *where.values(), chunks,
            D=dim, DP=columns, V=width, VP=value_columns, ROOM=count + chunk, BLOCK=64, **shared,
        )  # fmt: skip
    return leave, gone
