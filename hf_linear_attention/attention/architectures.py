# SPDX-License-Identifier: Apache-2.0
"""What a stock attention module does, determined from the module itself, so that a new model type needs no change.

The functions tell self-attention from cross-attention and causal from bidirectional attention, read the number and size
of the heads, and find what a module does to its logits or masks that a state of constant size cannot represent
(`features_of`).

The ALiBi families compute their own softmax. ALiBi (Press 2022) adds -slope (i - j) to a logit, so a weight decays by
exp(-slope) per token, and linear attention can reproduce it exactly. The classes at the end of this file are bases that
come after `LinearizedAttention` and before such a stock class: they call its projections, and `attend` between them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from ..configuration_linear_attention import DROPPABLE, is_causal_config, max_length_of
from ..mechanisms.base import LayerShape
from .calls import interface_keywords, layer_hidden_size
from .transformers_internals import attention_implementation


# The forward pass of classes with these names is observed; LongCat-Flash has a `LongcatFlashMLA`.
ATTENTION_NAME = re.compile(r"attention|attn|MLA", re.IGNORECASE)
# The name of a module that attends to another sequence, or of the parent of that module.
CROSS_NAME = re.compile(r"cross|x_attn|encoder_attn|encdec|encoder_decoder", re.IGNORECASE)
POSITION_BIAS_NAME = re.compile(r"relative_(position|attention)_bias")
# Arguments that stock layers pass to the attention function, and the feature that each of them implements.
FEATURE_ARGUMENTS = {
    "position_bias": "position_bias",
    "softcap": "softcap",
    "s_aux": "attention_sinks",
    "sinks": "attention_sinks",
    "indices": "sparse_attention",
    "block_indices": "sparse_attention",
}
# Stock attention classes that use the attention interface and still cannot be converted.
EXCEPTIONS = {
    "DiffLlamaAttention": "attends twice, to different values, with one cache entry",
    "DogeAttention": "adds a mask of its own, computed from the values, per head",
    "DeepseekV4Attention": "attends to compressed keys that it keeps in a cache layer of its own",
    # transformers sizes its masks by the cache layers of lightning attention, which stay empty.
    "MiniMaxAttention": "shares a cache with lightning attention, which knows no other linear state",
    "T5Gemma2MergedAttention": "attends to its own tokens and the encoder's in one softmax",
}
# Classes that compute their own softmax, in models of which another part (GIT's image encoder) uses the interface.
OWN_SOFTMAX = {"GitSelfAttention"}


def attention_modules(model: nn.Module, cross: bool = False) -> dict[str, Any]:
    """`{name: module}` of every attention module that uses the attention interface, in the order of the model.

    Args:
        cross: whether to return the modules that attend to another sequence instead of those that attend to their own.
    """
    reaches: dict[type, bool] = {}
    for module in model.modules():
        if type(module) not in reaches:
            reaches[type(module)] = _reaches_interface(module)
    return {
        name: module
        for name, module in model.named_modules()
        if reaches[type(module)] and is_cross_attention(name, module) == cross
    }


def _reaches_interface(module: nn.Module) -> bool:
    if adapter_of(type(module)) is not None or hasattr(module, "linear_attention_enabled"):
        return True
    if isinstance(module, PreTrainedModel) or not isinstance(config_of(module), PreTrainedConfig):
        return False
    return bool(ATTENTION_NAME.search(type(module).__name__)) and interface_keywords(module, type(module)) is not None


def has_own_dispatch(model_class: type) -> bool:
    """Whether a table in the modeling file picks the attention class by `attn_implementation`; ours is not in it."""
    return any(name.endswith("ATTENTION_CLASSES") for name in vars(sys.modules[model_class.__module__]))


def is_cross_attention(name: str, module: Any) -> bool:
    """Whether the module of this name takes its keys from another sequence, such as an encoder's."""
    places = (type(module).__name__, *name.split(".")[-2:])
    return bool(getattr(module, "is_cross_attention", False)) or any(map(CROSS_NAME.search, places))


