# SPDX-License-Identifier: Apache-2.0
"""`convert`: a pretrained softmax model with its attention made linear, ready to be healed or saved; `calibrate`."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .attention_observation import ObservedAttention, observe_attention
from .configuration_linear_attention import entries_of
from .configuration_linear_attention import linear_config_class
from .configuration_linear_attention import max_length_of
from .attention_layer import LinearizedCrossAttention
from .mechanisms import MECHANISMS
from .modeling_linear_attention import linear_attention_modules, linear_model_class
from .transformers_internals import base_model_class


Settings = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def convert_config(config, settings: Settings | None = None, **linear_attention) -> Any:
    """The `Linear<X>Config` of a stock config; `settings` as in `convert`.

    Raises:
        TypeError: for `settings` and more settings beside them.
        ValueError: for a model type that is already linear or unknown, or for impossible settings.
    """
    if settings is not None and linear_attention:
        names = ", ".join(f"`{name}`" for name in linear_attention)
        raise TypeError(f"Got `settings` and, beside them, {names}; put everything into `settings`.")
    model_type = config.model_type
    if hasattr(config, "linear_attention"):
        raise ValueError(f"This model is converted already (model type `{model_type}`); convert its softmax source.")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"Model type `{model_type}` is not part of transformers, so its attention is not known here.")
    fields = copy.deepcopy(config.to_dict())
    for name in ("model_type", "transformers_version", "auto_map"):
        fields.pop(name, None)
    given = linear_attention if settings is None else settings
    filled = [_with_trained_length(entry, config) for entry in entries_of(given)]
    is_one = isinstance(given, Mapping)
    return linear_config_class(model_type)(**fields, linear_attention=filled[0] if is_one else filled)


def _with_trained_length(settings: Any, config) -> Any:
    """Settings with the length that the config says the model was trained on, where the mechanism asks for it."""
    if not isinstance(settings, Mapping):
        return settings  # refused where all settings are checked
    mechanism = MECHANISMS.get(settings.get("mechanism", "linear"))
    known = mechanism is not None and "trained_length" in mechanism.options
    return {"trained_length": max_length_of(config), **settings} if known else dict(settings)


def stock_model_class(config) -> Any:
    """The class that a checkpoint was saved from (`architectures` in its config), or the base model's.

    Raises:
        ValueError: if transformers has no class of that name.
    """
    name = (getattr(config, "architectures", None) or [None])[0]
    if name is None:
        return base_model_class(type(config))
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise ValueError(
            f"The checkpoint names the class `{name}`, which transformers {transformers.__version__} lacks."
        )
    return model_class


def convert(
    model: PreTrainedModel | str | os.PathLike,
    *,
    model_class: type[PreTrainedModel] | None = None,
    from_pretrained: dict[str, Any] | None = None,
    settings: Settings | None = None,
    **linear_attention,
) -> PreTrainedModel:
    """A linear copy of a pretrained model: the same base weights, and new mechanisms in the converted layers.

    Args:
        model: a folder or hub name, or a loaded model (which is left as it is; its weights are copied).
        model_class: the stock class to load, such as `BertForMaskedLM`; by default the one the checkpoint names.
        from_pretrained: further arguments of `from_pretrained` when `model` is a folder or name.
        settings: in place of `linear_attention`, a dict; or a list of dicts, for layers with different settings, each
            with the numbers of its `layers`.
        **linear_attention: `mechanism`, `layers` and the options of the mechanism; see `LinearAttentionSettings`.

    Returns:
        A `Linear<X>...` model in evaluation mode. `save_pretrained` writes its code beside its weights.

    Raises:
        TypeError: for a module that is no model of transformers, such as a `PeftModel`, or for settings beside
            `settings`.
        ValueError: for impossible settings, an architecture without convertible attention, or a loaded model whose
            weights are not those of `model_class`.
    """
    if not isinstance(model, (PreTrainedModel, str, os.PathLike)):
        inside = "`model.merge_and_unload()`" if hasattr(model, "merge_and_unload") else "the `PreTrainedModel` in it"
        raise TypeError(
            f"Got a {type(model).__name__}; `convert` takes a model of transformers, or the folder or hub name of one. "
            f"Pass {inside}."
        )
    arguments = {"dtype": "auto", **(from_pretrained or {})}
    if isinstance(model, PreTrainedModel):
        config = convert_config(model.config, settings, **linear_attention)
        with torch.random.fork_rng(devices=[]):
            converted: Any = linear_model_class(model_class or type(model))(config)
        _leave_out(model, converted)
        _copy_weights(model, converted)
        if model.can_generate():
            converted.generation_config = copy.deepcopy(model.generation_config)
        return converted.to(model.device).eval()
    hub = {
        k: arguments[k] for k in ("revision", "subfolder", "token", "cache_dir", "local_files_only") if k in arguments
    }
    stock = AutoConfig.from_pretrained(model, **hub)
    config = convert_config(stock, settings, **linear_attention)
    return linear_model_class(model_class or stock_model_class(stock)).from_pretrained(
        model, config=config, **arguments
    )


def _leave_out(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Modules that `source` was built without, such as the pooler of `BertModel(config, add_pooling_layer=False)`."""
    for path, module in source.named_modules():
        with contextlib.suppress(AttributeError):  # of a place that `target` lacks, which `_copy_weights` refuses
            other = target.get_submodule(path)
            for name in [name for name, child in other.named_children() if getattr(module, name, child) is None]:
                setattr(other, name, None)


