"""The plan of a training run: its length, batches, optimizer, schedule, losses and checkpoints."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from hf_linear_attention.training.checkpoints import Checkpointer
from hf_linear_attention.training.context import RunContext
from hf_linear_attention.training.data.batches import Stream
from hf_linear_attention.training.data.inputs import TrainInputs
from hf_linear_attention.training.distributed import prepare_zero, uses_deepspeed, zero_stage
from hf_linear_attention.training.evaluation.evaluator import Selection
from hf_linear_attention.training.losses.combined_loss import StudentWithObjectives, TransferLayers
from hf_linear_attention.training.losses.objectives import Objective
from hf_linear_attention.training.losses.teacher_cache import CachedTeacher, HiddenStates, Kind, Logits, open_cache
from hf_linear_attention.training.models import WindowDropout, freeze, parameter_groups
from hf_linear_attention.training.recipe import Recipe, parse_rates


logger = logging.getLogger(__name__)


@dataclass
class TrainingPlan:
    """Everything that the training loop uses, prepared by accelerate."""

    inputs: TrainInputs
    total_steps: int
    optimizer: AcceleratedOptimizer
    scheduler: LambdaLR
    module: torch.nn.Module  # StudentWithObjectives, wrapped by accelerate or containing a student that is sharded
    synchronized: torch.nn.Module  # the module that accelerate has wrapped
    objectives: dict[str, tuple[float, Objective]]
    checkpointer: Checkpointer
    window_dropout: WindowDropout
    transfer: TransferLayers
    cached: CachedTeacher | None


def hidden_layers_of(recipe: Recipe, objectives: dict[str, tuple[float, Objective]]) -> str | None:
    """Which hidden states the models must return: "last", "all" or None for none."""
    if not any(objective.needs_hidden_states for _, objective in objectives.values()):
        return None
    return recipe.objective.hidden_state_layers


def make_training_plan(
    context: RunContext, inputs: TrainInputs, objectives: dict[str, tuple[float, Objective]]
) -> TrainingPlan:
    """The plan for training the student of `context`, whose parameters are frozen, wrapped or sharded as it says."""
    recipe, accelerator = context.recipe, context.accelerator
    optimization, total_steps = recipe.optimization, inputs.total_steps()
    inputs.warn_of_repetition(total_steps)
    warmup = optimization.warmup_steps or math.ceil(optimization.warmup_ratio * total_steps)
    if recipe.model.freeze_pattern is not None:
        freeze(context.student, recipe.model.freeze_pattern)
    optimizer = torch.optim.AdamW(parameter_groups(context.student, recipe))
    scheduler = get_scheduler(optimization.lr_scheduler_type, optimizer, warmup, total_steps)
    transfer = TransferLayers(
        context.student,
        recipe.objective.transfer_layers,
        recipe.objective.layer_patience,
        is_sharded=accelerator.is_fsdp2 or uses_deepspeed(accelerator),
    )
    cached, layers = cached_teacher(context, inputs, objectives), hidden_layers_of(recipe, objectives)
    note = None
    if cached is not None and cached.teacher is None:
        note, layers = cached.note, _kept_layers(recipe)
    module = StudentWithObjectives(context.student, objectives, layers, transfer, note)
    # The scheduler is not prepared, because accelerate would advance it once per process. The student needs no device
    # placement, because it is on its device already.
    if uses_deepspeed(accelerator):
        wrapped, optimizer = prepare_zero(accelerator, context.student, module, optimizer)
    else:
        wrapped, optimizer = accelerator.prepare(
            context.student if accelerator.is_fsdp2 else module, optimizer, device_placement=[False, True]
        )
    if not accelerator.is_fsdp2:  # FSDP2 shards the student in place, inside `module`
        module = wrapped
    facts = recipe.facts() | {
        "metric_for_best_model": Selection(recipe).name,
        **inputs.facts(),
        "world_size": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "zero_stage": zero_stage(accelerator),
    }
    checkpointer = Checkpointer(
        *(accelerator, scheduler, recipe.output_dir, facts),
        *(recipe.run.save_total_limit, recipe.run.load_best_model_at_end),
    )
    dropout = WindowDropout(context.student, parse_rates(recipe.objective.window_dropout), total_steps)
    return TrainingPlan(
        inputs, total_steps, optimizer, scheduler, module, wrapped, objectives, checkpointer, dropout, transfer, cached
    )


def _kept_layers(recipe: Recipe) -> str | None:
    """The hidden states that attention transfer writes for the stages that follow it."""
    return recipe.objective.hidden_state_layers if recipe.task.logits is None else None


def cached_teacher(
    context: RunContext, inputs: TrainInputs, objectives: dict[str, tuple[float, Objective]]
) -> CachedTeacher | None:
    """The teacher with the outputs that are kept for it (`--cache_teacher`); None without the option.

    In attention transfer, the student computes what the teacher would, and only writes it: the logits, or the hidden
    states if its task has no logits. In mixed precision it writes nothing, because its weights are in float32.
    """
    recipe, source = context.recipe, inputs.source
    if recipe.objective.cache_teacher is None or not isinstance(source, Stream):
        return None
    precision = context.accelerator.mixed_precision
    used = [objective for _, objective in objectives.values()]
    is_transfer = any(objective.observes_attention for objective in used)
    if is_transfer and precision != "no":
        logger.info("attention transfer in mixed precision does not write the outputs of the teacher")
        return None
    layers = _kept_layers(recipe) if is_transfer else hidden_layers_of(recipe, objectives)
    logits = any(objective.needs_logits and objective.needs_teacher for objective in used)
    logits = logits or (is_transfer and recipe.task.logits is not None)
    model = context.student if is_transfer or context.teacher is None else context.teacher.model
    config = model.config.get_text_config()
    kinds: list[Kind] = [Logits(config.vocab_size, recipe.objective.temperature)] if logits else []
    if layers is not None:
        kinds.append(HiddenStates(layers, config.num_hidden_layers if layers == "all" else 1, config.hidden_size))
    with context.accelerator.main_process_first():
        files = open_cache(Path(recipe.objective.cache_teacher), model, source.examples, kinds, precision)
    return CachedTeacher(None if is_transfer else context.teacher, files)
