# SPDX-License-Identifier: Apache-2.0
"""The registry of mechanisms by the name in `config.linear_attention["mechanism"]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..features.maps import FEATURE_MAPS, FeatureMap
from .aft import AftAttention
from .base import AttentionMechanism, LayerShape
from .gated_delta import GatedDeltaAttention
from .hybrid import HybridAttention
from .latent import LatentAttention
from .linear import LinearAttention
from .linformer import LinformerAttention
from .linformer_linear import LinformerLinearAttention
from .nystrom import NystromAttention
from .performer import PerformerAttention
from .settings import FEATURE_MAP_TRAITS, MECHANISM_OPTIONS, FeatureMapTraits, LinearOptions
from .window import WindowAttention


MECHANISMS: dict[str, type[AttentionMechanism]] = {
    "aft": AftAttention,
    "gated_delta": GatedDeltaAttention,
    "hybrid": HybridAttention,
    "latent": LatentAttention,
    "linear": LinearAttention,
    "linformer": LinformerAttention,
    "linformer_linear": LinformerLinearAttention,
    "nystrom": NystromAttention,
    "performer": PerformerAttention,
    "window": WindowAttention,
}


def refuse_shape(name: str, shape: LayerShape, needed: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for an attention layer of class `name` that needs a capability which its mechanism lacks."""
    mechanism = MECHANISMS[settings["mechanism"]]
    if obstacle := mechanism.obstacle(needed, settings):
        raise ValueError(
            f"`{settings['mechanism']}` {obstacle}, which layer {shape.layer} ({name}) needs; choose another "
            "mechanism, or keep such layers softmax (setting `layers`)."
        )
    if shape.num_heads != shape.num_key_value_heads and not mechanism.supports("gqa", settings):
        raise ValueError(
            f"`{settings['mechanism']}` does not support grouped-query attention, which {name} has; choose another "
            "mechanism."
        )
    if shape.alibi_slopes is not None and needed != "causal":
        raise ValueError(
            f"{name} is {needed} and has ALiBi, which linear attention honours in decoders only; keep such layers "
            "softmax (setting `layers`)."
        )
    obstacle = mechanism.obstacle("alibi", settings)
    if shape.alibi_slopes is not None and obstacle is not None:
        raise ValueError(
            f"{name} has ALiBi positions, and `{settings['mechanism']}` {obstacle}; mechanisms that have one are "
            + ", ".join(f"`{able}`" for able, other in MECHANISMS.items() if other.supports_alibi)
            + "."
        )


def register_mechanism(name: str, mechanism: type[AttentionMechanism]) -> None:
    """Add a mechanism of your own, so that `convert`, configs and the command line know it.

    Its checkpoints do not carry its code: whoever loads one imports this package and registers the mechanism first.

    Raises:
        ValueError: if another mechanism has the name.
    """
    if MECHANISMS.get(name, mechanism) is not mechanism:
        raise ValueError(f"`{name}` is the name of {MECHANISMS[name].__name__}; choose another.")
    MECHANISMS[name] = MECHANISM_OPTIONS[name] = mechanism


def register_feature_map(name: str, feature_map: type[FeatureMap]) -> None:
    """Add a feature map of your own to those of `linear`, as `register_mechanism` adds a mechanism.

    Raises:
        ValueError: if another feature map has the name.
    """
    if FEATURE_MAPS.get(name, feature_map) is not feature_map:
        raise ValueError(f"`{name}` is the name of {FEATURE_MAPS[name].__name__}; choose another.")
    FEATURE_MAPS[name] = feature_map
    FEATURE_MAP_TRAITS[name] = FeatureMapTraits(feature_map.log_features, feature_map.has_num_features)
    option = LinearOptions.options["feature_map"]
    LinearOptions.options["feature_map"] = replace(option, choices=tuple(FEATURE_MAP_TRAITS))
