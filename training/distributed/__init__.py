"""The processes that `accelerate launch` has started, and models in shards: FSDP2 and DeepSpeed's ZeRO.

With FSDP2, every process has one shard of the parameters, gradients and optimizer state (torch's DTensor). DeepSpeed's
ZeRO-2 and ZeRO-3 partition gradients, optimizer state and, with ZeRO-3, parameters; its engine clips the gradients,
makes the steps and stores the optimizer. The results are those of one process with a whole model.

Checkpoints hold whole tensors, so a run can be resumed with another launch file. Only the optimizer state of DeepSpeed
is not written whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import is_deepspeed_available
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.integrations import unset_hf_deepspeed_config

from hf_linear_attention._common.devices import computing_device, keep_freed_memory
from hf_linear_attention._common.errors import SetupError
from hf_linear_attention.attention.transformers_internals import undivided_modules
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.tracking import wanted_trackers


logger = logging.getLogger(__name__)


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


FOLDER = "deepspeed"  # the folder of its files in a checkpoint


def uses_deepspeed(accelerator: Accelerator) -> bool:
    """Whether the launch file asks for DeepSpeed."""
    return accelerator.state.deepspeed_plugin is not None


def engine_of(accelerator: Accelerator) -> Any:
    """The engine of DeepSpeed, which exists after `prepare`; None if DeepSpeed is not used."""
    wrapped = accelerator.deepspeed_engine_wrapped if uses_deepspeed(accelerator) else None
    return wrapped.engine if wrapped is not None else None


def zero_stage(accelerator: Accelerator) -> int | None:
    """The stage of ZeRO, 2 or 3; None if DeepSpeed is not used."""
    return accelerator.state.deepspeed_plugin.zero_stage if uses_deepspeed(accelerator) else None


def configure_zero(accelerator: Accelerator, recipe: Recipe) -> None:
    """Set what the recipe decides about the optimization, whatever the launch file says."""
    optimization = recipe.optimization
    accelerator.state.deepspeed_plugin.deepspeed_config.update(
        train_micro_batch_size_per_gpu=optimization.per_device_train_batch_size,
        gradient_accumulation_steps=optimization.gradient_accumulation_steps,
        gradient_clipping=optimization.max_grad_norm or 0.0,
    )
    accelerator.gradient_accumulation_steps = optimization.gradient_accumulation_steps
    # accelerate sets this config even without `zero3_init_flag`, and from_pretrained would split the teacher by it.
    unset_hf_deepspeed_config()
    if accelerator.mixed_precision == "bf16":
        # accelerate leaves the precision to DeepSpeed, and would autocast teacher and evaluation to torch's default.
        accelerator.native_amp = True
        torch.set_autocast_dtype(accelerator.device.type, torch.bfloat16)


@contextmanager
def autocast_not_cast(accelerator: Accelerator) -> Iterator[None]:
    """Inside, DeepSpeed makes an engine that autocasts to bf16; by default it would cast the float32 parameters."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    with_bf16 = dict(config)
    if accelerator.mixed_precision == "bf16":
        # Without safe modules, all gradients are summed in float32.
        autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        config.update(bf16={"enabled": False}, torch_autocast=autocast)
    try:
        yield
    finally:
        config.clear()
        config.update(with_bf16)


def prepare_zero(
    accelerator: Accelerator, student: PreTrainedModel, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, Any]:
    """The engine for `module` and the optimizer, both as accelerate wraps them."""
    if zero_stage(accelerator) == 3:
        gather_by_layer(student)
    with autocast_not_cast(accelerator):
        return accelerator.prepare(module, optimizer)


def gather_by_layer(student: PreTrainedModel) -> None:
    """Have ZeRO-3 gather the parameters of a layer together, as FSDP does, instead of those of each module called.

    Kernels read parameters without calling their modules. With packed documents, a mechanism is called once per
    length, and the number of lengths differs between processes.
    """
    from deepspeed.utils import set_z3_leaf_modules

    names = undivided_modules(student)
    set_z3_leaf_modules(student, list({type(part) for part in student.modules() if type(part).__name__ in names}))


def zero_backward(engine: Any, loss: Tensor, is_last: bool) -> None:
    """Add the gradients of `loss`, not rescaled; `is_last` marks the last backward pass of a step.

    The backward pass of accelerate would step at once.
    """
    engine.set_gradient_accumulation_boundary(is_last)
    engine.backward(loss, scale_wrt_gas=False)


def zero_step(engine: Any) -> Tensor:
    """Clip the gradients and step, and return their norm. If it is not finite, no step is made, and it is infinite."""
    engine.step()
    return torch.tensor(torch.inf if engine.optimizer.overflow else float(engine.get_global_grad_norm()))


def save_zero(engine: Any, checkpoint: Path) -> None:
    """Write the part of the optimizer that each process has into `checkpoint`. All processes call this together.

    Raises:
        OSError: if a file cannot be written.
    """
    try:
        engine.save_checkpoint(str(checkpoint / FOLDER), tag="state", save_latest=False)
    except RuntimeError as error:  # the error of torch's writer on a full disk
        raise OSError(f"{checkpoint / FOLDER} could not be written: {str(error).splitlines()[0]}") from error


