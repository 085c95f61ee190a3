# SPDX-License-Identifier: Apache-2.0
"""Feature maps phi with phi(q)·phi(k) > 0: what makes attention linear in the length.

Axes: B batch, H query heads, Hkv key/value heads, N length, D head_dim, F features.

A map says by `log_features` what it returns: exponents, for maps of the form exp(...) (the kernels keep a running
maximum, so nothing over- or underflows), or the features themselves. Maps that approximate the softmax
kernel exp(scaling q·k) take sqrt(scaling) on queries and keys each; elu1 and relu act on q and k as they come, as in
the papers. Parameters are raw `nn.Parameter`, so LoRA "all-linear" and quantisers leave them alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn
from transformers import initialization as init

from .kernels_torch import accumulated
from .kernels_torch import accumulation_dtype
from .kernels_torch import with_dtype
from .kernels import is_eager
from .kernels_causal import ElementwiseMap
from .kernels_torch import ELU_PLUS_ONE
from .kernels_torch import EXP
from .kernels_torch import HEDGEHOG
from .kernels_cpu import takes
from .kernels_operators import elu_plus_one_in_c
from .kernels_torch import Affine
from .kernels_torch import KernelMap


class FeatureMap(nn.Module):
    """`forward_queries` and `forward_keys`: `[B, heads, N, D]` -> `[B, heads, N, F]` in float32."""

    log_features: ClassVar[bool] = False
    # Whether `num_features` can be chosen; otherwise it is `head_dim`.
    has_num_features: ClassVar[bool] = False
    # Whether `forward_visible_keys` needs all keys at once.
    depends_on_all_keys: ClassVar[bool] = False

    def __init__(self, num_heads: int, num_key_value_heads: int, head_dim: int, num_features: int | None = None):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = num_heads, num_key_value_heads, head_dim
        self.num_features = num_features or self.default_num_features(head_dim)

    @staticmethod
    def default_num_features(head_dim: int) -> int:
        return head_dim

    @classmethod
    def check_num_features(cls, num_features: int) -> str | None:
        """What is wrong with this number of features, or None."""
        return None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initialise parameters and buffers, except those that a checkpoint has just filled."""

    def forward_queries(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        raise NotImplementedError

    def forward_keys(self, key: torch.Tensor, scaling: float) -> torch.Tensor:
        raise NotImplementedError

    def forward_visible_keys(self, key: torch.Tensor, scaling: float, key_mask: torch.Tensor | None) -> torch.Tensor:
        """`forward_keys` for a map whose features depend on which keys are visible (bool `[B, S]` or None)."""
        return self.forward_keys(key, scaling)

    def kernel_map(self, scaling: float) -> KernelMap | None:
        """The same map for the C kernels, which then make the features themselves; None where they do not know it."""
        return None

    def elementwise_map(self) -> ElementwiseMap | None:
        """The same map for the causal kernel of torch, if it maps numbers one by one, queries and keys alike."""
        return None


class ElementwiseFeatureMap(FeatureMap):
    """The same non-negative function on every element of queries and keys."""

    function: ClassVar[Callable[..., torch.Tensor]]
    # Its derivative; with it the causal kernel of torch makes features block by block instead of keeping them.
    slope: ClassVar[Callable[..., torch.Tensor] | None] = None

    def forward_queries(self, query, scaling):
        return type(self).function(accumulated(query))

    def forward_keys(self, key, scaling):
        return type(self).function(accumulated(key))

    def elementwise_map(self):
        slope = type(self).slope
        return None if slope is None else ElementwiseMap(type(self).function, slope)


# Tokens at a time of a map on a CPU: what lies between its steps stays in cache, and only the output takes new pages.
TOKENS_IN_CACHE = 64


class _EluPlusOne(torch.autograd.Function):
    """`elu_plus_one` with one new tensor and one saved one: its slope is its value, but at most 1."""

    @staticmethod
    def forward(ctx, x):
        output = _elu_plus_one(x)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx, grad):
        (output,) = ctx.saved_tensors
        return grad * output.clamp(max=1)


