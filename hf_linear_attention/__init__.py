# SPDX-License-Identifier: Apache-2.0
"""Linear-cost attention for pretrained Hugging Face models.

Importing this package registers the `linear_<x>` model types with the Auto classes and changes no native one.

    from hf_linear_attention import convert
    model = convert("path/to/checkpoint", mechanism="linear", feature_map="exp")
"""

from __future__ import annotations

import importlib
from typing import Any

from .registration import register


__version__ = "0.1.0"

_LAZY = {
    "LinearAttentionSettings": "configuration_linear_attention",
    "accelerate_stock_models": "stock_models",
    "PromptStore": "prompt_store",
    "calibrate": "conversion_api",
    "convert": "conversion_api",
    "convert_and_heal": "conversion.convert_and_heal",
    "convert_config": "conversion_api",
    "kernel_backend": "kernels_cpu",
    "load_prompt_state": "prompt_state",
    "save_prompt_state": "prompt_state",
    "softmax_attention": "modeling_linear_attention",
    "supported_model_types": "tested_architectures",
    "write_conversion_files": "conversion.report",
}
__all__ = [
    "LinearAttentionSettings",
    "PromptStore",
    "accelerate_stock_models",
    "calibrate",
    "convert",
    "convert_and_heal",
    "convert_config",
    "kernel_backend",
    "load_prompt_state",
    "save_prompt_state",
    "softmax_attention",
    "supported_model_types",
]

register()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))
