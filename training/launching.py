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
    if recipe.run.mixed_precision is None and os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8":
        raise TrainingError(
            "the launch file asks for mixed precision fp8, which this loop does not do (a linear attention state in 8 "
            "bit would be wrong after a few tokens); allowed are no, fp16 and bf16: set `mixed_precision: bf16` there"
        )
    for variable, name in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if _is_on(variable):
            silent = "; without a GPU, accelerate would silently make DDP of FSDP"
            silent = "" if torch.cuda.is_available() else silent
            raise TrainingError(
                f"the launch file asks for {name}, but finetune.py keeps a whole model on every process (its teacher, "
                f"evaluation and checkpoints need one){silent}: launch with training/launch/ddp.yaml or "
                "cpu2.yaml, or train the converted model by transformers' Trainer or trl with this launch file"
            )


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("1", "true", "yes")


def _all_reach_the_loss(recipe: Recipe) -> bool:
    """Whether every parameter takes part: hidden-state objectives leave heads and poolers without gradient."""
    return bool(recipe.objective.task_loss_weight or recipe.objective.logits_kl_weight)
