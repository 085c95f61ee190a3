"""Float64 oracles, written as in the papers and as slowly: the N x N weights are formed. The tests compare with them.

Axes: B batch, H query heads, Hkv key/value heads, N queries, S keys, D head dimension, F features.
"""

from __future__ import annotations

import math

import torch


def repeat_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`[B, Hkv, S, D]` -> `[B, H, S, D]`: each key/value head serves H / Hkv query heads."""
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def attend(log_weights: torch.Tensor, value: torch.Tensor, key_mask=None, is_causal: bool = False) -> torch.Tensor:
    """Normalised attention from the logarithms of its weights `[B, H, N, S]`; 0 for a query that sees no key."""
    queries, keys = log_weights.shape[-2:]
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if is_causal:
        visible = visible.tril(keys - queries)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
    log_weights = log_weights.masked_fill(~visible, -math.inf)
    weights = log_weights.softmax(dim=-1).nan_to_num(0.0)
    return weights @ repeat_heads(value.double(), log_weights.shape[1])


def kernel_attention(query_features, key_features, value, *, log_features=True, key_mask=None, is_causal=False):
    """Katharopoulos 2020, equation 4: weights phi(q_i)·phi(k_j), from features or their logarithms."""
    query_features = query_features.double()
    key_features = repeat_heads(key_features.double(), query_features.shape[1])
    if log_features:
        exponents = query_features.unsqueeze(-2) + key_features.unsqueeze(-3)
        return attend(exponents.logsumexp(dim=-1), value, key_mask, is_causal)
    return attend((query_features @ key_features.transpose(-1, -2)).log(), value, key_mask, is_causal)


def elu1(x: torch.Tensor) -> torch.Tensor:
    """Katharopoulos 2020, equation 7."""
    x = x.double()
    return torch.where(x > 0, x + 1, x.exp())


def relu(x: torch.Tensor) -> torch.Tensor:
    """Performer 2020, section 4: generalised attention with f = ReLU and the kernel epsilon 1e-3."""
    return x.double().clamp(min=0) + 1e-3


def hedgehog(x: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
    """Logarithms of [softmax(x W), softmax(-x W)] per head (Hedgehog 2024, section 4.2).

    x `[B, H, N, D]`, weight `[H, D, F / 2]`.
    """
    projected = torch.einsum("bhnd,hdf->bhnf", x.double() * math.sqrt(scaling), weight.double())
    return torch.cat((projected.log_softmax(-1), (-projected).log_softmax(-1)), dim=-1)


def favor(x: torch.Tensor, projection: torch.Tensor, scaling: float) -> torch.Tensor:
    """Logarithms of FAVOR+ (Performer 2020, Lemma 1): w·x - |x|^2 / 2 - log(F) / 2 with x scaled by sqrt(scaling)."""
    x = x.double() * math.sqrt(scaling)
    return x @ projection.double().T - x.square().sum(-1, keepdim=True) / 2 - math.log(projection.shape[0]) / 2


def exp_keys(x, weight, bias, norm_weight, scaling: float) -> torch.Tensor:
    """Logarithms of the learned exponential features of keys: x W + b - a |x|^2 / 2, x scaled by sqrt(scaling)."""
    x = x.double() * math.sqrt(scaling)
    return x @ weight.double() + bias.double() - norm_weight.double() * x.square().sum(-1, keepdim=True) / 2


def linformer(query, key, value, key_projection, value_projection, scaling: float, max_length=None, full=None):
    """Linformer 2020, equation 7: softmax(q (E K)^T) (F V), for one unpadded input.

    An input shorter than `max_length` sees the first columns of E and F only; each slot is then divided by the share
    of its absolute weight (`full` is the whole of E's and F's, `[1 or Hkv, k]` each) that is left, and slots with less
    than half of one token's share take no part.
    """
    heads = query.shape[1]
    compressed, empty = [], []
    for x, projection, total in zip((key, value), (key_projection, value_projection), full or (None, None)):
        projection = projection.double()
        mass = projection.abs().sum(-1)
        total = mass if total is None else total
        least = total * 0.5 * projection.shape[-2] / (projection.shape[-1] if max_length is None else max_length)
        empty.append(mass <= least)
        compressed.append((projection @ x.double()) * (total / torch.maximum(mass, least)).unsqueeze(-1))
    key, value = compressed
    logits = scaling * query.double() @ repeat_heads(key, heads).transpose(-1, -2)
    hidden = empty[0].expand(key.shape[1], -1).repeat_interleave(heads // key.shape[1], dim=0)
    logits = logits.masked_fill(hidden.unsqueeze(1), -math.inf)
    return logits.softmax(dim=-1) @ repeat_heads(value, heads)


def hybrid(query, key, value, query_features, key_features, far_log_scale, scaling, window_size, num_sinks):
    """One softmax over exact logits near by and logarithms of kernel weights far away, for one unpadded causal input.

    Near are the last `window_size` tokens and the first `num_sinks`; features are logarithms, `far_log_scale [B, H, N, 1]`.
    """
    heads, length = query.shape[1:3]
    exact = scaling * query.double() @ repeat_heads(key.double(), heads).transpose(-1, -2)
    key_features = repeat_heads(key_features.double(), heads)
    far = (query_features.double().unsqueeze(-2) + key_features.unsqueeze(-3)).logsumexp(dim=-1)
    far = far + far_log_scale
    distance = torch.arange(length)[:, None] - torch.arange(length)
    near = (distance < window_size) | (torch.arange(length) < num_sinks)
    return attend(torch.where(near, exact, far), value, is_causal=True)


def nystrom(query, key, value, num_landmarks: int, iterations: int, scaling: float, conv_weight=None):
    """Nystromformer 2021, equations 11 to 15, for one unpadded input of n tokens.

    Landmark s is the mean of the tokens t with floor(t M / n) = s. At most M tokens: exact softmax, since A A^+ A = A.
    conv_weight `[H, width]`: a convolution along the length of the values, one kernel per head, is added.
    """
    heads, length = query.shape[1:3]
    query, key, value = query.double(), repeat_heads(key.double(), heads), repeat_heads(value.double(), heads)
    if length <= num_landmarks:
        output = attend(scaling * query @ key.transpose(-1, -2), value)
    else:
        owner = torch.arange(length) * num_landmarks // length
        landmarks = [
            torch.stack([x[:, :, owner == s].mean(dim=2) for s in range(num_landmarks)], dim=2) for x in (query, key)
        ]
        pairs = ((query, landmarks[1]), (landmarks[0], landmarks[1]), (landmarks[0], key))
        first, middle, last = ((scaling * q @ k.transpose(-1, -2)).softmax(dim=-1) for q, k in pairs)
        inverse = torch.stack([_newton_schulz(a, iterations) for a in middle.flatten(0, 1)]).view_as(middle)
        output = first @ inverse @ last @ value
    if conv_weight is not None:
        half = conv_weight.shape[1] // 2
        for shift in range(-half, half + 1):
            moved = torch.zeros_like(value)
            here, there = slice(max(0, -shift), length - max(0, shift)), slice(max(0, shift), length + min(0, shift))
            moved[:, :, here] = value[:, :, there]
            output = output + conv_weight.double()[:, shift + half, None, None] * moved
    return output


def _newton_schulz(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4 from Z = A^T / (|A|_1 |A|_inf), one matrix `[M, M]`."""
    inverse = matrix.T / (torch.linalg.matrix_norm(matrix, 1) * torch.linalg.matrix_norm(matrix, math.inf))
    identity = torch.eye(matrix.shape[0], dtype=matrix.dtype)
    for _ in range(iterations):
        az = matrix @ inverse
        inverse = inverse @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az))) / 4
    return inverse
