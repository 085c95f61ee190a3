# SPDX-License-Identifier: Apache-2.0
"""Everything of transformers that is used here and not documented there: what a new version may rename.

Imports stand inside the functions where they take long: `import hf_linear_attention` goes through this file.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import transformers
from torch import Tensor
from transformers import Cache
from transformers.utils import output_capturing

from ..extensions import EXTENSIONS, extension


# The newest version of transformers that this code was tested with.
TESTED = (5, 24)


def untested_version() -> str | None:
    """What to know when something fails in a transformers newer than the tested one, which may rename what follows."""
    found = tuple(int(number) for number in re.findall(r"\d+", transformers.__version__)[:2])
    if found <= TESTED:
        return None
    newest = ".".join(map(str, TESTED))
    return (
        f"transformers {transformers.__version__} is newer than {newest}, the newest that this code of "
        f'hf_linear_attention was tested with; if that is why, `pip install "transformers<={newest}.99"`, or a newer '
        "hf-linear-attention."
    )


def explained(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose errors say so if transformers is newer than the tested version."""
    if (note := untested_version()) is None:
        return function

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise

    return wrapper


# What stock code calls the cache of a decoder, among arguments and outputs: `past_key_values` in 5.16 to 5.23, `cache`
# from 5.24 on, which takes the old name until 5.40; `layer_past` in the layers of BLOOM and others (5.16 to 5.24).
CACHE_NAMES = ("cache", "past_key_values", "layer_past")


# What stock code calls the number of tokens before its input: `past_key_values_length` in 5.16 to 5.23, `cache_length`
# from 5.24 on.
LENGTH_NAMES = ("cache_length", "past_key_values_length")
# Arguments of decoders with an axis of tokens, and the place of this axis (5.16 to 5.24).
PER_TOKEN = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "token_type_ids": 1}
# Arguments that ask for an output per layer (5.16 to 5.24).
COLLECTED = ("output_attentions", "output_hidden_states", "output_router_logits")
# The inputs of modules that use tables of learned positions (5.16 to 5.24).
INPUTS = ("input_ids", "inputs_embeds", "input_embeds")
# The arguments of modules that make the cos and sin of rotary positions (5.16 to 5.24).
ROTARY_ARGUMENTS = {"x", "position_ids"}
# Arguments that stock layers pass to the attention function, and the feature that each implements (5.16 to 5.24).
FEATURE_ARGUMENTS = {
    "position_bias": "position_bias",
    "softcap": "softcap",
    "s_aux": "attention_sinks",
    "sinks": "attention_sinks",
    "indices": "sparse_attention",
    "block_indices": "sparse_attention",
}


def cache_among(values: Iterable[Any]) -> Cache | None:
    """The cache among the arguments or the outputs of a stock forward, whatever it is called there."""
    for value in values:
        if isinstance(value, Cache):
            return value
    return None


