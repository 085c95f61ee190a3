"""The processes that `accelerate launch` has started, and models in shards: FSDP2.

With FSDP2, every process has one shard of the parameters, gradients and optimizer state (torch's DTensor). The results
are those of one process with a whole model, and checkpoints hold whole tensors, so a run can be resumed with another
launch file.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from hf_linear_attention._common.command_line import is_first_process
from hf_linear_attention._common.devices import computing_device, keep_freed_memory
from hf_linear_attention._common.errors import SetupError
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.tracking import wanted_trackers


logger = logging.getLogger(__name__)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 puts the parameters of the model into shards; after a forward pass, they may still be whole."""
    return isinstance(model, FSDPModule)


def whole(value: Any, keep: bool) -> Any:
    """`value`, a tensor or a nested dictionary or list of them, with whole tensors in main memory in place of shards.

    All processes call this together. Those without `keep` get None in place of every tensor that was in shards.
    """
    if isinstance(value, DTensor):
        full = value.detach().full_tensor()
        return full.cpu() if keep else None
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
        tensor.copy_(shard_like(values[name], tensor))


def shard_optimizer_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state dict of an optimizer, with the moments put into shards as the parameters of `optimizer` are."""
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    moments = {
        number: {name: shard_like(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": moments}


def mean_gradient(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor | None:
    """The mean over all processes of the gradients of a parameter in shards, in shards too; for others, `gradient`.

    All processes call this together. A gradient that is None counts as 0, because some may have one and others not.
    """
    if not isinstance(parameter, DTensor) or not parameter.requires_grad:
        return gradient
    mesh, shape = parameter.device_mesh, parameter.shape
    own = torch.zeros(shape, device=parameter.device) if gradient is None else gradient
    parts = DTensor.from_local(own.to(parameter.dtype) / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
    return parts.redistribute(placements=parameter.placements)


def reshard(model: nn.Module) -> None:
    """Put all parameters of a model of FSDP2 into shards again, as its own backward pass does."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


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


TWO_PROCESSES = "accelerate launch --config_file training/launch/cpu2.yaml training/finetune.py ..."


def start_processes(recipe: Recipe) -> Accelerator:
    """Connect the launched processes, and return the accelerator.

    Raises:
        SetupError: if the launch would train something other than the launch file or the recipe says.
    """
    _refuse_launch()
    handlers: list[Any] = [DistributedDataParallelKwargs(find_unused_parameters=not _all_reach_the_loss(recipe))]
    has_gpu = computing_device() == "cuda"
    if not has_gpu:
        keep_freed_memory()
    accelerator = Accelerator(
        # Without cpu=True, processes on a machine without a GPU would train separate models.
        cpu=not has_gpu,
        log_with=wanted_trackers(recipe) or None,
        project_dir=recipe.output_dir,
        kwargs_handlers=handlers,
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise SetupError(
            f"WORLD_SIZE is {launched}, but accelerate connected {accelerator.num_processes} process(es), so each "
            f"would train a separate model; launch with `{TWO_PROCESSES}` or `accelerate launch --multi_gpu "
            "--num_processes N training/finetune.py ...` (both also work without a GPU)"
        )
    logger.info("%d process(es), %s, mixed precision %s", launched, accelerator.device, accelerator.mixed_precision)
    return accelerator


def first_alone(name: str, action: Callable[[], object]) -> bool:
    """Whether `action` returns something true; the first process of a launch calls it alone, and the others wait.

    The processes need not be connected yet, and no collective operation has to wait, which would have a time limit.

    Args:
        name: another one for each call.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return bool(action())
    store = _store()
    if is_first_process():
        store.set(name, str(int(bool(action()))))
    while not store.check([name]):
        time.sleep(0.1)
    return bool(int(store.get(name)))


@functools.cache
def _store() -> torch.distributed.Store:
    """The store through which the processes of a launch find each other; the first of them may be its server."""
    store, _, _ = next(torch.distributed.rendezvous("env://"))
    return store


def _refuse_launch() -> None:
    """Refuse launch files with which accelerate would fail without advice, or train something else silently.

    Raises:
        SetupError: if the launch file is one; it names all settings that do not work.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if precision == "fp8":
        raise SetupError(
            "the launch file asks for fp8; allowed are no, fp16 and bf16: set `mixed_precision: bf16` in it"
        )
    if _is_on("ACCELERATE_USE_DEEPSPEED"):
        raise SetupError("the launch file asks for DeepSpeed; FSDP2 takes its place: training/launch/fsdp2.yaml")
    if not _is_on("ACCELERATE_USE_FSDP"):
        return
    if not torch.cuda.is_available():
        raise SetupError("the launch file asks for FSDP, which needs a GPU; launch with training/launch/cpu2.yaml")
    version = os.environ.get("FSDP_VERSION", "1")
    conditions = {
        f"`fsdp_version: {version}` in the launch file (allowed is 2)": version != "2",
        # With it, the teacher would have weights on the main process alone.
        "`fsdp_cpu_ram_efficient_loading: true` in the launch file": _is_on("FSDP_CPU_RAM_EFFICIENT_LOADING"),
        "mixed precision fp16 (allowed are no, bf16)": precision == "fp16",
    }
    if wrong := [name for name, is_wrong in conditions.items() if is_wrong]:
        text = f"the launch file asks for FSDP, which does not work with {'; '.join(wrong)}"
        raise SetupError(f"{text}; change these settings, or launch with training/launch/ddp.yaml")


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("1", "true", "yes")


def _all_reach_the_loss(recipe: Recipe) -> bool:
    """Whether every parameter reaches the loss.

    Objectives on hidden states leave out heads and poolers. A T5 converted without its position bias keeps its weights,
    which do nothing.
    """
    if recipe.task.logits == "targets":
        return False
    return bool(recipe.objective.task_loss_weight or recipe.objective.logits_kl_weight)


def disconnect() -> None:
    """Close the connection between the processes, after the last run of the command."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
