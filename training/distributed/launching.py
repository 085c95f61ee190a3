"""The processes that `accelerate launch` has started: they are connected, and checked against the launch file."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import is_deepspeed_available

from hf_linear_attention._common.devices import computing_device, keep_freed_memory
from hf_linear_attention._common.errors import SetupError
from hf_linear_attention.training.distributed import zero
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.tracking import wanted_trackers


logger = logging.getLogger(__name__)

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
    if launched > 1 and recipe.model.offload_folder is not None:
        raise SetupError("`--offload_folder` works with one process only; launch one process, or drop the option")
    if zero.uses_deepspeed(accelerator):
        zero.configure(accelerator, recipe)
    logger.info("%d process(es), %s, mixed precision %s", launched, accelerator.device, accelerator.mixed_precision)
    return accelerator


def _refuse_before(recipe: Recipe) -> None:
    """Refuse launch files with which accelerate would fail without advice, or train something else silently."""
    if _precision(recipe) == "fp8":
        raise SetupError(
            "the launch file asks for mixed precision fp8, which this loop does not support (a linear attention state "
            "in 8 bits would be wrong after a few tokens); allowed are no, fp16 and bf16: set `mixed_precision: bf16` "
            "in the launch file"
        )
    if _is_on(DEEPSPEED):
        if not is_deepspeed_available():
            raise SetupError("the launch file asks for DeepSpeed, which is not installed: `pip install deepspeed`")
        _refuse_with_shards(recipe, "DeepSpeed", _wrong_with_deepspeed(recipe))
    if _is_on("ACCELERATE_USE_FSDP"):
        if not torch.cuda.is_available():
            raise SetupError(
                "the launch file asks for FSDP, but without a GPU accelerate would silently use DDP instead; launch "
                "with training/launch/cpu2.yaml"
            )
        _refuse_with_shards(recipe, "FSDP", _wrong_with_fsdp())


def _wrong_with_deepspeed(recipe: Recipe) -> list[str]:
    stage = int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    moved = {os.environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what}_DEVICE", "none") for what in ("OPTIMIZER", "PARAM")}
    # With this flag, from_pretrained would split every model that is loaded, including the teacher.
    splits_on_load = stage == 3 and _is_on("ACCELERATE_DEEPSPEED_ZERO3_INIT", default="true")
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    conditions = {
        f"`zero_stage: {stage}` in the launch file (allowed are 2, 3)": stage not in (2, 3),
        "`deepspeed_config_file` in the launch file (allowed are the settings of zero2.yaml and zero3.yaml)": file
        != "none",
        "offloading in the launch file (allowed is `none`)": moved != {"none"},
        "`zero3_init_flag: true` in the launch file": splits_on_load,
        "`--ema_decay`": recipe.optimization.ema_decay is not None,
        # DeepSpeed gives parameters without a gradient one of zeros, so that the weight decay would change them.
        "`--weight_decay` with an objective that leaves the output layer out": bool(recipe.optimization.weight_decay)
        and not _all_reach_the_loss(recipe),
    }
    return [name for name, is_wrong in conditions.items() if is_wrong]


def _wrong_with_fsdp() -> list[str]:
    version = os.environ.get("FSDP_VERSION", "1")
    conditions = {
        f"`fsdp_version: {version}` in the launch file (allowed is 2)": version != "2",
        # With it, the teacher would have weights on the main process alone.
        "`fsdp_cpu_ram_efficient_loading: true` in the launch file": _is_on("FSDP_CPU_RAM_EFFICIENT_LOADING"),
    }
    return [name for name, is_wrong in conditions.items() if is_wrong]


def _refuse_with_shards(recipe: Recipe, engine: str, wrong: list[str]) -> None:
    """Refuse settings, `wrong` and others, that do not work if no process has a whole model or optimizer.

    Raises:
        SetupError: if there are any; it names all of them.
    """
    transfer = any((recipe.objective.attention_transfer_weight, recipe.objective.attention_map_weight))
    wrong = [
        *wrong,
        *(["mixed precision fp16 (allowed are no, bf16)"] if _precision(recipe) == "fp16" else []),
        *(["attention transfer, which trains the mechanisms alone"] if transfer else []),
        *(["`--use_peft`"] if recipe.model.use_peft else []),
        *(["`--untie_embeddings`"] if recipe.model.untie_embeddings is not None else []),
    ]
    if wrong:
        raise SetupError(
            f"the launch file asks for {engine}, whose shards do not work with {'; '.join(wrong)}; change these "
            "settings, or launch with training/launch/ddp.yaml, which keeps a whole model on every process"
        )


def _precision(recipe: Recipe) -> str | None:
    return recipe.run.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")


def _is_on(variable: str, default: str = "false") -> bool:
    return os.environ.get(variable, default).lower() in ("1", "true", "yes")


def _all_reach_the_loss(recipe: Recipe) -> bool:
    """Whether every parameter reaches the loss.

    Objectives on hidden states leave out heads and poolers. A T5 converted without its position bias keeps its weights,
    which do nothing, and a model of speech what stands in masked time, of which there is none with a teacher.
    """
    if recipe.task.logits == "targets" or recipe.task.inputs == "sound":
        return False
    return bool(recipe.objective.task_loss_weight or recipe.objective.logits_kl_weight)


def disconnect() -> None:
    """Close the connection between the processes, after the last run of the command."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