def cache_name(forward: Callable[..., Any]) -> str | None:
    """The name by which a stock forward takes its cache, or None if it takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def cache_argument(model: Any, cache: Cache | None) -> dict[str, Cache | None]:
    """The keyword argument by which a decoder continues `cache`."""
    return {cache_name(model.forward) or CACHE_NAMES[0]: cache}


def foreign_cache(kwargs: Mapping[str, Any]) -> Any:
    """What stands in place of a cache and is none, such as the pages of keys of continuous batching (5.16 to 5.24)."""
    given = (kwargs.get(name) for name in CACHE_NAMES)
    return next((value for value in given if value is not None and not isinstance(value, Cache)), None)


class _NoHook:
    """In place of a hook of accelerate whose weights are there already."""

    no_grad = False

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        return output


@contextmanager
def weights_at_hand(modules: Iterable[Any]) -> Iterator[None]:
    """A context in which modules have the weights that accelerate has offloaded (`device_map`, `cpu_offload`).

    accelerate (1.6 to 1.15) keeps them on `meta` and brings them for the forward of the module that owns them, in a
    `_hf_hook`; mechanisms read weights of their parts elsewhere too.
    """
    hooks = {module: module._hf_hook for module in modules if "_hf_hook" in vars(module)}
    for module, hook in hooks.items():
        hook.pre_forward(module)
        module._hf_hook = _NoHook()
    try:
        yield
    finally:
        for module, hook in hooks.items():
            module._hf_hook = hook
            hook.post_forward(module, None)


def attention_implementation(config: Any) -> str:
    """The name of the attention function that modules with this config call."""
    return config._attn_implementation


def set_attention_implementation(config: Any, name: str) -> None:
    """Set the attention function of this config alone, without the checks and sub-configs of the public setter."""
    config._attn_implementation_internal = name


# Whether the weights that are loaded are those of a softmax model, which has none of mechanisms.
_CONVERTS: ContextVar[bool] = ContextVar("a softmax checkpoint is converted", default=False)


@contextmanager
def converting() -> Iterator[None]:
    """A context in which transformers reports no missing weights of mechanisms, which are new."""
    token = _CONVERTS.set(True)
    try:
        yield
    finally:
        _CONVERTS.reset(token)


def is_loaded(tensor: Tensor) -> bool:
    """Whether the weights of a checkpoint have replaced this one, so that it is not to be initialised."""
    return getattr(tensor, "_is_hf_initialized", False)


# Ends the name of a conversion that has no folder yet.
NOT_SAVED = "that is not saved: call `save_pretrained(FOLDER)` on it first"


def has_adapters(model: Any) -> bool:
    """Whether adapters were loaded into or added to a model by transformers itself (5.16 to 5.24), not by PEFT."""
    return getattr(model, "_hf_peft_config_loaded", False)


class ModelHooks:
    """Mixed in before a stock model class: methods that transformers calls, under names of our own."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; with `linear_attention` (settings as `convert` takes them), a softmax checkpoint is
        converted while it is loaded."""
        settings = kwargs.pop("linear_attention", None)
        if settings is None:
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        convert = extension("convert", "`linear_attention` converts a checkpoint")
        if args or "config" in kwargs:
            raise TypeError("`linear_attention` makes the config and the model from the softmax checkpoint alone.")
        given = {"settings": settings, "from_pretrained": kwargs}
        return convert(pretrained_model_name_or_path, model_class=cls.stock_class, **given)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As in transformers, which saves adapters of its own alone; after a conversion in Python also
        conversion_report.json and a model card."""
        super().save_pretrained(save_directory, *args, **kwargs)
        if has_adapters(self):  # which transformers has saved alone
            if getattr(self, "converted_from", None) is not None and self.name_or_path.endswith(NOT_SAVED):
                warnings.warn(f"{save_directory} has adapters of {self.name_or_path}.", stacklevel=2)
            return
        if hasattr(self, "converted_from"):  # the base of adapters that are saved from now on
            self.name_or_path = self.config.name_or_path = os.fspath(save_directory)
        is_converted = hasattr(self, "converted_from") or hasattr(self, "conversion_files")
        if is_converted and "after_saving" in EXTENSIONS and kwargs.get("is_main_process", True):
            EXTENSIONS["after_saving"](self, save_directory)

    def default_attention_implementation(self) -> str | None:
        """The attention function of a model that is built or loaded without `attn_implementation`; None: as stock."""
        return None

    def prepare_generation(self, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
        """Called by `generate` before the first forward, with the cache among the arguments of the model."""

    def stock_attention_implementation(self) -> str:
        """The attention function that the stock model would choose."""
        return super()._check_and_adjust_attn_implementation(None)

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any, *args: Any, **kwargs: Any) -> None:
        super()._adjust_missing_and_unexpected_keys(loading_info, *args, **kwargs)
        if _CONVERTS.get():
            missing = loading_info.missing_keys
            loading_info.missing_keys = {name for name in missing if ".linear_attention." not in name}

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        own = self.default_attention_implementation() if attn_implementation is None else None
        return own or super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return cls.stock_class._can_set_attn_implementation()  # which looks for a text in the file of the class

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        self.prepare_generation(generation_config, model_kwargs)


