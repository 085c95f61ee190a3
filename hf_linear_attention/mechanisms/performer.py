# SPDX-License-Identifier: Apache-2.0
"""`performer`: FAVOR+, random features of the softmax kernel (Choromanski 2020), and FAVOR++ (Likhosherstov 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..features.random_maps import RANDOM_FEATURES, RandomFeatureMap
from ..torch_kernels.blocks import accumulated, with_dtype
from .base import LayerShape, MechanismInputs, State
from .linear import LinearAttention
from .settings import PerformerOptions


class PerformerAttention(PerformerOptions, LinearAttention):
    """Linear attention whose features estimate exp(q·k) without bias and without training.

    The features are redrawn only in training mode, at the first of every `redraw_interval` forward passes that start a
    sequence. A forward pass that gradient checkpointing recomputes is not counted. The k-th projection follows from
    `seed`, the layer and k, so all ranks agree; the count and the projection are buffers, so a resumed run draws the
    same projections as an uninterrupted one.

    With `geometry` = `learned`, a trained affine map per head changes queries and keys first, from q, k to q', k', and
    the features estimate exp(q'·k') without bias. A redrawn projection leaves the maps as they are: they are trained
    for all projections, and not for one of them.
    """

    feature_map: RandomFeatureMap
    num_forwards: Tensor

    def __init__(self, settings: Mapping[str, Any], shape: LayerShape):
        super().__init__(settings, shape)
        self.redraw_interval = settings["redraw_interval"]
        sizes = (shape.num_heads, shape.num_key_value_heads, shape.head_dim)
        self.geometry = LearnedGeometry(*sizes) if settings["geometry"] == "learned" else None
        if self.redraw_interval:
            self.register_buffer("num_forwards", torch.zeros((), dtype=torch.long))

    @classmethod
    def feature_map_class(cls, settings: Mapping[str, Any]) -> type[RandomFeatureMap]:
        """The class of the random features that `settings` name."""
        return RANDOM_FEATURES[settings["features"]]

    def build_feature_map(self, sizes: tuple[int, int, int], settings: Mapping[str, Any]) -> RandomFeatureMap:
        """The random features for `sizes` = (H, Hkv, D)."""
        return self.feature_map_class(settings)(*sizes, settings["num_features"], settings["orthogonal"])

    def reset_parameters(self) -> None:
        """Draw the projection, start with the geometry of FAVOR+, and reset the count of forward passes."""
        super().reset_parameters()
        if self.geometry is not None:
            self.geometry.reset_parameters()
        if self.redraw_interval:
            init.zeros_(self.num_forwards)

    def calibrate(self, inputs: MechanismInputs) -> None:
        """Fit A of FAVOR++ to these queries and keys; the other features have no constants."""
        query, key = inputs.query, inputs.key
        if self.geometry is not None:
            query, key = self.geometry(query, key)
        self.feature_map.calibrate(query, key, inputs.scaling, inputs.attention_mask)

    def forward(self, inputs: MechanismInputs, state: State | None = None) -> tuple[Tensor, State | None]:
        """Redraw the projection if it is due, and attend; see `AttentionMechanism.forward`."""
        if self.redraw_interval and self.training and state is None:
            self._count_forward()
        return self._attend(inputs, state)

    def absorb(self, inputs: MechanismInputs, state: State | None = None) -> State | None:
        """The state after these keys; their sequence was already counted, so this is no new forward pass."""
        return self._attend(inputs, state)[1]

    def _attend(self, inputs: MechanismInputs, state: State | None) -> tuple[Tensor, State | None]:
        has_state, dtype = self.supports("state", self.settings), inputs.query.dtype
        if self.geometry is not None:
            query, key = self.geometry(inputs.query, inputs.key)
            inputs = inputs._replace(query=query, key=key)
        output, new_state = super().forward(inputs, state)
        return with_dtype(output, dtype), new_state if has_state else None

    @torch.compiler.disable
    def _count_forward(self) -> None:
        """Count a training forward pass and redraw first if the interval is over; reads one number from the device."""
        if torch._C._current_graph_task_id() != -1:  # a backward pass recomputes this forward pass
            return
        count = int(self.num_forwards)
        if count and count % self.redraw_interval == 0:
            self.feature_map.redraw(self.generator(count // self.redraw_interval))
        self.num_forwards = self.num_forwards + 1


class HeadMaps(nn.Module):
    """x -> exp(t) x A + b with A `[heads, D, D]`, t `[heads, 1, 1]` and b `[heads, 1, D]`; at the start x -> x.

    t is a redundant parameter with a purpose: real queries and keys are too long for random features, and an optimiser
    shortens them with t in a few steps, for which it would have to move all numbers of A.
    """

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim))
        self.log_scale = nn.Parameter(torch.empty(num_heads, 1, 1))
        self.bias = nn.Parameter(torch.empty(num_heads, 1, head_dim))

    def reset_parameters(self) -> None:
        """Start as the identity."""
        identity = torch.eye(self.weight.shape[-1], dtype=torch.float32, device="cpu")
        init.copy_(self.weight, identity.expand_as(self.weight))
        init.zeros_(self.log_scale)
        init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, heads, N, D]` to the same shape in the accumulation dtype."""
        x = accumulated(x)
        weight, log_scale, bias = (with_dtype(part, x.dtype) for part in (self.weight, self.log_scale, self.bias))
        return x @ (log_scale.exp() * weight) + bias


class LearnedGeometry(nn.Module):
    """A map per query head for queries and a map per key/value head for keys, so that the state is one per key head."""

    def __init__(self, num_heads: int, num_key_value_heads: int, head_dim: int) -> None:
        super().__init__()
        self.query = HeadMaps(num_heads, head_dim)
        self.key = HeadMaps(num_key_value_heads, head_dim)

    def reset_parameters(self) -> None:
        """Start as the identity, which is FAVOR+."""
        self.query.reset_parameters()
        self.key.reset_parameters()

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Map queries `[B, H, N, D]` and keys `[B, Hkv, S, D]`; the results are in the accumulation dtype."""
        return self.query(query), self.key(key)
