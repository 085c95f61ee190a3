"""The class swap: any stock model whose attention goes through transformers' `AttentionInterface`, made linear.

`LinearLlamaForCausalLM` is `LlamaForCausalLM` whose attention modules, after the stock `__init__`, each got one child,
`linear_attention` (the mechanism), and the class `LinearLlamaAttention`. Projections, rotary embedding, QK-norm,
biases and grouped-query attention stay stock code; base weight names and values do not change. Classes are made when
first asked for: `modeling_linear_attention.LinearLlamaForCausalLM` works, and can be pickled.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AutoModel, GenerationMixin, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils.output_capturing import _active_collector

from .attention_masks import attend_packed
from .attention_masks import is_tracing
from .attention_masks import linear_attention_mask
from .attention_masks import read_mask
from .attention_mechanism import LayerShape
from .cache_linear_attention import state_layer
from .configuration_linear_attention import converted_layers
from .configuration_linear_attention import linear_config_class
from .configuration_linear_attention import max_length_of
from .configuration_linear_attention import model_heads
from .mechanisms import MECHANISMS


IMPLEMENTATION = "linear_attention"
CACHE_ARGUMENTS = ("past_key_values", "layer_past")
# What some stock layers pass to the attention function that changes softmax attention and has no linear form here.
UNSUPPORTED_ARGUMENTS = {
    "softcap": "soft-capping of the attention logits",
    "s_aux": "attention sink parameters",
    "position_bias": "an additive position bias",
}


def linear_attention_forward(module, query, key, value, attention_mask, **kwargs):
    """The attention function registered as `linear_attention`; the work is the module's, so that two copies of this
    file in one process (plugin and checkpoint) may overwrite each other's registration harmlessly."""
    if not hasattr(module, "attend"):
        raise ValueError(
            f"`attn_implementation` = `{IMPLEMENTATION}` reached {type(module).__name__}, which was not converted; "
            "choose `sdpa` for this model, its converted layers stay linear."
        )
    return module.attend(query, key, value, attention_mask, **kwargs)


AttentionInterface.register(IMPLEMENTATION, linear_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, linear_attention_mask)


