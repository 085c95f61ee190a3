"""FSDP2: every process has one shard of the parameters, gradients and optimizer state (torch's DTensor).

Checkpoints hold whole tensors, so a run can be resumed with another launch file. Weights that DeepSpeed's ZeRO-3 has
partitioned are also written whole, but its optimizer state is not (`zero.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 or ZeRO-3 has put the parameters of the model into shards."""
    return any(isinstance(value, DTensor) or _is_partitioned(value) for value in model.parameters())


def _is_partitioned(value: Any) -> bool:
    """Whether it is a parameter that ZeRO-3 has partitioned, which is empty and has this mark."""
    return hasattr(value, "ds_id")


def _gathered(tensor: Tensor) -> AbstractContextManager[Any]:
    """Inside, a parameter of ZeRO-3 is whole; afterwards, all processes have the value that the first has given it."""
    if not _is_partitioned(tensor):
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters([tensor], modifier_rank=0)


def whole(value: Any, keep: bool) -> Any:
    """`value`, a tensor or a nested dictionary or list of them, with whole tensors in main memory in place of shards.

    All processes call this together. Those without `keep` get None in place of every tensor that was in shards.
    """
    if isinstance(value, DTensor):
        full = value.detach().full_tensor()
        return full.cpu() if keep else None
    if _is_partitioned(value):
        with _gathered(value):
            return value.detach().cpu().clone() if keep else None
    if isinstance(value, dict):
        return {name: whole(part, keep) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(whole(part, keep) for part in value)
    return value


def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """The whole tensor `value`, put into shards if `like` is in shards and has the same shape."""
    if isinstance(like, DTensor) and value.shape == like.shape:
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value


@torch.no_grad()
def load_whole(tensors: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Copy the whole `values` into the `tensors` of the same names, which may be in shards."""
    for name, tensor in tensors.items():
        with _gathered(tensor):
            tensor.copy_(shard_like(values[name], tensor))


def shard_optimizer_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state dict of an optimizer, with the moments put into shards as the parameters of `optimizer` are."""
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    moments = {
        number: {name: shard_like(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": moments}


@contextmanager
def without_sharding_class(model: nn.Module) -> Iterator[None]:
    """Inside, `model` has the class that it had before `fully_shard` replaced it by a subclass.

    `save_pretrained` finds the code that belongs to the weights through that class.
    """
    own: Any = type(model)
    if issubclass(own, FSDPModule):
        model.__class__ = next(base for base in own.__mro__ if not issubclass(base, FSDPModule))
    try:
        yield
    finally:
        model.__class__ = own
