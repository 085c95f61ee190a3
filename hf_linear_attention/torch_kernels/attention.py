# SPDX-License-Identifier: Apache-2.0
"""Kernel attention: the functions that mechanisms call.

torch computes them, or the implementation that is registered for them (`implementations`): in the package one operator
in the graphs of torch.compile, C on a CPU, and fla-core (extra `gpu`) on CUDA. torch.export, ONNX and torch.func always
see plain torch operations.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, S keys, W head dimension of the values,
F features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .blocks import (
    BLOCK_SIZE,
    EXP,
    PLAIN,
    Affine,
    KernelMap,
    Parts,
    accumulated,
    needs_plain,
    plain_attention,
    sized_step,
    with_dtype,
    zero_where_masked,
)
from .causal import CausalAttention, ElementwiseMap, causal_attention, scanned_attention
from .implementations import implemented


# In a graph, longer inputs take one step of a loop per block: every block of its own would make the graph long.
MOST_BLOCKS = 16


def makes_features(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, num_features: int) -> bool:
    """Whether `map_attention` computes the features inside a kernel, so that computing them first wastes memory."""
    return bool(implemented("makes_features", query, key, value, key_mask, num_features))


def map_attention(
    feature_map: KernelMap,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    key_mask: Tensor | None = None,
    state: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Kernel attention for a feature map that the kernels implement; the C kernels never store the features.

    The arguments are those of `kernel_attention` (and so are the errors), except that `query [B, H, N, D]` and
    `key [B, Hkv, S, D]` are given before the feature map.

    Returns:
        The output `[B, N, H, W]` in the dtype of `query`; then, in the accumulation dtype, its denominator
        `[B, Hkv, G, N, 1]`, the log scale of the same shape (a constant without gradient; None unless the map returns
        exponents), and the state.
    """
    query_map, key_map = feature_map.query, feature_map.key
    affine = (None,) * 4 if query_map is None or key_map is None else (*key_map, query_map.weight)
    given: Any = (query, key, value, key_mask, log_decay, state, *affine, feature_map.function, is_causal)
    found = implemented("attention", *given)
    if found is None:
        is_plain = needs_plain(value) or torch.compiler.is_compiling()
        output, denominator, scale, state = in_torch(*given, plain=is_plain)
        return with_dtype(output.flatten(1, 2).transpose(1, 2), query.dtype), denominator, scale, state
    output, denominator, scale, state = found
    return output, denominator, scale if feature_map.log_features else None, state


def in_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor | None,
    key_weight: Tensor | None,
    key_bias: Tensor | None,
    key_norm: Tensor | None,
    query_weight: Tensor | None,
    function: int,
    is_causal: bool,
    *,
    plain: bool = False,
) -> Parts:
    """The sums of `map_attention` in torch with output `[B, Hkv, G, N, W]`; if `plain`, in plain operations only."""
    feature_map = KernelMap(function)
    if key_weight is not None and query_weight is not None:
        feature_map = KernelMap(function, Affine(query_weight), Affine(key_weight, key_bias, key_norm))
    key, value = zero_where_masked(key, key_mask), zero_where_masked(value, key_mask)
    query, key = feature_map.features(query, feature_map.query), feature_map.features(key, feature_map.key)
    options: dict[str, Any] = {"log_features": feature_map.log_features, "key_mask": key_mask, "state": state}
    if is_causal and _needs_loop(key.shape[2]):
        return scanned_attention(query, key, value, log_decay=log_decay, **options)
    is_packed = key_mask is not None and key_mask.dtype != torch.bool
    if plain or is_packed or not is_causal or 0 in key.shape[:3]:
        return plain_attention(query, key, value, is_causal=is_causal, log_decay=log_decay, **options)
    options |= {"log_decay": log_decay, "gpu_kernel": implemented("gpu_kernel", value, query.shape[2])}
    return causal_attention(query, key, value, **options)