class LinearizedAttention:
    """Mixed in before a stock attention class: finds this layer's cache and attends with the mechanism."""

    def forward(self, *args, **kwargs):
        if not self.linear_attention_enabled:
            return super().forward(*args, **kwargs)
        if kwargs.get("cache") is not None:
            raise NotImplementedError("Continuous batching has no place for a recurrent state; use `generate`.")
        cache = next((kwargs[name] for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), None)
        if cache is not None:
            kwargs["state_layer"] = state_layer(cache, self.layer_idx)
        return super().forward(*args, **kwargs)

    def attend(self, query, key, value, attention_mask, *, scaling=None, state_layer=None, is_causal=None, **kwargs):
        """The attention function's part: `query [B, H, N, D]`, `key, value [B, Hkv, S, D]` -> `[B, N, H, D]`.

        Dropout of attention weights has no N x N matrix to act on and is left out.

        Raises:
            ValueError: for a mask or an argument of softmax attention that linear attention cannot honour.
        """
        for name, meaning in UNSUPPORTED_ARGUMENTS.items():
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{type(self).__name__} passes `{name}` ({meaning}), which linear attention cannot honour; keep "
                    "these layers softmax (setting `layers`)."
                )
        scaling = self._scaling(scaling)
        if scaling != self.linear_attention_scaling:  # OPT and kin scale the query themselves
            query, scaling = query * (scaling / self.linear_attention_scaling), self.linear_attention_scaling
        is_causal = self.linear_attention_is_causal if is_causal is None else is_causal
        seen = state_layer.get_seq_length() - key.shape[2] if state_layer is not None else 0
        key_mask, segments = read_mask(attention_mask, key.shape[2], seen, is_causal)
        # No autocast inside: the sums must stay float32.
        with torch.autocast(device_type=query.device.type, enabled=False):
            if self._wants_weights(kwargs):
                return self._attend_with_weights(query, key, value, key_mask, segments, scaling, is_causal, state_layer)
            return self._attend(query, key, value, key_mask, segments, scaling, is_causal, state_layer), None

    def _scaling(self, scaling: float | None) -> float:
        return self.linear_attention.shape.head_dim**-0.5 if scaling is None else scaling

    def _attend(self, query, key, value, key_mask, segments, scaling, is_causal, state_layer):
        if segments is not None and is_tracing():
            key_mask = segments
        elif segments is not None:

            def attend(query, key, value, mask):
                return self.linear_attention(
                    query, key, value, attention_mask=mask, scaling=scaling, is_causal=is_causal, state=None
                )[0]

            output = attend_packed(attend, query, key, value, key_mask, segments)
            if state_layer is not None:
                self._keep_last_sequence(key, value, segments, scaling, state_layer)
            return output
        state = self._current_state(state_layer, scaling)
        output, state = self.linear_attention(
            query, key, value, attention_mask=key_mask, scaling=scaling, is_causal=is_causal, state=state
        )
        if state_layer is not None:
            state_layer.record(key, value, key_mask)
            state_layer.store(state)
        return output

    def _keep_last_sequence(self, key, value, segments, scaling, state_layer):
        """What follows packed sequences belongs to the last one of each row, so the state is of that one alone."""
        if self._current_state(state_layer, scaling) is not None:
            raise ValueError(
                "Got packed sequences after cached tokens; linear attention takes them only with an empty cache."
            )
        last = segments == segments.amax(dim=1, keepdim=True)
        state_layer.record(key, value, last)
        state_layer.store(self.linear_attention.absorb(key, value, attention_mask=last, scaling=scaling, state=None))

    def _current_state(self, state_layer, scaling):
        if state_layer is None:
            return None
        if (pending := state_layer.take_pending()) is not None:
            key, value, mask = pending
            state_layer.absorbed(
                self.linear_attention.absorb(
                    key, value, attention_mask=mask, scaling=scaling, state=state_layer.state_at_crop
                )
            )
        return state_layer.state

    def _wants_weights(self, kwargs) -> bool:
        collector = _active_collector.get()
        return bool(
            kwargs.get("output_attentions")
            or getattr(self.model_config, "output_attentions", False)
            or (collector is not None and "attentions" in collector)
        )

    def _attend_with_weights(self, query, key, value, key_mask, segments, scaling, is_causal, state_layer):
        """Weights `[B, H, N, S]` over the keys of this call (a state has no weights left to show)."""
        if not self.linear_attention.supports("weights", self.linear_attention.settings):
            raise ValueError(
                f"{type(self.linear_attention).__name__} has no matrix of weights per head to show; leave out "
                "`output_attentions`."
            )
        is_all = state_layer is None or (state_layer.state is None and state_layer.pending is None)
        output = self._attend(query, key, value, key_mask, segments, scaling, is_causal, state_layer)
        identity = torch.eye(key.shape[2], dtype=value.dtype, device=value.device).expand(*key.shape[:3], -1)
        weights = self._attend(query, key, identity, key_mask, segments, scaling, is_causal, None).transpose(1, 2)
        if is_all:  # from the weights, so that they have gradients
            groups = weights.shape[1] // value.shape[1]
            output = (weights @ value.repeat_interleave(groups, dim=1)).transpose(1, 2)
        return output, weights


