# SPDX-License-Identifier: Apache-2.0
"""Feature maps phi with phi(q)·phi(k) > 0, which make the cost of attention linear in the length.

Axes: B batch, H query heads, Hkv key/value heads, N length, D head_dim, F features.

The attribute `log_features` of a map says what it returns. Maps of the form exp(...) return exponents, for which the
kernels keep a running maximum, so nothing overflows or underflows; the others return the features themselves. Maps that
approximate the softmax kernel exp(scaling q·k) apply sqrt(scaling) to queries and to keys; elu1 and relu act on q and k
unscaled, as in their papers. Parameters are plain `nn.Parameter`s and not `nn.Linear`, so LoRA "all-linear" and
quantisers leave them alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..torch_kernels.blocks import (
    ELU_PLUS_ONE,
    EXP,
    HEDGEHOG,
    Affine,
    KernelMap,
    accumulated,
    accumulation_dtype,
    is_eager,
    project_heads,
    with_dtype,
)
from ..torch_kernels.causal import ElementwiseMap
from ..torch_kernels.implementations import implemented


class FeatureMap(nn.Module):
    """Base class: `forward_queries` and `forward_keys` map `[B, heads, N, D]` to `[B, heads, N, F]` in float32."""

    log_features: ClassVar[bool] = False
    # Whether the user may choose `num_features`; otherwise it follows from head_dim.
    has_num_features: ClassVar[bool] = False
    # Whether `forward_visible_keys` needs all keys at once.
    depends_on_all_keys: ClassVar[bool] = False

    def __init__(self, num_heads: int, num_key_value_heads: int, head_dim: int, num_features: int | None = None):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = num_heads, num_key_value_heads, head_dim
        self.num_features = num_features or self.default_num_features(head_dim)

    @staticmethod
    def default_num_features(head_dim: int) -> int:
        """The number of features F for this head_dim if the user does not choose it."""
        return head_dim

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initialise the parameters and buffers, except those that a checkpoint has just filled."""

    def forward_queries(self, query: Tensor, scaling: float) -> Tensor:
        """Map queries `[B, H, N, D]` to `[B, H, N, F]`: features, or exponents if `log_features` is true."""
        raise NotImplementedError

    def forward_keys(self, key: Tensor, scaling: float) -> Tensor:
        """Map keys `[B, Hkv, S, D]` to `[B, Hkv, S, F]`: features, or exponents if `log_features` is true."""
        raise NotImplementedError

    def forward_visible_keys(self, key: Tensor, scaling: float, key_mask: Tensor | None) -> Tensor:
        """`forward_keys` for maps whose features depend on which keys are visible (bool `[B, S]`, or None for all)."""
        return self.forward_keys(key, scaling)

    def kernel_map(self, scaling: float) -> KernelMap | None:
        """The same map in the form that the C kernels implement, or None if they do not implement it."""
        return None

    def elementwise_map(self) -> ElementwiseMap | None:
        """The same map for the causal kernel of torch, if it maps queries and keys alike, number by number."""
        return None


class ElementwiseFeatureMap(FeatureMap):
    """A feature map that applies one non-negative function to every element of queries and keys."""

    function: ClassVar[Callable[..., Tensor]]
    # The derivative of `function`, with which the causal kernel of torch need not store the features.
    slope: ClassVar[Callable[..., Tensor] | None] = None

    def forward_queries(self, query: Tensor, scaling: float) -> Tensor:
        """Apply `function` to every element."""
        return type(self).function(accumulated(query))

    def forward_keys(self, key: Tensor, scaling: float) -> Tensor:
        """Apply `function` to every element."""
        return type(self).function(accumulated(key))

    def elementwise_map(self) -> ElementwiseMap | None:
        """`function` with its derivative, or None if the derivative is not defined."""
        slope = type(self).slope
        return None if slope is None else ElementwiseMap(type(self).function, slope)


# Tokens per step of a map on a CPU, so that intermediate results stay in the cache and only the output is allocated.
TOKENS_IN_CACHE = 64


class _EluPlusOne(torch.autograd.Function):
    """`elu_plus_one` with one new tensor and one saved tensor: its derivative is min(its value, 1)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        output = _elu_plus_one(x)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors
        return grad * output.clamp(max=1)


def _elu_plus_one(x: Tensor) -> Tensor:
    if (found := implemented("elu_plus_one", x)) is not None:
        return found
    output = torch.empty_like(x)
    for part, out in zip(x.split(TOKENS_IN_CACHE, dim=-2), output.split(TOKENS_IN_CACHE, dim=-2)):
        torch.clamp(part, max=0, out=out).exp_().add_(part.relu())
    return output


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1 (Katharopoulos 2020, equation 7), in a form that stays positive where `F.elu(x) + 1` rounds to 0.

    The C kernel returns at least the smallest normal number.
    """
    if x.ndim != 4 or x.device.type != "cpu" or not is_eager(x):
        return x.clamp(max=0).exp_() + x.relu()
    return _EluPlusOne.apply(x) if torch.is_grad_enabled() else _elu_plus_one(x)


