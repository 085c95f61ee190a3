"""Saving the weights of a model: gathered from shards, with adapters merged, or in files that fit into memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_linear_attention.training.adapters import ADAPTER, merged_state_dict
from hf_linear_attention.training.distributed.sharding import is_sharded, whole, without_sharding_class
from hf_linear_attention.training.parameters import with_dropout


SHARD_SIZE = "2GB"  # size of a file of an offloaded model; the tensors of one file are in memory together


def save_model(model: PreTrainedModel, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Save `model` with `save_pretrained`, with adapters merged into a copy of their weights.

    Args:
        weights: the whole weights of a model that is in shards (`whole_weights`).
    """
    with with_dropout(model):
        if weights is not None:
            with without_sharding_class(model):
                model.save_pretrained(folder, state_dict=weights)
        elif any(ADAPTER in name for name, _ in model.named_parameters()):
            model.save_pretrained(folder, state_dict=merged_state_dict(model))
        elif is_offloaded(model):
            model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
        else:
            model.save_pretrained(folder)


def whole_weights(model: PreTrainedModel, keep: bool) -> dict[str, Tensor] | None:
    """The whole weights of a model in shards, for `save_model`; None for other models.

    All processes call this together. Those without `keep` get None in place of every tensor that was in shards.
    """
    if not is_sharded(model):
        return None
    # Tied parameters are left out: gathered, they would be separate tensors, and saved twice.
    state = model.state_dict(keep_vars=True)  # a detached parameter of ZeRO-3 could not be recognised as one
    own = {name: value for name, value in state.items() if name not in model.all_tied_weights_keys}
    return whole(own, keep)


class TrainedParameters:
    """The trained parameters alone, for checkpoints: from merged weights, adapters cannot be recovered."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        """The value of every parameter that requires gradients, by name."""
        return {name: value.detach() for name, value in self.model.named_parameters() if value.requires_grad}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the values in `state` into the parameters of the same names."""
        parameters = dict(self.model.named_parameters())
        for name, value in state.items():
            parameters[name].copy_(value)


def is_offloaded(model: PreTrainedModel) -> bool:
    """Whether some weights of the model are on disk (`--offload_folder`)."""
    return "disk" in (getattr(model, "hf_device_map", None) or {}).values()
