# SPDX-License-Identifier: Apache-2.0
"""What a stock attention module does, determined from the module itself, so that a new model type needs no change.

The functions tell self-attention from cross-attention and causal from bidirectional attention, and read the number and
size of the heads. `survey.py` finds out the rest when a model is converted.

The ALiBi families compute their own softmax. ALiBi (Press 2022) adds -slope (i - j) to a logit, so a weight decays by
exp(-slope) per token, and linear attention can reproduce it exactly. The classes at the end of this file are bases that
come after `LinearizedAttention` and before such a stock class: they call its projections, and `attend` between them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from ..configuration_linear_attention import is_causal_config, max_length_of
from ..extensions import extension
from ..mechanisms.base import LayerShape
from .transformers_internals import attention_implementation, cache_among


# The name of a module that attends to another sequence, or of the parent of that module.
CROSS_NAME = re.compile(r"cross|x_attn|encoder_attn|encdec|encoder_decoder", re.IGNORECASE)
# Classes that compute their own softmax, in models of which another part (GIT's image encoder) uses the interface.
OWN_SOFTMAX = {"GitSelfAttention"}


def attention_modules(model: Any, cross: bool = False) -> dict[str, Any]:
    """`{name: module}` of every self-attention, or cross-attention, that uses the attention interface, in their order.

    The config of a converted model names their classes.
    """
    classes = getattr(getattr(model, "config", None), "linear_attention_classes", None)
    if classes is None:
        purpose = "The config does not name the model's classes of attention (`linear_attention_classes`)"
        classes = extension("attention_classes", purpose)(model)
    return {
        name: module
        for name, module in model.named_modules()
        if stock_class_of(module).__name__ in classes and is_cross_attention(name, module) == cross
    }


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


def layer_hidden_size(module: Any) -> int:
    """E, the size of the hidden states of an attention module: what its first projection takes, else `hidden_size`."""
    for child in module.modules():
        size = getattr(child, "in_features", None) or getattr(child, "nx", None)  # GPT-2 has `Conv1D`
        if isinstance(size, int):
            return size
    return getattr(getattr(module, "config", None), "hidden_size", 8)


def layer_shape(module: Any, layer: int, config: PreTrainedConfig) -> LayerShape:
    """Heads and sizes of an attention module, from the module itself: hidden_size / heads is wrong for many models.

    ValueError if the module has them under none of the names that transformers uses.
    """
    config = getattr(module, "config", config)
    num_heads = _first_attribute(module, "num_heads", "num_attention_heads", "n_heads")
    num_heads = num_heads or _first_attribute(config, "num_attention_heads", "n_heads", "n_head")
    # `qk_head_dim` comes first, because `head_dim` means something else in multi-head latent attention.
    names = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
    head_dim = _first_attribute(module, *names)
    if not num_heads or not head_dim:
        raise ValueError(
            f"Cannot determine the number of heads (got {num_heads}) and head_dim (got {head_dim}) of "
            f"{type(module).__name__}; keep its layers softmax (setting `layers`)."
        )
    groups = getattr(module, "num_key_value_groups", None) or 1
    adapter = adapter_of(type(module))
    slopes = adapter.alibi_slopes(module) if adapter else None
    sizes = (num_heads, num_heads // groups, head_dim, layer, max_length_of(config), slopes)
    epsilon = getattr(config, "rms_norm_eps", 1e-6)
    return LayerShape(*sizes, hidden_size=layer_hidden_size(module), norm_epsilon=epsilon)


def refuse_without_hidden_states(module: Any, layer: int, needed: str, mechanism: str) -> None:
    """Refuse (ValueError) a layer without a hidden state per key, from which `mechanism` would compute gates.

    These are cross-attention, and a stock forward whose first argument is not `hidden_states`.
    """
    first = list(inspect.signature(stock_class_of(module).forward).parameters)[1]
    if needed != "cross" and first == "hidden_states":
        return
    what = "takes its keys from another sequence" if needed == "cross" else f"takes `{first}`"
    raise ValueError(
        f"`{mechanism}` computes gates from the hidden states of a layer, but {type(module).__name__} (layer {layer}) "
        f"{what}; choose another mechanism, or keep such layers softmax (setting `layers`)."
    )


def _first_attribute(owner: Any, *names: str) -> int | None:
    return next((getattr(owner, name) for name in names if getattr(owner, name, None) is not None), None)


def config_of(module: Any) -> Any:
    """The config that the module keeps, or None: the modules of BLOOM and MPT read theirs and do not store it."""
    return getattr(module, "config", None)


def layer_type(module: Any) -> str | None:
    """The entry of `config.layer_types` for the layer of this module, such as `full_attention`, or None."""
    config, layer = config_of(module), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    return types[layer] if types and layer is not None and layer < len(types) else None


def stock_class_of(module: Any) -> type:
    """The class that an attention module has in transformers, or had before its conversion."""
    return getattr(type(module), "stock_class", type(module))


def skips_position_bias(module: Any, settings: Mapping[str, Any]) -> bool:
    """Whether a dropped position bias, which T5's first layer computes as N x N for all layers, can be skipped."""
    if "position_bias" not in settings["drop"] or settings["layers"] != "all":
        return False
    return "position_bias" in inspect.signature(type(module).forward).parameters and hasattr(module, "o")


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
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The arguments and results are those of the stock class."""
        if not self.linear_attention_enabled:
            return super().forward(hidden_states, residual, alibi, attention_mask, *args, **kwargs)
        mixed = self.query_key_value(hidden_states).unflatten(2, (self.num_heads, 3, self.head_dim))
        query, key, value = (x.transpose(1, 2) for x in mixed.unbind(3))
        if (cache := cache_among((*args, *kwargs.values()))) is not None:
            key, value = cache.update(key, value, self.layer_idx)
        output, weights = self.attend(
            query, key, value, attention_mask, scaling=self.inv_norm_factor, **own_arguments(kwargs)
        )
        output = F.dropout(self.dense(output.flatten(2)), p=self.hidden_dropout, training=self.training)
        return residual + output, weights

    @staticmethod
    def alibi_slopes(module: Any) -> tuple[float, ...]:
        """One per head."""
        with torch.device("cpu"):  # the model may be built on meta
            mask = torch.ones(1, 2, dtype=torch.float32, device="cpu")
            file: Any = sys.modules[stock_class_of(module).__module__]
            bias = file.build_alibi_tensor(mask, module.num_heads, torch.float32)
        return tuple((bias[:, 0, 1] - bias[:, 0, 0]).tolist())


class MptAttention:
    """A base before transformers' `MptAttention`."""

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        *args: Any,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The arguments and results are those of the stock class."""
        if not self.linear_attention_enabled:
            return super().forward(hidden_states, position_bias, *args, attention_mask=attention_mask, **kwargs)
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        heads = (x.unflatten(2, (self.n_heads, self.head_dim)) for x in mixed.chunk(3, dim=2))
        query, key, value = (x.transpose(1, 2) for x in heads)
        if (cache := cache_among((*args, *kwargs.values()))) is not None:
            key, value = cache.update(key, value, self.layer_idx)
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
            file: Any = sys.modules[stock_class_of(module).__module__]
            bias = file.build_mpt_alibi_tensor(module.n_heads, 2)
        return tuple((bias[:, 0, 1] - bias[:, 0, 0]).tolist())


ADAPTERS: dict[str, Any] = {"BloomAttention": BloomAttention, "MptAttention": MptAttention}


def adapter_of(attention_class: type) -> Any:
    """The base to put before this stock attention class, or None."""
    return ADAPTERS.get(attention_class.__name__)
