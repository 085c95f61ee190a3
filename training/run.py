"""One run from its recipe: processes, data, models, then training or evaluation."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import set_seed
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from training import checkpointing, models
from training.arguments import Recipe
from training.batches import Masking, Stream, steps_for_tokens
from training.checkpointing import Checkpointer, TrainingState
from training.data import build_examples, label_names, load_rows
from training.errors import TrainingError
from training.export import save_final
from training.logs import MetricsFile
from training.loop import Parts, TrainingLoop, TrainingPlan
from training.objectives import Objective, StudentWithObjectives, build_objectives
from training.packing import Examples
from training.teacher import Teacher


logger = logging.getLogger(__name__)

DEFAULT_EPOCHS = 3.0
TWO_PROCESSES = "accelerate launch --config_file training/configs/accelerate_cpu2.yaml training/finetune.py ..."


@dataclass
class Data:
    """The examples of both splits, and the class indices that their labels became."""

    train: Examples | None
    validation: Examples | None
    classes: dict[str, int] | None


def run(recipe: Recipe) -> dict[str, float]:
    """Train (or only evaluate) as the recipe says; returns the last evaluation's figures."""
    accelerator = start_processes(recipe)
    set_seed(recipe.run.seed)
    checkpoint = _prepare_folder(recipe, accelerator)
    tokenizer = models.load_tokenizer(recipe)
    with accelerator.main_process_first():  # the others then find the data sets' cache filled
        data = load_data(recipe, tokenizer)
    objectives = build_objectives(recipe) if data.train is not None else {}
    student = models.load_student(recipe, str(checkpoint or recipe.model.model_name_or_path), data.classes)
    student.to(accelerator.device)
    resumed_step = None if checkpoint is None else int(checkpoint.name.split("-")[-1])
    parts = Parts(
        recipe,
        accelerator,
        tokenizer,
        student,
        _teacher(recipe, accelerator, student, objectives),
        models.pad_token_id(tokenizer),
        _stream(data.validation, recipe, tokenizer, shuffle=False),
        MetricsFile(recipe.output_dir, accelerator.is_main_process, resumed_step),
    )
    with ending(accelerator):
        if data.train is None:
            return parts.evaluate(0, 0)
        return _train(parts, data.train, objectives, checkpoint)


def start_processes(recipe: Recipe) -> Accelerator:
    """The accelerator, after making sure that the launched processes found each other."""
    find_unused = DistributedDataParallelKwargs(find_unused_parameters=not _all_reach_the_loss(recipe))
    accelerator = Accelerator(
        # without cpu=True a machine without GPU gives processes that train apart
        cpu=not torch.cuda.is_available(),
        mixed_precision=recipe.run.mixed_precision,
        kwargs_handlers=[find_unused],
    )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != accelerator.num_processes:
        raise TrainingError(
            f"WORLD_SIZE is {launched}, but accelerate connected {accelerator.num_processes} process(es): each would "
            f"train a model of its own. Launch with `{TWO_PROCESSES}` or `accelerate launch --multi_gpu "
            "--num_processes N training/finetune.py ...` (both also work without a GPU)"
        )
    logger.info("%d process(es), %s, mixed precision %s", launched, accelerator.device, accelerator.mixed_precision)
    return accelerator


def _all_reach_the_loss(recipe: Recipe) -> bool:
    """Whether every parameter takes part: hidden-state objectives leave heads and poolers without gradient."""
    return bool(recipe.objective.task_loss_weight or recipe.objective.logits_kl_weight)


@contextmanager
def ending(accelerator: Accelerator) -> Iterator[None]:
    """Close the connection between the processes when all went well."""
    yield
    accelerator.end_training()


def _prepare_folder(recipe: Recipe, accelerator: Accelerator) -> Path | None:
    """Create or clean output_dir; returns the checkpoint to resume from."""
    if accelerator.is_main_process:
        recipe.output_dir.mkdir(parents=True, exist_ok=True)
        checkpointing.clean(recipe.output_dir, everything=recipe.run.overwrite_output_dir)
    accelerator.wait_for_everyone()
    wanted = recipe.run.resume_from_checkpoint
    if wanted != "latest":
        return None if wanted is None else Path(wanted)
    checkpoint = checkpointing.latest_checkpoint(recipe.output_dir)
    if checkpoint is None:
        logger.warning("no checkpoint in %s: starting from the beginning", recipe.output_dir)
    return checkpoint


