"""`convert`: a pretrained softmax model with its attention made linear, ready to be healed or saved."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .configuration_linear_attention import linear_config_class
from .modeling_linear_attention import linear_model_class


def convert_config(config, **linear_attention) -> Any:
    """The `Linear<X>Config` of a stock config.

    Raises:
        ValueError: for a model type that is already linear or unknown, or for impossible settings.
    """
    model_type = config.model_type
    if hasattr(config, "linear_attention"):
        raise ValueError(f"This model is converted already (model type `{model_type}`); convert its softmax source.")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"Model type `{model_type}` is not part of transformers, so its attention is not known here.")
    fields = copy.deepcopy(config.to_dict())
    for name in ("model_type", "transformers_version", "auto_map"):
        fields.pop(name, None)
    return linear_config_class(model_type)(**fields, linear_attention=linear_attention)


def stock_model_class(config) -> Any:
    """The class that a checkpoint was saved from (`architectures` in its config), or the base model's.

    Raises:
        ValueError: if transformers has no class of that name.
    """
    name = (getattr(config, "architectures", None) or [None])[0]
    if name is None:
        return transformers.AutoModel._model_mapping[type(config)]
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
    **linear_attention,
) -> PreTrainedModel:
    """A linear copy of a pretrained model: the same base weights, and new mechanisms in the converted layers.

    Args:
        model: a folder or hub name, or a loaded model (which is left as it is; its weights are copied).
        model_class: the stock class to load, such as `BertForMaskedLM`; by default the one the checkpoint names.
        from_pretrained: further arguments of `from_pretrained` when `model` is a folder or name.
        **linear_attention: `mechanism`, `layers` and the options of the mechanism; see `LinearAttentionSettings`.

    Returns:
        A `Linear<X>...` model in evaluation mode. `save_pretrained` writes its code beside its weights.

    Raises:
        ValueError: for impossible settings, or an architecture without convertible attention.
    """
    arguments = {"dtype": "auto", **(from_pretrained or {})}
    if isinstance(model, PreTrainedModel):
        config = convert_config(model.config, **linear_attention)
        with torch.random.fork_rng(devices=[]):
            converted: Any = linear_model_class(model_class or type(model))(config)
        converted = converted.to(dtype=model.dtype)
        converted.load_state_dict(model.state_dict(), strict=False)
        if model.can_generate():
            converted.generation_config = copy.deepcopy(model.generation_config)
        return converted.to(model.device).eval()
    hub = {
        k: arguments[k] for k in ("revision", "subfolder", "token", "cache_dir", "local_files_only") if k in arguments
    }
    stock = AutoConfig.from_pretrained(model, **hub)
    config = convert_config(stock, **linear_attention)
    return linear_model_class(model_class or stock_model_class(stock)).from_pretrained(
        model, config=config, **arguments
    )
