# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in torch, in blocks of C tokens and in plain operations (Yang 2024; Kimi Linear 2025).

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N tokens, F features, D head dimension of the values, c
blocks of C tokens. The state S is `[B, Hkv, F, D]`. Token by token, with the log decay g <= 0 of a token (one number
per head, or one per feature):

    S <- exp(g) S,   u = beta (v - S^T k),   S <- S + k u^T,   o = S^T q        (u = beta v if nothing is erased)

In a block, let E_ij = exp(g_(j+1) + ... + g_i) for i >= j. The u of its tokens, the rows of U, solve a triangular
system, so that every step is a product of matrices:

    (I + diag(beta) A) U = diag(beta) (V - K' S),   A_ij = sum_f k_if k_jf E_ijf  for i > j
    O = Q' S + P U,                                 P_ij = sum_f q_if k_jf E_ijf  for i >= j
    S <- exp(g_1 + ... + g_C) S + K''^T U

    K'_i = exp(g_1 + ... + g_i) k_i,   Q'_i likewise,   K''_j = exp(g_(j+1) + ... + g_C) k_j

Every exponent is a sum of numbers of one sign: differences of cumulated decays would lose all digits after a few
tokens that decay strongly, and exponents above 0 would overflow.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import accumulation_dtype, is_free, with_dtype, with_padding_counted
from .implementations import implemented


# Tokens per block, a power of 2. Long blocks need fewer calls of torch, short ones fewer products of pairs.
DELTA_BLOCK_SIZE = 64
# Tokens whose pairs are in memory at the same time.
LONGEST_PIECE = 4096
# The log decay that empties a state: its exponential is 0 in float32 and 1e-56 in float64, and beside larger ones (or
# -inf) the sums of fla's kernels would lose the other decays.
EMPTYING = -128.0


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
    rows: Tensor | None = None,
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
            the first, which continues `state`. An entry -n marks a token of sequence n that only reads.
        state: `[B, Hkv, F, D]` after all earlier tokens, or None if there are none. Without rows it is never
            changed in place.
        rows: int64 `[B]`, for one real token: that of sequence b is `state[rows[b]]`, which is overwritten.

    Returns:
        The output `[B, H, N, D]` and the state after these tokens, both float32 (float64 for float64 values).

    Raises:
        ValueError: if the shapes, dtypes or devices do not match.
    """
    given: tuple[Any, ...] = (query, key, value, log_decay, beta, state, erases)
    if (found := implemented("gated_delta_step", given, key_mask, rows)) is not None:
        return found
    implemented("check_delta", given, key_mask, rows)
    if state is not None and rows is not None:
        output, new = plain_delta(query, key, value, log_decay, beta, state.index_select(0, rows), erases)
        return output, state.index_copy_(0, rows, new)
    if key_mask is not None:
        given = (*masked(query, key, value, log_decay, beta, key_mask), state, erases)
    found = implemented("gated_delta", given)
    return plain_delta(*given) if found is None else found


def unit_length(x: Tensor) -> Tensor:
    """`x [..., F]` divided by its length, to whose square 1e-6 is added first, as in transformers and in fla."""
    return x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt()


def masked(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, mask: Tensor
) -> tuple[Tensor, ...]:
    """The same with 0 at padding, which may hold anything, and with a decay that empties S where a sequence begins."""
    is_hidden, is_padding = (mask <= 0)[:, None], (mask == 0)[:, None, :, None]
    query = query.masked_fill(is_padding, 0.0)
    key, value = (x.masked_fill(is_hidden.unsqueeze(3), 0.0) for x in (key, value))
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
    mask = mask.abs()
    before = F.pad(with_padding_counted(mask)[:, :-1], (1, 0))
    return (mask > 0) & (before > 0) & (mask != before)


def plain_delta(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, erases: bool
) -> tuple[Tensor, Tensor]:
    """`gated_delta` of real tokens, with no branch on data, so that graphs and torch.func can use it.

    The output `[B, H, N, D]` and the state are in the accumulation dtype.
    """
    dtype = accumulation_dtype(value)
    query, key, value, log_decay, beta = (with_dtype(x, dtype) for x in (query, key, value, log_decay, beta))
    (batch, kv_heads, length, features), width = key.shape, value.shape[3]
    if state is None:
        state = value.new_zeros(batch, kv_heads, features, width)
    if not is_free(length) and not length:
        return query[..., :1] * value.new_zeros(width), state.clone()
    log_decay, beta = log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(3), beta.unsqueeze(3)
    if not is_free(length) and length == 1:
        return _step(query, key, value, log_decay, beta, state, erases)
    size = DELTA_BLOCK_SIZE if is_free(length) else 1 << (min(length, DELTA_BLOCK_SIZE) - 1).bit_length()
    missing = (length // size + 2) * size - length if is_free(length) else -length % size  # as in causal.py
    tensors = query.unflatten(1, (kv_heads, -1)), key, value, log_decay, beta
    padded = [F.pad(x, (0, 0, 0, missing)) for x in tensors]  # a token of zeros changes nothing
    outputs = []
    for piece in [padded] if is_free(length) else zip(*(x.split(LONGEST_PIECE, dim=-2) for x in padded)):
        q, k, v, g, b = (x.unflatten(-2, (-1, size)) for x in piece)
        output, state = _piece(q, k, v, g, b, state, erases)
        outputs.append(output)
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=3)
    return output[:, :, :, :length].flatten(1, 2), state


def _step(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, erases: bool
) -> tuple[Tensor, Tensor]:
    """One token in few operations, because at this size each operation costs more than its arithmetic."""
    state = state * log_decay.exp().transpose(2, 3)
    new = beta * (value - key @ state if erases else value)
    state = torch.addcmul(state, key.transpose(2, 3), new)
    rows = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # [B, Hkv, G, F]
    return (rows @ state).flatten(1, 2).unsqueeze(2), state


def _piece(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, erases: bool
) -> tuple[Tensor, Tensor]:
    """`query [B, Hkv, G, c, C, F]`; the others `[B, Hkv, c, C, X]` give the output `[B, Hkv, G, c C, D]`."""
    groups, size = query.shape[2], query.shape[4]
    rows = query.permute(0, 1, 3, 2, 4, 5)  # [B, Hkv, c, G, C, F]
    rows = torch.cat((key.unsqueeze(3), rows), dim=3) if erases else rows
    pairs = _decayed_pairs(rows, key, log_decay)  # [B, Hkv, c, 1 + G or G, C, C]
    from_start = log_decay.cumsum(dim=3)
    rows = (rows * from_start.exp().unsqueeze(3)).flatten(3, 4)
    key = key * _after(log_decay).exp()
    inverse, pairs = (_inverse(beta * pairs[:, :, :, 0].tril(-1)), pairs[:, :, :, 1:]) if erases else (beta, pairs)
    value = beta * value
    if erases:  # the rows of the keys come first, and beta is part of them
        rows = torch.cat((beta * rows[..., :size, :], rows[..., size:, :]), dim=3)
    total = from_start[..., -1, :].exp().unsqueeze(4)  # [B, Hkv, c, 1 or F, 1]

    def step(state: Tensor, block: Any) -> tuple[Tensor, Tensor]:
        row, key_t, new, solved, pair, fade = block
        read = row @ state
        if erases:
            new = solved @ (new - read[:, :, :size])
            read = read[:, :, size:]
        return fade * state + key_t @ new, read + pair @ new

    blocks = (rows, key.transpose(3, 4), value, inverse, pairs.flatten(3, 4), total)
    if is_free(rows.shape[2]):
        from torch._higher_order_ops.scan import scan  # as in causal.py

        state, output = scan(step, state, [x.movedim(2, 0) for x in blocks])
        output = output.movedim(0, 3)
    else:
        outputs = []
        # `.unbind` and not indices: autograd through indices of one tensor costs O(N^2).
        for block in zip(*(x.unbind(dim=2) for x in blocks)):
            state, output = step(state, block)
            outputs.append(output)
        output = torch.stack(outputs, dim=3)
    output = output.unflatten(2, (groups, size))  # [B, Hkv, G, C, c, D]
    return output.transpose(3, 4).flatten(3, 4), state


def _after(log_decay: Tensor) -> Tensor:
    """The sum of the log decays after each token of its block, `[..., C, X]`."""
    return F.pad(log_decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(dim=-2).flip(-2)


def _decayed_pairs(rows: Tensor, key: Tensor, log_decay: Tensor) -> Tensor:
    """sum_f rows_if key_jf E_ijf if i >= j, else 0: `rows [..., R, C, F]` and `key [..., C, F]` to `[..., R, C, C]`."""
    if log_decay.shape[-1] > 1:
        return _pairs_by_halves(rows, key, log_decay)
    size = key.shape[-2]
    steps = log_decay.transpose(-1, -2).expand(*log_decay.shape[:-2], size, size)  # [..., j, i] = g_i
    decay = steps.triu(1).cumsum(dim=-1).transpose(-1, -2).exp()
    products = rows.flatten(-3, -2) @ key.transpose(-1, -2)
    return (products.unflatten(-2, rows.shape[-3:-1]) * decay.unsqueeze(-3)).tril()


def _pairs_by_halves(rows: Tensor, key: Tensor, log_decay: Tensor) -> Tensor:
    """`_decayed_pairs` for a decay per feature, from blocks of one token to blocks of C.

    The pairs of a later and an earlier half are one product: the rows decay from the border between both, and the keys
    up to it, so that every exponent is at most 0.
    """
    key, log_decay = key.unsqueeze(-3), log_decay.unsqueeze(-3)
    pairs = (rows * key).sum(dim=-1)[..., None, None]  # [..., R, C, 1, 1]
    half = 1
    while half < key.shape[-2]:
        earlier, later = key.unflatten(-2, (-1, 2, half))[..., 0, :, :], rows.unflatten(-2, (-1, 2, half))[..., 1, :, :]
        faded = log_decay.unflatten(-2, (-1, 2, half))
        earlier = earlier * _after(faded[..., 0, :, :]).exp()
        later = later * faded[..., 1, :, :].cumsum(dim=-2).exp()
        pairs = _joined(pairs, later @ earlier.transpose(-1, -2))
        half *= 2
    return pairs.squeeze(-3)


def _inverse(lower: Tensor) -> Tensor:
    """(I + lower)^-1 of strictly lower triangular `[..., C, C]`, from blocks of one token to blocks of C.

    It is as exact as substitution (both divide by ones only), and exports to ONNX, which has no triangular solver.
    """
    size, half = lower.shape[-1], 1
    inverse = lower.new_ones(*lower.shape[:-2], size, 1, 1)
    while half < size:
        blocks = lower.unflatten(-2, (-1, 2, half))[..., 1, :, :].unflatten(-1, (-1, 2, half))[..., 0, :]
        blocks = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # [..., C / 2 half, half, half], below the diagonal
        first, second = inverse.unflatten(-3, (-1, 2)).unbind(dim=-3)
        inverse = _joined(inverse, -(second @ blocks @ first))
        half *= 2
    return inverse.squeeze(-3)


def _joined(diagonal: Tensor, lower: Tensor) -> Tensor:
    """Pairs of `diagonal [..., 2 n, h, h]`, and below each `lower [..., n, h, h]`, as `[..., n, 2 h, 2 h]`."""
    first, second = diagonal.unflatten(-3, (-1, 2)).unbind(dim=-3)
    upper = torch.cat((first, torch.zeros_like(first)), dim=-1)
    return torch.cat((upper, torch.cat((lower, second), dim=-1)), dim=-2)
