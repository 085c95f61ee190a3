# SPDX-License-Identifier: Apache-2.0
"""Families with ALiBi, whose stock attention computes its own softmax: their projections, and `attend` in between.

ALiBi (Press 2022) adds -slope (i - j) to a logit, so a weight decays by exp(-slope) with every token: linear attention
honours it exactly. A class here stands between `LinearizedAttention` and the stock class of the same name.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from .transformers_internals import attention_implementation


def _stock_module(module: Any) -> Any:
    """The modeling file of transformers that defines the stock class."""
    return sys.modules[getattr(type(module), "stock_class", type(module)).__module__]


class BloomAttention:
    """Before transformers' `BloomAttention`."""

    def forward(self, hidden_states, residual, alibi, attention_mask, layer_past=None, **kwargs):
        if not self.linear_attention_enabled:
            return super().forward(hidden_states, residual, alibi, attention_mask, layer_past=layer_past, **kwargs)
        mixed = self.query_key_value(hidden_states).unflatten(2, (self.num_heads, 3, self.head_dim))
        query, key, value = (x.transpose(1, 2) for x in mixed.unbind(3))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        output, weights = self.attend(
            query, key, value, attention_mask, scaling=self.inv_norm_factor, state_layer=kwargs.get("state_layer")
        )
        output = F.dropout(self.dense(output.flatten(2)), p=self.hidden_dropout, training=self.training)
        return residual + output, weights

    @staticmethod
    def alibi_slopes(module: Any) -> tuple[float, ...]:
        """One per head."""
        with torch.device("cpu"):  # the model may be built on meta
            bias = _stock_module(module).build_alibi_tensor(torch.ones(1, 2), module.num_heads, torch.float32)
        return tuple((bias[:, 0, 1] - bias[:, 0, 0]).tolist())


class MptAttention:
    """Before transformers' `MptAttention`."""

    def forward(self, hidden_states, position_bias, past_key_values=None, attention_mask=None, **kwargs):
        if not self.linear_attention_enabled:
            return super().forward(hidden_states, position_bias, past_key_values, attention_mask, **kwargs)
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            x.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for x in mixed.chunk(3, dim=2)
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        has_own_mask = attention_implementation(self.model_config) == attention_implementation(self.config)
        if attention_mask is not None and not has_own_mask:
            attention_mask = ~attention_mask  # MPT turns the additive mask of its softmax layers into True = hidden
        output, weights = self.attend(
            query, key, value, attention_mask, scaling=self.softmax_scale, state_layer=kwargs.get("state_layer")
        )
        return self.out_proj(output.flatten(2)), weights

    @staticmethod
    def alibi_slopes(module: Any) -> tuple[float, ...]:
        """One per head."""
        with torch.device("cpu"):  # the model may be built on meta
            bias = _stock_module(module).build_mpt_alibi_tensor(module.n_heads, 2)
        return tuple((bias[:, 0, 1] - bias[:, 0, 0]).tolist())


ADAPTERS: dict[str, Any] = {"BloomAttention": BloomAttention, "MptAttention": MptAttention}


def adapter_of(attention_class: type) -> Any:
    """The class to put before this stock attention class, or None."""
    return ADAPTERS.get(attention_class.__name__)
