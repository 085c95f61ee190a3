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
        "window_size": 64,
        "num_sinks": 4,
        "num_features": 64,
        "decay": "learned",
        "rope": "partial",
    },
    "bidirectional": {"mechanism": "linear", "feature_map": "exp"},
}
REASONS = {
    "causal": "`hybrid`, the default for decoders: its window and sinks are exact, so that it begins near the original",
    "bidirectional": "`linear`, the default for encoders: the fastest one after training (untrained, `nystrom` and "
    "`hybrid` are nearer the original)",
}


def direction_of(config: PreTrainedConfig) -> str:
    """`causal` for decoders, `bidirectional` for encoders and for encoder-decoders, whose two parts differ."""
    model_type = getattr(config, "stock_model_type", config.model_type)
    is_causal = not config.is_encoder_decoder and is_causal_config(config, model_type)
    return "causal" if is_causal else "bidirectional"
