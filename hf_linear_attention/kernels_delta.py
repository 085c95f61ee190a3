# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule, token by token in plain torch.

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - (exp(g_t) S_(t-1))^T k_t)^T      o_t = S_t^T q_t

Axes: B batch, H query heads, Hkv key/value heads, N tokens, F features, D head dimension of the values.
"""

from __future__ import annotations

import torch

from .kernels_torch import accumulated


def gated_delta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    erases: bool = True,
    key_mask: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule (Gated DeltaNet 2024, equation 10; per channel: Kimi Linear 2025).

    Args:
        query: `[B, H, N, F]`.
        key: `[B, Hkv, N, F]`.
        value: `[B, Hkv, N, D]`.
        log_decay: `[B, Hkv, N]`, or `[B, Hkv, N, F]` per channel of the keys; at most 0.
        beta: `[B, Hkv, N]`.
        erases: whether the state forgets what it holds at a key before it stores the new value.
        key_mask: bool `[B, N]`, False at padding, which changes nothing; or integers that number packed sequences from
            1, with 0 at padding.
        state: `[B, Hkv, F, D]` after all earlier tokens, or None if there are none.

    Returns:
        The output `[B, H, N, D]`, 0 at padding, and the state after these tokens, in the accumulation dtype.
    """
    query, key, value, log_decay, beta = (accumulated(x) for x in (query, key, value, log_decay, beta))
    groups = query.shape[1] // key.shape[1]
    query = query.unflatten(1, (key.shape[1], groups))
    if state is None:
        state = value.new_zeros(*key.shape[:2], key.shape[3], value.shape[3])
    if not key.shape[2]:
        return (query[..., :1] * value.unsqueeze(2)).flatten(1, 2), state
    decay = log_decay.exp()
    decay = decay.unsqueeze(-1) if decay.ndim == 3 else decay
    number = None if key_mask is None or key_mask.dtype == torch.bool else _first_number(key_mask)
    outputs = []
    for token in range(key.shape[2]):
        old = state
        if number is not None and key_mask is not None:
            here = key_mask[:, token]
            old = torch.where(_per_row((here == number) | (here == 0)), old, 0.0)
            number = torch.where(here == 0, number, here)
        new = old * decay[:, :, token].unsqueeze(-1)
        written = value[:, :, token]
        if erases:
            written = written - (key[:, :, token].unsqueeze(2) @ new).squeeze(2)
        new = new + (beta[:, :, token, None] * key[:, :, token]).unsqueeze(-1) * written.unsqueeze(2)
        output = query[:, :, :, token] @ new
        if key_mask is not None:
            real = _per_row(key_mask[:, token] > 0)
            new, output = torch.where(real, new, old), torch.where(real, output, 0.0)
        state = new
        outputs.append(output)
    return torch.stack(outputs, dim=3).flatten(1, 2), state


def _first_number(numbers: torch.Tensor) -> torch.Tensor:
    """The number of the first packed sequence of each row, to which the initial state belongs."""
    return torch.where(numbers > 0, numbers, torch.iinfo(numbers.dtype).max).amin(dim=1)


def _per_row(mask: torch.Tensor) -> torch.Tensor:
    return mask[:, None, None, None]
