# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule: a state that erases what it holds at a key before it writes there.

Axes: B batch, H query heads, Hkv key/value heads, N tokens, F features, D head dimension of the values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .kernels_checks import check_heads
from .kernels_checks import check_mask
from .kernels_checks import check_shape
from .kernels_checks import check_state
from .kernels_delta_torch import plain_delta


# The log decay that empties a state: its exponential is 0 in every dtype, and unlike -inf it can be multiplied by 0.
EMPTYING = -1e4


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    erases: bool = True,
    key_mask: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (Yang 2024, "Gated Delta Networks"), and with a decay per feature Kimi Delta Attention.

    Each token decays the state S, S <- exp(g) S, writes S <- S + beta k (v - S^T k)^T, and its queries read S^T q. The
    scale of queries and keys is the caller's; keys of norm 1 with beta between 0 and 2 keep the state bounded.

    Args:
        query: `[B, H, N, F]`; H is a multiple of Hkv, and H / Hkv consecutive query heads share a state.
        key, value: `[B, Hkv, N, F]` and `[B, Hkv, N, D]`.
        log_decay: g <= 0, `[B, Hkv, N]`, or `[B, Hkv, N, F]` for a decay of its own per feature (row of S).
        beta: `[B, Hkv, N]`.
        erases: whether what the state holds at k is erased first. If not, a token writes S <- S + beta k v^T, which is
            gated linear attention.
        key_mask: bool `[B, N]`, False at padding, which leaves the state as it is and whose output is 0. An integer
            mask numbers packed sequences from 1, with 0 at padding; each of them starts with an empty state, except
            the first, which continues `state`.
        state: `[B, Hkv, F, D]` after all earlier tokens, or None if there are none. It is never changed in place.

    Returns:
        The output `[B, H, N, D]` and the state after these tokens, both float32 (float64 for float64 values).

    Raises:
        ValueError: if the shapes, dtypes or devices do not match.
    """
    check_delta(query, key, value, log_decay, beta, state)
    check_mask(key_mask, key, query)
    if key_mask is not None:
        query, key, value, log_decay, beta = _masked(query, key, value, log_decay, beta, key_mask)
    return plain_delta(query, key, value, log_decay, beta, state, erases)


def check_delta(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> None:
    """Check the tensors of `gated_delta`, except the mask.

    Raises:
        ValueError: for the first invalid argument.
    """
    batch, heads, kv_heads = check_heads(query, key, value)
    per_token, (features, width) = (batch, kv_heads, query.shape[2]), (key.shape[3], value.shape[3])
    check_shape("query", query, (batch, heads, key.shape[2], features), like=query)
    check_shape("log_decay", log_decay, per_token, (*per_token, features), like=query)
    check_shape("beta", beta, per_token, like=query)
    for name, tensor in (("log_decay", log_decay), ("beta", beta)):
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` is {tensor.dtype}; it must be a floating-point tensor.")
    if state is not None:
        check_state("state", state, (batch, kv_heads, features, width), query, value)


def _masked(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, mask: Tensor
) -> tuple[Tensor, ...]:
    """The same with 0 at padding, which may hold anything, and with a decay that empties S where a sequence begins."""
    is_hidden = (mask == 0)[:, None]
    query, key, value = (x.masked_fill(is_hidden.unsqueeze(3), 0.0) for x in (query, key, value))
    log_decay, is_hidden_too = log_decay.float() if log_decay.dtype != torch.float64 else log_decay, is_hidden
    if log_decay.ndim == 4:
        is_hidden_too = is_hidden.unsqueeze(3)
    log_decay = log_decay.masked_fill(is_hidden_too, 0.0)
    if mask.dtype != torch.bool:
        begins = _begins(mask)[:, None]
        log_decay = log_decay.masked_fill(begins.unsqueeze(3) if log_decay.ndim == 4 else begins, EMPTYING)
    return query, key, value, log_decay, beta.masked_fill(is_hidden, 0.0)


def _begins(mask: Tensor) -> Tensor:
    """Where the sequence number `[B, N]` differs from that of the last real token, whatever padding is between."""
    rank = (mask > 0).cumsum(dim=1)  # ONNX lacks `cummax`
    numbers = torch.zeros_like(F.pad(mask, (1, 0))).scatter(1, rank * (mask > 0), mask)
    before = numbers.gather(1, (rank - 1).clamp(min=0))
    return (mask > 0) & (rank > 1) & (mask != before)
