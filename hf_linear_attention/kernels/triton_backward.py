# SPDX-License-Identifier: Apache-2.0
"""The gradients of `hybrid` on CUDA: what triton_prefill.py computes of whole sequences, computed again and backwards.

With the logarithm l_n of the denominator of query n, every key has the weight p = exp(its exponent - l_n), as in
FlashAttention-2 (Dao 2023, algorithm 2), and the gradient of the exponent is p (dO_n·v - dO_n·O_n). A far key has an
exponent a_nf + e_tf for each feature, so that

    da_nf = exp(a_nf - l_n) (S_f·dO_n - Z_f dO_n·O_n)      S, Z: the far sums before query n, of values and of ones
    de_tf = exp(e_tf) (R_f·v_t - Y_f)                      R, Y: sums over later queries, of dO_n and of dO_n·O_n
    dv_t  = sum_f exp(e_tf) R_f

All but a_nf, e_tf and l_n is at most 1, and S and R are kept relative to the largest exponent of each feature. What the
forward pass keeps is its choice of keys and l_n. The launches, after those of lists, exponents and states again:

    _of_far_queries  a program per chunk and query head: a_nf, and the gradients of queries that are due to far keys
    _of_queries      the same, of window, sinks and exact keys; adds to what the one before wrote
    _states_behind   R and Y behind each chunk, in groups of chunks as `_states`
    _of_far_keys     a program per chunk: the gradients of the keys that are displaced in it, as far keys
    _lives, a sort   the keys in packs of similar lives
    _of_keys         a program per pack: the other gradients of keys and values, and the sum of both

A key is exact from its own query on until it is displaced, so the queries that see it follow one another. In a pack,
lives are of similar lengths: few queries are visited that do not see most of its keys.

In no launch several programs add to the same numbers, so gradients are the same in every run. Axes: triton_prefill.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .operators import gradient_like
from .triton_prefill import (
    EMPTY,
    GROUP,
    _exponents,
    _gone_at,
    _head_of,
    _load_sums,
    _numbers,
    _order_at,
    _rows,
    _sink_rows,
    _start_at,
    _states,
    _store_sums,
    _where_it_goes_on,
    _window_rows,
    chunk_of,
    lists_of,
)
from .triton_step import TYPES, _frequency, _log_decay, _pair, _turned, wide


# A far key that comes later in a chunk and is e^80 times larger in a feature hides earlier ones there.
LARGEST = tl.constexpr(80.0)
LIVES = 1024  # keys of a program of `_lives`


@triton.jit
def _turned_with(x, other, sign, angle):
    """The rows `x` turned by `angle`; `other` says which are the other columns of rotary pairs."""
    return _turned(x, tl.gather(x, tl.broadcast_to(other[None, :], x.shape), 1), sign[None, :], angle)


@triton.jit
def _map_rows(
    query, position, frequencies, t, c, k, N, query_row, D: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr,
    FIRST: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The queries of a chunk, and as the feature map sees them."""
    n = k * C + t
    inside = (n < N)[:, None] & (c < D)[None, :]
    q = tl.load(query + n.to(tl.int64)[:, None] * query_row + c[None, :], mask=inside, other=0.0).to(tl.float32)
    x = q
    if FIRST < PAIRS:
        other, number, sign = _pair(c, PAIRS, INTERLEAVED)
        turn = _frequency(frequencies, c, FIRST, PAIRS, INTERLEAVED)[None, :]
        place = tl.load(position + n, mask=n < N, other=0)
        x = _turned_with(q, other, sign, -place.to(tl.float32)[:, None] * turn)
    return q, x


@triton.jit
def _whole(x):
    """The sum of a vector as a block of one number. For sm_100, Triton 3.7 does not compile the sum of what a product
    has made if it is a scalar ("parent layout must have at least rank >= 2").
    """
    return tl.sum(x[:, None], 0)


