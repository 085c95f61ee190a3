"""LoRA and DoRA by peft: adapters beside the base weights while training, merged into what is saved."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_linear_attention._common.errors import TrainingError
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.recipe import ModelArguments


ADAPTER = ".lora_"  # in the name of every parameter that an adapter has


def add_adapters(model: PreTrainedModel, arguments: ModelArguments) -> None:
    """Put adapters into `model`, in place. The base weights are frozen; what the mechanisms train, they go on training.

    Raises:
        TrainingError: if peft finds nothing to adapt.
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
        raise TrainingError(f"peft adds no adapters ({error}); choose modules with `--lora_target_modules`") from error
    for name, parameter in model.named_parameters():
        if name in trained and ".linear_attention." in name:
            parameter.requires_grad_(True)


def attention_projections(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers of every converted attention module: of queries, keys, values and outputs."""
    return [
        f"{name}.{child}"
        for name, attention in linear_attention_modules(model).items()
        for child, layer in attention.named_modules()
        if isinstance(layer, (nn.Linear, Conv1D)) and not child.startswith("linear_attention")
    ]


@torch.no_grad()
def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict that `model` would have without adapters and with their effect; the model stays as it is."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    state = model.state_dict()
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer):
            merged: Any = copy.deepcopy(layer)  # one layer at a time, so that memory does not double
            merged.merge()
            state = {key: value for key, value in state.items() if not key.startswith(f"{name}.")}
            state |= {f"{name}.{key}": value for key, value in merged.get_base_layer().state_dict().items()}
    return state