def _elu_plus_one(x: torch.Tensor) -> torch.Tensor:
    if takes(x, dtypes=(torch.float32,)):
        return elu_plus_one_in_c(x)
    output = torch.empty_like(x)
    for part, out in zip(x.split(TOKENS_IN_CACHE, dim=-2), output.split(TOKENS_IN_CACHE, dim=-2)):
        torch.clamp(part, max=0, out=out).exp_().add_(part.relu())
    return output


def elu_plus_one(x: torch.Tensor) -> torch.Tensor:
    """elu(x) + 1 (Katharopoulos 2020, equation 7), written so that it is positive where `F.elu(x) + 1` rounds to 0.

    In C it goes no lower than the smallest normal number.
    """
    if x.ndim != 4 or x.device.type != "cpu" or not is_eager(x):
        return x.clamp(max=0).exp_() + x.relu()
    return _EluPlusOne.apply(x) if torch.is_grad_enabled() else _elu_plus_one(x)


def _slope_of_elu(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(max=0).exp_()


def relu_plus_epsilon(x: torch.Tensor) -> torch.Tensor:
    """relu(x) + 1e-3 (Performer's generalised ReLU attention): the constant keeps every denominator positive."""
    return x.relu() + 1e-3


def squared_relu_plus_epsilon(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2 (Primer 2021's activation as a feature map), with the constant of `relu_plus_epsilon`."""
    return x.relu().square() + 1e-3


def _slope_of_relu(x: torch.Tensor) -> torch.Tensor:
    return (x > 0).to(x.dtype)


def _slope_of_squared_relu(x: torch.Tensor) -> torch.Tensor:
    return 2 * x.relu()


class EluFeatureMap(ElementwiseFeatureMap):
    function, slope = staticmethod(elu_plus_one), staticmethod(_slope_of_elu)

    def kernel_map(self, scaling):
        return KernelMap(ELU_PLUS_ONE)


class ReluFeatureMap(ElementwiseFeatureMap):
    function, slope = staticmethod(relu_plus_epsilon), staticmethod(_slope_of_relu)


class SquaredReluFeatureMap(ElementwiseFeatureMap):
    function, slope = staticmethod(squared_relu_plus_epsilon), staticmethod(_slope_of_squared_relu)


class TaylorFeatureMap(FeatureMap):
    """exp(s) to second order, 1 + s + s^2 / 2 with s = scaling q·k: a kernel of at least 1/2 (Based, Arora 2024).

    phi(x) = [1, x_a, x_a^2 / sqrt(2), x_a x_b for a < b] on x scaled by sqrt(scaling), F = 1 + D + D (D + 1) / 2: the
    products above the diagonal stand for both, which halves the 1 + D + D^2 features of the paper.
    """

    @staticmethod
    def default_num_features(head_dim: int) -> int:
        return 1 + head_dim + head_dim * (head_dim + 1) // 2

    def forward_queries(self, query, scaling):
        x = accumulated(query) * math.sqrt(scaling)
        first, second = torch.triu_indices(self.head_dim, self.head_dim, offset=1, device=x.device)
        squares, products = x.square() * math.sqrt(0.5), x[..., first] * x[..., second]
        return torch.cat((torch.ones_like(x[..., :1]), x, squares, products), dim=-1)

    forward_keys = forward_queries


class LearnedFeatureMap(FeatureMap):
    """A learned projection per head, queries and keys apart (keys: one per key/value head, so the state is too)."""

    log_features = True
    has_num_features = True

    def _project(self, x: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
        dtype = accumulation_dtype(x)
        return (with_dtype(x, dtype) * math.sqrt(scaling)) @ with_dtype(weight, dtype)


class ExpFeatureMap(LearnedFeatureMap):
    """log phi_q(x) = x W_q and log phi_k(x) = x W_k + b - a |x|^2 / 2 on inputs scaled by sqrt(scaling).

    W starts as `initial_scale` times an orthogonal Gaussian matrix, b and a as 0: a smooth kernel, from which training
    sharpens. Starting as the softmax kernel's own random features (scale 1, a = 1; Performer 2020, Lemma 1) is unbiased
    but so noisy that training has to undo it. A bias or norm term of the queries would cancel in the normalisation.
    """

    # Distilled for 0.2M tokens, stories260k (64 features) reached 1.93 nats/token from 0.3, 1.94 from 0.5 and 2.62 from
    # scale 1 with a = 1; for 0.08M tokens, MiniLM an embedding cosine of 0.877 from 0.3 and 0.901 from 0.5.
    initial_scale: ClassVar[float] = 0.5

    def __init__(self, num_heads, num_key_value_heads, head_dim, num_features=None):
        super().__init__(num_heads, num_key_value_heads, head_dim, num_features)
        self.query_projection = nn.Parameter(torch.empty(num_heads, head_dim, self.num_features))
        self.key_projection = nn.Parameter(torch.empty(num_key_value_heads, head_dim, self.num_features))
        self.key_bias = nn.Parameter(torch.empty(num_key_value_heads, 1, self.num_features))
        self.key_norm_weight = nn.Parameter(torch.empty(num_key_value_heads, 1, 1))

    @staticmethod
    def default_num_features(head_dim: int) -> int:
        return 2 * head_dim

    def reset_parameters(self, generator):
        # One matrix per key/value head, shared by the query heads of its group: q and k must be projected alike.
        weights = [
            orthogonal_random_matrix(self.num_features, self.head_dim, generator).T
            for _ in range(self.num_key_value_heads)
        ]
        keys = self.initial_scale * torch.stack(weights)
        init.copy_(self.key_projection, keys)
        init.copy_(self.query_projection, keys.repeat_interleave(self.num_heads // self.num_key_value_heads, dim=0))
        init.zeros_(self.key_bias)
        init.zeros_(self.key_norm_weight)

    def forward_queries(self, query, scaling):
        return self._project(query, self.query_projection, scaling)

    def forward_keys(self, key, scaling):
        exponent = self._project(key, self.key_projection, scaling) + with_dtype(self.key_bias, accumulation_dtype(key))
        weight = with_dtype(self.key_norm_weight, exponent.dtype)
        return torch.addcmul(exponent, weight, squared_norm(key), value=-scaling / 2)

    def kernel_map(self, scaling):
        parts = (self.query_projection, self.key_projection, self.key_norm_weight, self.key_bias)
        query, key, norm, bias = (with_dtype(part, torch.float32) for part in parts)
        root = math.sqrt(scaling)
        return KernelMap(EXP, Affine(query * root), Affine(key * root, bias, norm * scaling))


class HedgehogFeatureMap(LearnedFeatureMap):
    """phi(x) = [softmax(x W), softmax(-x W)] per head, W starting as the identity (Hedgehog 2024, section 4.2).

    The two softmaxes are apart, as in the paper; flash-linear-attention takes one softmax over both halves.
    `num_features` = F is twice the width of W.
    """

    def __init__(self, num_heads, num_key_value_heads, head_dim, num_features=None):
        super().__init__(num_heads, num_key_value_heads, head_dim, num_features)
        self.query_projection = nn.Parameter(torch.empty(num_heads, head_dim, self.num_features // 2))
        self.key_projection = nn.Parameter(torch.empty(num_key_value_heads, head_dim, self.num_features // 2))

    @staticmethod
    def default_num_features(head_dim: int) -> int:
        return 2 * head_dim

    @classmethod
    def check_num_features(cls, num_features):
        return None if num_features % 2 == 0 else "must be even for the feature map `hedgehog` (W and -W)"

    def reset_parameters(self, generator):
        width = self.num_features // 2
        start = torch.eye(self.head_dim, width)
        if width > self.head_dim:  # columns that start alike stay alike
            extra = orthogonal_random_matrix(width - self.head_dim, self.head_dim, generator).T
            start[:, self.head_dim :] = extra / extra.norm(dim=0)
        init.copy_(self.query_projection, start.expand_as(self.query_projection))
        init.copy_(self.key_projection, start.expand_as(self.key_projection))

    def kernel_map(self, scaling):
        weights = self.query_projection, self.key_projection
        scaled = (with_dtype(weight, torch.float32) * math.sqrt(scaling) for weight in weights)
        return KernelMap(HEDGEHOG, *map(Affine, scaled))

    def forward_queries(self, query, scaling):
        return self._log_softmaxes(query, self.query_projection, scaling)

    def forward_keys(self, key, scaling):
        return self._log_softmaxes(key, self.key_projection, scaling)

    def _log_softmaxes(self, x: torch.Tensor, weight: torch.Tensor, scaling: float) -> torch.Tensor:
        projected = self._project(x, weight, scaling)
        return torch.cat((projected.log_softmax(dim=-1), (-projected).log_softmax(dim=-1)), dim=-1)


class T2rFeatureMap(LearnedFeatureMap):
    """phi(x) = relu(x W + b) per key/value head, the same for queries and keys (T2R, Kasai 2021).

    As in the paper there is no constant under the relu: a query with no feature in common with any key gets 0. W
    starts as an orthogonal Gaussian matrix, b as 0.
    """

    log_features = False

    def __init__(self, num_heads, num_key_value_heads, head_dim, num_features=None):
        super().__init__(num_heads, num_key_value_heads, head_dim, num_features)
        self.projection = nn.Parameter(torch.empty(num_key_value_heads, head_dim, self.num_features))
        self.bias = nn.Parameter(torch.empty(num_key_value_heads, 1, self.num_features))

    def reset_parameters(self, generator):
        heads = [orthogonal_random_matrix(self.num_features, self.head_dim, generator).T for _ in self.bias]
        init.copy_(self.projection, torch.stack(heads))
        init.zeros_(self.bias)

    def forward_keys(self, key, scaling):
        return (self._project(key, self.projection, scaling) + self.bias.to(accumulation_dtype(key))).relu()

    def forward_queries(self, query, scaling):
        groups = query.shape[1] // self.num_key_value_heads
        weight, bias = (x.repeat_interleave(groups, dim=0) for x in (self.projection, self.bias))
        return (self._project(query, weight, scaling) + bias.to(accumulation_dtype(query))).relu()


def half_squared_norm(x: torch.Tensor, scaling: float) -> torch.Tensor:
    """scaling |x|^2 / 2 over the last axis, kept."""
    return squared_norm(x) * (scaling / 2)


def squared_norm(x: torch.Tensor) -> torch.Tensor:
    """|x|^2 over the last axis, kept."""
    norm = torch.linalg.vector_norm(accumulated(x), dim=-1, keepdim=True)  # makes no tensor of the size of x
    return norm.square()


def orthogonal_random_matrix(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """`[rows, columns]` whose blocks of `columns` rows are Haar orthogonal, each row with the norm of a Gaussian one.

    LAPACK's QR is not Haar distributed: without multiplying by sign(diag R) (Mezzadri 2007) the kernel estimate is
    off by a factor of 0.73 to 1.26 at dimension 16. The last block may be partial.
    """
    blocks = []
    for start in range(0, rows, columns):
        orthogonal, upper = torch.linalg.qr(torch.randn(columns, columns, generator=generator, dtype=torch.float64))
        blocks.append((orthogonal * upper.diagonal().sign()).T[: rows - start])
    norms = torch.randn(rows, columns, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
    return (torch.cat(blocks) * norms).float()


FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "elu1": EluFeatureMap,
    "relu": ReluFeatureMap,
    "squared_relu": SquaredReluFeatureMap,
    "taylor": TaylorFeatureMap,
    "exp": ExpFeatureMap,
    "hedgehog": HedgehogFeatureMap,
    "t2r": T2rFeatureMap,
}
