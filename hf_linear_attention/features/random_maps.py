# SPDX-License-Identifier: Apache-2.0
"""Random features of the softmax kernel exp(scaling q·k): the FAVOR+ family, with one small class per formula.

Axes: B batch, H query heads, Hkv key/value heads, N length, D head_dim, M rows of the projection, F features (M, or 2 M
if a row gives two features). x is an input scaled by sqrt(scaling), and w is a row of the projection W `[M, D]`, a
standard Gaussian vector. Queries, keys and heads of a layer share W, which is a persistent buffer, because it is part
of the function that a checkpoint stores. Factors that are equal for all features of a query, or for all keys of a head,
cancel in attention and are left out: 1 / sqrt(M), and for queries exp(-|q|^2 / 2).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import initialization as init

from ..torch_kernels.blocks import EXP, Affine, KernelMap, accumulation_dtype, largest_visible, with_dtype
from .maps import FeatureMap, half_squared_norm, orthogonal_random_matrix, relu_plus_epsilon


class RandomFeatureMap(FeatureMap):
    """Base class that draws the projection W: in blocks of D orthogonal rows if `orthogonal`, else independent rows."""

    log_features = True
    has_num_features = True
    # The number of features that one row of W gives.
    features_per_row: ClassVar[int] = 1
    projection: Tensor

    def __init__(
        self,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        num_features: int | None = None,
        orthogonal: bool = True,
    ):
        super().__init__(num_heads, num_key_value_heads, head_dim, num_features)
        self.orthogonal = orthogonal
        self.register_buffer("projection", torch.empty(self.num_features // self.features_per_row, head_dim))

    @staticmethod
    def default_num_features(head_dim: int) -> int:
        """Four times the head_dim."""
        return 4 * head_dim

    def draw(self, generator: torch.Generator) -> Tensor:
        """Draw a new W `[M, D]` in float32."""
        rows = self.projection.shape[0]
        if self.orthogonal:
            return orthogonal_random_matrix(rows, self.head_dim, generator)
        return torch.randn(rows, self.head_dim, generator=generator, dtype=torch.float32, device="cpu")

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw W."""
        init.copy_(self.projection, self.draw(generator))

    def redraw(self, generator: torch.Generator) -> None:
        """Replace W by a new tensor; the old tensor is not changed, because a backward pass may still need it."""
        self.projection = self.draw(generator).to(self.projection)

    def calibrate(self, query: Tensor, key: Tensor, scaling: float, key_mask: Tensor | None) -> None:
        """Fit constants to `query [B, H, N, D]` and `key [B, Hkv, N, D]`; `key_mask` is bool `[B, N]` or None."""

    def _project(self, x: Tensor, scaling: float) -> Tensor:
        """The products w·x: `[B, heads, N, D]` -> `[B, heads, N, M]`."""
        dtype = accumulation_dtype(x)
        return (with_dtype(x, dtype) * math.sqrt(scaling)) @ with_dtype(self.projection, dtype).T


class ExpRandomFeatureMap(RandomFeatureMap):
    """FAVOR+, positive features (Performer 2020, Lemma 1): log phi(x) = w·x - |x|^2 / 2."""

    def forward_queries(self, query: Tensor, scaling: float) -> Tensor:
        """The exponents w·x; the norm term of a query cancels."""
        return self._project(query, scaling)

    def forward_keys(self, key: Tensor, scaling: float) -> Tensor:
        """The exponents w·x - |x|^2 / 2."""
        return self._project(key, scaling) - half_squared_norm(key, scaling)

    def kernel_map(self, scaling: float) -> KernelMap | None:
        """The C kernels compute these exponents as affine maps."""
        weight = self._kernel_weight(scaling)
        return KernelMap(EXP, Affine(weight), Affine(weight, norm=weight.new_full((1, 1, 1), scaling)))

    def _kernel_weight(self, scaling: float) -> Tensor:
        """The matrix `[1, D, F]` whose product with x equals `_project`."""
        return (with_dtype(self.projection, torch.float32) * math.sqrt(scaling)).T.unsqueeze(0)


class CoshRandomFeatureMap(ExpRandomFeatureMap):
    """Positive features with w and -w (Performer 2020, Lemma 1, "hyperbolic"); at most half the variance of exp."""

    features_per_row = 2

    def _project(self, x: Tensor, scaling: float) -> Tensor:
        projected = super()._project(x, scaling)
        return torch.cat((projected, -projected), dim=-1)

    def _kernel_weight(self, scaling: float) -> Tensor:
        weight = super()._kernel_weight(scaling)
        return torch.cat((weight, -weight), dim=-1)


class ReluRandomFeatureMap(RandomFeatureMap):
    """Generalised attention (Performer 2020, section 2.2): phi(x) = relu(w·x) + 1e-3, which does not estimate softmax.

    The constant is the paper's kernel epsilon, which keeps every denominator positive.
    """

    log_features = False

    def forward_queries(self, query: Tensor, scaling: float) -> Tensor:
        """The features relu(w·x) + 1e-3."""
        return relu_plus_epsilon(self._project(query, scaling))

    def forward_keys(self, key: Tensor, scaling: float) -> Tensor:
        """The features relu(w·x) + 1e-3."""
        return self.forward_queries(key, scaling)


