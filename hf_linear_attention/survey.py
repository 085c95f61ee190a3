# SPDX-License-Identifier: Apache-2.0
"""What stock attention does, found out when a model is converted; the config of the converted model keeps it.

`survey` refuses layers that do something to their logits or masks that a state of constant size cannot represent
(`features_of`), and fills in the rotary positions. A converted model is built and loaded without it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .attention.architectures import (
    adapter_of,
    config_of,
    is_causal_attention,
    is_cross_attention,
    layer_shape,
    layer_type,
    stock_class_of,
)
from .attention.transformers_internals import FEATURE_ARGUMENTS
from .attention_calls import interface_keywords
from .configuration_linear_attention import DROPPABLE, max_length_of, num_attention_layers
from .mechanisms.base import LayerShape
from .observed_rotary import observed_rotary
from .positions.rotary import needs_rotary, rotary_of


# The forward pass of classes with these names is observed; LongCat-Flash has a `LongcatFlashMLA`.
ATTENTION_NAME = re.compile(r"attention|attn|MLA", re.IGNORECASE)
POSITION_BIAS_NAME = re.compile(r"relative_(position|attention)_bias")
# Stock attention classes that use the attention interface and still cannot be converted.
EXCEPTIONS = {
    "DiffLlamaAttention": "attends twice, to different values, with one cache entry",
    "DogeAttention": "adds a mask of its own, computed from the values, per head",
    "DeepseekV4Attention": "attends to compressed keys that it keeps in a cache layer of its own",
    # transformers sizes its masks by the cache layers of lightning attention, which stay empty.
    "MiniMaxAttention": "shares a cache with lightning attention, which knows no other linear state",
    "T5Gemma2MergedAttention": "attends to its own tokens and the encoder's in one softmax",
}


class RotaryError(ValueError):
    """The setting `rope` cannot be applied to the rotary positions of this model."""


class NoRotaryError(RotaryError):
    """The model has no rotary positions, so that all values of the setting `rope` mean the same."""


class BoundedLayersError(ValueError):
    """Some layers have a sliding window or chunks, and can stay as they are: all others have `full_attention`."""


Group = tuple[dict[str, Any], Mapping[int, Any]]


def survey(model: Any, groups: Sequence[Group]) -> None:
    """Refuse what cannot be converted, and complete the config: the classes of attention and the rotary positions.

    The attention modules of each of `groups` are converted with its settings, by layer. ValueError if one cannot be.
    """
    for settings, chosen in groups:
        refuse_features(model, chosen, settings["drop"])
    for settings, chosen in groups:
        if chosen and needs_rotary(settings):
            _complete_rotary(model, settings, chosen)
    model.config.linear_attention_classes = attention_classes(model)
    for name, module in model.named_modules():
        if (found := model.config.linear_attention_classes.get(stock_class_of(module).__name__)) is not None:
            is_causal = is_causal_attention(module, model)
            direction = "cross" if is_cross_attention(name, module) else "causal" if is_causal else "bidirectional"
            found.extend([] if direction in found else [direction])


def attention_classes(model: nn.Module) -> dict[str, list[str]]:
    """The names of the stock classes of attention in this model that use the attention interface, each with a list."""
    names: dict[type, str | None] = {}
    for module in model.modules():
        if type(module) not in names:
            names[type(module)] = stock_class_of(module).__name__ if _reaches_interface(module) else None
    return {name: [] for name in sorted({name for name in names.values() if name is not None})}


def _reaches_interface(module: nn.Module) -> bool:
    if adapter_of(type(module)) is not None or hasattr(module, "linear_attention_enabled"):
        return True
    if isinstance(module, PreTrainedModel) or not isinstance(config_of(module), PreTrainedConfig):
        return False
    return bool(ATTENTION_NAME.search(type(module).__name__)) and interface_keywords(module, type(module)) is not None


def features_of(module: Any, model: nn.Module) -> dict[str, str]:
    """`{feature: what the stock attention does}`: the `DROPPABLE` features, and those that cannot be dropped."""
    found = {
        "exception": EXCEPTIONS.get(stock_class_of(module).__name__),
        "position_bias": _position_bias(module, model),
        "softcap": _softcap(module),
        "attention_sinks": _sinks(module),
        "sliding_window": _window(module),
        "chunked_attention": _chunk(module),
        "sparse_attention": _selection(module),
    }
    return {feature: text for feature, text in found.items() if text is not None}


def refuse_features(model: Any, converted: Mapping[int, Any], drop: Collection[str]) -> None:
    """Refuse (ValueError) all features of the layers to convert that linear attention lacks, unless `drop` names them.

    An entry of `drop` that no layer has changes nothing, so that one setting serves a family.
    """
    if not converted:
        return
    found = converted_features(model, converted)
    kept = {feature: texts for feature, texts in found.items() if feature not in drop}
    refused = {text: layers for texts in kept.values() for text, layers in texts.items()}
    problems = [f"{text}, in layers {', '.join(map(str, layers))}" for text, layers in refused.items()]
    if problems:
        clean = [layer for layer in converted if not any(layer in layers for layers in refused.values())]
        by_type = all(layer_type(converted[layer]) == "full_attention" for layer in clean)
        others = "full_attention" if clean and by_type else clean
        typed = others if isinstance(others, str) else ",".join(map(str, others))
        how = f": set `layers` to `{others}` (`--layers {typed}`)" if clean else " (`layers`)"
        problems.append(f"keep these layers softmax{how}")
        if names := [feature for feature in kept if feature in DROPPABLE]:
            listed = ", ".join(f"`{name}`" for name in names)
            problems.append(
                f"or convert them without it: set `drop` to a list with {listed} (`--drop {','.join(names)}`)"
            )
    if problems:
        is_bounded = others == "full_attention" and set(kept) <= {"sliding_window", "chunked_attention"}
        raise (BoundedLayersError if is_bounded else ValueError)(
            f"{type(model).__name__} has attention that linear attention cannot reproduce:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def converted_features(model: Any, converted: Mapping[int, Any]) -> dict[str, dict[str, list[int]]]:
    """`{feature: {class and what it does: layers}}` of the layers to convert, or of those converted with `drop`."""
    found: dict[str, dict[str, list[int]]] = {}
    for layer, module in converted.items():
        for feature, text in features_of(module, model).items():
            found.setdefault(feature, {}).setdefault(f"{stock_class_of(module).__name__} {text}", []).append(layer)
    return found


def _passes(module: Any, feature: str) -> bool:
    """Whether the stock forward passes an argument for this feature to the attention function."""
    if adapter_of(stock := stock_class_of(module)) is not None:
        return False
    return any(FEATURE_ARGUMENTS.get(name) == feature for name in interface_keywords(module, stock) or ())


def _position_bias(module: Any, model: nn.Module) -> str | None:
    if getattr(module, "position_embeddings_type", "relative") in (None, "rotary"):
        return None
    tables = (name for name, _ in model.named_parameters() if POSITION_BIAS_NAME.search(name))
    # The module of such a table is inside the attention, its layer or its encoder (BEiT adds it to the mask).
    owners = (model.get_submodule(".".join(name.split(".")[:-2])) for name in tables)
    if _passes(module, "position_bias") or any(module is child for owner in owners for child in owner.modules()):
        return "adds a learned position bias to its logits"
    return None


def _softcap(module: Any) -> str | None:
    cap = getattr(module, "attn_logit_softcapping", None) if _passes(module, "softcap") else None
    return f"caps its logits at {cap}" if cap else None


def _sinks(module: Any) -> str | None:
    has_sinks = _passes(module, "attention_sinks") and getattr(module, "sinks", None) is not None
    return "has learned attention sinks" if has_sinks else None


def _selection(module: Any) -> str | None:
    is_sparse = _passes(module, "sparse_attention") and layer_type(module) != "full_attention"
    return "attends to a selection of the keys" if is_sparse else None


def is_bounded(module: Any) -> bool:
    """Whether the original attention sees a window or chunk only, so that its cache does not grow without end."""
    return _window(module) is not None or _chunk(module) is not None


def _window(module: Any) -> str | None:
    if "sliding" not in (layer_type(module) or "sliding"):
        return None
    window = getattr(module, "sliding_window", getattr(config_of(module), "sliding_window", None))
    return f"sees the nearest {window} tokens only" if _hides(window, config_of(module)) else None


def _chunk(module: Any) -> str | None:
    is_chunked = layer_type(module) == "chunked_attention"
    size = getattr(config_of(module), "attention_chunk_size", None) if is_chunked else None
    return f"sees its own chunk of {size} tokens only" if _hides(size, config_of(module)) else None


def _hides(size: Any, config: Any) -> bool:
    """Whether a window of this size hides keys: one that is as long as the longest input does not."""
    return isinstance(size, int) and size < (max_length_of(config) or size + 1)


def _complete_rotary(model: PreTrainedModel, settings: dict[str, Any], chosen: Mapping[int, Any]) -> None:
    """Fill in the rotary positions that these layers compute with, and the frequencies that `rope` = `partial` keeps.

    ValueError if these layers cannot do what the setting `rope` asks for.
    """
    if settings["rotary"] is None:
        settings["rotary"] = _observed_rotary(model, chosen, settings)
    rotary = rotary_of(settings)
    shapes = {
        layer: dataclasses.replace(layer_shape(module, layer, model.config), rotary=rotary.get(layer))
        for layer, module in chosen.items()
    }
    if settings.get("rope") == "partial" and settings["rope_frequencies"] is None:
        num_layers = num_attention_layers(model.config) or 0  # the settings are refused if the list is shorter
        settings["rope_frequencies"] = kept_frequencies(shapes, settings["trained_length"], num_layers)
    refuse_frequencies(settings.get("rope_frequencies"), shapes)


def _observed_rotary(
    model: PreTrainedModel, modules: Mapping[int, Any], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    rope = settings.get("rope", "before_map")
    try:
        found = observed_rotary(model, modules)
    except ValueError as error:
        if rope == "before_map":  # only sinks would use them
            return []
        raise RotaryError(f"`rope` = `{rope}`, but {error}") from error
    if not found and rope != "before_map":
        name = type(next(iter(modules.values()))).__name__
        raise NoRotaryError(f"`rope` = `{rope}`, but {name} has no rotary positions; leave out the option `rope`.")
    return found


def kept_frequencies(shapes: Mapping[int, LayerShape], longest: int | None, num_layers: int = 0) -> list[int]:
    """The number of rotary frequencies per attention layer that make a full turn within `longest` tokens.

    The list has at least `num_layers` numbers, which are 0 for layers that are not in `shapes`. ValueError if the
    length is unknown, or the frequencies do not fall from one pair of channels to the next.
    """
    if longest is None:
        raise ValueError("`rope` = `partial` needs the length that the model was trained on; set `trained_length`.")
    kept = [0] * max(1 + max(shapes), num_layers)
    for layer, shape in shapes.items():
        turns = [2 * math.pi <= abs(f) * longest for f in (shape.rotary.inverse_frequencies if shape.rotary else ())]
        kept[layer] = sum(turns)
        if any(turns[kept[layer] :]):
            raise ValueError(
                f"`rope` = `partial` keeps the first frequencies of a layer, but in layer {layer} these are not the "
                "fastest; use `rope` = `none`."
            )
    return kept


def refuse_frequencies(given: int | Sequence[int] | None, shapes: Mapping[int, LayerShape]) -> None:
    """Raise ValueError for the first layer that has fewer frequencies."""
    for layer, shape in shapes.items():
        kept = given[layer] if isinstance(given, Sequence) and layer < len(given) else given
        number = len(shape.rotary.inverse_frequencies) if shape.rotary else 0
        if isinstance(kept, int) and kept > number:
            raise ValueError(
                f"`rope_frequencies` = {kept}, but layer {layer} has {number} rotary frequencies; give no more of them."
            )