def _slope_of_elu(x: Tensor) -> Tensor:
    return x.clamp(max=0).exp_()


def relu_plus_epsilon(x: Tensor) -> Tensor:
    """relu(x) + 1e-3 (Performer's generalised ReLU attention); the constant keeps every denominator positive."""
    return x.relu() + 1e-3


def _slope_of_relu(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


class EluFeatureMap(ElementwiseFeatureMap):
    """phi(x) = elu(x) + 1 (Katharopoulos 2020, equation 7)."""

    function, slope = staticmethod(elu_plus_one), staticmethod(_slope_of_elu)

    def kernel_map(self, scaling: float) -> KernelMap | None:
        """The C kernels implement this map."""
        return KernelMap(ELU_PLUS_ONE)


class ReluFeatureMap(ElementwiseFeatureMap):
    """phi(x) = relu(x) + 1e-3 (Performer 2020, generalised attention)."""

    function, slope = staticmethod(relu_plus_epsilon), staticmethod(_slope_of_relu)


class LearnedFeatureMap(FeatureMap):
    """Learned projections, per head for queries and per key/value head for keys, so that the state is too."""

    log_features = True
    has_num_features = True
    kernel_function: ClassVar[int]  # of `KernelMap`

    @staticmethod
    def default_num_features(head_dim: int) -> int:
        """Twice the head_dim."""
        return 2 * head_dim

    def affine_parameters(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Weight, bias and norm of the keys' `Affine` and the weight of the queries', for inputs scaled by
        sqrt(scaling)."""
        bias, norm = getattr(self, "key_bias", None), getattr(self, "key_norm_weight", None)
        return cast(Tensor, self.key_projection), bias, norm, cast(Tensor, self.query_projection)

    def kernel_map(self, scaling: float) -> KernelMap | None:
        """The C kernels implement this map."""
        key, bias, norm, query = (x if x is None else with_dtype(x, torch.float32) for x in self.affine_parameters())
        root, norm = math.sqrt(scaling), None if norm is None else norm * scaling
        of_keys = Affine(cast(Tensor, key) * root, bias, norm)
        return KernelMap(self.kernel_function, Affine(cast(Tensor, query) * root), of_keys)

    def _project(self, x: Tensor, weight: Tensor, scaling: float) -> Tensor:
        dtype = accumulation_dtype(x)
        return project_heads(with_dtype(x, dtype) * math.sqrt(scaling), with_dtype(weight, dtype))


class ExpFeatureMap(LearnedFeatureMap):
    """log phi_q(x) = x W_q and log phi_k(x) = x W_k + b - a |x|^2 / 2 for inputs scaled by sqrt(scaling).

    W starts as `initial_scale` times an orthogonal Gaussian matrix, b and a as 0. This is a smooth kernel, which
    training sharpens. A start as random features of the softmax kernel itself (scale 1, a = 1; Performer 2020, Lemma 1)
    is unbiased, but so noisy that training has to undo it. A bias or norm term of the queries would cancel in the
    normalisation.
    """

    # Distilled for 0.2M tokens, stories260k (64 features) reached 1.93 nats/token from scale 0.3, 1.94 from 0.5 and
    # 2.62 from 1 with a = 1. Distilled for 0.08M tokens, MiniLM reached an embedding cosine of 0.877 from scale 0.3
    # and 0.901 from 0.5.
    initial_scale: ClassVar[float] = 0.5
    kernel_function = EXP

    def __init__(self, num_heads: int, num_key_value_heads: int, head_dim: int, num_features: int | None = None):
        super().__init__(num_heads, num_key_value_heads, head_dim, num_features)
        self.query_projection = nn.Parameter(torch.empty(num_heads, head_dim, self.num_features))
        self.key_projection = nn.Parameter(torch.empty(num_key_value_heads, head_dim, self.num_features))
        self.key_bias = nn.Parameter(torch.empty(num_key_value_heads, 1, self.num_features))
        self.key_norm_weight = nn.Parameter(torch.empty(num_key_value_heads, 1, 1))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start with orthogonal Gaussian W, and b = a = 0."""
        # The query heads of a group start with the matrix of their key/value head, so q and k are projected alike.
        weights = [
            orthogonal_random_matrix(self.num_features, self.head_dim, generator).T
            for _ in range(self.num_key_value_heads)
        ]
        keys = self.initial_scale * torch.stack(weights)
        init.copy_(self.key_projection, keys)
        init.copy_(self.query_projection, keys.repeat_interleave(self.num_heads // self.num_key_value_heads, dim=0))
        init.zeros_(self.key_bias)
        init.zeros_(self.key_norm_weight)

    def forward_queries(self, query: Tensor, scaling: float) -> Tensor:
        """The exponents x W_q."""
        return self._project(query, self.query_projection, scaling)

    def forward_keys(self, key: Tensor, scaling: float) -> Tensor:
        """The exponents x W_k + b - a |x|^2 / 2."""
        exponent = self._project(key, self.key_projection, scaling) + with_dtype(self.key_bias, accumulation_dtype(key))
        weight = with_dtype(self.key_norm_weight, exponent.dtype)
        return torch.addcmul(exponent, weight, squared_norm(key), value=-scaling / 2)


class HedgehogFeatureMap(LearnedFeatureMap):
    """phi(x) = [softmax(x W), softmax(-x W)] per head, with W starting as the identity (Hedgehog 2024, section 4.2).

    The two softmaxes are separate, as in the paper, whereas flash-linear-attention takes one softmax over both halves.
    `num_features` = F is twice the number of columns of W.
    """

    kernel_function = HEDGEHOG

    def __init__(self, num_heads: int, num_key_value_heads: int, head_dim: int, num_features: int | None = None):
        super().__init__(num_heads, num_key_value_heads, head_dim, num_features)
        self.query_projection = nn.Parameter(torch.empty(num_heads, head_dim, self.num_features // 2))
        self.key_projection = nn.Parameter(torch.empty(num_key_value_heads, head_dim, self.num_features // 2))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start with W = identity; further columns are orthonormal random vectors."""
        start = identity_start(self.head_dim, self.num_features // 2, generator)
        init.copy_(self.query_projection, start.expand_as(self.query_projection))
        init.copy_(self.key_projection, start.expand_as(self.key_projection))

    def forward_queries(self, query: Tensor, scaling: float) -> Tensor:
        """The logarithms of both softmaxes of the projected queries."""
        return self._log_softmaxes(query, self.query_projection, scaling)

    def forward_keys(self, key: Tensor, scaling: float) -> Tensor:
        """The logarithms of both softmaxes of the projected keys."""
        return self._log_softmaxes(key, self.key_projection, scaling)

    def _log_softmaxes(self, x: Tensor, weight: Tensor, scaling: float) -> Tensor:
        projected = self._project(x, weight, scaling)
        return torch.cat((projected.log_softmax(dim=-1), (-projected).log_softmax(dim=-1)), dim=-1)


def half_squared_norm(x: Tensor, scaling: float) -> Tensor:
    """scaling |x|^2 / 2 over the last axis, which is kept with size 1."""
    return squared_norm(x) * (scaling / 2)


def squared_norm(x: Tensor) -> Tensor:
    """|x|^2 over the last axis, which is kept with size 1."""
    norm = torch.linalg.vector_norm(accumulated(x), dim=-1, keepdim=True)  # allocates no tensor of the size of x
    return norm.square()


def identity_start(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """The identity `[rows, columns]`; further columns are orthonormal, because those that start equal stay equal."""
    start = torch.eye(rows, columns, dtype=torch.float32, device="cpu")
    if columns > rows:
        extra = orthogonal_random_matrix(columns - rows, rows, generator).T
        start[:, rows:] = extra / extra.norm(dim=0)
    return start


def orthogonal_random_matrix(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A random matrix `[rows, columns]` of Haar orthogonal blocks, its rows scaled to the norms of Gaussian vectors.

    Each block has `columns` rows; the last may have fewer. LAPACK's QR is not Haar distributed: without the factor
    sign(diag R) (Mezzadri 2007), the kernel estimate is off by a factor of 0.73 to 1.26 at dimension 16.
    """

    def gaussian(rows: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64, device="cpu")

    blocks = []
    for start in range(0, rows, columns):
        orthogonal, upper = torch.linalg.qr(gaussian(columns))
        blocks.append((orthogonal * upper.diagonal().sign()).T[: rows - start])
    norms = gaussian(rows).norm(dim=1, keepdim=True)
    return (torch.cat(blocks) * norms).float()


FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "elu1": EluFeatureMap,
    "relu": ReluFeatureMap,
    "exp": ExpFeatureMap,
    "hedgehog": HedgehogFeatureMap,
}