class TrigRandomFeatureMap(RandomFeatureMap):
    """Trigonometric features (Performer 2020, section 2.3): phi(x) = [cos(w·x), sin(w·x)] exp(|x|^2 / 2).

    They are the best features at small norms (scaling |q + k|^2 below about 1) and useless at large norms, where
    estimates, weights and denominators become negative (51 % of the rows for q and k of standard deviation 2). Keys are
    divided by one constant per batch member and head, the largest exp(|k|^2 / 2) of the visible keys, so only
    bidirectional attention is possible.
    """

    log_features = False
    features_per_row = 2
    depends_on_all_keys = True

    def forward_queries(self, query: Tensor, scaling: float) -> Tensor:
        """The features cos(w·x) and sin(w·x)."""
        projected = self._project(query, scaling)
        return torch.cat((projected.cos(), projected.sin()), dim=-1)

    def forward_keys(self, key: Tensor, scaling: float) -> Tensor:
        """`forward_visible_keys` with all keys visible."""
        return self.forward_visible_keys(key, scaling, None)

    def forward_visible_keys(self, key: Tensor, scaling: float, key_mask: Tensor | None) -> Tensor:
        """The features of keys, divided by the largest exp(|k|^2 / 2) of the visible keys."""
        exponent = half_squared_norm(key, scaling)
        if key_mask is not None:
            exponent = exponent.masked_fill(~key_mask[:, None, :, None], 0.0)
        largest = largest_visible(exponent, None).unsqueeze(2)
        return self.forward_queries(key, scaling) * (exponent - largest).exp()


class OptimalRandomFeatureMap(RandomFeatureMap):
    """FAVOR++, optimal positive random features (Likhosherstov 2022, "Chefs' random tables").

    log phi(x) = (D / 4) log(1 - 4 A) + A |w|^2 + sqrt(1 - 4 A) w·x - |x|^2 / 2

    The estimate is unbiased for every A < 1/8. `calibrate` sets A `[Hkv]`, one number per key/value head, to the
    minimum of the variance for the given queries and keys. A is constant from then on, because an A that follows the
    input would let later keys change earlier outputs. Before calibration A = 0, which is FAVOR+.
    """

    norm_weight: Tensor

    def __init__(self, *sizes: Any, **options: Any):
        super().__init__(*sizes, **options)
        self.register_buffer("norm_weight", torch.empty(self.num_key_value_heads))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw W and set A = 0."""
        super().reset_parameters(generator)
        init.zeros_(self.norm_weight)

    def calibrate(self, query: Tensor, key: Tensor, scaling: float, key_mask: Tensor | None) -> None:
        """Set A from the moments of the real tokens."""
        query = query.unflatten(1, (self.num_key_value_heads, -1))
        query_norm, query_mean = _moments(query, key_mask, scaling)
        key_norm, key_mean = _moments(key.unsqueeze(2), key_mask, scaling)
        f = query_norm + key_norm + 2 * (query_mean * key_mean).sum(dim=-1)
        with torch.no_grad():
            self.norm_weight.copy_(optimal_norm_weight(f, self.head_dim))

    def forward_queries(self, query: Tensor, scaling: float) -> Tensor:
        """The exponents without the norm term of the query, which cancels."""
        return self._exponents(query, scaling)

    def forward_keys(self, key: Tensor, scaling: float) -> Tensor:
        """The exponents of the keys."""
        return self._exponents(key, scaling) - half_squared_norm(key, scaling)

    def _exponents(self, x: Tensor, scaling: float) -> Tensor:
        dtype = accumulation_dtype(x)
        a = self.norm_weight.to(dtype).repeat_interleave(x.shape[1] // self.num_key_value_heads)[:, None, None]
        squared_norm = self.projection.to(dtype).square().sum(dim=1)
        stretch = 1 - 4 * a
        return stretch.log() * (self.head_dim / 4) + a * squared_norm + stretch.sqrt() * self._project(x, scaling)


def optimal_norm_weight(f: Tensor, dim: int) -> Tensor:
    """The A <= 0 that minimises E[phi(x)^2 phi(y)^2] in dimension `dim` if |x + y|^2 = f (Likhosherstov 2022)."""
    f = f.clamp(min=1e-6)  # f = 0 would give 0 / 0; its limit is A = 0
    # This is (sqrt((2 f + d)^2 + 8 d f) - (2 f + d)) / (4 f) without its cancellation at large f.
    rho = 2 * dim / (((2 * f + dim).square() + 8 * dim * f).sqrt() + 2 * f + dim)
    return (1 - 1 / rho) / 8


def _moments(x: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Means over batch, group and position of scaling |x|^2 `[Hkv]` and sqrt(scaling) x `[Hkv, D]`, in float64.

    x is `[B, Hkv, G, N, D]`; the bool mask `[B, N]` is False at padding.
    """
    place = "cpu" if x.device.type == "mps" else x.device  # Apple GPUs lack float64
    x = x.to(place).double()
    weights = torch.ones_like(x[:, :1, :1, :, :1]) if mask is None else mask[:, None, None, :, None].to(place).double()
    weights = weights / (weights.sum() * x.shape[2])
    x = x.masked_fill(weights == 0, 0.0)
    norm = (weights * x.square()).sum(dim=(0, 2, 3, 4)) * scaling
    return norm, (weights * x).sum(dim=(0, 2, 3)) * math.sqrt(scaling)


RANDOM_FEATURES: dict[str, type[RandomFeatureMap]] = {
    "exp": ExpRandomFeatureMap,
    "cosh": CoshRandomFeatureMap,
    "trig": TrigRandomFeatureMap,
    "relu": ReluRandomFeatureMap,
    "favor++": OptimalRandomFeatureMap,
}
