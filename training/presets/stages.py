"""Running of the stages of a preset, so that a run that was killed can be resumed in the stage where it stopped."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from accelerate.state import AcceleratorState

from hf_linear_attention._common.model_card import HISTORY, training_history
from hf_linear_attention.training.checkpoints.checkpointing import clear_output, latest_checkpoint
from hf_linear_attention.training.presets.preset import Preset, fit_to, model_without_weights, stage_runs
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.recipe_parser import recipe_of


logger = logging.getLogger(__name__)

Run = Callable[[Recipe, dict[str, float]], dict[str, float]]
"""A function of a stage's recipe and of the figures of the model that it starts from, which are empty if unknown."""


def run_stages(preset: Preset, given: dict[str, Any], run: Run) -> dict[str, float]:
    """Run every stage that is not finished yet, and return the figures of the last one.

    Args:
        given: options of `finetune.py` that hold for all stages, which share `max_train_tokens`.
        run: `run.run`, or a function that calls it.
    """
    is_resumed = given.get("resume_from_checkpoint") is not None
    figures: dict[str, float] = {}
    before: Recipe | None = None
    preset = fit_to(preset, model_without_weights(given))
    runs = stage_runs(preset, given)
    if not is_resumed and is_main_process():  # resuming later must not find finished stages of an older run
        for stage_run in runs:
            clear_output(stage_run.folder, everything=True)
    for number, stage_run in enumerate(runs, 1):
        folder, options = stage_run.folder, stage_run.options
        if is_resumed and (folder / HISTORY).is_file():  # this file is written with the finished model
            continue
        if is_resumed and latest_checkpoint(folder) is not None:
            options = {**options, "resume_from_checkpoint": "latest"}
        elif folder.exists():  # the last folder contains the others; a stage without a checkpoint starts again
            options = {**options, "overwrite_output_dir": True}
        place = f"stage {number} of {len(runs)}"
        logger.info("%s, %s, of preset %s (version %d)", place, stage_run.stage.name, preset.name, preset.version)
        recipe = recipe_of(options)
        figures = run(recipe, figures if before and _evaluates_alike(before, recipe) else {})
        before = recipe
        AcceleratorState._reset_state(reset_partial_state=True)  # the processes of the next stage connect anew
    return figures or training_history(given["output_dir"])[-1]["metrics"]


def _evaluates_alike(before: Recipe, recipe: Recipe) -> bool:
    """Whether a stage would begin with the evaluation, of the same weights, with which the one before it has ended."""

    def evaluation(stage: Recipe) -> tuple[Any, ...]:
        compares = stage.task.compares or stage.task.logits is None
        teacher = stage.model.teacher_name_or_path if compares else None
        size = stage.optimization.per_device_eval_batch_size
        return stage.data, stage.task_options, stage.run.mixed_precision, size, teacher

    return evaluation(before) == evaluation(recipe) and not before.model.use_peft  # saving merges adapters


def is_main_process() -> bool:
    """Whether this is the first process, before there is an accelerator that knows it."""
    return os.environ.get("RANK", "0") == "0"