def _copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Give `target` the weights and buffers of `source`, each in its own dtype; the mechanisms' get the model's."""
    weights, places = source.state_dict(), target.state_dict()
    problems = {
        f"{type(target).__name__} has no place for": [name for name in weights if name not in places],
        f"{type(source).__name__} lacks": [n for n in places if n not in weights and ".linear_attention." not in n],
    }
    if found := [f"{what} {', '.join(names)}" for what, names in problems.items() if names]:
        raise ValueError(
            f"The loaded model has other weights than its class: {'; '.join(found)}. Pass the model as transformers "
            "loads it, of the class `model_class` if you give one, without adapters (merge them) and not quantised."
        )
    own = dict(source.named_parameters()) | dict(source.named_buffers())
    for name, tensor in (*target.named_parameters(), *target.named_buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(own[name].dtype if name in own else source.dtype)
    target.load_state_dict(weights, strict=False)
    for name, buffer in source.named_buffers():
        if name not in weights:  # not part of a checkpoint, such as rotary frequencies
            target.get_buffer(name).data = buffer.detach().to("cpu", copy=True)


@torch.no_grad()
def calibrate(model: PreTrainedModel, batches: Iterable[Mapping[str, Any]]) -> int:
    """Fit the constants of a converted model's mechanisms (FAVOR++) to its own queries and keys, in place, before use.

    Every layer sees what it would see with the original softmax attention before it, over all batches at once: how
    tokens are cut into batches and padded makes no difference. All their queries and keys are kept until the end;
    some thousand tokens are enough.

    Args:
        batches: keyword arguments of the base model, as a tokenizer or image processor returns them: `input_ids` and
            `attention_mask`, or `pixel_values`.

    Returns:
        How many tokens (or patches) the first layer saw; 0 where there is nothing to fit, and no batch was looked at.

    Raises:
        ValueError: if there is something to fit and no token to fit it to.
        NotImplementedError: for a model whose attention cannot be observed (ALiBi families).
    """
    converted = linear_attention_modules(model).values()
    modules = [m for m in converted if m.linear_attention.needs_calibration(m.linear_attention.settings)]
    if not modules:
        return 0
    queries: dict[Any, list[torch.Tensor]] = {module: [] for module in modules}
    keys: dict[Any, list[torch.Tensor]] = {module: [] for module in modules}

    def collect(seen: ObservedAttention) -> None:
        if seen.module not in queries:
            return
        mask, is_cross = seen.inputs.key_mask, isinstance(seen.module, LinearizedCrossAttention)
        queries[seen.module].append(_real_tokens(seen.inputs.query, None if is_cross else mask))
        keys[seen.module].append(_real_tokens(seen.inputs.key, mask))

    num_batches = 0
    with observe_attention(model, collect):
        for batch in batches:
            model.base_model(**{name: value.to(model.device) for name, value in batch.items()})
            num_batches += 1
    if not num_batches or not all(sum(part.shape[2] for part in parts) for parts in keys.values()):
        raise ValueError("`batches` held no token to calibrate on; give at least one batch of real inputs.")
    for module in modules:
        query, key = torch.cat(queries[module], dim=2), torch.cat(keys[module], dim=2)
        module.linear_attention.calibrate(query, key, attention_mask=None, scaling=module.linear_attention_scaling)
    first = keys[modules[0]]
    # ALBERT's layers share one module, which then sees every batch several times.
    return sum(part.shape[2] for part in first) * num_batches // len(first)


def _real_tokens(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`[B, heads, N, D]` -> `[1, heads, T, D]`, the T tokens where `mask` bool `[B, N]` is True, or all of them."""
    tokens = x.transpose(1, 2)
    tokens = tokens.flatten(0, 1) if mask is None else tokens[mask]
    return tokens.transpose(0, 1).unsqueeze(0)
