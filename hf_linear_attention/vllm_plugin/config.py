# SPDX-License-Identifier: Apache-2.0
"""What vLLM has to know of a converted model before any weight is loaded."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from ..configuration_linear_attention import entries_of
from .families import is_encoder, refuse_family


# The attribute of the config that keeps the `layer_types` of the stock model, which builds its layers by them.
STOCK_LAYER_TYPES = "_stock_layer_types"


class ConvertedModelConfig(VerifyAndUpdateConfig):
    """Refuses what this plugin cannot serve, and tells vLLM which layers have states."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Mark converted layers in `layer_types`; vLLM takes a model of `full_attention` alone for one without states.

        Raises:
            ValueError: for `softmax_heads`, whose state grows, and for families that vLLM cannot run.
        """
        config = model_config.hf_config
        refuse_family(config)
        entries = entries_of(config.linear_attention)
        if any(entry["softmax_heads"] for entry in entries):
            raise ValueError(
                "Heads with softmax attention (`softmax_heads`) keep all keys in the state, which vLLM cannot store; "
                "serve this model with `hf-linear-attention serve`, or convert it with whole softmax layers."
            )
        types = getattr(config, "layer_types", None)
        if not types or hasattr(config, STOCK_LAYER_TYPES) or is_encoder(config):
            return
        converted = {layer for entry in entries for layer in _numbers(entry["layers"], types)}
        setattr(config, STOCK_LAYER_TYPES, list(types))
        config.layer_types = ["linear_attention" if n in converted else kind for n, kind in enumerate(types)]

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuse ways of running that states do not allow.

        Raises:
            ValueError: for tensor parallelism and for speculative decoding.
        """
        if (size := vllm_config.parallel_config.tensor_parallel_size) > 1:
            raise ValueError(
                f"Got `tensor_parallel_size` = {size}; parameters of linear attention belong to heads and are not "
                "divided. Use `--pipeline-parallel-size` or `--data-parallel-size`."
            )
        if vllm_config.speculative_config is not None:
            raise ValueError("Speculative decoding takes tokens back, which a state does not allow; leave it out.")


def _numbers(layers: Any, types: list[str]) -> list[int]:
    """The layers that a setting `layers` names."""
    if not isinstance(layers, str):
        return list(layers)
    chosen = {"all": lambda kind: True, "none": lambda kind: False}.get(layers, layers.__eq__)
    return [number for number, kind in enumerate(types) if chosen(kind)]
