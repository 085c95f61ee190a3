# SPDX-License-Identifier: Apache-2.0
"""What vLLM has to know of a converted model before any weight is loaded."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from ..configuration_linear_attention import entries_of
from .families import is_encoder, refuse_family


# The attribute of the config that keeps the `layer_types` of the stock model, which builds its layers by them.
STOCK_LAYER_TYPES = "_stock_layer_types"
FULL = "full_attention"
CPU_BLOCK = 128  # tokens


class ConvertedModelConfig(VerifyAndUpdateConfig):
    """Refuses what this plugin cannot serve, and tells vLLM which layers have states."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Mark converted layers in `layer_types`; vLLM takes a model of `full_attention` alone for one without states.

        ValueError for families that vLLM cannot run.
        """
        config = model_config.hf_config
        refuse_family(config)
        types = getattr(config, "layer_types", None)
        if not types or hasattr(config, STOCK_LAYER_TYPES) or is_encoder(config):
            return
        converted = _converted_layers(config, types)
        setattr(config, STOCK_LAYER_TYPES, list(types))
        config.layer_types = ["linear_attention" if n in converted else kind for n, kind in enumerate(types)]

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse speculative decoding, and let prefix caching find states.

        By default vLLM keeps a state at the end of each prompt, and where the blocks of softmax layers show that two
        prompts part. A model without softmax layers has no such blocks, and keeps states at the ends of chunks too.

        On a CPU, vLLM 0.32 gives states blocks of 16 tokens before it takes 128 for everything else, and then finds no
        state again; 128 from the start, as if a user had asked for it, is right.

        Raises:
            ValueError: for speculative decoding.
        """
        if vllm_config.speculative_config is not None:
            raise ValueError("Speculative decoding takes tokens back, which a state does not allow; leave it out.")
        config, cache = vllm_config.model_config.hf_config, vllm_config.cache_config
        if is_encoder(config):
            return
        types = getattr(config, STOCK_LAYER_TYPES, None) or [FULL] * config.num_hidden_layers
        if len(_converted_layers(config, types)) == len(types) and cache.prefix_cache_retention_interval == 0:
            cache.prefix_cache_retention_interval = None
        if current_platform.is_cpu() and not cache.user_specified_block_size:
            cache.block_size, cache.user_specified_block_size = CPU_BLOCK, True


def _converted_layers(config: Any, types: list[str]) -> set[int]:
    """The numbers of the converted layers of a model whose layers have these types."""
    return {layer for entry in entries_of(config.linear_attention) for layer in _numbers(entry["layers"], types)}


def _numbers(layers: Any, types: list[str]) -> list[int]:
    """The layers that a setting `layers` names."""
    if not isinstance(layers, str):
        return list(layers)
    chosen = {"all": lambda kind: True, "none": lambda kind: False}.get(layers, layers.__eq__)
    return [number for number, kind in enumerate(types) if chosen(kind)]
