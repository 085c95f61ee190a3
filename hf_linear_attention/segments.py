# SPDX-License-Identifier: Apache-2.0
"""Means of consecutive segments of each row's real tokens, and the tokens moved together: padding may lie anywhere.

    tokens   a b - c d e - f g     - is padding; a row of 7 real tokens in 3 segments of rank r: floor(3 r / 7)
    segment  0 0   0 1 1   2 2

Axes: B batch, N length, M segments.
"""

from __future__ import annotations

import itertools

import torch

from .kernels import is_tracing


def segment_mean_weights(mask: torch.Tensor, segments: int, dtype: torch.dtype) -> torch.Tensor:
    """The matrix `[B, M, N]` that averages the real tokens of each segment; rows of 0 where a segment has no token.

    Args:
        mask: bool `[B, N]`, False at padding.
        segments: M. A row of at most M real tokens has one token a segment, and empty segments after them.

    Every row of the batch is cut by its own number of tokens, so padding and batch mates change nothing.
    """
    rank = mask.cumsum(dim=1) - 1
    count = (rank[:, -1:] + 1).clamp(min=segments)
    owner = (rank * segments).div(count, rounding_mode="floor").masked_fill(~mask, -1)
    weights = (owner.unsqueeze(1) == torch.arange(segments, device=mask.device)[:, None]).to(dtype)
    return weights / weights.sum(dim=2, keepdim=True).clamp(min=1)


def segment_means(x: torch.Tensor, segments: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """`x [B, heads, N, D]` -> `[B, heads, M, D]`; by `segment_mean_weights` `[B, 1, M, N]`, or of all tokens."""
    length = x.shape[2]
    if weights is None and length >= segments and not is_tracing():
        if length % segments == 0:
            return x.unflatten(2, (segments, -1)).mean(dim=3)
        if x.device.type == "cpu":  # a product with mostly zeros costs more
            bounds = [-(-segment * length // segments) for segment in range(segments + 1)]
            sizes = [end - start for start, end in itertools.pairwise(bounds)]
            return torch.stack([part.mean(dim=2) for part in x.split(sizes, dim=2)], dim=2)
    if weights is None:
        mask = torch.ones(1, length, dtype=torch.bool, device=x.device)
        weights = segment_mean_weights(mask, segments, x.dtype).unsqueeze(1)
    return weigh_tokens(weights, x)


def weigh_tokens(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`weights [1 or B, 1 or heads, M, N]` times `x [B, heads, N, D]`."""
    rows = x.transpose(1, 2)
    if weights.shape[1] == 1 and rows.is_contiguous():  # as models have it: one product for all heads, and no copy
        product = torch.bmm(weights.squeeze(1).expand(x.shape[0], -1, -1), rows.flatten(2))
        return product.unflatten(2, rows.shape[2:]).transpose(1, 2)
    return weights @ x


def without_padding(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`x [B, heads, N, D]` with 0 at padding: what is there may be anything, and 0 times infinity is not 0."""
    return x if mask is None else torch.where(mask[:, None, :, None], x, 0.0)  # keeps the order in memory


def real_first(mask: torch.Tensor) -> torch.Tensor:
    """`[B, N]`: the places of each row's real tokens, in order, and then those of its padding.

    Not by sorting: ONNX knows no stable sort.
    """
    real, padding = mask.cumsum(dim=1), (~mask).cumsum(dim=1)
    return way_back(torch.where(mask, real, real[:, -1:] + padding) - 1)


def way_back(places: torch.Tensor) -> torch.Tensor:
    """The inverse of the permutation `places [B, N]`."""
    numbers = torch.arange(places.shape[1], device=places.device).expand_as(places)
    return torch.empty_like(places).scatter(1, places, numbers)


def take(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`x [B, heads, N, D]` with its tokens in the order `places [B, N]`."""
    # Not `take_along_dim`, which ties `torch.export` to the batch and length of the example.
    return x.gather(2, places[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
