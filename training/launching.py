"""The processes that `accelerate launch` started: connected, and what the launch file says they are."""

from __future__ import annotations

import logging
import os

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

from training.arguments import Recipe
from training.errors import TrainingError
from training.trackers import wanted_trackers


logger = logging.getLogger(__name__)

TWO_PROCESSES = "accelerate launch --config_file training/launch/cpu2.yaml training/finetune.py ..."


def start_processes(recipe: Recipe) -> Accelerator:
    """The accelerator, after making sure that the launched processes found each other.

    Raises:
        TrainingError: for a launch that would train something else than it says.
    """
    _refuse_before(recipe)
    find_unused = DistributedDataParallelKwargs(find_unused_parameters=not _all_reach_the_loss(recipe))
    accelerator = Accelerator(
        # without cpu=True a machine without GPU gives processes that train apart
        cpu=not torch.cuda.is_available(),
        mixed_precision=recipe.run.mixed_precision,
        log_with=wanted_trackers(recipe) or None,
        project_dir=recipe.output_dir,
        kwargs_handlers=[find_unused],
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise TrainingError(
            f"WORLD_SIZE is {launched}, but accelerate connected {accelerator.num_processes} process(es): each would "
            f"train a model of its own. Launch with `{TWO_PROCESSES}` or `accelerate launch --multi_gpu "
            "--num_processes N training/finetune.py ...` (both also work without a GPU)"
        )
    if launched > 1 and recipe.model.offload_folder is not None:
        raise TrainingError("`--offload_folder` reads one model from disk; launch one process, or drop the option")
    logger.info("%d process(es), %s, mixed precision %s", launched, accelerator.device, accelerator.mixed_precision)
    return accelerator


def _refuse_before(recipe: Recipe) -> None:
    """What accelerate itself would fail over, or go on with, without saying what to do."""
    if _precision(recipe) == "fp8":
        raise TrainingError(
            "the launch file asks for mixed precision fp8, which this loop does not do (a linear attention state in 8 "
            "bit would be wrong after a few tokens); allowed are no, fp16 and bf16: set `mixed_precision: bf16` there"
        )
    if _is_on("ACCELERATE_USE_DEEPSPEED"):
        raise TrainingError(
            "the launch file asks for DeepSpeed, which takes the optimizer step, clipping and checkpoints over from "
            "finetune.py: launch with training/launch/fsdp2.yaml, which shards as ZeRO-3 does, or ddp.yaml, or train "
            "the converted model by transformers' Trainer or trl with this launch file"
        )
    if _is_on("ACCELERATE_USE_FSDP"):
        _refuse_shards(recipe)


def _refuse_shards(recipe: Recipe) -> None:
    """What would not be what the launch file or the recipe says, with FSDP."""
    if not torch.cuda.is_available():
        raise TrainingError(
            "the launch file asks for FSDP; without a GPU, accelerate would silently make DDP of it: launch with "
            "training/launch/cpu2.yaml"
        )
    transfer = any((recipe.objective.attention_transfer_weight, recipe.objective.attention_map_weight))
    wrong = [
        *(
            ["`fsdp_version: 1` in the launch file (allowed is 2)"]
            if os.environ.get("FSDP_VERSION", "1") != "2"
            else []
        ),
        # the other processes would have a teacher without weights
        *(["`fsdp_cpu_ram_efficient_loading: true` there"] if _is_on("FSDP_CPU_RAM_EFFICIENT_LOADING") else []),
        *(["mixed precision fp16 (allowed are no, bf16)"] if _precision(recipe) == "fp16" else []),
        *(["attention transfer, which trains the mechanisms alone"] if transfer else []),
        *(["`--use_peft`"] if recipe.model.use_peft else []),
        *(["`--untie_embeddings`"] if recipe.model.untie_embeddings is not None else []),
    ]
    if wrong:
        raise TrainingError(
            f"the launch file asks for FSDP, and shards do not go with {'; '.join(wrong)}: change that, or launch with "
            "training/launch/ddp.yaml, which has a whole model on every process"
        )


def _precision(recipe: Recipe) -> str | None:
    return recipe.run.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("1", "true", "yes")


def _all_reach_the_loss(recipe: Recipe) -> bool:
    """Whether every parameter takes part: hidden-state objectives leave heads and poolers without gradient."""
    return bool(recipe.objective.task_loss_weight or recipe.objective.logits_kl_weight)
