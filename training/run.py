"""One run of a recipe: it starts processes, loads data and models, then trains or evaluates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list, set_seed
from transformers import PreTrainedModel

from hf_linear_attention._common.command_line import is_first_process
from hf_linear_attention._common.errors import SetupError, TrainingError
from hf_linear_attention._common.model_card import HISTORY, training_history
from hf_linear_attention._common.reading import read_json
from hf_linear_attention.configuration_linear_attention import max_length_of
from hf_linear_attention.training.checkpoints import (
    STATE_FILE,
    TrainedParameters,
    TrainingState,
    clear_output,
    damage_of,
    latest_checkpoint,
    newest_intact_checkpoint,
    save_final,
    whole_weights,
)
from hf_linear_attention.training.data.batches import TrainInputs, sequences_per_step, stream_of, with_enough_steps
from hf_linear_attention.training.data.packing import Examples
from hf_linear_attention.training.data.processors import bos_of, load_processor, pad_token_id, sequence_length
from hf_linear_attention.training.data.splits import load_data
from hf_linear_attention.training.distributed import load_whole, start_processes
from hf_linear_attention.training.evaluation.recall import RecallProbe
from hf_linear_attention.training.loop import OutOfMemoryError, RunContext, TrainingLoop, hidden_layers_of
from hf_linear_attention.training.losses.objectives import Objective, build_objectives
from hf_linear_attention.training.losses.teacher import Teacher
from hf_linear_attention.training.models import (
    checkpoint_dtype,
    checkpoint_gradients,
    disable_dropout,
    frozen_dtype,
    load_student,
    load_teacher,
    share_frozen_weights,
)
from hf_linear_attention.training.presets import Preset, fit_to, model_without_weights, stage_runs
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.recipe_parser import make_recipe
from hf_linear_attention.training.tracking import METRICS, MetricsFile, start_trackers


logger = logging.getLogger(__name__)


def run(recipe: Recipe, known: dict[str, float] | None = None) -> dict[str, float]:
    """Train, or only evaluate, as the recipe says, and return the figures of the last evaluation.

    Args:
        recipe: the options.
        known: the figures of the model before the training, if they were measured with the same options.
    """
    accelerator = start_processes(recipe)
    try:
        checkpoint = _prepare_folder(recipe, accelerator)
        recipe = _as_before(recipe, checkpoint)
        while True:
            set_seed(recipe.run.seed)
            try:
                return _run(recipe, accelerator, checkpoint, known or {})
            except OutOfMemoryError as error:
                if accelerator.num_processes > 1:  # the others wait
                    raise error.cause from None
                recipe, known = _with_less_memory(recipe, error, checkpoint is not None), None
            for tracker in accelerator.trackers:
                tracker.finish()
            if checkpoint is None:
                (recipe.output_dir / METRICS).unlink(missing_ok=True)
            accelerator.free_memory()
    except BaseException:
        with suppress(OSError):  # it holds something, or another process was faster
            recipe.output_dir.rmdir()
        raise


def _with_less_memory(recipe: Recipe, error: OutOfMemoryError, is_resumed: bool) -> Recipe:
    """The recipe with fewer rows at a time, or where it is one row, with rows half as long; a step keeps its tokens.

    Raises:
        Exception: what the error comes from, where rows cannot be shorter: another length is another run than the one
            that is resumed.
    """
    rows, turns = error.rows, recipe.optimization.gradient_accumulation_steps
    if rows > 1:
        parts = next(number for number in range(2, rows + 1) if rows % number == 0)
        text = "there is no memory for %d rows at once; a step takes %d at a time now, with the same result"
        logger.warning(text, rows, rows // parts)
        return recipe.changed(per_device_train_batch_size=rows // parts, gradient_accumulation_steps=turns * parts)
    if error.length is None or is_resumed:
        raise error.cause from None
    text = "there is no memory for a row of %s tokens; rows are half as long now, and a step has twice as many"
    logger.warning(text, f"{error.length:,}")
    return recipe.changed(max_length=error.length // 2, gradient_accumulation_steps=2 * turns)


def _as_before(recipe: Recipe, checkpoint: Path | None) -> Recipe:
    """The recipe with the rows that the run had at this checkpoint, if there was no memory for those asked for."""
    then = {} if checkpoint is None else read_json(checkpoint / STATE_FILE)["recipe"]
    asked, values = then.get("asked", {}), recipe.flat()
    if not asked or any(values[name] != value for name, value in asked.items()):
        return recipe
    return recipe.changed(**{name: then[name] for name in asked})


def _run(
    recipe: Recipe, accelerator: Accelerator, checkpoint: Path | None, known: dict[str, float]
) -> dict[str, float]:
    processor = load_processor(recipe)
    with accelerator.main_process_first():  # the other processes then read from the cache of `datasets`
        data = load_data(recipe, processor)
    objectives = build_objectives(recipe) if data.train is not None else {}
    # Adapters need the weights that they were added to; a checkpoint holds merged weights, and may be removed.
    source = None if recipe.model.use_peft else checkpoint
    frozen = frozen_dtype(recipe, accelerator.device.type, accelerator.is_fsdp2)
    student = load_student(recipe, str(source or recipe.model.model_name_or_path), data.classes, frozen)
    if not accelerator.is_fsdp2 or data.train is None:  # shards are moved to the device when they are made
        student.to(accelerator.device)
    resumed_step = None if checkpoint is None else int(checkpoint.name.split("-")[-1])
    context = RunContext(
        recipe,
        accelerator,
        processor,
        student,
        _teacher(recipe, accelerator, student, objectives),
        pad_token_id(processor),
        None if data.validation is None else stream_of(data.validation, recipe, processor, shuffle=False),
        MetricsFile(recipe.output_dir, accelerator.is_main_process, resumed_step),
        recall=recall_probe(recipe, processor, student.config, data.validation or data.train),
        known=known,
    )
    start_trackers(recipe, accelerator)
    if data.train is None:
        figures = context.evaluate(0, 0)
    else:
        state, figures = _train(context, data.train, objectives, checkpoint)
        _save(context, state, figures)
    # The processes stay connected for the next stage of a preset: a second connection through torchrun's store hangs.
    for tracker in accelerator.trackers:
        tracker.finish()
    return figures


def _prepare_folder(recipe: Recipe, accelerator: Accelerator) -> Path | None:
    """Create or clean `output_dir`, and return the checkpoint to resume from."""
    if accelerator.is_main_process:
        recipe.output_dir.mkdir(parents=True, exist_ok=True)
        clear_output(recipe.output_dir, everything=recipe.run.overwrite_output_dir)
    accelerator.wait_for_everyone()
    wanted = recipe.run.resume_from_checkpoint
    found: list[Any] = [None]
    if accelerator.is_main_process:
        found = [_checkpoint(recipe.output_dir, wanted)]
    chosen = broadcast_object_list(found)[0]
    if isinstance(chosen, TrainingError):
        raise chosen
    return chosen


def _checkpoint(output_dir: Path, wanted: str | None) -> Path | TrainingError | None:
    """The intact checkpoint to resume from. An error is returned, not raised, so that all processes can raise it."""
    if wanted is None:
        return None
    if wanted == "latest":
        checkpoint = newest_intact_checkpoint(output_dir)
        if checkpoint is None:
            logger.warning("there is no intact checkpoint in %s; training starts from the beginning", output_dir)
        return checkpoint
    if (damage := damage_of(Path(wanted).resolve())) is not None:
        return SetupError(
            f"`--resume_from_checkpoint {wanted}` is damaged ({damage}); give another checkpoint, or `latest` for the "
            "newest one that is intact"
        )
    return Path(wanted)


def _teacher(
    recipe: Recipe, accelerator: Accelerator, student: PreTrainedModel, objectives: dict[str, tuple[float, Objective]]
) -> Teacher | None:
    if recipe.model.teacher_name_or_path is None:
        return None
    has_16_bits = accelerator.mixed_precision != "no" or student.dtype == torch.bfloat16
    model = load_teacher(recipe, student, "auto" if has_16_bits else torch.float32)
    layers = hidden_layers_of(recipe, objectives)
    if layers is None and recipe.task.logits is None:
        layers = "last"  # the evaluation compares them
    model.to(accelerator.device)
    if not accelerator.is_fsdp2:  # it moves weights into shards
        share_frozen_weights(student, model)
    return Teacher(model, accelerator.autocast, layers)


def _train(
    context: RunContext, examples: Examples, objectives: dict[str, tuple[float, Objective]], checkpoint: Path | None
) -> tuple[TrainingState, dict[str, float]]:
    recipe, accelerator = context.recipe, context.accelerator
    inputs = _train_inputs(context, examples)
    if recipe.imitates:
        disable_dropout(context.student)
    if recipe.optimization.gradient_checkpointing and not any(o.observes_attention for _, o in objectives.values()):
        checkpoint_gradients(context.student)  # attention transfer keeps no activations that could be recomputed
    loop = TrainingLoop(context, inputs, objectives)
    # Dropout differs between processes; new heads, which exist already, do not.
    set_seed(recipe.run.seed + accelerator.process_index)
    if checkpoint is not None:
        loop.resume(checkpoint)
    state = loop.state
    # Even if no step was left to train, the model is evaluated.
    figures = loop.train() or context.evaluate(state.step, state.tokens)
    # There is no best evaluation if the evaluation has changed and nothing was trained since.
    if recipe.run.load_best_model_at_end and state.best:
        figures = _load_best(context, state)
    return state, figures


def _save(context: RunContext, state: TrainingState, figures: dict[str, float]) -> None:
    recipe, accelerator = context.recipe, context.accelerator
    weights = whole_weights(context.student, keep=accelerator.is_main_process)
    if accelerator.is_main_process:
        done = {"steps": state.step, recipe.unit: state.tokens, "processes": accelerator.num_processes}
        save_final(recipe, context.student, context.processor, recipe.summary() | done, figures, weights)
    accelerator.wait_for_everyone()


def recall_probe(recipe: Recipe, processor: Any, config: Any, examples: Examples | None) -> RecallProbe | None:
    """What measures recall on the first of these examples, if the model is a causal language model."""
    if recipe.model.task != "causal_lm" or examples is None:
        return None
    length, bos = sequence_length(recipe, processor, config), bos_of(processor)
    # A tenth of the training, or probing a large model would take longer than training it.
    wanted = recipe.optimization.max_train_tokens
    return RecallProbe(examples, length, max_length_of(config), bos, wanted and wanted // 10)


def _train_inputs(context: RunContext, examples: Examples) -> TrainInputs:
    recipe, processor = context.recipe, context.processor
    recipe = with_enough_steps(recipe, examples.lengths, context.accelerator.num_processes)
    together = sequences_per_step(recipe, context.accelerator) if recipe.data.group_by_length else None
    source = stream_of(examples, recipe, processor, shuffle=True, step_size=together)
    return TrainInputs(source, recipe, context.accelerator, context.pad_token_id)


def _load_best(context: RunContext, state: TrainingState) -> dict[str, float]:
    """Load the weights of the best evaluation into the student, and return the figures of that evaluation."""
    step = state.best["step"]
    if step != state.step:
        checkpoint = context.recipe.output_dir / f"checkpoint-{step}"
        saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True, mmap=True)
        if "trained" in saved:
            TrainedParameters(context.student).load_state_dict(saved["trained"])
        else:
            best = load_student(context.recipe, str(checkpoint), None)
            load_whole(context.student.state_dict(keep_vars=True), best.state_dict())
        logger.info("the best model is that of step %d of %d", step, state.step)
    return state.best["figures"]


Run = Callable[[Recipe, dict[str, float]], dict[str, float]]
"""A function of a stage's recipe and of the figures of the model that it starts from, which are empty if unknown."""