@triton.jit
def _of_far_queries(
    query, value, visible, position, order, frequencies, query_weight, log_decay, log_scale, norm_weight, gone,
    starts, exponents, states, out, grad_out, size, delta, query_exponents, grad_query, of_maps,
    query_batch, query_head, query_row, value_batch, value_head, value_row, grad_batch, grad_head, grad_row,
    N, K, scaling, root,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    F: tl.constexpr, FP: tl.constexpr, W: tl.constexpr, M: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr,
    FIRST: tl.constexpr, INTERLEAVED: tl.constexpr, IS_RATE: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
    FAR: tl.constexpr,
):  # fmt: skip
    k, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // (HKV * G)).to(tl.int64), (head % (HKV * G)) // G
    bh = (head // G).to(tl.int64)
    own_head = head % (HKV * G)
    t, c, cv, f = tl.arange(0, C), tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, FP)
    n = k * C + t
    real = n < N
    order += b * N
    position = position if position is None else position + b * N
    value += _head_of(bh, value_batch, value_head, HKV)
    query += b * query_batch + own_head.to(tl.int64) * query_head
    at = ((b * N + n) * (HKV * G) + own_head)[:, None] * V + cv[None, :]
    rows = tl.load(grad_out + at, mask=real[:, None] & (cv < V)[None, :], other=0.0)
    output = tl.load(out + at, mask=real[:, None] & (cv < V)[None, :], other=0.0)
    average = tl.sum(rows.to(tl.float32) * output.to(tl.float32), 1)
    of_head = head.to(tl.int64) * N + n
    tl.store(delta + of_head, average, mask=real)
    lse = tl.load(size + of_head, mask=real, other=EMPTY)
    # Exponents of the queries, which include all that a far key weighs for a query.
    weight_at = query_weight + own_head * D * F + c[:, None] * F + f[None, :]
    inside_weight = (c < D)[:, None] & (f < F)[None, :]
    q, x = _map_rows(query, position, frequencies, t, c, k, N, query_row, D, C, PAIRS, FIRST, INTERLEAVED)
    norm_of_head = tl.load(norm_weight + own_head).to(tl.float32)
    add = tl.load(log_scale + own_head).to(tl.float32) - norm_of_head * (scaling / 2) * tl.sum(q * q, 1) - lse
    weight = tl.load(weight_at, mask=inside_weight, other=0.0).to(tl.float32)
    a = tl.dot(x * root, weight, input_precision=PRECISION) + add[:, None]
    a = tl.where((real & (lse > EMPTY / 2))[:, None] & (f < F)[None, :], a, EMPTY)
    inside = real[:, None] & (f < F)[None, :]
    tl.store(query_exponents + of_head[:, None] * F + f[None, :], a, mask=inside)
    # Those displaced before the chunk.
    lam = _log_decay(log_decay, h, IS_RATE)
    since = (_order_at(n, order, 0, N, W) - _order_at(k * C - 1, order, 0, N, W)).to(tl.float32)
    state, total, largest = _load_sums(states + (bh * K + k) * F * (V + 2), f, cv, F, V)
    found = tl.dot(rows.to(tl.float32), tl.trans(state), input_precision=FAR) - average[:, None] * total[None, :]
    of_features = tl.exp(tl.minimum(a + largest[None, :] + lam * since[:, None], 0.0)) * found
    if starts is not None:
        begin = tl.load(starts + b * N + n, mask=real, other=N)
        of_features = tl.where((begin < k * C)[:, None], of_features, 0.0)
    of_decay = _whole(tl.sum(of_features, 1) * since)
    # Those displaced in it.
    g = _gone_at(n, gone + bh * N, visible + b * N, 0, N, W, M)
    e = tl.load(exponents + (bh * N + n)[:, None] * F + f[None, :], mask=inside, other=EMPTY)
    most = tl.max(e, 0)
    weights = tl.where((g >= 0)[:, None] & (f < F)[None, :], tl.exp(e - most[None, :]), 0.0)
    values = _rows(g, g >= 0, cv, cv < V, value, value_row, None, 0, V, W, M)
    pairs = tl.dot(rows.to(T), tl.trans(values.to(T)), input_precision="ieee") - average[:, None]
    pairs = pairs * tl.exp(lam * tl.maximum(since[:, None] - since[None, :], 0.0))
    pairs = tl.where((t[None, :] <= t[:, None]) & (g >= 0)[None, :], pairs, 0.0)
    if starts is not None:
        pairs = tl.where(n[None, :] >= begin[:, None], pairs, 0.0)
    scale = tl.exp(tl.minimum(a + most[None, :], LARGEST))
    of_features += scale * tl.dot(pairs, weights, input_precision=FAR)
    # Back through the map; rows are read again, because there are few registers.
    q, x = _map_rows(query, position, frequencies, t, c, k, N, query_row, D, C, PAIRS, FIRST, INTERLEAVED)
    sums, norm = tl.sum(of_features, 1), tl.sum(q * q, 1)
    of_maps += (head.to(tl.int64) * K + k) * (D * F + 3)
    numbers = of_maps + D * F + tl.arange(0, 1)
    of_weight = tl.dot(tl.trans(x * root), of_features, input_precision=FAR)
    tl.store(of_maps + c[:, None] * F + f[None, :], of_weight, mask=inside_weight)
    tl.store(numbers, _whole(sums))
    tl.store(numbers + 1, -scaling / 2 * _whole(sums * norm))
    tl.store(numbers + 2, of_decay)
    weight = tl.load(weight_at, mask=inside_weight, other=0.0).to(tl.float32)
    grad = root * tl.dot(of_features, tl.trans(weight), input_precision=FAR)
    if FIRST < PAIRS:
        other, number, sign = _pair(c, PAIRS, INTERLEAVED)
        turn = _frequency(frequencies, c, FIRST, PAIRS, INTERLEAVED)[None, :]
        place = tl.load(position + n, mask=real, other=0)
        grad = _turned_with(grad, other, sign, place.to(tl.float32)[:, None] * turn)
    grad -= (norm_of_head * scaling * sums)[:, None] * q
    at = b * grad_batch + own_head.to(tl.int64) * grad_head + n.to(tl.int64)[:, None] * grad_row + c[None, :]
    tl.store(grad_query + at, grad.to(grad_query.dtype.element_ty), mask=real[:, None] & (c < D)[None, :])


