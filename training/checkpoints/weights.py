"""The weights of a model as files: whole ones of shards, with adapters merged, or in parts that fit into memory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_linear_attention.training.adapters import ADAPTER, merged_state_dict
from hf_linear_attention.training.distributed.sharding import is_sharded, whole, without_sharding_class


SHARD_SIZE = "2GB"  # of what is saved: each is gathered in memory


def save_model(model: PreTrainedModel, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """`save_pretrained`, with adapters merged into a copy of the weights that they belong to.

    Args:
        weights: where those of the model are in shards, the whole ones (`sharding.whole`).
    """
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
    """`weights` for `save_model`; all processes call it together, and those that do not `keep` them get no tensors."""
    if not is_sharded(model):
        return None
    # once gathered, tied parameters would be tensors of their own, and saved twice
    state = model.state_dict(keep_vars=True)  # a detached parameter of ZeRO-3 has lost its mark
    own = {name: value for name, value in state.items() if name not in model.all_tied_weights_keys}
    return whole(own, keep)


class TrainedParameters:
    """What a checkpoint keeps beside the merged weights, from which adapters cannot be told apart again."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.model.named_parameters() if value.requires_grad}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, value in state.items():
            parameters[name].copy_(value)


def is_offloaded(model: PreTrainedModel) -> bool:
    return "disk" in (getattr(model, "hf_device_map", None) or {}).values()