def server_namespace() -> Any:
    """The module in which the server of transformers looks up model classes.

    It is taken from the server, because `transformers` may replace itself in `sys.modules` after it was imported.
    """
    from transformers.cli.serving import model_manager

    return model_manager.transformers


def is_stateful(model: Any) -> bool:
    """Whether a model has recurrent states of its own (Mamba), which cannot be split or removed like keys."""
    return model._is_stateful


def wants_attentions(kwargs: Mapping[str, Any], config: Any) -> bool:
    """Whether the forward whose layer passes `kwargs` is to return attention weights (`output_attentions`)."""
    if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
        return True
    collector = output_capturing._active_collector.get()
    return collector is not None and "attentions" in collector


def mask_functions() -> tuple[Callable, Callable]:
    """What transformers hands to a mask function for a plainly causal mask, and for one that hides nothing."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    return causal_mask_function, bidirectional_mask_function


def is_masked_lm(model_type: str) -> bool:
    """Whether transformers has a masked language model of this type."""
    from transformers.models.auto import modeling_auto

    return model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES


def is_causal_lm(model_type: str) -> bool:
    """Whether transformers has a causal language model of this type."""
    from transformers.models.auto import modeling_auto

    return model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def stock_heads(model_type: str) -> Iterator[tuple[str, str]]:
    """(name of the Auto class, name of its model class) for every Auto class that knows this model type."""
    from transformers.models.auto import modeling_auto  # imports torch's compiler: half a second

    for name, auto_class in vars(modeling_auto).items():
        mapping = getattr(auto_class, "_model_mapping", None)
        if not name.startswith("AutoModel") or mapping is None:
            continue
        stock = mapping._model_mapping.get(model_type) or ""
        yield name, stock[0] if isinstance(stock, (tuple, list)) else stock


def base_model_class(config_class: type) -> Any:
    """The model class without a head of a stock config class."""
    from transformers import AutoModel

    return AutoModel._model_mapping[config_class]


def replace_extra_configs(make: Callable[[Mapping[str, type]], Any]) -> None:
    """Put what `make` makes of it in place of the mapping of config classes that are registered in AutoConfig."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    CONFIG_MAPPING._extra_content = make(CONFIG_MAPPING._extra_content)


def copy_checkpoint_conversion(source: str, target: str) -> None:
    """Have weights renamed, merged and split for `target` as for `source`, both class names or both model types."""
    from transformers import conversion_mapping

    if (mapping := conversion_mapping.get_checkpoint_conversion_mapping(source)) is not None:
        rules = [_sparing_mechanisms(rule) for rule in mapping]
        conversion_mapping.register_checkpoint_conversion_mapping(target, rules, overwrite=True)


def _sparing_mechanisms(rule: Any) -> Any:
    """A rule that does not rename what is in `linear_attention`.

    In 5.16 to 5.19 a pattern may end inside a name: ViT's `attention.value` is in `linear_attention.value_...` too.
    """
    from transformers.core_model_loading import WeightRenaming

    patterns = [re.sub("^attention", "(?<!linear_)attention", pattern) for pattern in rule.source_patterns]
    is_plain = type(rule) is WeightRenaming and patterns != rule.source_patterns
    return WeightRenaming(patterns, rule.target_patterns) if is_plain else rule


def loaded_names(names: Iterable[str], model: Any, expected: Mapping[str, Any]) -> dict[str, tuple[str, str | None]]:
    """`{name in the files: (name in the model, pattern of the converter that rewrites it or None)}`, as loaded."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix = model.base_model_prefix
    return {name: rename_source_key(name, renamings, converters, prefix, dict(expected)) for name in names}
