"""LoRA and DoRA adapters of peft: trained beside the base weights, and merged into the weights that are saved."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_linear_attention._common.errors import SetupError
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.recipe import ModelArguments


ADAPTER = ".lora_"  # part of the name of every parameter of an adapter


def add_adapters(model: PreTrainedModel, arguments: ModelArguments) -> None:
    """Add adapters to `model`, in place. The base weights are frozen; parameters of the mechanisms stay trainable.

    Raises:
        SetupError: if peft finds no module to adapt.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets: Any = arguments.lora_target_modules
    if targets == "attention":
        targets = attention_projections(model)
    elif targets is not None and targets != "all-linear":
        targets = targets.split(",")
    config = LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=targets,
        use_dora=arguments.use_dora,
    )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise SetupError(
            f"peft could not add adapters ({error}); choose modules with `--lora_target_modules`"
        ) from error
    for name, parameter in model.named_parameters():
        if name in trained and ".linear_attention." in name:
            parameter.requires_grad_(True)


def attention_projections(model: PreTrainedModel) -> list[str]:
    """The names of the query, key, value and output projections of every converted attention module."""
    return [
        f"{name}.{child}"
        for name, attention in linear_attention_modules(model).items()
        for child, layer in attention.named_modules()
        if isinstance(layer, (nn.Linear, Conv1D)) and not child.startswith("linear_attention")
    ]


@torch.no_grad()
def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of `model` with its adapters merged into the base weights; `model` itself is not changed."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    state = model.state_dict()
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer):
            merged: Any = copy.deepcopy(layer)  # one layer at a time, so that memory use does not double
            merged.merge()
            state = {key: value for key, value in state.items() if not key.startswith(f"{name}.")}
            state |= {f"{name}.{key}": value for key, value in merged.get_base_layer().state_dict().items()}
    return state