def _needs_loop(length: int) -> bool:
    """Whether the causal form is to be a loop of the graph that is being built; the loop has no gradients."""
    if isinstance(length, torch.SymInt):
        return True
    return torch.compiler.is_compiling() and length > MOST_BLOCKS * BLOCK_SIZE and not torch.is_grad_enabled()


def kernel_attention(
    query_features: Tensor,
    key_features: Tensor,
    value: Tensor,
    *,
    log_features: bool,
    is_causal: bool,
    key_mask: Tensor | None = None,
    state: Tensor | None = None,
    log_decay: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with weights phi(q_i)·phi(k_j) / sum_j phi(q_i)·phi(k_j) (Katharopoulos 2020, eq. 5, 9 and 18-20).

    Args:
        query_features: `[B, H, N, F]`, non-negative features, or their logarithms if `log_features` is true.
        key_features: `[B, Hkv, S, F]`, likewise. The causal form requires S = N.
        value: `[B, Hkv, S, W]`.
        key_mask: bool `[B, S]`, False where a key is ignored. The output of a query that sees no key is 0. An integer
            mask numbers packed sequences from 1, with 0 at padding: a query then sees only the keys of its own
            sequence. An entry -n marks a token of sequence n whose key is ignored.
        state: the state after all earlier tokens, or None if there are none.
        log_decay: `[Hkv]`, at most 0. The weight of a key is multiplied by exp(log_decay) for every real token between
            it and the query, which is ALiBi with slope -log_decay. Causal form only.
        rows: int64 `[B]`, for one token: that of sequence b is `state[rows[b]]`, which is overwritten.

    Returns:
        The output `[B, H, N, W]` in the accumulation dtype, and the state after these tokens.

    Raises:
        ValueError: if the shapes, dtypes or devices do not match.
    """
    query, key = accumulated(query_features), accumulated(key_features)
    if state is not None and key_mask is None and query.ndim == key.ndim == 4 and query.shape[2] == key.shape[2] == 1:
        found = implemented("attention_step", query, key, value, state, log_decay, log_features, rows)
        if found is None:
            old = state if rows is None else state.index_select(0, rows)
            output, _, new = sized_step(query, key, value, old, log_features, log_decay)
            found = output, new if rows is None else state.index_copy_(0, rows, new)
        return found
    feature_map = KernelMap(EXP if log_features else PLAIN)
    options: dict[str, Any] = {"key_mask": key_mask, "state": state, "log_decay": log_decay}
    output, _, _, state = map_attention(feature_map, query, key, value, is_causal=is_causal, **options)
    return output.transpose(1, 2), state


def state_after(
    features_of: Callable[[Tensor, Tensor | None], Tensor],
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    state: Tensor | None,
    *,
    log_features: bool,
    size: int,
) -> Tensor | None:
    """The state of `kernel_attention` after all keys, of which no more than `size` have features at the same time.

    Bidirectional attention in memory that is constant in the length takes two passes: this one, then one over queries.
    `features_of` gives the features `[B, Hkv, C, F]` of keys `[B, Hkv, C, D]` with their mask `[B, C]`.
    """
    for start in range(0, key.shape[2], size):
        part = slice(start, start + size)
        mask = None if key_mask is None else key_mask[:, part]
        features = features_of(key[:, :, part], mask)
        options: dict[str, Any] = {"log_features": log_features, "is_causal": False, "key_mask": mask, "state": state}
        _, state = kernel_attention(features[:, :, :1], features, value[:, :, part], **options)
    return state


def elementwise_attention(
    feature_map: ElementwiseMap,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Causal `kernel_attention` in torch that computes the features block by block instead of storing them."""
    implemented("check_attention", query, key, value, key_mask, None, state, *(None,) * 4, PLAIN, True)
    mask = None if key_mask is None else key_mask[:, None, :, None]
    query = query.unflatten(1, (key.shape[1], -1))
    key, value = zero_where_masked(key, key_mask), zero_where_masked(value, key_mask)
    output, _, state = CausalAttention.apply(query, key, value, state, mask, feature_map)
    return output.flatten(1, 2), state
