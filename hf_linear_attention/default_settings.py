# SPDX-License-Identifier: Apache-2.0
"""What a model gets if no mechanism is named: the settings with which the preset `default` begins."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from .configuration_linear_attention import is_causal_config


# A test compares these with training/presets/default.yaml, where sizes also follow the size of the heads.
DEFAULTS: dict[str, dict[str, Any]] = {
    "causal": {
        "mechanism": "hybrid",
        "window_size": 16,
        "num_sinks": 4,
        "num_exact_keys": 48,
        "num_features": 64,
        "decay": "learned",
        "rope": "partial",
    },
    "bidirectional": {"mechanism": "hybrid", "window_size": 64, "num_sinks": 1},
    # `hybrid` has no form for cross-attention, so with `cross_attention` a model gets one that has.
    "cross_attention": {"mechanism": "linear", "feature_map": "exp"},
}
REASONS = {
    "causal": "`hybrid`, the default for decoders: its window and sinks are exact, so that it begins near the original",
    "bidirectional": "`hybrid`, the default for encoders: its window is exact, so that it begins near the original "
    "(`linear` is faster on long inputs, and needs training)",
    "cross_attention": "`linear`, the default for encoder-decoders whose cross-attention is converted too",
}


def direction_of(config: PreTrainedConfig, cross_attention: bool = False) -> str:
    """`causal` for decoders, `bidirectional` for encoders and for encoder-decoders, whose two parts differ.

    With `cross_attention` (it is converted too) it is `cross_attention` for all of them.
    """
    if cross_attention:
        return "cross_attention"
    model_type = getattr(config, "stock_model_type", config.model_type)
    is_causal = not config.is_encoder_decoder and is_causal_config(config, model_type)
    return "causal" if is_causal else "bidirectional"
