# SPDX-License-Identifier: Apache-2.0
"""Linear-cost attention for pretrained Hugging Face models.

Importing this package registers the `linear_<x>` model types with the Auto classes and changes no native one.

    from hf_linear_attention import convert
    model = convert("path/to/checkpoint", mechanism="linear", feature_map="exp")
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

from .extensions import EXTENSIONS
from .torch_kernels.implementations import PROVIDERS


__version__ = "0.1.0"

_LAZY = {
    "LinearAttentionSettings": "configuration_linear_attention",
    "calibrate": "model_conversion",
    "convert": "model_conversion",
    "convert_and_heal": "conversion.convert_and_heal",
    "convert_config": "model_conversion",
    "divide_exact_keys": "key_division",
    "kernel_backend": "kernels.cpu",
    "load_prompt_state": "state.prompt_state",
    "register_feature_map": "mechanisms.registry",
    "register_mechanism": "mechanisms.registry",
    "save_prompt_state": "state.prompt_state",
    "softmax_attention": "modeling_linear_attention",
    "supported_model_types": "tested_architectures",
}
__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY))


def _on_demand(module: str, name: str) -> Callable[..., Any]:
    """A function that imports its module when it is called."""
    return lambda *args, **kwargs: getattr(importlib.import_module(f".{module}", __name__), name)(*args, **kwargs)


class _AfterTransformers(MetaPathFinder):
    """Registers the `linear_<x>` model types once transformers has read its table of configs."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _AUTO_CONFIGS:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = exec_module
        return spec


_AUTO_CONFIGS = "transformers.models.auto.configuration_auto"
_register = _on_demand("registration", "register")
# `--help` needs no transformers, so that this import must not import it.
if _AUTO_CONFIGS in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _AfterTransformers())
PROVIDERS.append(_on_demand("kernels", "register_kernels"))
EXTENSIONS["first_instance"] = _on_demand("registration", "register_heads")
EXTENSIONS["checkpoint_code"] = _on_demand("checkpoint_code", "checkpoint_code")
for _name in ("attention_classes", "survey"):
    EXTENSIONS[_name] = _on_demand("survey", _name)
EXTENSIONS["after_saving"] = _on_demand("conversion.report", "write_conversion_files")
for _name in ("convert", "save_prompt_state", "load_prompt_state"):
    EXTENSIONS[_name] = _on_demand(_LAZY[_name], _name)