def run_stages(preset: Preset, given: Mapping[str, Any], run: Run) -> dict[str, float]:
    """Run every stage that is not finished yet, and return the figures of the last one.

    Args:
        given: options of `finetune.py` that hold for all stages, which share `max_train_tokens`.
        run: the function above, or one that calls it.
    """
    is_resumed = given.get("resume_from_checkpoint") is not None
    figures: dict[str, float] = {}
    before: Recipe | None = None
    preset = fit_to(preset, model_without_weights(given), given.get("max_train_tokens"))
    runs = stage_runs(preset, given)
    source = given["task"], str(given["model_name_or_path"]), bool(given.get("trust_remote_code"))
    dtype = given.get("dtype") or checkpoint_dtype(*source)
    if not is_resumed and is_first_process():  # resuming later must not find finished stages of an older run
        for _, options in runs:
            clear_output(Path(options["output_dir"]), everything=True)
    for number, (stage, options) in enumerate(runs, 1):
        folder = Path(options["output_dir"])
        if is_resumed and (folder / HISTORY).is_file():  # this file is written with the finished model
            continue
        if is_resumed and latest_checkpoint(folder) is not None:
            options["resume_from_checkpoint"] = "latest"
        elif folder.exists():  # the last folder contains the others; a stage without a checkpoint starts again
            options["overwrite_output_dir"] = True
        options["dtype"] = dtype if number == len(runs) else "float32"
        place = f"stage {number} of {len(runs)}"
        logger.info("%s, %s, of preset %s", place, stage.name, preset.name)
        recipe = make_recipe(options)
        figures = run(recipe, figures if before and _evaluates_alike(before, recipe) else {})
        ran = [done["training"].get("max_length") for done in training_history(str(folder))[-1:]]
        before = recipe if recipe.data.max_length in ran else None  # else rows were too long
        AcceleratorState._reset_state(reset_partial_state=True)  # the processes of the next stage connect anew
    return figures or training_history(given["output_dir"])[-1]["metrics"]


def _evaluates_alike(before: Recipe, recipe: Recipe) -> bool:
    """Whether a stage would begin with the evaluation, of the same weights, with which the one before it has ended."""

    def evaluation(stage: Recipe) -> tuple[Any, ...]:
        compares = stage.task.compares or stage.task.logits is None
        teacher = stage.model.teacher_name_or_path if compares else None
        size = stage.optimization.per_device_eval_batch_size
        return stage.data, size, teacher

    return evaluation(before) == evaluation(recipe) and not before.model.use_peft  # saving merges adapters
