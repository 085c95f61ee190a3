# SPDX-License-Identifier: Apache-2.0
"""The class swap that makes any stock model linear if its attention uses transformers' `AttentionInterface`.

`LinearLlamaForCausalLM` is `LlamaForCausalLM` in which, after the stock `__init__`, each converted attention module has
one new child, `linear_attention` (the mechanism), and the class `LinearLlamaAttention`. Projections, rotary embedding,
QK-norm, biases and grouped-query attention remain stock code; the names and values of base weights do not change.
Classes are made on first access, as in `modeling_linear_attention.LinearLlamaForCausalLM`. Models and their modules can
be pickled: a process that does not have these classes yet makes them from the stock classes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import inspect
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModel, GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel

from .attention.architectures import (
    OWN_SOFTMAX,
    adapter_of,
    attention_modules,
    has_own_dispatch,
    is_causal_attention,
    layer_shape,
    layer_type,
    refuse_without_hidden_states,
    skips_position_bias,
)
from .attention.layer import IMPLEMENTATION, LinearizedAttention, LinearizedCrossAttention, check_softmax_cache
from .attention.long_inputs import divide_long_inputs
from .attention.masks import linear_attention_mask
from .attention.transformers_internals import (
    ModelHooks,
    attention_implementation,
    cache_among,
    copy_checkpoint_conversion,
    explained,
    is_loaded,
    set_attention_implementation,
)
from .configuration_linear_attention import (
    entries_of,
    linear_config_class,
    mechanisms_of,
    model_heads,
    num_attention_layers,
    unknown_mechanism,
)
from .extensions import extension, installed_package
from .mechanisms.registry import MECHANISMS, refuse_shape
from .positions.limit import limit_positions
from .positions.padding import number_padded_rows
from .positions.rotary import needs_rotary, rotary_of


# The classes made in this file, by their stock class and whether they are for cross-attention.
CLASSES: dict[tuple[type, bool], Any] = {}


class LinearAttentionModelMixin(ModelHooks):
    """The base that `Linear<X>ForY` has before its stock model class."""

    stock_class: type[PreTrainedModel]

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        # The generic classification heads build their base by `AutoModel.from_config`, which must return our class.
        if (base := model_heads(self.stock_class.config_class.model_type).get("AutoModel")) is not None:
            base_class = linear_model_class(getattr(transformers, base))
            if base_class.config_class.model_type != config.model_type:
                raise ValueError(
                    f"`{config.stock_model_type}` has no model classes of its own and uses those of "
                    f"`{base_class.stock_class.config_class.model_type}`; set `model_type` to that in the checkpoint's "
                    "config.json before you convert it."
                )
            AutoModel.register(type(config), base_class, exist_ok=True)
        super().__init__(config, *args, **kwargs)
        if not linear_attention_modules(self):
            linearize(self)
        # There is nothing to initialise yet on `meta`.
        if not any(parameter.is_meta for parameter in self.parameters()):
            reset_mechanisms(self)

    def initialize_weights(self) -> None:
        """Initialise stock modules as transformers does, and the mechanisms, which the stock models do not know."""
        super().initialize_weights()
        reset_mechanisms(self)

    @classmethod
    def is_custom_code(cls) -> bool:
        """False, so that transformers applies the stock initialisation to modules without parameters of their own
        (GPT-2's scaled `c_proj`). It skips that for custom code, lest loaded weights be overwritten; ours are safe."""
        return False

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Record nothing for the classes made here: their config saves the code of its own mechanisms."""
        if cls.__module__ != __name__:
            super().register_for_auto_class(auto_class)

    def default_attention_implementation(self) -> str | None:
        """Ours by default, with masks that are linear in the length; None if a softmax layer needs square masks."""
        entries = entries_of(self.config.linear_attention)
        named = {layer for entry in entries if not isinstance(entry["layers"], str) for layer in entry["layers"]}
        is_every_layer = entries[0]["layers"] == "all" or len(named) == num_attention_layers(self.config)
        has_cross_attention = getattr(self.config, "add_cross_attention", False) or self.config.is_encoder_decoder
        is_pure = is_every_layer and (not has_cross_attention or any(entry["cross_attention"] for entry in entries))
        return IMPLEMENTATION if is_pure and not has_own_dispatch(self.stock_class) else None

    def prepare_generation(self, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
        """Put the state layers into the cache before generation."""
        if (cache := cache_among(model_kwargs.values())) is None:
            return
        # This is done before the first forward pass, because assisted decoding makes the layers record from here on.
        for module in linear_attention_modules(self).values():
            if module.linear_attention_enabled and (module.linear_attention_is_causal or module.attends_across):
                module.find_state_layer(cache)
        if generation_config.is_assistant:
            cache.activate_past_recording()

    def save_prompt_state(self, past_key_values: Any, path: str | os.PathLike) -> None:
        """Write the prompt in `past_key_values` to a file; see `hf_linear_attention.save_prompt_state`."""
        extension("save_prompt_state", "Prompt states need the package")(self, past_key_values, path)

    def load_prompt_state(self, path: str | os.PathLike) -> Any:
        """A cache with the prompt in a file; see `hf_linear_attention.load_prompt_state`."""
        return extension("load_prompt_state", "Prompt states need the package")(self, path)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError, before transformers does so in another thread and recommends `sdpa`."""
        if any(module.linear_attention_enabled for module in linear_attention_modules(self).values()):
            raise NotImplementedError(
                "Continuous batching stores paged keys and values and cannot store the recurrent state of linear "
                "attention; use `generate` with a padded batch."
            )
        return super().init_continuous_batching(*args, **kwargs)


def linear_attention_modules(model: Any) -> dict[str, Any]:
    """`{name: attention module}` of the converted layers, in the order of the model."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Got a {type(model).__name__}; it must be a model, as `convert` or `from_pretrained` returns it."
        )
    return {name: module for name, module in model.named_modules() if hasattr(module, "linear_attention_enabled")}


def converted_modules(model: Any) -> list[Any]:
    """The converted layers of a converted model, none with `layers` = `none`; ValueError if it was not converted."""
    modules = list(linear_attention_modules(model).values())
    if not modules and not hasattr(model.config, "linear_attention"):
        raise ValueError(
            f"{type(model).__name__} has no converted layers; pass what `convert` returned, or what `from_pretrained` "
            "loaded from a converted checkpoint."
        )
    return modules


def self_attention_modules(model: nn.Module) -> dict[str, Any]:
    """`{name: module}` of every self-attention that uses the attention interface; a module's index is its layer number.

    ValueError if there is none, for example because the architecture computes its own softmax.
    """
    found, names = attention_modules(model), {type(module).__name__ for module in model.modules()}
    if not found or names & OWN_SOFTMAX:
        own = sorted(names & OWN_SOFTMAX or {name for name in names if name.endswith("Attention")})
        reason = f"{', '.join(own)} computes its own softmax" if own else "it has no attention"
        raise ValueError(
            f"{type(model).__name__} has no self-attention that goes through transformers' attention interface "
            f"({reason}), so nothing can be converted; `hf_linear_attention.supported_model_types()` lists the model "
            "types that can."
        )
    return found


def converted_layers(settings: Mapping[str, Any], modules: Sequence[Any]) -> list[int]:
    """The numbers of the self-attention modules that these settings convert; ValueError if the model lacks one."""
    layers, numbers = settings["layers"], list(range(len(modules)))
    if layers == "full_attention":
        chosen = [number for number in numbers if layer_type(modules[number]) == layers]
        if not chosen:
            raise ValueError(
                "`layers` = `full_attention`, but the model's config has no layer of this type in `layer_types`; give "
                "the layers by their numbers."
            )
        return chosen
    if isinstance(layers, str):
        return numbers if layers == "all" else []
    if beyond := sorted(set(layers) - set(numbers)):
        raise ValueError(f"`layers` names {beyond}, but the model has self-attention layers 0 to {len(modules) - 1}.")
    return list(layers)


def linearize(model: PreTrainedModel) -> None:
    """Give the layers to convert of a newly built model their mechanism and class, in place.

    ValueError if a layer or the mechanism cannot do what the settings ask for.
    """
    # The config may come from the code of another checkpoint.
    if unknown := mechanisms_of(model.config.linear_attention) - set(MECHANISMS):
        raise ValueError(f"{unknown_mechanism(min(unknown))}.")
    limit_positions(model)
    modules = list(self_attention_modules(model).values())
    groups = [(settings, _chosen(model, modules, settings)) for settings in entries_of(model.config.linear_attention)]
    is_complete = all(settings["rotary"] is not None for settings, _ in groups if needs_rotary(settings))
    if getattr(model.config, "linear_attention_classes", None) is None or not is_complete:
        extension("survey", "The config lacks what conversion finds out (`linear_attention_classes`)")(model, groups)
    converted = {layer for _, chosen in groups for layer in chosen}
    for layer, module in enumerate(modules):
        if converted and layer not in converted and getattr(module, "layer_idx", None) is not None:
            module.register_forward_pre_hook(check_softmax_cache, with_kwargs=True)
    for settings, chosen in groups:
        _convert_layers(model, len(modules), settings, chosen)
    if converted:
        number_padded_rows(model)


def _chosen(model: PreTrainedModel, modules: Sequence[Any], settings: Mapping[str, Any]) -> dict[int, Any]:
    """`{layer: attention module}` to convert with these settings; cross-attention is numbered after self-attention."""
    chosen = {layer: modules[layer] for layer in converted_layers(settings, modules)}
    if settings["cross_attention"]:
        cross = attention_modules(model, cross=True).values()
        if not cross:
            raise ValueError(f"`cross_attention` = true, but {type(model).__name__} has none; set it to false.")
        chosen |= dict(enumerate(cross, start=len(modules)))
    return chosen


def _convert_layers(
    model: PreTrainedModel, num_self_attention: int, settings: dict[str, Any], chosen: Mapping[int, Any]
) -> None:
    """Give these attention modules mechanisms with the same settings, which share what their class shares."""
    first = None
    rotary = rotary_of(settings) if chosen and needs_rotary(settings) else {}
    for layer, module in chosen.items():
        shape = dataclasses.replace(layer_shape(module, layer, model.config), rotary=rotary.get(layer))
        needed = "causal" if is_causal_attention(module, model) else "bidirectional"
        needed = "cross" if layer >= num_self_attention else needed
        refuse_shape(type(module).__name__, shape, needed, settings)
        child = MECHANISMS[settings["mechanism"]](settings, shape)
        if child.needs_gates:
            refuse_without_hidden_states(module, layer, needed, settings["mechanism"])
        for projection in child.replaced_projections:
            if hasattr(module, projection):
                getattr(module, projection).requires_grad_(False)
        if first is not None:
            child.share_with(first)
        first = first or child
        _swap(module, child, model.config, needed)
    if "position_bias" in settings["drop"] and settings["layers"] == "all":
        for name, x in model.named_parameters():  # nothing reads these tables, and optimizers count on gradients
            x.requires_grad &= "relative_attention_bias" not in name and "relative_position_bias" not in name


def _swap(module: Any, mechanism: Any, config: Any, needed: str) -> None:
    module.linear_attention, module.linear_attention_parts = mechanism, tuple(mechanism.modules())
    module.linear_attention_enabled = True
    module.linear_attention_scaling = getattr(module, "scaling", None) or mechanism.shape.head_dim**-0.5
    module.linear_attention_is_causal = needed == "causal"
    module.linear_attention_skips_bias = skips_position_bias(module, mechanism.settings)
    # The layer gets its own config, so that setting `attn_implementation` later cannot silently make it softmax again.
    module.model_config = getattr(module, "config", config)
    module.config = copy.copy(module.model_config)
    set_attention_implementation(module.config, IMPLEMENTATION)
    module.__class__ = _attention_class(type(module), is_cross=needed == "cross")


def reset_mechanisms(model: Any) -> None:
    """Initialise the parameters of all mechanisms, except for those loaded from a checkpoint."""
    with torch.no_grad():
        for module in linear_attention_modules(model).values():
            tensors = (*module.linear_attention.parameters(), *module.linear_attention.buffers())
            # Random matrices that a checkpoint has replaced already need not be drawn.
            if not all(map(is_loaded, tensors)):
                module.linear_attention.reset_parameters()
                module.linear_attention.start_from(module)


@contextlib.contextmanager
def softmax_attention(model: PreTrainedModel, layers: Collection[int] | None = None) -> Iterator[PreTrainedModel]:
    """A context in which a converted model computes its original softmax attention with the same weights.

    The model can thus be its own teacher. Threads must not share the model meanwhile. A cache made inside is a softmax
    cache and remains one.

    Args:
        layers: the converted layers to which this applies, numbered as in the setting `layers`; by default all.

    Raises:
        TypeError: if `layers` is no list of numbers.
        ValueError: if it names layers that are not converted.
    """
    if layers is not None and not all(
        type(layer) is int for layer in (layers if isinstance(layers, Collection) else "x")
    ):
        raise TypeError(f"Got `layers` = {layers!r}; it must be a list of layer numbers, or None for all.")
    converted = converted_modules(model)
    known = {module.linear_attention.shape.layer for module in converted}
    if layers is not None and not known.issuperset(layers):
        raise ValueError(f"Got `layers` = {layers!r}; only converted layers are allowed, which are {sorted(known)}.")
    modules = [module for module in converted if layers is None or module.linear_attention.shape.layer in layers]
    implementations = {id(m.model_config): (m.model_config, attention_implementation(m.model_config)) for m in modules}
    configs = [module.config for module in modules]
    try:
        for config, implementation in implementations.values():
            if implementation == IMPLEMENTATION:
                hooks: Any = model
                set_attention_implementation(config, hooks.stock_attention_implementation())
        for module in modules:
            module.config, module.linear_attention_enabled = module.model_config, False
        yield model
    finally:
        for config, implementation in implementations.values():
            set_attention_implementation(config, implementation)
        for module, config in zip(modules, configs):
            module.config, module.linear_attention_enabled = config, True


def _attention_class(stock: type, is_cross: bool) -> type:
    if is_cross:
        name = f"LinearCross{stock.__name__}"
        return _make_class(name, (LinearizedCrossAttention, stock), {"stock_class": stock}, is_cross=True)
    adapter = adapter_of(stock)
    bases = (LinearizedAttention, adapter, stock) if adapter else (LinearizedAttention, stock)
    return _make_class(f"Linear{stock.__name__}", bases, {"stock_class": stock})


def linear_model_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """`LlamaForCausalLM` -> `LinearLlamaForCausalLM`."""
    if (stock, False) in CLASSES:
        return CLASSES[stock, False]
    name = f"Linear{stock.__name__}"
    bases: tuple[type, ...] = (LinearAttentionModelMixin, stock)
    if issubclass(stock, GenerationMixin):  # transformers looks for it in the direct bases
        bases += (GenerationMixin,)
    config_class: Any = linear_config_class(stock.config_class.model_type)
    config_class.linear_attention_mask = staticmethod(linear_attention_mask)
    model_class = _make_class(name, bases, {"stock_class": stock, "config_class": config_class})

    def initialize(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        LinearAttentionModelMixin.__init__(self, config, *args, **kwargs)

    initialize = explained(initialize)
    # transformers and its users inspect the arguments of a model class (`add_pooling_layer`, `use_mask_token`).
    initialize.__signature__ = inspect.signature(stock.__init__)
    model_class.__init__ = initialize
    divide_long_inputs(model_class, linear_attention_modules)
    model_class.forward = explained(model_class.forward)
    # Older or split checkpoints (ViT, GPT-NeoX, MoE), whose weights are renamed, load into our class as well.
    copy_checkpoint_conversion(stock.__name__, name)
    copy_checkpoint_conversion(stock.config_class.model_type, config_class.model_type)
    return model_class


def _make_class(name: str, bases: tuple[type, ...], namespace: dict[str, Any], is_cross: bool = False) -> type:
    stock = namespace["stock_class"]
    if (stock, is_cross) not in CLASSES:
        doc = f"`{stock.__name__}` with linear attention."
        about = {"__module__": __name__, "__qualname__": name, "__doc__": doc, "__reduce_ex__": _reduce}
        CLASSES[stock, is_cross] = globals()[name] = type(name, bases, {**about, **namespace})
    return CLASSES[stock, is_cross]


def _reduce(self: Any, protocol: Any) -> str | tuple[Any, ...]:
    """What pickle writes for an object of a class made here: where the stock class is, and the state of the object."""
    stock = type(self).stock_class
    for is_cross in (False, True):
        if CLASSES.get((stock, is_cross)) is type(self):
            state = object.__reduce_ex__(self, 2)[2:]
            return (_without_init, (stock.__module__, stock.__qualname__, is_cross), *state)
    return object.__reduce_ex__(self, protocol)  # pickle finds a class derived from ours by its own name


def _without_init(module: str, name: str, is_cross: bool) -> Any:
    """What pickle calls: it returns an empty object of the class made from the stock class `name` of `module`."""
    stock = getattr(importlib.import_module(module), name)
    linear: Any = linear_model_class(stock) if issubclass(stock, PreTrainedModel) else _attention_class(stock, is_cross)
    return linear.__new__(linear)


def __getattr__(name: str) -> type[PreTrainedModel]:
    """`LinearLlamaForCausalLM` and similar classes, made on first access."""
    match = re.fullmatch(r"Linear(\w+)", name)
    stock = getattr(transformers, match[1], None) if match else None
    if isinstance(stock, type) and issubclass(stock, PreTrainedModel):
        if (package := installed_package()) is not None:
            return getattr(importlib.import_module(f"{package}.modeling_linear_attention"), name)
        return linear_model_class(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