@triton.jit
def _of_queries(
    query, key, value, visible, sink_key, sink_value, seen, position, key_position, frequencies, leave, listed, counts,
    starts, grad_out, size, delta, grad_query, of_sinks,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    sink_key_batch, sink_key_head, sink_key_row, sink_value_batch, sink_value_head, sink_value_row,
    grad_batch, grad_head, grad_row, N, K, scaling, trained,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    W: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, M: tl.constexpr, ROOM: tl.constexpr, C: tl.constexpr,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, CLAMPS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    k, head = tl.program_id(0), tl.program_id(1)
    b = (head // (HKV * G)).to(tl.int64)
    bh = (head // G).to(tl.int64)
    own_head = head % (HKV * G)
    t, c, cv, j = tl.arange(0, C), tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, BLOCK)
    n = k * C + t
    real = n < N
    visible += b * N
    key += _head_of(bh, key_batch, key_head, HKV)
    value += _head_of(bh, value_batch, value_head, HKV)
    query += b * query_batch + own_head.to(tl.int64) * query_head + n.to(tl.int64)[:, None] * query_row
    inside = real[:, None] & (c < D)[None, :]
    q = tl.load(query + c[None, :], mask=inside, other=0.0)
    other, number, sign = _pair(c, PAIRS, INTERLEAVED)
    rows = tl.load(
        grad_out + ((b * N + n) * (HKV * G) + own_head)[:, None] * V + cv[None, :],
        mask=real[:, None] & (cv < V)[None, :],
        other=0.0,
    )
    of_head = head.to(tl.int64) * N + n
    lse = tl.load(size + of_head, mask=real, other=0.0)
    average = tl.load(delta + of_head, mask=real, other=0.0)
    grad_query += b * grad_batch + own_head.to(tl.int64) * grad_head + n.to(tl.int64)[:, None] * grad_row + c[None, :]
    grad = tl.zeros([C, DP], tl.float32)
    furthest = -1
    if CLAMPS:
        p = tl.load(position + b * N + n, mask=real, other=0)
        furthest = tl.max(p, 0)
    if S > 0:
        js = tl.arange(0, SP)
        sinks, sink_values, sees_sinks = _sink_rows(
            sink_key, sink_value, seen, b, bh, n, c, cv, sink_key_batch, sink_key_head, sink_key_row,
            sink_value_batch, sink_value_head, sink_value_row, N, HKV, D, V, S, SP,
        )  # fmt: skip
        moved_to_sinks = q
        if CLAMPS:
            if furthest >= trained:
                near_turn = _frequency(frequencies, c, 0, PAIRS, INTERLEAVED)[None, :]
                near_angle = (tl.minimum(p, trained - 1) - p).to(tl.float32)[:, None] * near_turn
                moved_to_sinks = _turned_with(q.to(tl.float32), other, sign, near_angle).to(q.dtype)
        of_sink = scaling * tl.dot(moved_to_sinks.to(T), tl.trans(sinks.to(T)), input_precision="ieee")
        of_sink = tl.where(sees_sinks, tl.exp(of_sink - lse[:, None]), 0.0)
        sink_slopes = tl.dot(rows.to(T), tl.trans(sink_values.to(T)), input_precision="ieee")
        sink_slopes = scaling * of_sink * (sink_slopes - average[:, None])
        of_sinks += ((head.to(tl.int64) * K + k) * S + js)[:, None] * (D + V)
        sink_grad = tl.dot(tl.trans(sink_slopes.to(T)), moved_to_sinks.to(T), input_precision="ieee")
        tl.store(of_sinks + c[None, :], sink_grad, mask=(js < S)[:, None] & (c < D)[None, :])
        value_grad = tl.dot(tl.trans(of_sink.to(T)), rows.to(T), input_precision="ieee")
        tl.store(of_sinks + D + cv[None, :], value_grad, mask=(js < S)[:, None] & (cv < V)[None, :])
        grad = tl.dot(sink_slopes.to(T), sinks.to(T), input_precision="ieee")
        if CLAMPS:
            if furthest >= trained:
                turn_of_sinks = _frequency(frequencies, c, 0, PAIRS, INTERLEAVED)[None, :]
                angle_of_sinks = (tl.minimum(p, trained - 1) - p).to(tl.float32)[:, None] * turn_of_sinks
                grad = _turned_with(grad, other, sign, -angle_of_sinks)
    last = tl.minimum(k * C + C, N)
    for start in range(tl.maximum(k * C - W + 1, 0), last, BLOCK):
        keys, values, sees = _window_rows(start + j, last, n, key, value, visible, key_row, value_row, c, cv, D, V, W)
        if starts is not None:
            begin = tl.load(starts + b * N + n, mask=real, other=N)
            sees = sees & (start + j[None, :] >= begin[:, None])
        logits = scaling * tl.dot(q.to(T), tl.trans(keys.to(T)), input_precision="ieee")
        weights = tl.where(sees, tl.exp(logits - lse[:, None]), 0.0)
        slopes = tl.dot(rows.to(T), tl.trans(values.to(T)), input_precision="ieee")
        slopes = scaling * weights * (slopes - average[:, None])
        grad += tl.dot(slopes.to(T), keys.to(T), input_precision="ieee")
    if M > 0:
        leave += bh * (M + N)
        listed += (bh * (K + 1) + k) * ROOM
        count = tl.load(counts + bh * (K + 1) + k)
        for start in range(0, count, BLOCK):
            there = start + j < count
            g = tl.load(listed + start + j, mask=there, other=0)
            ends = tl.load(leave + g, mask=there, other=0)
            keys = _rows(g, there, c, c < D, key, key_row, None, 0, D, W, M)
            values = _rows(g, there, cv, cv < V, value, value_row, None, 0, V, W, M)
            sees = there[None, :] & (g[None, :] - M <= n[:, None]) & (n[:, None] < ends[None, :])
            if CLAMPS:
                place = _numbers(g, there, key_position + b * N, 1, None, 0, W, M)
                sees = sees & (p[:, None] - place[None, :] < trained)
            logits = scaling * tl.dot(q.to(T), tl.trans(keys.to(T)), input_precision="ieee")
            weights = tl.where(sees, tl.exp(logits - lse[:, None]), 0.0)
            slopes = tl.dot(rows.to(T), tl.trans(values.to(T)), input_precision="ieee")
            slopes = scaling * weights * (slopes - average[:, None])
            grad += tl.dot(slopes.to(T), keys.to(T), input_precision="ieee")
        if CLAMPS:
            if furthest >= trained:
                turn = _frequency(frequencies, c, 0, PAIRS, INTERLEAVED)[None, :]
                forth = (trained - 1 - p).to(tl.float32)[:, None] * turn
                moved = _turned_with(q.to(tl.float32), other, sign, forth).to(q.dtype).to(T)
                of_moved = tl.zeros([C, DP], tl.float32)
                for start in range(0, count, BLOCK):
                    there = start + j < count
                    g = tl.load(listed + start + j, mask=there, other=0)
                    ends = tl.load(leave + g, mask=there, other=0)
                    place = _numbers(g, there, key_position + b * N, 1, None, 0, W, M)
                    sees = there[None, :] & (g[None, :] - M <= n[:, None]) & (n[:, None] < ends[None, :])
                    sees = sees & (p[:, None] - place[None, :] >= trained)
                    keys = _rows(g, there, c, c < D, key, key_row, None, 0, D, W, M)
                    turned = _turned_with(keys.to(tl.float32), other, sign, -place.to(tl.float32)[:, None] * turn)
                    turned = turned.to(keys.dtype).to(T)
                    logits = scaling * tl.dot(moved, tl.trans(turned), input_precision="ieee")
                    weights = tl.where(sees, tl.exp(logits - lse[:, None]), 0.0)
                    values = _rows(g, there, cv, cv < V, value, value_row, None, 0, V, W, M)
                    slopes = tl.dot(rows.to(T), tl.trans(values.to(T)), input_precision="ieee")
                    slopes = scaling * weights * (slopes - average[:, None])
                    of_moved += tl.dot(slopes.to(T), turned, input_precision="ieee")
                grad += _turned_with(of_moved, other, sign, -forth)
    grad += tl.load(grad_query, mask=inside, other=0.0).to(tl.float32)  # what `_of_far_queries` wrote
    tl.store(grad_query, grad.to(grad_query.dtype.element_ty), mask=inside)


@triton.jit
def _states_behind(
    query_exponents, grad_out, delta, order, starts, log_decay, group_sums, states, N, K,
    HKV: tl.constexpr, G: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, V: tl.constexpr, VB: tl.constexpr,
    W: tl.constexpr, C: tl.constexpr, FAR: tl.constexpr, IN_GROUP: tl.constexpr, GROUPS: tl.constexpr,
    IS_RATE: tl.constexpr,
):  # fmt: skip
    """R and Y of the queries behind each chunk; without `states`, those of each group alone, but not of the first."""
    bh, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if states is None:
        group += 1
    b, h = bh // HKV, bh % HKV
    f, t, column = tl.arange(0, FP), tl.arange(0, C), tl.program_id(2) * VB + tl.arange(0, VB)
    lam = _log_decay(log_decay, h, IS_RATE)
    order += b * N
    if starts is not None:
        starts += b * N
    grad_out += b * N * (HKV * G) * V
    state, total, top = tl.zeros([FP, VB], tl.float32), tl.zeros([FP], tl.float32), tl.zeros([FP], tl.float32) + EMPTY
    if states is not None and GROUPS > 1:
        for i in range(group + 1, GROUPS):
            later = GROUPS + group - i
            first = later * IN_GROUP * C
            count = _order_at(first + IN_GROUP * C - 1, order, 0, N, W) - _order_at(first - 1, order, 0, N, W)
            own, own_total, own_top = _load_sums(group_sums + (bh * GROUPS + later) * F * (V + 2), f, column, F, V)
            faded = top + lam * count.to(tl.float32)
            if starts is not None:
                state, total, faded = _where_it_goes_on(first, first + IN_GROUP * C - 1, starts, N, state, total, faded)
            new = tl.maximum(faded, own_top)
            keep, grow = tl.exp(faded - new), tl.exp(own_top - new)
            state, total, top = state * keep[:, None] + own * grow[:, None], total * keep + own_total * grow, new
    last = tl.minimum(group * IN_GROUP + IN_GROUP, K)
    for i in range(0, last - group * IN_GROUP):
        k = last - 1 - i
        if states is not None:
            _store_sums(states + (bh * K + k) * F * (V + 2), state, total, top, f, column, F, V)
        n = k * C + t
        start = _order_at(k * C - 1, order, 0, N, W)
        fade = lam * (_order_at(n, order, 0, N, W) - start).to(tl.float32)
        faded = top + lam * (_order_at(k * C + C - 1, order, 0, N, W) - start).to(tl.float32)
        own = n < N
        if starts is not None:  # of the sequence of the last token before the chunk alone
            own = own & (_start_at(n, starts, N) < k * C)
            state, total, faded = _where_it_goes_on(k * C, k * C + C - 1, starts, N, state, total, faded)
        inside = own[:, None] & (f < F)[None, :]
        new = faded
        for g in range(G):
            at = (bh * G + g) * N + n
            a = tl.load(query_exponents + at[:, None] * F + f[None, :], mask=inside, other=EMPTY)
            new = tl.maximum(new, tl.max(a + fade[:, None], 0))
        keep = tl.exp(faded - new)
        state, total = state * keep[:, None], total * keep
        for g in range(G):
            at = (bh * G + g) * N + n
            a = tl.load(query_exponents + at[:, None] * F + f[None, :], mask=inside, other=EMPTY)
            weights = tl.where(a > EMPTY / 2, tl.exp(a + fade[:, None] - new[None, :]), 0.0)
            rows = tl.load(
                grad_out + (n.to(tl.int64) * (HKV * G) + h * G + g)[:, None] * V + column[None, :],
                mask=(n < N)[:, None] & (column < V)[None, :],
                other=0.0,
            )
            state += tl.dot(tl.trans(weights), rows.to(tl.float32), input_precision=FAR)
            total += tl.sum(weights * tl.load(delta + at, mask=n < N, other=0.0)[:, None], 0)
        top = new
    if states is None:
        _store_sums(group_sums + (bh * GROUPS + group) * F * (V + 2), state, total, top, f, column, F, V)


@triton.jit
def _of_far_keys(
    key, value, visible, position, order, frequencies, key_weight, key_norm, log_decay, gone, starts, exponents,
    query_exponents, grad_out, delta, states, behind, far_key, far_value, of_maps,
    key_batch, key_head, key_row, value_batch, value_head, value_row, N, K, root,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    F: tl.constexpr, FP: tl.constexpr, W: tl.constexpr, M: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr,
    FIRST: tl.constexpr, INTERLEAVED: tl.constexpr, IS_RATE: tl.constexpr, T: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    k, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // HKV, bh % HKV
    t, c, cv, f = tl.arange(0, C), tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, FP)
    n = k * C + t
    real = n < N
    order += b * N
    key += _head_of(bh, key_batch, key_head, HKV)
    value += _head_of(bh, value_batch, value_head, HKV)
    g = _gone_at(n, gone + bh * N, visible + b * N, 0, N, W, M)
    there = g >= 0
    inside = real[:, None] & (f < F)[None, :]
    e = tl.load(exponents + (bh * N + n)[:, None] * F + f[None, :], mask=inside, other=EMPTY)
    values = _rows(g, there, cv, cv < V, value, value_row, None, 0, V, W, M)
    lam = _log_decay(log_decay, h, IS_RATE)
    came = _order_at(n, order, 0, N, W)
    start, end = _order_at(k * C - 1, order, 0, N, W), _order_at(k * C + C - 1, order, 0, N, W)
    until = (end - came).to(tl.float32)
    # What later chunks make of these keys.
    at = (bh * K + k) * F * (V + 2)
    state, total, top = _load_sums(behind + at, f, cv, F, V)
    weights = tl.exp(tl.minimum(e + lam * until[:, None] + top[None, :], 0.0))
    goes_on = there
    if starts is not None:
        starts += b * N
        start_of_last = _start_at(k * C + C - 1, starts, N)
        goes_on = there & (n >= start_of_last)
    weights = tl.where(goes_on[:, None] & (f < F)[None, :], weights, 0.0)
    found = tl.dot(values.to(tl.float32), tl.trans(state), input_precision=FAR) - total[None, :]
    of_features = weights * found
    of_value = tl.dot(weights, state, input_precision=FAR)
    of_decay = tl.zeros([1], tl.float32)
    if log_decay is not None:
        # The tokens between a key and a query: those after the key in its chunk, of whole chunks, and before the query.
        of_decay = _whole(tl.sum(of_features, 1) * until)
        before, total_before, largest = _load_sums(states + at, f, cv, F, V)
        length = (end - start).to(tl.float32)
        found = tl.sum(before * state, 1) - total_before * total
        found = _whole(found * tl.exp(tl.minimum(largest + top + lam * length, 0.0)))
        if starts is not None:
            found = tl.where(start_of_last < k * C, found, 0.0)
        of_decay += length * found
    # And the queries of this one.
    most = tl.max(e, 0)
    weights = tl.where(there[:, None] & (f < F)[None, :], tl.exp(e - most[None, :]), 0.0)
    since = (came - start).to(tl.float32)
    decay = tl.exp(lam * tl.maximum(since[:, None] - since[None, :], 0.0))
    decay = tl.where((t[None, :] <= t[:, None]) & there[None, :], decay, 0.0)
    if starts is not None:
        decay = tl.where(n[None, :] >= _start_at(n, starts, N)[:, None], decay, 0.0)
    for i in range(G):
        of_head = (bh * G + i) * N + n
        a = tl.load(query_exponents + of_head[:, None] * F + f[None, :], mask=inside, other=EMPTY)
        scale = tl.exp(tl.minimum(a + most[None, :], LARGEST))
        rows = tl.load(
            grad_out + ((b * N + n) * (HKV * G) + h * G + i)[:, None] * V + cv[None, :],
            mask=real[:, None] & (cv < V)[None, :],
            other=0.0,
        )
        pairs = tl.dot(scale, tl.trans(weights), input_precision=FAR)
        of_value += tl.dot(tl.trans((decay * pairs).to(T)), rows.to(T), input_precision="ieee")
        slopes = tl.dot(rows.to(T), tl.trans(values.to(T)), input_precision="ieee")
        slopes = decay * (slopes - tl.load(delta + of_head, mask=real, other=0.0)[:, None])
        if log_decay is not None:
            pairs *= slopes
            of_decay += _whole(since * (tl.sum(pairs, 1) - tl.sum(pairs, 0)))
        of_features += weights * tl.dot(tl.trans(slopes), scale, input_precision=FAR)
    tl.store(far_value + (bh * N + n)[:, None] * V + cv[None, :], of_value, mask=there[:, None] & (cv < V)[None, :])
    # Back through the map.
    x = _rows(g, there, c, c < D, key, key_row, None, 0, D, W, M).to(tl.float32)
    if FIRST < PAIRS:
        other, number, sign = _pair(c, PAIRS, INTERLEAVED)
        place = _numbers(g, there, position + b * N, 1, None, 0, W, M)
        angle = -place.to(tl.float32)[:, None] * _frequency(frequencies, c, FIRST, PAIRS, INTERLEAVED)[None, :]
        x = _turned_with(x, other, sign, angle)
    x *= root
    weight = tl.load(
        key_weight + h * D * F + c[:, None] * F + f[None, :], mask=(c < D)[:, None] & (f < F)[None, :], other=0.0
    ).to(tl.float32)
    sums = tl.sum(of_features, 1)
    of_x = tl.dot(of_features, tl.trans(weight), input_precision=FAR)
    if key_norm is not None:
        of_x -= (tl.load(key_norm + h).to(tl.float32) * sums)[:, None] * x
    if FIRST < PAIRS:
        of_x = _turned_with(of_x, other, sign, -angle)
    tl.store(far_key + (bh * N + n)[:, None] * D + c[None, :], root * of_x, mask=there[:, None] & (c < D)[None, :])
    of_maps += (bh * K + k) * (D * F + F + 2)
    found = tl.dot(tl.trans(x), of_features, input_precision=FAR)
    tl.store(of_maps + c[:, None] * F + f[None, :], found, mask=(c < D)[:, None] & (f < F)[None, :])
    tl.store(of_maps + D * F + f, tl.sum(of_features, 0), mask=f < F)
    numbers = of_maps + D * F + F + tl.arange(0, 1)
    tl.store(numbers, -0.5 * _whole(sums * tl.sum(x * x, 1)))
    left = tl.load(order + g - M - W, mask=there, other=0)
    tl.store(numbers + 1, of_decay + _whole(sums * (came - left).to(tl.float32)))


@triton.jit
def _end_of(slot, there, leave, ends, N, W: tl.constexpr, M: tl.constexpr):
    """The first query that does not see the key of a slot any more, N or later if there is none. `ends` are those of
    packed sequences.
    """
    if M > 0:
        found = tl.load(leave + slot + W + M, mask=there & (slot + W < N), other=N)
        if ends is not None:
            found = tl.minimum(found, tl.load(ends + slot, mask=there, other=N))
    else:
        found = slot + W
    return found


@triton.jit
def _lives(
    leave, ends, lives, N, HKV: tl.constexpr, W: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Numbers that sort keys by the lengths of their lives, in powers of 2 and the longest first, and by age."""
    bh, slot = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if ends is not None:
        ends += (bh // HKV) * N
    end = tl.minimum(_end_of(slot, slot < N, leave + bh * (M + N), ends, N, W, M), N)
    chunks = tl.maximum(end - slot, 0) // C + 1
    tl.store(lives + bh * N + slot, (31 - tl.log2(chunks.to(tl.float32)).to(tl.int32)) * N + slot, mask=slot < N)


@triton.jit
def _query_rows(
    query, grad_out, size, delta, k, g, t, c, cv, query_head, query_row, N, HEADS: tl.constexpr, D: tl.constexpr,
    V: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Of the queries of a chunk and head of a group: rows, gradients of the output, log sizes and averages of these."""
    n = k * C + t
    inside, at, row = n < N, g * N + n, n.to(tl.int64)[:, None]
    query += g * query_head
    q = tl.load(query + row * query_row + c[None, :], mask=inside[:, None] & (c < D)[None, :], other=0.0)
    grad_out += g * V
    rows = tl.load(grad_out + row * (HEADS * V) + cv[None, :], mask=inside[:, None] & (cv < V)[None, :], other=0.0)
    return q, rows, tl.load(size + at, mask=inside, other=0.0), tl.load(delta + at, mask=inside, other=0.0)


@triton.jit
def _of_keys(
    query, key, value, visible, position, key_position, frequencies, leave, ends, lives, size, delta, grad_out, far_key,
    far_value, grad_key, grad_value,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    grad_key_batch, grad_key_head, grad_key_row, grad_value_batch, grad_value_head, grad_value_row,
    N, scaling, trained,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    W: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr, CLAMPS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // HKV, bh % HKV
    own, t, c, cv = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, C), tl.arange(0, DP), tl.arange(0, VP)
    slot = own
    if M > 0:
        slot = tl.load(lives + bh * N + own, mask=own < N, other=0) % N
        leave += bh * (M + N)
    there = own < N
    there = there & (tl.load(visible + b * N + slot, mask=there, other=0) != 0)
    far_before = N
    if ends is not None:
        ends += b * N
        far_before = tl.load(ends + slot, mask=there, other=0)
    end = _end_of(slot, there, leave, ends, N, W, M)
    at = slot.to(tl.int64)[:, None]
    key += _head_of(bh, key_batch, key_head, HKV)
    keys = tl.load(key + at * key_row + c[None, :], mask=there[:, None] & (c < D)[None, :], other=0.0)
    value += _head_of(bh, value_batch, value_head, HKV)
    values = tl.load(value + at * value_row + cv[None, :], mask=there[:, None] & (cv < V)[None, :], other=0.0)
    of_keys, of_values = tl.zeros([BLOCK, DP], tl.float32), tl.zeros([BLOCK, VP], tl.float32)
    first, last = tl.min(tl.where(there, slot, N), 0), tl.max(tl.where(there, tl.minimum(end, N), 0), 0)
    query += b * query_batch + h * G * query_head
    grad_out += (b * N * (HKV * G) + h * G) * V
    size += bh * G * N
    delta += bh * G * N
    place = slot
    if CLAMPS:
        place = tl.load(key_position + b * N + slot, mask=there, other=0)
        other, number, sign = _pair(c, PAIRS, INTERLEAVED)
        turn = _frequency(frequencies, c, 0, PAIRS, INTERLEAVED)[None, :]
        back = -place.to(tl.float32)[:, None] * turn
        turned = _turned_with(keys.to(tl.float32), other, sign, back).to(keys.dtype).to(T)
        of_turned = tl.zeros([BLOCK, DP], tl.float32)
        # One loop over both, because what an inner loop does not change would stay in registers.
        for i in range(first // C * G, tl.cdiv(last, C) * G):
            k, g = i // G, i % G
            n = k * C + t
            p = tl.load(position + b * N + n, mask=n < N, other=0)
            if tl.max(p, 0) >= trained:
                sees = there[:, None] & (slot[:, None] + W <= n[None, :]) & (n[None, :] < tl.minimum(end, N)[:, None])
                sees = sees & (p[None, :] - place[:, None] >= trained)
                q, rows, lse, average = _query_rows(
                    query, grad_out, size, delta, k, g, t, c, cv, query_head, query_row, N, HKV * G, D, V, C
                )
                forth = (trained - 1 - p).to(tl.float32)[:, None] * turn
                moved = _turned_with(q.to(tl.float32), other, sign, forth).to(q.dtype).to(T)
                logits = scaling * tl.dot(turned, tl.trans(moved), input_precision="ieee")
                weights = tl.where(sees, tl.exp(logits - lse[None, :]), 0.0)
                of_values += tl.dot(weights.to(T), rows.to(T), input_precision="ieee")
                slopes = tl.dot(values.to(T), tl.trans(rows.to(T)), input_precision="ieee") - average[None, :]
                of_turned += tl.dot((scaling * weights * slopes).to(T), moved, input_precision="ieee")
        of_keys = _turned_with(of_turned, other, sign, -back)
    for k in range(first // C, tl.cdiv(last, C)):
        n = k * C + t
        sees = there[:, None] & (slot[:, None] <= n[None, :]) & (n[None, :] < tl.minimum(end, N)[:, None])
        if CLAMPS:
            p = tl.load(position + b * N + n, mask=n < N, other=0)
            sees = sees & ((slot[:, None] + W > n[None, :]) | (p[None, :] - place[:, None] < trained))
        for g in range(G):
            q, rows, lse, average = _query_rows(
                query, grad_out, size, delta, k, g, t, c, cv, query_head, query_row, N, HKV * G, D, V, C
            )
            logits = scaling * tl.dot(keys.to(T), tl.trans(q.to(T)), input_precision="ieee")
            weights = tl.where(sees, tl.exp(logits - lse[None, :]), 0.0)
            of_values += tl.dot(weights.to(T), rows.to(T), input_precision="ieee")
            slopes = tl.dot(values.to(T), tl.trans(rows.to(T)), input_precision="ieee") - average[None, :]
            of_keys += tl.dot((scaling * weights * slopes).to(T), q.to(T), input_precision="ieee")
    far = there & (end < far_before)
    at = (bh * N + end)[:, None]
    of_keys += tl.load(far_key + at * D + c[None, :], mask=far[:, None] & (c < D)[None, :], other=0.0)
    of_values += tl.load(far_value + at * V + cv[None, :], mask=far[:, None] & (cv < V)[None, :], other=0.0)
    at = slot.to(tl.int64)[:, None]
    grad_key += _head_of(bh, grad_key_batch, grad_key_head, HKV) + at * grad_key_row + c[None, :]
    tl.store(grad_key, of_keys.to(grad_key.dtype.element_ty), mask=(own < N)[:, None] & (c < D)[None, :])
    grad_value += _head_of(bh, grad_value_batch, grad_value_head, HKV) + at * grad_value_row + cv[None, :]
    tl.store(grad_value, of_values.to(grad_value.dtype.element_ty), mask=(own < N)[:, None] & (cv < V)[None, :])


def run(
    grad_output: Tensor, output: Tensor, size: Tensor, leave: Tensor, gone: Tensor, query: Tensor, key: Tensor,
    value: Tensor, visible: Tensor, sink_key: Tensor, sink_value: Tensor, seen: Tensor, position: Tensor | None,
    key_position: Tensor | None, key_weight: Tensor, key_bias: Tensor | None, key_norm: Tensor | None,
    query_weight: Tensor, log_decay: Tensor | None, log_scale: Tensor, norm_weight: Tensor,
    frequencies: Tensor | None, spans: Tensor | None, window: int, count: int, first_turned: int,
    is_interleaved: bool, trained_length: int, scaling: float, is_rate: bool, has_room: bool = True,
) -> Sequence[Tensor | None]:  # fmt: skip
    """The gradients of query, key, value, sinks (key and value), the map (key weight, bias, norm and query weight),
    `log_decay`, `log_scale` and `norm_weight`; None for what is None.

    Args:
        grad_output, output: `[B, N, H, W]`, dense.
        size: float32 `[B, H, N]`, the logarithm of the denominator of each query.
        leave, gone: int32 `[B Hkv, M + N]` and `[B Hkv, N]`, of `triton_prefill.choose`; unused without exact keys.
        has_room: whether there is shared memory for blocks of wide rows that are loaded ahead (`ROOM`).

    See `triton_prefill.run` for the others, of which nothing comes before the first query.
    """
    (batch, heads, length, dim), kv_heads, width = query.shape, key.shape[1], value.shape[3]
    features, sinks, device = key_weight.shape[2], sink_key.shape[2], query.device
    chunk = chunk_of(features, query, key, value)
    rows, chunks, groups = batch * kv_heads, -(-length // chunk), heads // kv_heads
    columns, value_columns = wide(dim), wide(width)
    pairs = 0 if frequencies is None else frequencies.shape[0]

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    exact = value.dtype
    is_exact = exact == torch.float32
    of_query, of_key, of_value, of_sink_key, of_sink_value = (
        x.stride()[:3] for x in (query, key, value, sink_key, sink_value)
    )
    order = visible.cumsum(dim=1, dtype=torch.int32)
    shared: dict[str, Any] = {"HKV": kv_heads, "W": window, "M": count}
    turns: dict[str, Any] = {"PAIRS": pairs, "INTERLEAVED": is_interleaved, "FIRST": first_turned}
    map_sizes: dict[str, Any] = {"F": features, "FP": wide(features), "C": chunk, "IS_RATE": is_rate}
    sizes: dict[str, Any] = {"D": dim, "DP": columns, "V": width, "VP": value_columns}
    room = count + chunk
    listed, counts = lists_of(leave, length, count, chunk) if count else (None, None)
    gone = gone if count else order
    starts, ends = (None, None) if spans is None else spans
    precision = "ieee" if is_exact else "tf32x3"
    exponents = new(rows, length, features)
    _exponents[(rows, chunks)](
        key, visible, order, gone, key_position, frequencies, key_weight, key_bias, key_norm, log_decay, None, None,
        None, exponents, *of_key, 0, length, length, scaling**0.5,
        D=dim, DP=columns, PRECISION=precision, num_warps=8, **shared, **turns, **map_sizes,
    )  # fmt: skip
    states, behind = (new(rows, chunks, features, width + 2) for _ in range(2))
    group_sums, in_groups = None, -(-chunks // GROUP)
    block = min(value_columns, 64)
    grid = (rows, in_groups, -(-width // block))
    in_states: dict[str, Any] = {"V": width, "VB": block, "IN_GROUP": GROUP, "GROUPS": in_groups, "num_warps": 8}
    given: Any = (exponents, value, None, visible, order, gone, starts, log_decay)
    how = {**shared, **map_sizes, **in_states, "PRECISION": precision}
    where = *of_value, 0, length, length, chunks
    unused = new(rows, features, width + 2)
    if in_groups > 1:
        group_sums = new(rows, in_groups, features, width + 2)
        _states[(rows, in_groups - 1, grid[2])](*given, None, group_sums, None, None, *where, **how)
    _states[grid](*given, None, group_sums, states, unused, *where, **how)
    delta, query_exponents = torch.empty_like(size), new(batch, heads, length, features)
    grad_query, grad_key, grad_value = (gradient_like(x) for x in (query, key, value))
    of_sinks = new(batch, kv_heads, groups, chunks, sinks, dim + width)
    of_queries = new(batch, kv_heads, groups, chunks, dim * features + 3)
    far = "ieee" if is_exact else "tf32"
    clamps = bool(pairs and trained_length and position is not None)
    with_types: dict[str, Any] = {"T": TYPES[exact], "G": groups, "num_warps": 8, **sizes}
    _of_far_queries[(chunks, batch * heads)](
        query, value, visible, position, order, frequencies, query_weight, log_decay, log_scale, norm_weight, gone,
        starts, exponents, states, output, grad_output, size, delta, query_exponents, grad_query, of_queries,
        *of_query, *of_value, *grad_query.stride()[:3], length, chunks, scaling, scaling**0.5,
        PRECISION=precision, FAR=far, **shared, **turns, **map_sizes, **with_types,
    )  # fmt: skip
    _of_queries[(chunks, batch * heads)](
        query, key, value, visible, sink_key, sink_value, seen, position, key_position, frequencies, leave, listed,
        counts, starts, grad_output, size, delta, grad_query, of_sinks,
        *of_query, *of_key, *of_value, *of_sink_key, *of_sink_value, *grad_query.stride()[:3],
        length, chunks, scaling, trained_length,
        S=sinks, SP=wide(sinks), ROOM=room, C=chunk, BLOCK=chunk, CLAMPS=clamps, PAIRS=pairs,
        INTERLEAVED=is_interleaved, num_stages=2 if has_room or columns <= 64 else 1, **shared, **with_types,
    )  # fmt: skip
    given = query_exponents, grad_output, delta, order, starts, log_decay, group_sums
    how = {**map_sizes, **in_states, "HKV": kv_heads, "W": window, "G": groups, "FAR": far}
    if in_groups > 1:
        _states_behind[(rows, in_groups - 1, grid[2])](*given, None, length, chunks, **how)
    _states_behind[grid](*given, behind, length, chunks, **how)
    far_key, far_value = new(rows, length, dim), new(rows, length, width)
    of_far_keys = new(batch, kv_heads, chunks, dim * features + features + 2)
    _of_far_keys[(chunks, rows)](
        key, value, visible, key_position, order, frequencies, key_weight, key_norm, log_decay, gone, starts, exponents,
        query_exponents, grad_output, delta, states, behind, far_key, far_value, of_far_keys, *of_key, *of_value,
        length, chunks, scaling**0.5, FAR=far, num_stages=1, **shared, **turns, **map_sizes, **with_types,
    )  # fmt: skip
    lives = None
    if count:
        lives = new(rows, length, dtype=torch.int32)
        _lives[(rows, -(-length // LIVES))](leave, ends, lives, length, C=chunk, BLOCK=LIVES, **shared)
        lives = lives.sort(dim=1).values
    _of_keys[(chunks, rows)](
        query, key, value, visible, position, key_position, frequencies, leave, ends, lives, size, delta, grad_output,
        far_key, far_value, grad_key, grad_value, *of_query, *of_key, *of_value, *grad_key.stride()[:3],
        *grad_value.stride()[:3], length, scaling, trained_length,
        C=chunk, BLOCK=chunk, CLAMPS=clamps and count > 0, num_stages=2, PAIRS=pairs, INTERLEAVED=is_interleaved,
        **shared, **with_types,
    )  # fmt: skip
    of_sink_key, of_sink_value = of_sinks.sum(dim=(2, 3)).split((dim, width), dim=3)
    number = dim * features
    weight, scale, norm, decay = of_queries.sum(dim=(0, 3)).split((number, 1, 1, 1), dim=2)
    of_maps = of_far_keys.sum(dim=(0, 2)).split((number, features, 1, 1), dim=1)
    if log_decay is not None:
        decay = decay.sum(dim=(1, 2)) + of_maps[3].squeeze(1)
        decay = decay * -log_decay.float().sigmoid() if is_rate else decay
    likes = key_weight, key_bias, key_norm, query_weight, log_decay, log_scale, norm_weight
    found = *of_maps[:3], weight, decay, scale, norm
    return [
        *(grad_query, grad_key, grad_value, of_sink_key.to(sink_key.dtype), of_sink_value.to(sink_value.dtype)),
        *(None if x is None else grad.reshape(x.shape).to(x.dtype) for x, grad in zip(likes, found)),
    ]