def is_causal_attention(module: Any, model: Any) -> bool:
    """Whether this self-attention is causal; in an encoder-decoder each module states this itself."""
    config = getattr(module, "config", model.config)
    if (is_causal := getattr(config, "is_causal", None)) is not None:
        return bool(is_causal)
    if hasattr(module, "is_causal"):  # some decoders leave it False and rely on their mask
        return bool(module.is_causal or getattr(module, "is_decoder", False))
    return is_causal_config(model.config, model.config.stock_model_type)


def layer_shape(module: Any, layer: int, config: PreTrainedConfig) -> LayerShape:
    """Heads and sizes of an attention module, from the module itself: hidden_size / heads is wrong for many models.

    Raises:
        ValueError: if the module has its heads or sizes under none of the names that transformers uses.
    """
    config = getattr(module, "config", config)
    num_heads = _first_attribute(module, ("num_heads", "num_attention_heads", "n_heads")) or _first_attribute(
        config, ("num_attention_heads", "n_heads", "n_head")
    )
    # `qk_head_dim` comes first, because `head_dim` means something else in multi-head latent attention.
    head_dim = _first_attribute(
        module, ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
    )
    if not num_heads or not head_dim:
        raise ValueError(
            f"Cannot determine the number of heads (got {num_heads}) and head_dim (got {head_dim}) of "
            f"{type(module).__name__}; keep its layers softmax (setting `layers`)."
        )
    groups = getattr(module, "num_key_value_groups", None) or 1
    adapter = adapter_of(type(module))
    slopes = adapter.alibi_slopes(module) if adapter else None
    sizes = (num_heads, num_heads // groups, head_dim, layer, max_length_of(config), slopes)
    return LayerShape(*sizes, hidden_size=layer_hidden_size(module))


def refuse_without_hidden_states(module: Any, layer: int, needed: str, mechanism: str) -> None:
    """Refuse a layer without a hidden state for each of its keys, from which `mechanism` would compute gates.

    Raises:
        ValueError: for cross-attention, or a stock forward whose first argument is not `hidden_states`.
    """
    first = list(inspect.signature(stock_class_of(module).forward).parameters)[1]
    if needed != "cross" and first == "hidden_states":
        return
    what = "takes its keys from another sequence" if needed == "cross" else f"takes `{first}`"
    raise ValueError(
        f"`{mechanism}` computes gates from the hidden states of a layer, but {type(module).__name__} (layer {layer}) "
        f"{what}; choose another mechanism, or keep such layers softmax (setting `layers`)."
    )


def _first_attribute(owner: Any, names: tuple[str, ...]) -> int | None:
    return next((getattr(owner, name) for name in names if getattr(owner, name, None) is not None), None)


def config_of(module: Any) -> Any:
    """The config that the module keeps, or None: the modules of BLOOM and MPT read theirs and do not store it."""
    return getattr(module, "config", None)


def layer_type(module: Any) -> str | None:
    """The entry of `config.layer_types` for the layer of this module, such as `full_attention`, or None."""
    config, layer = config_of(module), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    return types[layer] if types and layer is not None and layer < len(types) else None


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
    """Refuse features of the layers to convert that linear attention cannot reproduce, unless `drop` names them.

    Raises:
        ValueError: naming each such feature. An entry of `drop` that no layer has changes nothing, so that one setting
            serves a family.
    """
    if not converted:
        return
    found = converted_features(model, converted)
    kept = {feature: texts for feature, texts in found.items() if feature not in drop}
    problems = [
        f"{text}, in layers {', '.join(map(str, layers))}" for texts in kept.values() for text, layers in texts.items()
    ]
    if problems:
        clean = [
            layer for layer in converted if not any(layer in layers for t in kept.values() for layers in t.values())
        ]
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
        raise ValueError(
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


def stock_class_of(module: Any) -> type:
    """The class that an attention module has in transformers, or had before its conversion."""
    return getattr(type(module), "stock_class", type(module))


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


def skips_position_bias(module: Any, settings: Mapping[str, Any]) -> bool:
    """Whether a dropped position bias, which T5's first layer computes as N x N for all layers, can be skipped."""
    if "position_bias" not in settings["drop"] or settings["layers"] != "all":
        return False
    return "position_bias" in inspect.signature(type(module).forward).parameters and hasattr(module, "o")


def _softcap(module: Any) -> str | None:
    cap = getattr(module, "attn_logit_softcapping", None) if _passes(module, "softcap") else None
    return f"caps its logits at {cap}" if cap else None


def _sinks(module: Any) -> str | None:
    has_sinks = _passes(module, "attention_sinks") and getattr(module, "sinks", None) is not None
    return "has learned attention sinks" if has_sinks else None


def _selection(module: Any) -> str | None:
    is_sparse = _passes(module, "sparse_attention") and layer_type(module) != "full_attention"
    return "attends to a selection of the keys" if is_sparse else None


def _window(module: Any) -> str | None:
    if "sliding" not in (layer_type(module) or "sliding"):
        return None
    window = getattr(module, "sliding_window", getattr(config_of(module), "sliding_window", None))
    return f"sees the nearest {window} tokens only" if _hides(window, config_of(module)) else None


def _chunk(module: Any) -> str | None:
    size = (
        getattr(config_of(module), "attention_chunk_size", None) if layer_type(module) == "chunked_attention" else None
    )
    return f"sees its own chunk of {size} tokens only" if _hides(size, config_of(module)) else None


def _hides(size: Any, config: Any) -> bool:
    """Whether a window of this size hides keys: one that is as long as the longest input does not."""
    return isinstance(size, int) and size < (max_length_of(config) or size + 1)


def _stock_module(module: Any) -> Any:
    """The modeling file of transformers that defines the stock class."""
    return sys.modules[getattr(type(module), "stock_class", type(module)).__module__]


def own_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What `LinearizedAttention.forward` adds to the arguments of the stock forward, for `attend`."""
    return {name: kwargs.get(name) for name in ("state_layer", "gates")}


class BloomAttention:
    """A base before transformers' `BloomAttention`."""

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        layer_past: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The arguments and results are those of the stock class."""
        if not self.linear_attention_enabled:
            return super().forward(hidden_states, residual, alibi, attention_mask, layer_past=layer_past, **kwargs)
        mixed = self.query_key_value(hidden_states).unflatten(2, (self.num_heads, 3, self.head_dim))
        query, key, value = (x.transpose(1, 2) for x in mixed.unbind(3))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        output, weights = self.attend(
            query, key, value, attention_mask, scaling=self.inv_norm_factor, **own_arguments(kwargs)
        )
        output = F.dropout(self.dense(output.flatten(2)), p=self.hidden_dropout, training=self.training)
        return residual + output, weights

    @staticmethod
    def alibi_slopes(module: Any) -> tuple[float, ...]:
        """One per head."""
        with torch.device("cpu"):  # the model may be built on meta
            bias = _stock_module(module).build_alibi_tensor(
                torch.ones(1, 2, dtype=torch.float32, device="cpu"), module.num_heads, torch.float32
            )
        return tuple((bias[:, 0, 1] - bias[:, 0, 0]).tolist())


class MptAttention:
    """A base before transformers' `MptAttention`."""

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The arguments and results are those of the stock class."""
        if not self.linear_attention_enabled:
            return super().forward(hidden_states, position_bias, past_key_values, attention_mask, **kwargs)
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            x.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for x in mixed.chunk(3, dim=2)
        )
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        has_own_mask = attention_implementation(self.model_config) == attention_implementation(self.config)
        if attention_mask is not None and not has_own_mask:
            attention_mask = ~attention_mask  # MPT makes a mask that is True where a key is hidden for softmax layers
        output, weights = self.attend(
            query, key, value, attention_mask, scaling=self.softmax_scale, **own_arguments(kwargs)
        )
        return self.out_proj(output.flatten(2)), weights

    @staticmethod
    def alibi_slopes(module: Any) -> tuple[float, ...]:
        """One per head."""
        with torch.device("cpu"):  # the model may be built on meta
            bias = _stock_module(module).build_mpt_alibi_tensor(module.n_heads, 2)
        return tuple((bias[:, 0, 1] - bias[:, 0, 0]).tolist())


ADAPTERS: dict[str, Any] = {"BloomAttention": BloomAttention, "MptAttention": MptAttention}


def adapter_of(attention_class: type) -> Any:
    """The base to put before this stock attention class, or None."""
    return ADAPTERS.get(attention_class.__name__)
