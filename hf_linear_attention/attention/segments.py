# SPDX-License-Identifier: Apache-2.0
"""Means of consecutive segments of each row's real tokens, and reordering that moves padding, which may be anywhere.

    tokens   a b - c d e - f g     - is padding; a row of 7 real tokens in 3 segments: token r is in floor(3 r / 7)
    segment  0 0   0 1 1   2 2

Axes: B batch, N length, M segments.
"""

from __future__ import annotations

import itertools

import torch

from ..torch_kernels.implementations import is_tracing


def segment_mean_weights(mask: torch.Tensor, segments: int, dtype: torch.dtype) -> torch.Tensor:
    """The matrix `[B, M, N]` that averages the real tokens of each segment; the row of an empty segment is 0.

    Each row of the batch is divided by its own number of tokens, so padding and other rows do not affect it.

    Args:
        mask: bool `[B, N]`, False at padding.
        segments: M. A row of at most M real tokens has one token per segment, followed by empty segments.
        dtype: the dtype of the weights.
    """
    rank = mask.cumsum(dim=1) - 1
    count = (rank[:, -1:] + 1).clamp(min=segments)
    owner = (rank * segments).div(count, rounding_mode="floor").masked_fill(~mask, -1)
    weights = (owner.unsqueeze(1) == torch.arange(segments, dtype=torch.long, device=mask.device)[:, None]).to(dtype)
    return weights / weights.sum(dim=2, keepdim=True).clamp(min=1)


def segment_means(x: torch.Tensor, segments: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Means `[B, heads, M, D]` of `x [B, heads, N, D]`, of all tokens or by the `weights` of `segment_mean_weights`."""
    length = x.shape[2]
    if weights is None and length >= segments and not is_tracing():
        if length % segments == 0:
            return x.unflatten(2, (segments, -1)).mean(dim=3)
        if x.device.type == "cpu":  # a product with a matrix of mostly zeros costs more
            bounds = [-(-segment * length // segments) for segment in range(segments + 1)]
            sizes = [end - start for start, end in itertools.pairwise(bounds)]
            return torch.stack([part.mean(dim=2) for part in x.split(sizes, dim=2)], dim=2)
    if weights is None:
        mask = torch.ones(1, length, dtype=torch.bool, device=x.device)
        weights = segment_mean_weights(mask, segments, x.dtype).unsqueeze(1)
    return weigh_tokens(weights, x)


def weigh_tokens(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The product of `weights [1 or B, 1 or heads, M, N]` and `x [B, heads, N, D]`."""
    rows = x.transpose(1, 2)
    if weights.shape[1] == 1 and rows.is_contiguous():  # the layout in models allows one product without a copy
        product = torch.bmm(weights.squeeze(1).expand(x.shape[0], -1, -1), rows.flatten(2))
        return product.unflatten(2, rows.shape[2:]).transpose(1, 2)
    return weights @ x


def without_padding(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`x [B, heads, N, D]` with 0 at padding, where x may hold any value, even one whose product with 0 is NaN."""
    return x if mask is None else torch.where(mask[:, None, :, None], x, 0.0)  # `where` keeps the memory layout


def real_first(mask: torch.Tensor) -> torch.Tensor:
    """The places `[B, N]` of each row's real tokens, in order, followed by those of its padding.

    This does not sort, because ONNX has no stable sort.
    """
    real, padding = mask.cumsum(dim=1), (~mask).cumsum(dim=1)
    return inverse_order(torch.where(mask, real, real[:, -1:] + padding) - 1)


def inverse_order(places: torch.Tensor) -> torch.Tensor:
    """The inverse of the permutation `places [B, N]`."""
    numbers = torch.arange(places.shape[1], dtype=torch.long, device=places.device).expand_as(places)
    return torch.empty_like(places).scatter(1, places, numbers)


def gather_tokens(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`x [B, heads, N, D]` with its tokens in the order `places [B, N]`."""
    # `take_along_dim` would tie `torch.export` to the batch size and length of the example.
    return x.gather(2, places[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
