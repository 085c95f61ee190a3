# SPDX-License-Identifier: Apache-2.0
"""What a model gets if no mechanism is named: the settings with which the preset `default` begins."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from .configuration_linear_attention import is_causal_config


# A test compares these with training/presets/default.yaml.
DEFAULTS: dict[str, dict[str, Any]] = {
    "causal": {"mechanism": "hybrid", "state_tokens": "auto", "decay": "learned", "rope": "partial"},
    "bidirectional": {"mechanism": "window", "window_size": 128, "num_sinks": 1},
    "encoder_decoder": {"mechanism": "hybrid", "window_size": 64, "num_sinks": 1},
    # `hybrid` has no form for cross-attention, so with `cross_attention` a model gets one that has.
    "cross_attention": {"mechanism": "linear", "feature_map": "exp"},
}
REASONS = {
    "causal": "`hybrid`, the default for decoders: its window and sinks are exact, so that it begins near the original",
    "bidirectional": "`window`, the default for encoders: inputs of at most 128 tokens are exact, and longer ones near "
    "the original without training",
    "encoder_decoder": "`hybrid`, the default for encoder-decoders: its window is exact, so that it begins near the "
    "original",
    "cross_attention": "`linear`, the default for encoder-decoders whose cross-attention is converted too",
}


def direction_of(config: PreTrainedConfig, cross_attention: bool = False) -> str:
    """`causal` for decoders, `bidirectional` for encoders, and `encoder_decoder` for models that have both.

    With `cross_attention` (it is converted too) it is `cross_attention` for all of them.
    """
    if cross_attention:
        return "cross_attention"
    if config.is_encoder_decoder:
        return "encoder_decoder"
    model_type = getattr(config, "stock_model_type", config.model_type)
    return "causal" if is_causal_config(config, model_type) else "bidirectional"