class LinearAttentionModelMixin:
    """Mixed in before a stock model class."""

    stock_class: type[PreTrainedModel]

    def __init__(self, config, *args, **kwargs):
        # The generic classification heads build their base by `AutoModel.from_config`, which must give our class.
        base_class = getattr(transformers, model_heads(self.stock_class.config_class.model_type)["AutoModel"])
        AutoModel.register(type(config), linear_model_class(base_class), exist_ok=True)
        super().__init__(config, *args, **kwargs)
        if not linear_attention_modules(self):
            linearize(self)
        if not any(parameter.is_meta for parameter in self.parameters()):
            reset_mechanisms(self)

    def initialize_weights(self):
        super().initialize_weights()
        # The stock inner models do not know our modules.
        reset_mechanisms(self)

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: in custom code transformers leaves out the stock initialisation of modules without own parameters
        (GPT-2's scaled `c_proj`), lest it overwrite loaded weights; stock code and ours never do that."""
        return False

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        """By default masks are linear in the length too, where no softmax layer needs them square."""
        has_cross_attention = getattr(self.config, "add_cross_attention", False) or self.config.is_encoder_decoder
        is_pure = self.config.linear_attention["layers"] == "all" and not has_cross_attention
        if attn_implementation is None and is_pure:
            return IMPLEMENTATION
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return cls.stock_class._can_set_attn_implementation()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = next((model_kwargs[name] for name in CACHE_ARGUMENTS if model_kwargs.get(name) is not None), None)
        if cache is None:
            return
        # Before the first forward, because assisted decoding asks the layers to record from here on.
        for module in linear_attention_modules(self).values():
            if module.linear_attention_enabled:
                state_layer(cache, module.layer_idx)
        if generation_config.is_assistant:
            cache.activate_past_recording()


def linear_attention_modules(model: Any) -> dict[str, Any]:
    """`{name: attention module}` of the converted layers, in order."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "linear_attention_enabled")}


def self_attention_modules(model: nn.Module) -> dict[str, Any]:
    """`{name: module}` of every self-attention that reaches the attention interface, in order; its place is its layer.

    Raises:
        ValueError: if there is none: the architecture computes its own softmax, and converting nothing is no result.
    """
    found = {name: module for name, module in model.named_modules() if _is_self_attention(name, module)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no self-attention that goes through transformers' attention interface, so "
            "there is nothing that could be converted; `hf_linear_attention.supported_model_types()` lists what can."
        )
    return found


def _is_self_attention(name: str, module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names:
        return hasattr(module, "linear_attention_enabled")
    is_cross = "CrossAttention" in type(module).__name__ or getattr(module, "is_cross_attention", False)
    return not is_cross and name.rsplit(".", 1)[-1] not in ("encoder_attn", "crossattention")


def layer_shape(module: Any, layer: int, config) -> LayerShape:
    """Heads and sizes of an attention module, from the module itself: hidden_size / heads is wrong for many models.

    Raises:
        ValueError: if the module tells none of the names that transformers uses.
    """
    num_heads = _first_attribute(module, ("num_heads", "num_attention_heads", "n_heads")) or _first_attribute(
        module.config, ("num_attention_heads", "n_heads", "n_head")
    )
    head_dim = _first_attribute(module, ("head_dim", "attention_head_size", "head_size"))
    if not num_heads or not head_dim:
        raise ValueError(
            f"Cannot tell the number of heads (got {num_heads}) and head_dim (got {head_dim}) of "
            f"{type(module).__name__}."
        )
    groups = getattr(module, "num_key_value_groups", None) or 1
    return LayerShape(num_heads, num_heads // groups, head_dim, layer, max_length_of(config))


def _first_attribute(owner: Any, names: tuple[str, ...]) -> int | None:
    return next((getattr(owner, name) for name in names if getattr(owner, name, None) is not None), None)


def linearize(model: PreTrainedModel) -> None:
    """Give the converted layers of a freshly built model their mechanism and class, in place."""
    modules = list(self_attention_modules(model).values())
    settings = model.config.linear_attention
    mechanism = MECHANISMS[settings["mechanism"]]
    first = None
    for layer in converted_layers(settings, len(modules)):
        module = modules[layer]
        shape = layer_shape(module, layer, model.config)
        if shape.num_heads != shape.num_key_value_heads and not mechanism.supports("gqa", settings):
            raise ValueError(f"`{settings['mechanism']}` does not support grouped-query attention.")
        child = mechanism(settings, shape)
        if first is not None:
            child.share_with(first)
        first = first or child
        _swap(module, child, model.config)


def _swap(module: Any, mechanism: Any, config) -> None:
    module.linear_attention = mechanism
    module.linear_attention_enabled = True
    module.linear_attention_scaling = getattr(module, "scaling", None) or mechanism.shape.head_dim**-0.5
    is_causal = getattr(config, "is_causal", None)
    module.linear_attention_is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if module.linear_attention_is_causal and not mechanism.supports("causal", mechanism.settings):
        raise ValueError(
            f"{type(module).__name__} attends causally, which `{mechanism.settings.get('mechanism')}` cannot do."
        )
    # A config of its own: no `attn_implementation` that is set later can turn this layer back into softmax silently.
    module.model_config = module.config
    module.config = copy.copy(module.config)
    module.config._attn_implementation_internal = IMPLEMENTATION
    module.__class__ = _attention_class(type(module))


def reset_mechanisms(model: Any) -> None:
    """Initialise what no checkpoint has filled in the mechanisms of a model."""
    with torch.no_grad():
        for module in linear_attention_modules(model).values():
            module.linear_attention.reset_parameters()


@contextlib.contextmanager
def softmax_attention(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Inside, a converted model computes its original softmax attention on the same weights: the teacher for free.

    Not safe for several threads that use the same model. A cache made inside is a softmax cache and stays one.
    """
    modules = list(linear_attention_modules(model).values())
    implementations = {id(m.model_config): (m.model_config, m.model_config._attn_implementation) for m in modules}
    configs = [module.config for module in modules]
    try:
        for config, implementation in implementations.values():
            if implementation == IMPLEMENTATION:
                stock = super(LinearAttentionModelMixin, model)
                config._attn_implementation_internal = stock._check_and_adjust_attn_implementation(None)
        for module in modules:
            module.config, module.linear_attention_enabled = module.model_config, False
        yield model
    finally:
        for config, implementation in implementations.values():
            config._attn_implementation_internal = implementation
        for module, config in zip(modules, configs):
            module.config, module.linear_attention_enabled = config, True


def _attention_class(stock: type) -> type:
    return _make_class(f"Linear{stock.__name__}", (LinearizedAttention, stock), {"stock_class": stock})


def linear_model_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """`LlamaForCausalLM` -> `LinearLlamaForCausalLM`."""
    name = f"Linear{stock.__name__}"
    if name in globals():
        return globals()[name]
    bases: tuple[type, ...] = (LinearAttentionModelMixin, stock)
    if issubclass(stock, GenerationMixin):  # transformers looks for it in the direct bases
        bases += (GenerationMixin,)
    config_class = linear_config_class(stock.config_class.model_type)
    model_class = _make_class(name, bases, {"stock_class": stock, "config_class": config_class})

    def initialize(self, config, *args, **kwargs):
        LinearAttentionModelMixin.__init__(self, config, *args, **kwargs)

    # transformers and its users ask which arguments a model class takes (`add_pooling_layer`, `use_mask_token`).
    initialize.__signature__ = inspect.signature(stock.__init__)
    model_class.__init__ = initialize
    _copy_checkpoint_conversion(stock, model_class)
    for auto_class, head in model_heads(stock.config_class.model_type).items():
        if head == stock.__name__:
            model_class.register_for_auto_class(auto_class)
    return model_class


def _make_class(name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    if name not in globals():
        doc = f"`{namespace['stock_class'].__name__}` with linear attention."
        globals()[name] = type(name, bases, {"__module__": __name__, "__qualname__": name, "__doc__": doc, **namespace})
    return globals()[name]


def _copy_checkpoint_conversion(stock: type, model_class: type) -> None:
    """Renamed weights of older or split checkpoints (ViT, GPT-NeoX, MoE) must load into our class as into the stock."""
    model_type = stock.config_class.model_type
    for source, target in ((stock.__name__, model_class.__name__), (model_type, model_class.config_class.model_type)):
        if (mapping := get_checkpoint_conversion_mapping(source)) is not None:
            register_checkpoint_conversion_mapping(target, mapping, overwrite=True)


def __getattr__(name: str):
    """`LinearLlamaForCausalLM`, `LinearLlamaAttention` and the like, made when first asked for."""
    match = re.fullmatch(r"Linear(\w+)", name)
    stock = getattr(transformers, match[1], None) if match else None
    if isinstance(stock, type) and issubclass(stock, PreTrainedModel):
        return linear_model_class(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
