# SPDX-License-Identifier: Apache-2.0
"""Converted cross-attention: a decoder's queries on the state of the encoder's keys, made once per generation."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .kernels import is_tracing
from .cache_linear_attention import LinearAttentionStateLayer
from .linearized_attention import LinearizedAttention


def cross_state_layer(cache, layer_idx: int) -> LinearAttentionStateLayer | None:
    """The state layer of the cross-attention cache at `layer_idx`, put there first; None for a cache without one."""
    cache = getattr(cache, "cross_attention_cache", None)
    if cache is None:
        return None
    while len(cache.layers) <= layer_idx:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[layer_idx]
    if not getattr(layer, "holds_linear_state", False):
        layer = cache.layers[layer_idx] = LinearAttentionStateLayer.replacing(layer)
        layer.siblings = cache.layers
    return layer


class LinearizedCrossAttention(LinearizedAttention):
    """Mixed in before a stock attention class whose keys come from another sequence."""

    cache_name = "cross_attention_cache"

    def find_state_layer(self, cache) -> LinearAttentionStateLayer | None:
        return cross_state_layer(cache, self.layer_idx)

    def _refuse_arguments(self, kwargs) -> None:
        # T5 gives its cross-attention a bias of zeros.
        super()._refuse_arguments({name: value for name, value in kwargs.items() if name != "position_bias"})

    def _read_mask(self, mask, key, seen, is_causal):
        """Of the keys alone: every query sees the same ones. After the first step they are all in the state."""
        if mask is None or key.shape[2] == 0:
            return None, None
        is_shared = mask.ndim == 4 and mask.shape[0] == 1
        if mask.shape[-1] != key.shape[2] or not (is_shared or mask.shape[0] == key.shape[0]):
            raise ValueError(
                f"Got an attention mask of {mask.shape[0]} rows and {mask.shape[-1]} columns for {key.shape[0]} rows "
                f"of {key.shape[2]} tokens that are attended to; give one row and one column for each."
            )
        visible = mask > -1.0 if mask.is_floating_point() else mask.bool()
        if visible.ndim == 4:
            rows = visible.flatten(1, 2)  # [B, heads and queries, S]
            if not is_tracing() and (rows != rows[:, :1]).any():
                raise ValueError("Converted cross-attention got a mask that differs by query or head; keep it softmax.")
            visible = rows[:, 0].expand(key.shape[0], -1).contiguous()
        return visible, None

    def _attend(self, query, key, value, key_mask, segments, scaling, is_causal, state_layer):
        """The new keys, if any, are the whole other sequence: the state is made of them, never continued."""
        num_keys = key.shape[2]
        state = None if num_keys or state_layer is None else state_layer.state
        if num_keys == 0:  # one key that nobody sees: some mechanisms take no empty sequence
            key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
            key_mask = torch.zeros(key.shape[0], 1, dtype=torch.bool, device=key.device)
        output, new_state = self.linear_attention(
            query, key, value, attention_mask=key_mask, scaling=scaling, is_causal=False, state=state
        )
        if state_layer is not None and state is None:
            state_layer.extend(new_state, num_keys)
        return output
