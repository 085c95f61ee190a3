# SPDX-License-Identifier: Apache-2.0
"""`linear`: kernel attention phi(q)·S / phi(q)·Z (Katharopoulos 2020, "Transformers are RNNs")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..features.maps import FEATURE_MAPS, FeatureMap
from ..positions.rotary import decay_of, rotary_shift, without_hidden
from ..torch_kernels.attention import (
    elementwise_attention,
    kernel_attention,
    makes_features,
    map_attention,
    state_after,
)
from ..torch_kernels.blocks import EXP, KernelMap, is_eager, is_free, read_state, with_dtype
from ..torch_kernels.implementations import implemented
from .base import AttentionMechanism, LayerShape, MechanismInputs, OutputParts, State, mask_chunks
from .settings import LinearOptions
from .token_gates import TOKENS_PER_PART, faded, gates_of, with_key_exponents


# The number of features per step on a CPU: 4 MB in float32.
FEATURES_IN_CACHE = 1 << 20


class LinearAttention(LinearOptions, AttentionMechanism):
    """Linear attention with a feature map; the state is the sums S and Z, constant in the length."""

    def __init__(self, settings: Mapping[str, Any], shape: LayerShape):
        super().__init__(settings, shape)
        sizes = (shape.num_heads, shape.num_key_value_heads, shape.head_dim)
        self.feature_map = self.build_feature_map(sizes, settings)
        self.decay = decay_of(settings, shape)
        self.gate: Any = None
        if settings.get("decay") == "gated" or settings.get("input_gate"):
            self.gate = gates_of(settings, shape)
        self.needs_gates = self.gate is not None
        self.shift = rotary_shift(settings, shape, self.layer_setting("rope_frequencies"))
        self.needs_positions = self.shift is not None

    def build_feature_map(self, sizes: tuple[int, int, int], settings: Mapping[str, Any]) -> FeatureMap:
        """The feature map for `sizes` = (H, Hkv, D)."""
        return self.feature_map_class(settings)(*sizes, settings["num_features"])

    @classmethod
    def feature_map_class(cls, settings: Mapping[str, Any]) -> type[FeatureMap]:
        """The class of the feature map that `settings` name."""
        return FEATURE_MAPS[settings["feature_map"]]

    def reset_parameters(self) -> None:
        """Initialise the feature map, the decay and the gates."""
        self.feature_map.reset_parameters(self.generator())
        if self.decay is not None:
            self.decay.reset_parameters()
        if self.gate is not None:
            self.gate.reset_parameters(self.generator())

    def gates(self, hidden_states: Tensor) -> Tensor:
        """The gates of every token, see `TokenGates`; only called if the settings ask for gates."""
        return super().gates(hidden_states) if self.gate is None else self.gate(hidden_states)

    def prepare(self, inputs: MechanismInputs) -> MechanismInputs:
        """Take back the rotary frequencies that the feature map must not see."""
        query, key = without_hidden(self.shift, inputs)
        return inputs._replace(query=query, key=key, positions=None)

    def forward(self, inputs: MechanismInputs, state: State | None = None) -> tuple[Tensor, State | None]:
        """phi(q)·S / phi(q)·Z by the fastest kernel; see `AttentionMechanism.forward`. Missing `gates`: ValueError."""
        query, key, value, attention_mask, scaling, is_causal, *_ = inputs
        old: Any = state[0] if state else None
        if self.gate is not None:
            output, old = self._gated(inputs, old)
            return with_dtype(output, query.dtype), (old,)
        is_step = old is not None and attention_mask is None and query.shape[2] == key.shape[2] == 1
        if is_step:
            output, old = self._kernel(inputs, old)
            return with_dtype(output, query.dtype), (old,)
        if makes_features(query, key, value, attention_mask, self.feature_map.num_features):
            kernel_map = self.feature_map.kernel_map(scaling)
            if kernel_map is not None:
                output, old = self._with_map(kernel_map, inputs, old)
                return output, (old,)
        if not self._takes_chunks(query, attention_mask) or self.feature_map.depends_on_all_keys:
            output, old = self._kernel(inputs, old)
            return with_dtype(output, query.dtype), (old,)
        elementwise_map = self.feature_map.elementwise_map() if self.decay is None else None
        if elementwise_map is not None and is_causal:
            output, old = elementwise_attention(elementwise_map, query, key, value, attention_mask, old)
            return with_dtype(output.transpose(1, 2), query.dtype), (old,)
        size = self._tokens_at_a_time(query)
        outputs = OutputParts(query)
        if is_causal or key.shape[2] <= size:
            chunks = zip(key.split(size, dim=2), value.split(size, dim=2), mask_chunks(attention_mask, size, key))
            for part, (keys, values, mask) in zip(query.split(size if is_causal else query.shape[2], dim=2), chunks):
                output, old = self._kernel(MechanismInputs(part, keys, values, mask, scaling, is_causal), old)
                outputs.append(output)
            return outputs.joined(), (old,)

        def features_of(keys: Tensor, mask: Tensor | None) -> Tensor:
            return self.feature_map.forward_visible_keys(keys, scaling, mask)

        log_features = self.feature_map.log_features
        old = state_after(features_of, key, value, attention_mask, old, log_features=log_features, size=size)
        for part in query.split(size, dim=2):
            features = self.feature_map.forward_queries(part, scaling)
            outputs.append(read_state(features, old, log_features).transpose(1, 2))
        return outputs.joined(), (old,)

    def _step_in_rows(self, inputs: MechanismInputs, states: State) -> Tensor | None:
        return None if self.gate is not None else self(inputs, states)[0]

    def _gated(self, inputs: MechanismInputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output `[B, N, H, W]` and the state, with exponents from the gates added to those of the keys."""
        if inputs.gates is None or self.gate is None:
            raise ValueError("These settings need `gates`; compute them with the method of that name.")
        query, key, value, mask, *_ = inputs
        weight, log_decay = self.gate.split(inputs.gates, mask)
        if log_decay is None:
            return self._weighed(inputs, weight, state)
        if (found := implemented("gated_attention", self, inputs, weight, log_decay, state)) is not None:
            return found
        outputs, parts = OutputParts(query), [slice(None)]
        if not is_free(key.shape[2]):
            parts = [slice(i, i + TOKENS_PER_PART) for i in range(0, max(1, key.shape[2]), TOKENS_PER_PART)]
        for tokens in parts:
            exponents = -log_decay[:, :, tokens].cumsum(dim=2)
            exponents = exponents if weight is None else weight[:, :, tokens] + exponents
            q, k, v = (x[:, :, tokens] for x in (query, key, value))
            part_mask = None if mask is None else mask[:, tokens]
            part = inputs._replace(query=q, key=k, value=v, attention_mask=part_mask)
            output, new = self._weighed(part, exponents, state)
            state = faded(new, log_decay[:, :, tokens].sum(dim=2))
            outputs.append(output)
        return outputs.joined(), cast(Tensor, state)

    def _weighed(self, inputs: MechanismInputs, exponents: Any, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attention with `exponents [B, Hkv, S]` added to those of the keys."""
        query, key, value, mask, scaling, *_ = inputs
        is_step = state is not None and mask is None and query.shape[2] == key.shape[2] == 1
        kernel_map = None
        if not is_step and makes_features(query, key, value, mask, self.feature_map.num_features):
            kernel_map = self.feature_map.kernel_map(scaling)
        if kernel_map is not None and kernel_map.function == EXP and kernel_map.key is not None:
            kernel_map, query, key = with_key_exponents(kernel_map, query, key, exponents)
            return self._with_map(kernel_map, inputs._replace(query=query, key=key), state)
        return self._kernel(inputs, state, exponents)

    def _with_map(self, kernel_map: KernelMap, inputs: MechanismInputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
        output, _, _, new_state = map_attention(kernel_map, *inputs[:3], **self._options(inputs, state))
        return output, new_state

    def _options(self, inputs: MechanismInputs, state: Tensor | None) -> dict[str, Any]:
        decay = self.decay() if self.decay is not None else None
        return {"is_causal": inputs.is_causal, "key_mask": inputs.attention_mask, "state": state, "log_decay": decay}

    def _kernel(self, inputs: MechanismInputs, state: Tensor | None, exponents: Any = None) -> tuple[Tensor, Tensor]:
        query, key, value, mask, scaling, *_ = inputs
        features = self.feature_map.forward_visible_keys(key, scaling, mask)
        if exponents is not None:
            features = features + exponents.unsqueeze(-1).to(features.dtype)
        queries, log_features = self.feature_map.forward_queries(query, scaling), self.feature_map.log_features
        options = self._options(inputs, state)
        output, state = kernel_attention(
            queries, features, value, log_features=log_features, rows=inputs.rows, **options
        )
        return output.transpose(1, 2), state

    def _takes_chunks(self, query: Tensor, mask: Tensor | None) -> bool:
        is_packed = mask is not None and mask.dtype != torch.bool
        return query.device.type == "cpu" and not is_packed and is_eager(query)

    def _tokens_at_a_time(self, query: Tensor) -> int:
        """On a CPU, allocating features for all tokens at once would cost more than summing them."""
        tokens = FEATURES_IN_CACHE // max(1, query.shape[0] * query.shape[1] * self.feature_map.num_features)
        return max(64, tokens // 64 * 64)
