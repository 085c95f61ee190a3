"""FSDP2: parameters, gradients and optimizer state in shards, one on every process (torch's DTensor).

Files hold whole tensors: a checkpoint knows nothing of shards, and goes on with another launch file. Weights that
DeepSpeed's ZeRO-3 has in parts are written whole, too; its optimizer is not (`zero.py`).
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
    return any(isinstance(value, DTensor) or _is_partitioned(value) for value in model.parameters())


def _is_partitioned(value: Any) -> bool:
    """Whether it is a parameter that ZeRO-3 has in parts: empty, and marked like this."""
    return hasattr(value, "ds_id")


def _gathered(tensor: Tensor) -> AbstractContextManager[Any]:
    """Inside, a parameter of ZeRO-3 is whole; afterwards all processes have what the first has made of it."""
    if not _is_partitioned(tensor):
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    return GatheredParameters([tensor], modifier_rank=0)


def whole(value: Any, keep: bool) -> Any:
    """`value` with whole tensors in main memory in place of shards, in dictionaries and lists, too.

    All processes call it together; those that do not `keep` the result get None for each tensor that was in shards.
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
    """A whole tensor in shards, if `like`, of the same shape, is."""
    if isinstance(like, DTensor) and value.shape == like.shape:
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value


@torch.no_grad()
def load_whole(tensors: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Copy whole `values` into `tensors` of the same names, which may be in shards."""
    for name, tensor in tensors.items():
        with _gathered(tensor):
            tensor.copy_(shard_like(values[name], tensor))


def shard_optimizer_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer, whole, as the one that `optimizer` would give."""
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    moments = {
        number: {name: shard_like(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": moments}


@contextmanager
def without_sharding_class(model: nn.Module) -> Iterator[None]:
    """Inside, `model` has the class that it had before `fully_shard` put one of torch's own in front of it.

    That class is where `save_pretrained` finds the code that goes with the weights.
    """
    own: Any = type(model)
    if issubclass(own, FSDPModule):
        model.__class__ = next(base for base in own.__mro__ if not issubclass(base, FSDPModule))
    try:
        yield
    finally:
        model.__class__ = own