def load_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Both splits as examples."""
    rows = {split: load_rows(recipe.data, split) for split in ("train", "validation")}
    config = models.load_config(recipe)
    max_length = models.sequence_length(recipe, tokenizer, config)
    classes = None
    if recipe.model.task == "sequence_classification":
        column = recipe.data.label_column_name
        labelled = [split for split in rows.values() if split is not None and column in split.column_names]
        # the first labelled split decides; unknown classes in the other are an error
        classes = models.class_mapping(config, label_names(labelled[0], column)) if labelled else None
    examples = {
        split: None if found is None else build_examples(recipe, found, tokenizer, max_length, classes, split)
        for split, found in rows.items()
    }
    return Data(examples["train"], examples["validation"], classes)


def _stream(
    examples: Examples | None, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, shuffle: bool
) -> Stream | None:
    if examples is None:
        return None
    masking = None
    if recipe.model.task == "masked_lm":
        special = tuple(tokenizer.all_special_ids)
        masking = Masking(recipe.data.mlm_probability, tokenizer.mask_token_id, len(tokenizer), special)
    return Stream(examples, recipe.run.seed, shuffle, masking)


def _hidden_layers(recipe: Recipe, objectives: dict[str, tuple[float, Objective]]) -> str | None:
    """Which hidden states the models must return: "last", "all" or none (None)."""
    if not any(objective.needs_hidden_states for _, objective in objectives.values()):
        return None
    return recipe.objective.hidden_state_layers


def _teacher(
    recipe: Recipe,
    accelerator: Accelerator,
    student: PreTrainedModel,
    objectives: dict[str, tuple[float, Objective]],
) -> Teacher | None:
    if recipe.model.teacher_name_or_path is None:
        return None
    model = models.load_teacher(recipe, student, accelerator.mixed_precision != "no")
    needs_logits = any(o.needs_logits and o.needs_teacher for _, o in objectives.values())
    layers = _hidden_layers(recipe, objectives)
    if layers is None and recipe.model.task == "embedding":
        layers = "last"  # for evaluation
    return Teacher(model.to(accelerator.device), accelerator.autocast, needs_logits, layers)


def _train(
    parts: Parts, examples: Examples, objectives: dict[str, tuple[float, Objective]], checkpoint: Path | None
) -> dict[str, float]:
    recipe, accelerator = parts.recipe, parts.accelerator
    stream = _stream(examples, recipe, parts.tokenizer, shuffle=True)
    if stream is None:
        raise RuntimeError("no training data")
    if recipe.objective.disable_dropout:
        models.disable_dropout(parts.student)
    plan = _plan(parts, stream, objectives)
    state = TrainingState()
    set_seed(recipe.run.seed + accelerator.process_index)  # dropout differs between processes, new heads do not
    if checkpoint is not None:
        state = plan.checkpointer.read_state(checkpoint)
    loop = TrainingLoop(parts, plan, state)
    if checkpoint is not None:
        plan.checkpointer.restore(checkpoint, loop.stateful)
        if not accelerator.is_main_process:
            state.sums = {}
        logger.info("resuming from %s: step %d of %d", checkpoint, state.step, plan.total_steps)
    figures = loop.train() or parts.evaluate(state.step, state.tokens)  # nothing was left to train: still say how good
    if accelerator.is_main_process:
        done = {"steps": state.step, "tokens": state.tokens, "processes": accelerator.num_processes}
        save_final(recipe, parts.student, parts.tokenizer, recipe.summary() | done, figures)
    accelerator.wait_for_everyone()
    return figures


def _plan(parts: Parts, stream: Stream, objectives: dict[str, tuple[float, Objective]]) -> TrainingPlan:
    recipe, accelerator = parts.recipe, parts.accelerator
    optimization = recipe.optimization
    per_step = (
        optimization.per_device_train_batch_size * optimization.gradient_accumulation_steps * accelerator.num_processes
    )
    total_steps = _total_steps(recipe, stream, per_step)
    warmup = optimization.warmup_steps or math.ceil(optimization.warmup_ratio * total_steps)
    optimizer = torch.optim.AdamW(models.parameter_groups(parts.student, recipe))
    scheduler = get_scheduler(optimization.lr_scheduler_type, optimizer, warmup, total_steps)
    module = StudentWithObjectives(parts.student, objectives, _hidden_layers(recipe, objectives))
    # the scheduler is not prepared: accelerate would advance it once per process
    module, optimizer = accelerator.prepare(module, optimizer)
    facts = _facts(recipe) | {
        "sequences_per_step": per_step,
        "train_examples": len(stream),
        "world_size": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
    }
    checkpointer = Checkpointer(accelerator, recipe.output_dir, facts, recipe.run.save_total_limit)
    return TrainingPlan(stream, total_steps, optimizer, scheduler, module, objectives, checkpointer)


def _facts(recipe: Recipe) -> dict[str, Any]:
    """The recipe as checkpoints store it: paths absolute, so that resuming from another folder works."""
    paths = ("model_name_or_path", "teacher_name_or_path", "tokenizer_name", "train_file", "dataset_name")
    flat = recipe.flat()
    found = {name: str(Path(flat[name]).resolve()) for name in paths if flat[name] and Path(flat[name]).exists()}
    return flat | found


def _total_steps(recipe: Recipe, stream: Stream, per_step: int) -> int:
    """The limit that is reached first: epochs, steps or tokens."""
    plan = recipe.optimization
    unlimited = plan.max_train_steps is None and plan.max_train_tokens is None
    epochs = plan.num_train_epochs or (DEFAULT_EPOCHS if unlimited else None)
    limits = [math.ceil(epochs * len(stream) / per_step)] if epochs else []
    limits += [plan.max_train_steps] if plan.max_train_steps else []
    if plan.max_train_tokens is not None:
        most = min(limits, default=plan.max_train_tokens)  # a step has at least one token
        return steps_for_tokens(stream, per_step, plan.max_train_tokens, most)
    return min(limits)
