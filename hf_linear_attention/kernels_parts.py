# SPDX-License-Identifier: Apache-2.0
"""Few key/value heads on many cores: attention in parts, where there are fewer heads than cores.

Forward, a long sequence is cut: first each part sums up its own keys, then every part attends with the merged state of
those before it (bidirectional form: with that of all). That reads keys twice, which two cores win back. Backward, the
query heads of a group are parted: each part makes gradients of keys and values of its own, which are added up.

Axes: B batch, Hkv key/value heads, G query heads per key/value head, N queries, S keys, F features, W head dimension of
the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .kernels_cpu import EXP
from .kernels_cpu import run_attention
from .kernels_torch import EMPTY_MAXIMUM
from .kernels_torch import merge_states


# Tokens; below, threads cost more than they win.
SHORTEST_PART = 4096
# Places in the lists of csrc/linear_attention.h.
QUERY, KEY, VALUE, MASK, DECAY = range(5)
QUERY_MAP, STATE, OUTPUT, DENOMINATOR, SCALE, NEW_STATE = 8, *range(11, 16)
GRAD_OUTPUT, GRAD_DENOMINATOR, GRAD_STATE, GRAD_QUERY = range(16, 20)
GRAD_KEY, GRAD_VALUE, GRAD_DECAY, GRAD_KEY_MAP, GRAD_QUERY_MAP, GRAD_FIRST_STATE = 20, 21, 22, 23, 26, 29
# What belongs to query heads, and the gradients to which every query head adds.
OF_QUERIES = (QUERY, QUERY_MAP, OUTPUT, DENOMINATOR, GRAD_OUTPUT, GRAD_DENOMINATOR, GRAD_QUERY, GRAD_QUERY_MAP)
SHARED = (GRAD_KEY, GRAD_VALUE, GRAD_DECAY, *range(GRAD_KEY_MAP, GRAD_QUERY_MAP), GRAD_FIRST_STATE)


def attend(function: Sequence[int], tensors: Sequence[Any]) -> None:
    """`run_attention("attention_forward", ...)`, in parts where that makes use of more cores."""
    query, key, is_causal = tensors[QUERY], tensors[KEY], function[2]
    length, pairs = key.shape[3], query.shape[0] * query.shape[1]
    count = min(torch.get_num_threads() // max(1, pairs), length // SHORTEST_PART)
    if count < 2:
        run_attention("attention_forward", function, tensors)
        return
    keys = _ranges(length, count)
    states = _states(function, tensors, keys)
    if is_causal:
        parts = [_part(tensors, part, part, before) for part, before in zip(keys, states)]
        unused = parts[:-1]
    else:
        parts = [_part(tensors, part, slice(0, 0), states[-1]) for part in _ranges(query.shape[3], count)]
        unused = parts
        tensors[NEW_STATE].squeeze(2).copy_(states[-1])
    for part in unused:
        part[NEW_STATE] = torch.empty_like(tensors[NEW_STATE])
    run_attention("attention_forward", function, *parts)


def differentiate(function: Sequence[int], tensors: Sequence[Any]) -> None:
    """`run_attention("attention_backward", ...)`, in parts where that makes use of more cores."""
    pairs, groups = tensors[QUERY].shape[0] * tensors[QUERY].shape[1], tensors[QUERY].shape[2]
    count = min(torch.get_num_threads() // max(1, pairs), groups)
    if count < 2:
        run_attention("attention_backward", function, tensors)
        return
    parts: list[list[Any]] = []
    for heads in _ranges(groups, count):
        part = list(tensors)
        for place in OF_QUERIES:
            part[place] = None if part[place] is None else part[place][:, :, heads]
        for place in SHARED:
            part[place] = None if part[place] is None else torch.empty(part[place].shape, dtype=torch.float32)
        part[GRAD_STATE] = None if parts else part[GRAD_STATE]  # of all query heads together
        parts.append(part)
    run_attention("attention_backward", function, *parts)
    for place in SHARED:
        if tensors[place] is not None:
            tensors[place].copy_(sum(part[place] for part in parts))


def _ranges(length: int, count: int) -> list[slice]:
    size = max(1, -(-length // count))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _states(function: Sequence[int], tensors: Sequence[Any], keys: Sequence[slice]) -> list[torch.Tensor]:
    """The state before each part; the bidirectional form needs that after the last one."""
    is_exp, is_causal = function[1] >= EXP, function[2]
    mask, decay, first = (tensors[place] for place in (MASK, DECAY, STATE))
    keys = keys[:-1] if is_causal else keys
    parts = [_part(tensors, slice(0, 0), part, None) for part in keys]
    for part in parts:
        part[NEW_STATE] = torch.empty_like(tensors[NEW_STATE])
        if is_causal:  # as many queries as keys, but no group of them: keys alone
            part[QUERY] = tensors[QUERY][:, :, :0]
    run_attention("attention_forward", function, *parts)
    if first is None:
        first = torch.zeros_like(tensors[NEW_STATE])
        first[..., first.shape[-1] - is_exp :] = EMPTY_MAXIMUM
    states = [first.squeeze(2)]
    for tokens, own in zip(keys, parts):
        fade = None
        if decay is not None:
            real = tokens.stop - tokens.start if mask is None else mask[:, :1, 0, tokens, 0].sum(dim=2)
            fade = (decay[:, :, 0, 0, 0] * real).unsqueeze(2)
        states.append(merge_states(states[-1], own[NEW_STATE].squeeze(2), is_exp, fade))
    return states


def _part(tensors: Sequence[Any], queries: slice, keys: slice, state: torch.Tensor | None) -> list[Any]:
    """The tensors of these queries and keys, views."""
    part = list(tensors)
    for places, tokens in (((QUERY, OUTPUT, DENOMINATOR, SCALE), queries), ((KEY, VALUE, MASK), keys)):
        for place in places:
            part[place] = None if part[place] is None else part[place][:, :, :, tokens]
    part[STATE] = None if state is None else state.contiguous().unsqueeze(2)
    return part
