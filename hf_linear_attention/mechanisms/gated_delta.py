# SPDX-License-Identifier: Apache-2.0
"""`gated_delta`: a state that erases what it holds at a key before it stores the key's new value.

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - (exp(g_t) S_(t-1))^T k_t)^T      o_t = S_t^T q_t

    decay     erase   what it is
    none      yes     DeltaNet (Schlag 2021, "Linear Transformers Are Secretly Fast Weight Programmers")
    head      yes     Gated DeltaNet (Yang 2024), the linear layers of Qwen3-Next
    channel   yes     Kimi Delta Attention (Kimi Linear 2025)
    head      no      gated linear attention (Yang 2023) with one decay per head, as in Mamba-2

The features of q and k have length 1, so that beta = 1 replaces what the state holds at k. There is no denominator. The
gates beta and g depend on the hidden state h from which the layer makes queries, keys and values: beta =
sigmoid(w h + b) and g = -softplus(u h + r), per key/value head, in float32. At the start w and u are 0, beta is 1/2,
and g is -1/20. q and k come after rotary embedding (see the option `rope`).

Axes: B batch, H query heads, Hkv key/value heads, N length, D head_dim, E hidden size, F features, W `conv_size`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..features.maps import identity_start
from ..positions.rotary import rotary_shift, without_hidden
from ..torch_kernels.blocks import accumulated, accumulation_dtype, project_heads, with_dtype
from ..torch_kernels.delta import gated_delta, unit_length
from .base import (
    AttentionMechanism,
    LayerShape,
    MechanismInputs,
    State,
    gather_tokens,
    hidden_size_of,
    inverse_order,
    real_first,
    scaled,
)
from .qwen3_5 import Qwen35Rule
from .settings import QWEN3_5, GatedDeltaOptions
from .token_gates import INITIAL_SLOPE, ForgetGate, SigmoidGate


class ShortConvolution(nn.Module):
    """y_t = sum_j w_j x_(t - j) over the W newest tokens of a sequence, one w per head and channel; it starts as y = x.

    With one channel, all channels of a head share w.
    """

    def __init__(self, num_heads: int, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, num_heads, 1, channels))

    def reset_parameters(self) -> None:
        """Start with y = x."""
        init.zeros_(self.weight)
        init.ones_(self.weight[0])

    def forward(self, line: Tensor, is_together: list[Tensor] | None) -> Tensor:
        """`line [B, heads, W - 1 + N, D]`, W - 1 earlier tokens first, to `[B, heads, N, D]`.

        `is_together[j]`, bool `[B, N]`, says whether the token j places before belongs to the same sequence.
        """
        size, (weight, dtype) = self.weight.shape[0], (self.weight, line.dtype)
        length = line.shape[2] - size + 1
        output = line[:, :, size - 1 :] * with_dtype(weight[0], dtype)
        for distance in range(1, size):
            start = size - 1 - distance
            term = line[:, :, start : start + length] * with_dtype(weight[distance], dtype)
            output = output + (term if is_together is None else term * is_together[distance][:, None, :, None])
        return output


class GatedDeltaAttention(GatedDeltaOptions, AttentionMechanism):
    """Gated delta rule (DeltaNet, Gated DeltaNet, Kimi Delta Attention): the state erases at a key before it writes."""

    needs_gates = True

    def __init__(self, settings: Mapping[str, Any], shape: LayerShape) -> None:
        super().__init__(settings, shape)
        self.is_qwen3_5 = settings["form"] == QWEN3_5
        self.conv_size = 4 if self.is_qwen3_5 else settings["conv_size"]
        self.convolutions = nn.ModuleList()
        heads, kv_heads, size = shape.num_heads, shape.num_key_value_heads, shape.head_dim
        # The values of a head share their weights, so that a query still weighs values and not their channels.
        sizes = ((heads, size), (kv_heads, size), (kv_heads, 1))
        self.rule: Any = DeltaRule(
            shape, settings["num_features"] or size, decay=settings["decay"], erases=settings["erase"]
        )
        if self.is_qwen3_5:
            self.rule, sizes = Qwen35Rule(shape), ((heads, size),) * 3
            self.replaced_projections = ("q_proj", "k_proj", "v_proj")
        if self.conv_size:
            self.convolutions.extend(ShortConvolution(*each, self.conv_size) for each in sizes)
        self.absorbs_queries = bool(self.conv_size) and not self.is_qwen3_5
        self.shift = rotary_shift(settings, shape, self.layer_setting("rope_frequencies"))
        self.needs_positions = self.shift is not None

    def reset_parameters(self) -> None:
        """Initialise the rule and the convolutions."""
        self.rule.reset_parameters(self.generator())
        convolutions: Any = self.convolutions
        for convolution in convolutions:
            convolution.reset_parameters()

    def start_from(self, attention: Any) -> None:
        """Start the form of Qwen3.5 with the layer's own projections."""
        if self.is_qwen3_5:
            self.rule.start_from(attention)

    def gates(self, hidden_states: Tensor) -> Tensor:
        """What follows from the hidden state of every token, see `DeltaRule` and `Qwen35Rule`."""
        return self.rule.gates(hidden_states)

    def prepare(self, inputs: MechanismInputs) -> MechanismInputs:
        """Take back the rotary frequencies that the feature map must not see."""
        query, key = without_hidden(self.shift, inputs)
        return inputs._replace(query=query, key=key, positions=None)

    def forward(self, inputs: MechanismInputs, state: State | None = None) -> tuple[Tensor, State | None]:
        """The gated delta rule, causal and with gates (else ValueError); see `AttentionMechanism.forward`.

        The state is S `[B, Hkv, F, D]` and, with convolutions, the W - 1 newest queries, keys and values.
        """
        if inputs.gates is None or not inputs.is_causal:
            raise ValueError("`gated_delta` is causal and needs `gates`; compute them with the method of that name.")
        sums, *tails = state or (None,)
        dtype, value_dtype = inputs.query.dtype, inputs.value.dtype
        if self.is_qwen3_5:
            inputs = self.rule.projected(inputs)
        if self.conv_size:
            (query, key, value), tails = self._convolved(inputs[:3], tails, inputs.attention_mask)
            # The dtype of the values decides how exactly a GPU multiplies.
            inputs = inputs._replace(query=query, key=key, value=with_dtype(value, value_dtype))
        output, sums = self.rule(inputs, sums)
        return with_dtype(output.transpose(1, 2), dtype), (sums, *tails)

    def _step_in_rows(self, inputs: MechanismInputs, states: State) -> Tensor | None:
        return None if self.conv_size else self(inputs, states)[0]

    def _convolved(
        self, tensors: tuple[Tensor, ...], tails: list[Tensor], mask: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Queries, keys and values after the convolutions, over real tokens only, and the new tails."""
        past = self.conv_size - 1
        tensors = tuple(accumulated(x) for x in tensors)
        tails = tails or [x.new_zeros(*x.shape[:2], past, x.shape[3]) for x in tensors]
        lines = [torch.cat(pair, dim=2) for pair in zip(tails, tensors)]
        if mask is None:
            outputs = [convolve(line, None) for convolve, line in zip(self.convolutions, lines)]
            return outputs, [line[:, :, line.shape[2] - past :] for line in lines]
        order = real_first(F.pad(mask, (past, 0), value=1) == 0)  # padding to the left
        lines = [gather_tokens(line, order) for line in lines]
        together = None
        if mask.dtype != torch.bool:  # the earlier tokens belong to the first sequence
            first = torch.where(mask > 0, mask, torch.iinfo(mask.dtype).max).amin(dim=1, keepdim=True)
            numbers = torch.cat((first.expand(-1, past), mask), dim=1).gather(1, order)
            length = mask.shape[1]
            own = numbers[:, past:]
            together = [own == numbers[:, past - distance : past - distance + length] for distance in range(past + 1)]
            is_last = (numbers[:, length:] == numbers[:, -1:])[:, None, :, None]
        places = (inverse_order(order)[:, past:] - past).clamp(min=0)
        outputs = [gather_tokens(convolve(line, together), places) for convolve, line in zip(self.convolutions, lines)]
        tails = [line[:, :, line.shape[2] - past :] for line in lines]
        return outputs, tails if together is None else [tail * is_last for tail in tails]


class NormalizedFeatures(nn.Module):
    """phi(x) = silu(x A + b) / |silu(x A + b)| per head, x scaled by sqrt(scaling); A starts as the identity, b as 0.

    Query heads of a group have their own A and b. With more features than channels, A starts with further random
    columns.
    """

    def __init__(self, shape: LayerShape, num_features: int) -> None:
        super().__init__()
        heads, kv_heads, size = shape.num_heads, shape.num_key_value_heads, shape.head_dim
        self.query_projection = nn.Parameter(torch.empty(heads, size, num_features))
        self.query_bias = nn.Parameter(torch.empty(heads, 1, num_features))
        self.key_projection = nn.Parameter(torch.empty(kv_heads, size, num_features))
        self.key_bias = nn.Parameter(torch.empty(kv_heads, 1, num_features))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Start with A = identity and b = 0."""
        start = identity_start(self.key_projection.shape[1], self.key_projection.shape[2], generator)
        for projection, bias in ((self.query_projection, self.query_bias), (self.key_projection, self.key_bias)):
            init.copy_(projection, start.expand_as(projection))
            init.zeros_(bias)

    def queries(self, query: Tensor, scaling: float) -> Tensor:
        """The features `[B, H, N, F]` of queries `[B, H, N, D]`."""
        return self._features(query, self.query_projection, self.query_bias, scaling)

    def keys(self, key: Tensor, scaling: float) -> Tensor:
        """The features `[B, Hkv, N, F]` of keys `[B, Hkv, N, D]`."""
        return self._features(key, self.key_projection, self.key_bias, scaling)

    def _features(self, x: Tensor, weight: Tensor, bias: Tensor, scaling: float) -> Tensor:
        dtype = accumulation_dtype(x)
        x = project_heads(with_dtype(x, dtype) * math.sqrt(scaling), with_dtype(weight, dtype))
        return unit_length(F.silu(x + with_dtype(bias, dtype)))


class DeltaRule(nn.Module):
    """S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - (exp(g_t) S_(t-1))^T k_t)^T and o_t = scale S_t^T q_t.

    q and k are features of length 1. beta and g follow from the hidden states; at the start beta is 1/2, and g is
    -1/20. `decay` is `none`, `head` or `channel`.
    """

    def __init__(self, shape: LayerShape, num_features: int, *, decay: str, erases: bool) -> None:
        super().__init__()
        heads, size = shape.num_key_value_heads, hidden_size_of(shape)
        self.num_heads, self.decay, self.erases = heads, decay, erases
        self.features = NormalizedFeatures(shape, num_features)
        self.beta = SigmoidGate(size, heads, start=0.5)
        self.forget = None
        if decay != "none":
            repeats, rank = (num_features, shape.head_dim) if decay == "channel" else (1, None)
            self.forget = ForgetGate(size, [INITIAL_SLOPE] * (heads * repeats), rank)
        self.output_scale = nn.Parameter(torch.empty(shape.num_heads, 1, 1))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Initialise the features, the gates and the output scale."""
        self.features.reset_parameters(generator)
        self.beta.reset_parameters()
        if self.forget is not None:
            self.forget.reset_parameters(generator)
        init.ones_(self.output_scale)

    def gates(self, hidden_states: Tensor) -> Tensor:
        """beta and the log-decay side by side, `[B, N, C]` in the accumulation dtype."""
        hidden = scaled(hidden_states)
        beta = self.beta(hidden)
        return beta if self.forget is None else torch.cat((beta, self.forget(hidden)), dim=-1)

    def forward(self, inputs: MechanismInputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output `[B, H, N, D]` and the state S `[B, Hkv, F, D]`; see `torch_kernels.delta.gated_delta`."""
        query, key, value, mask, scaling, *_ = inputs
        beta, log_decay = self._split(cast(Tensor, inputs.gates))
        # The scale of the output is one of the queries, because the output is linear in them.
        query, key = self.features.queries(query, scaling), self.features.keys(key, scaling)
        query = query * with_dtype(self.output_scale, query.dtype)
        options: dict[str, Any] = {"erases": self.erases, "key_mask": mask, "state": state, "rows": inputs.rows}
        return gated_delta(query, key, value, log_decay, beta, **options)

    def _split(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """beta `[B, Hkv, N]`, and the log-decay `[B, Hkv, N]` or `[B, Hkv, N, F]`."""
        beta, log_decay = gates.tensor_split((self.num_heads,), dim=-1)
        beta = beta.transpose(1, 2)
        if self.forget is None:
            return beta, torch.zeros_like(beta)
        log_decay = log_decay.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return beta, log_decay if self.decay == "channel" else log_decay.squeeze(-1)
