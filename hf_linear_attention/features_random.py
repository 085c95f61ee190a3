# SPDX-License-Identifier: Apache-2.0
"""Random features of the softmax kernel exp(scaling q·k): the FAVOR+ family, one small class for each paper's formula.

Axes: B batch, H query heads, Hkv key/value heads, N length, D head_dim, M rows of the projection, F features (M, or
2 M where a row gives two). x is an input scaled by sqrt(scaling), w a row of the projection W `[M, D]`, a standard
Gaussian vector. W is shared by queries, keys and heads of a layer, and is a persistent buffer: it is part of the
function that a checkpoint stores. Factors that are the same for all features of one query, or for all keys of one
head, cancel in attention and are left out: 1 / sqrt(M), and for queries exp(-|q|^2 / 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from transformers import initialization as init

from .kernels_torch import accumulation_dtype
from .kernels_torch import largest_visible
from .kernels_torch import with_dtype
from .features import FeatureMap
from .features import half_squared_norm
from .features import orthogonal_random_matrix
from .kernels_torch import EXP
from .kernels_torch import Affine
from .kernels_torch import KernelMap


class RandomFeatureMap(FeatureMap):
    """The projection W, its drawing and redrawing. `orthogonal` gives blocks of D orthogonal rows, else iid rows."""

    log_features = True
    has_num_features = True
    estimates_softmax: ClassVar[bool] = True
    # Features that one row of W gives.
    features_per_row: ClassVar[int] = 1
    projection: torch.Tensor

    def __init__(self, num_heads, num_key_value_heads, head_dim, num_features=None, orthogonal: bool = True):
        super().__init__(num_heads, num_key_value_heads, head_dim, num_features)
        self.orthogonal = orthogonal
        self.register_buffer("projection", torch.empty(self.num_features // self.features_per_row, head_dim))

    @staticmethod
    def default_num_features(head_dim: int) -> int:
        return 4 * head_dim

    @classmethod
    def check_num_features(cls, num_features):
        if num_features % cls.features_per_row == 0:
            return None
        return f"must be a multiple of {cls.features_per_row}: a row of the projection gives as many features"

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """A new W `[M, D]` in float32."""
        rows = self.projection.shape[0]
        if self.orthogonal:
            return orthogonal_random_matrix(rows, self.head_dim, generator)
        return torch.randn(rows, self.head_dim, generator=generator)

    def reset_parameters(self, generator):
        init.copy_(self.projection, self.draw(generator))

    def redraw(self, generator: torch.Generator) -> None:
        """Replace W; the old tensor stays as it is for a backward pass that still needs it."""
        self.projection = self.draw(generator).to(self.projection)

    def calibrate(self, query, key, scaling: float, key_mask: torch.Tensor | None) -> None:
        """Fit constants to `query [B, H, N, D]`, `key [B, Hkv, S, D]`; `key_mask` bool `[B, S]` or None, and N = S."""

    def _project(self, x: torch.Tensor, scaling: float) -> torch.Tensor:
        """w·x, `[B, heads, N, D]` -> `[B, heads, N, M]`."""
        dtype = accumulation_dtype(x)
        return (with_dtype(x, dtype) * math.sqrt(scaling)) @ with_dtype(self.projection, dtype).T


class ExpRandomFeatureMap(RandomFeatureMap):
    """FAVOR+, positive features (Performer 2020, Lemma 1): log phi(x) = w·x - |x|^2 / 2."""

    def forward_queries(self, query, scaling):
        return self._project(query, scaling)

    def forward_keys(self, key, scaling):
        return self._project(key, scaling) - half_squared_norm(key, scaling)

    def kernel_map(self, scaling):
        weight = self._kernel_weight(scaling)
        return KernelMap(EXP, Affine(weight), Affine(weight, norm=weight.new_full((1, 1, 1), scaling)))

    def _kernel_weight(self, scaling: float) -> torch.Tensor:
        """`[1, D, F]`, what gives the same as `_project`."""
        return (with_dtype(self.projection, torch.float32) * math.sqrt(scaling)).T.unsqueeze(0)


class CoshRandomFeatureMap(ExpRandomFeatureMap):
    """Positive features with w and -w (Performer 2020, Lemma 1, "hyperbolic"): half the variance of exp and less."""

    features_per_row = 2

    def _project(self, x, scaling):
        projected = super()._project(x, scaling)
        return torch.cat((projected, -projected), dim=-1)

    def _kernel_weight(self, scaling):
        weight = super()._kernel_weight(scaling)
        return torch.cat((weight, -weight), dim=-1)


class RegularizedRandomFeatureMap(ExpRandomFeatureMap):
    """SMREG (Performer 2020, Theorem 1): the rows of W lie on the sphere of radius sqrt(D).

    The kernel that these estimate is a lower bound of the softmax kernel, by a factor of at least 1 - 2 D^(-1/3).
    """

    def draw(self, generator):
        projection = super().draw(generator)
        return projection * (math.sqrt(self.head_dim) / projection.norm(dim=1, keepdim=True))


class GeneralizedRandomFeatureMap(RandomFeatureMap):
    """Generalised attention (Performer 2020, section 2.2): phi(x) = f(w·x) + 1e-3, no estimate of softmax.

    The constant is the paper's kernel epsilon, which keeps every denominator positive. f must not be negative: of the
    eight that the paper tries (its figure 16), gelu, tanh and the identity give weights of both signs, whose sum may be
    0, and cos alone is half of `trig`; they are left out.
    """

    log_features = False
    estimates_softmax = False
    epsilon: ClassVar[float] = 1e-3
    function: ClassVar[Callable[..., torch.Tensor]]

    def forward_queries(self, query, scaling):
        return type(self).function(self._project(query, scaling)) + self.epsilon

    def forward_keys(self, key, scaling):
        return self.forward_queries(key, scaling)


class ReluRandomFeatureMap(GeneralizedRandomFeatureMap):
    function = staticmethod(torch.relu)


class SigmoidRandomFeatureMap(GeneralizedRandomFeatureMap):
    function = staticmethod(torch.sigmoid)


class AbsRandomFeatureMap(GeneralizedRandomFeatureMap):
    function = staticmethod(torch.abs)


class GeneralizedExpRandomFeatureMap(GeneralizedRandomFeatureMap):
    """f = exp, as logarithms: log(exp(w·x) + 1e-3). Unlike `exp` without exp(-|x|^2 / 2): large keys weigh more."""

    log_features = True

    def forward_queries(self, query, scaling):
        projected = self._project(query, scaling)
        return torch.logaddexp(projected, projected.new_tensor(math.log(self.epsilon)))


class TrigRandomFeatureMap(RandomFeatureMap):
    """Trigonometric features (Performer 2020, section 2.3): phi(x) = [cos(w·x), sin(w·x)] exp(|x|^2 / 2).

    Best at small norms (scaling |q + k|^2 below about 1) and useless at large ones, where its estimates, weights and
    denominators become negative (51 % of rows at q, k of standard deviation 2). Keys are divided by one constant per
    batch and head, the largest exp(|k|^2 / 2) of the visible ones: bidirectional attention only.
    """

    log_features = False
    features_per_row = 2
    depends_on_all_keys = True

    def forward_queries(self, query, scaling):
        projected = self._project(query, scaling)
        return torch.cat((projected.cos(), projected.sin()), dim=-1)

    def forward_keys(self, key, scaling):
        return self.forward_visible_keys(key, scaling, None)

    def forward_visible_keys(self, key, scaling, key_mask):
        exponent = half_squared_norm(key, scaling)
        if key_mask is not None:
            exponent = exponent.masked_fill(~key_mask[:, None, :, None], 0.0)
        largest = largest_visible(exponent, None).unsqueeze(2)
        return self.forward_queries(key, scaling) * (exponent - largest).exp()


class OptimalRandomFeatureMap(RandomFeatureMap):
    """FAVOR++, optimal positive random features (Likhosherstov 2022, "Chefs' random tables").

    log phi(x) = (D / 4) log(1 - 4 A) + A |w|^2 + sqrt(1 - 4 A) w·x - |x|^2 / 2

    is unbiased for every A < 1/8. A, one per key/value head `[Hkv]`, minimises the variance for queries and keys like
    those given to `calibrate`, and is frozen from then on: an A that follows the input would let keys change the past.
    Before, A = 0, which is FAVOR+.
    """

    norm_weight: torch.Tensor

    def __init__(self, num_heads, num_key_value_heads, head_dim, num_features=None, orthogonal=True):
        super().__init__(num_heads, num_key_value_heads, head_dim, num_features, orthogonal)
        self.register_buffer("norm_weight", torch.empty(num_key_value_heads))

    def reset_parameters(self, generator):
        super().reset_parameters(generator)
        init.zeros_(self.norm_weight)

    def calibrate(self, query, key, scaling, key_mask):
        """Set A from the moments of real tokens."""
        query = query.unflatten(1, (self.num_key_value_heads, -1))
        query_norm, query_mean = _moments(query, key_mask, scaling)
        key_norm, key_mean = _moments(key.unsqueeze(2), key_mask, scaling)
        f = query_norm + key_norm + 2 * (query_mean * key_mean).sum(dim=-1)
        with torch.no_grad():
            self.norm_weight.copy_(optimal_norm_weight(f, self.head_dim))

    def forward_queries(self, query, scaling):
        return self._exponents(query, scaling)

    def forward_keys(self, key, scaling):
        return self._exponents(key, scaling) - half_squared_norm(key, scaling)

    def _exponents(self, x: torch.Tensor, scaling: float) -> torch.Tensor:
        dtype = accumulation_dtype(x)
        a = self.norm_weight.to(dtype).repeat_interleave(x.shape[1] // self.num_key_value_heads)[:, None, None]
        squared_norm = self.projection.to(dtype).square().sum(dim=1)
        stretch = 1 - 4 * a
        return stretch.log() * (self.head_dim / 4) + a * squared_norm + stretch.sqrt() * self._project(x, scaling)


def optimal_norm_weight(f: torch.Tensor, dim: int) -> torch.Tensor:
    """The A <= 0 that minimises E[phi(x)^2 phi(y)^2] at dimension `dim` when |x + y|^2 = f (Likhosherstov 2022)."""
    f = f.clamp(min=1e-6)  # f = 0 gives A = 0 only in the limit
    # rho = (sqrt((2 f + d)^2 + 8 d f) - (2 f + d)) / (4 f), without its cancellation at large f
    rho = 2 * dim / (((2 * f + dim).square() + 8 * dim * f).sqrt() + 2 * f + dim)
    return (1 - 1 / rho) / 8


def _moments(x: torch.Tensor, mask: torch.Tensor | None, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Means over batch, group and position of scaling |x|^2 `[Hkv]` and sqrt(scaling) x `[Hkv, D]`, in float64.

    x `[B, Hkv, G, N, D]`, mask bool `[B, N]`, False at padding.
    """
    x = x.double()
    weights = torch.ones_like(x[:, :1, :1, :, :1]) if mask is None else mask[:, None, None, :, None].double()
    weights = weights / (weights.sum() * x.shape[2])
    x = x.masked_fill(weights == 0, 0.0)
    norm = (weights * x.square()).sum(dim=(0, 2, 3, 4)) * scaling
    return norm, (weights * x).sum(dim=(0, 2, 3)) * math.sqrt(scaling)


RANDOM_FEATURES: dict[str, type[RandomFeatureMap]] = {
    "exp": ExpRandomFeatureMap,
    "cosh": CoshRandomFeatureMap,
    "trig": TrigRandomFeatureMap,
    "regularized": RegularizedRandomFeatureMap,
    "relu": ReluRandomFeatureMap,
    "sigmoid": SigmoidRandomFeatureMap,
    "abs": AbsRandomFeatureMap,
    "generalized_exp": GeneralizedExpRandomFeatureMap,
    "favor++": OptimalRandomFeatureMap,
}