def load_zero(engine: Any, checkpoint: Path) -> None:
    """Load the weights and the optimizer that `save_zero` has written with the same number of processes."""
    engine.load_checkpoint(str(checkpoint / FOLDER), tag="state")


DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
TWO_PROCESSES = "accelerate launch --config_file training/launch/cpu2.yaml training/finetune.py ..."


def start_processes(recipe: Recipe) -> Accelerator:
    """Connect the launched processes, and return the accelerator.

    Raises:
        SetupError: if the launch would train something other than the launch file or the recipe says.
    """
    _refuse_before(recipe)
    handlers: list[Any] = [DistributedDataParallelKwargs(find_unused_parameters=not _all_reach_the_loss(recipe))]
    has_gpu = computing_device() == "cuda"
    if not has_gpu:
        keep_freed_memory()
    if _is_on(DEEPSPEED) and not has_gpu:
        handlers.append(InitProcessGroupKwargs(backend="gloo"))
    accelerator = Accelerator(
        # Without cpu=True, processes on a machine without a GPU would train separate models; with it, accelerate would
        # not start DeepSpeed.
        cpu=not (has_gpu or _is_on(DEEPSPEED)),
        mixed_precision=recipe.run.mixed_precision,
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
    if uses_deepspeed(accelerator):
        configure_zero(accelerator, recipe)
    logger.info("%d process(es), %s, mixed precision %s", launched, accelerator.device, accelerator.mixed_precision)
    return accelerator


def _refuse_before(recipe: Recipe) -> None:
    """Refuse launch files with which accelerate would fail without advice, or train something else silently.

    Raises:
        SetupError: if the launch file is one; it names all settings that do not work.
    """
    if _precision(recipe) == "fp8":
        raise SetupError(
            "the launch file asks for fp8; allowed are no, fp16 and bf16: set `mixed_precision: bf16` in it"
        )
    shards = {"DeepSpeed": DEEPSPEED, "FSDP": "ACCELERATE_USE_FSDP"}
    engine = next((name for name, variable in shards.items() if _is_on(variable)), None)
    if engine is None:
        return
    if engine == "DeepSpeed" and not is_deepspeed_available():
        raise SetupError("the launch file asks for DeepSpeed, which is not installed: `pip install deepspeed`")
    if engine == "FSDP" and not torch.cuda.is_available():
        raise SetupError("the launch file asks for FSDP, which needs a GPU; launch with training/launch/cpu2.yaml")
    conditions = _wrong_with_deepspeed(recipe) if engine == "DeepSpeed" else _wrong_with_fsdp()
    weights = recipe.objective
    conditions |= {
        "mixed precision fp16 (allowed are no, bf16)": _precision(recipe) == "fp16",
        "attention transfer, which trains the mechanisms alone": bool(
            weights.attention_transfer_weight or weights.attention_map_weight
        ),
        "`--use_peft`": recipe.model.use_peft,
    }
    if wrong := [name for name, is_wrong in conditions.items() if is_wrong]:
        text = f"the launch file asks for {engine}, which does not work with {'; '.join(wrong)}"
        raise SetupError(f"{text}; change these settings, or launch with training/launch/ddp.yaml")


def _wrong_with_deepspeed(recipe: Recipe) -> dict[str, bool]:
    stage = int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    moved = {os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_DEVICE", "none") for what in ("OPTIMIZER", "PARAM")}
    # With this flag, from_pretrained would split every model that is loaded, including the teacher.
    splits_on_load = stage == 3 and _is_on("ACCELERATE_DEEPSPEED_ZERO3_INIT", default="true")
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    decays = bool(recipe.optimization.weight_decay)
    return {
        f"`zero_stage: {stage}` in the launch file (allowed are 2, 3)": stage not in (2, 3),
        "`deepspeed_config_file` in the launch file (allowed are the settings of zero2.yaml and zero3.yaml)": file
        != "none",
        "offloading in the launch file (allowed is `none`)": moved != {"none"},
        "`zero3_init_flag: true` in the launch file": splits_on_load,
        # DeepSpeed gives parameters without a gradient one of zeros, so that the weight decay would change them.
        "`--weight_decay` with an objective that leaves the output layer out": decays
        and not _all_reach_the_loss(recipe),
    }


def _wrong_with_fsdp() -> dict[str, bool]:
    version = os.environ.get("FSDP_VERSION", "1")
    return {
        f"`fsdp_version: {version}` in the launch file (allowed is 2)": version != "2",
        # With it, the teacher would have weights on the main process alone.
        "`fsdp_cpu_ram_efficient_loading: true` in the launch file": _is_on("FSDP_CPU_RAM_EFFICIENT_LOADING"),
    }


def _precision(recipe: Recipe) -> str | None:
    return recipe.run.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")


def _is_on(variable: str, default: str = "false") -> bool:
    return os.environ.get(variable, default).lower() in ("1", "true", "yes")


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
