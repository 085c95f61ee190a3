"""One run from its recipe: processes, data, models, then training or evaluation."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from transformers import PreTrainedModel, get_scheduler

from hf_linear_attention._common.errors import TrainingError
from hf_linear_attention._common.folders import find_damage
from hf_linear_attention.training import checkpointing, models, zero
from hf_linear_attention.training.adapters import TrainedParameters, whole_weights
from hf_linear_attention.training.averaging import WeightAverage
from hf_linear_attention.training.batches import Stream
from hf_linear_attention.training.boundaries import keeps_documents_apart
from hf_linear_attention.training.checkpointing import Checkpointer, TrainingState
from hf_linear_attention.training.final_model import save_final
from hf_linear_attention.training.freezing import freeze
from hf_linear_attention.training.inputs import TrainInputs, load_data, masking_of, stream_of
from hf_linear_attention.training.launching import start_processes
from hf_linear_attention.training.layer_transfer import TransferLayers
from hf_linear_attention.training.loop import Parts, TrainingLoop, TrainingPlan
from hf_linear_attention.training.metrics_file import MetricsFile
from hf_linear_attention.training.objectives import Objective, StudentWithObjectives, build_objectives
from hf_linear_attention.training.packing import Examples, PackedBlocks
from hf_linear_attention.training.recipe import Recipe, parse_rates
from hf_linear_attention.training.selection import Selection
from hf_linear_attention.training.sharding import load_whole
from hf_linear_attention.training.streaming import StreamedExamples
from hf_linear_attention.training.teacher import Teacher
from hf_linear_attention.training.tied_embeddings import retie, untie
from hf_linear_attention.training.trackers import start_trackers
from hf_linear_attention.training.window_dropout import WindowDropout


logger = logging.getLogger(__name__)


def run(recipe: Recipe) -> dict[str, float]:
    """Train (or only evaluate) as the recipe says; returns the last evaluation's figures."""
    accelerator = start_processes(recipe)
    set_seed(recipe.run.seed)
    checkpoint = _prepare_folder(recipe, accelerator)
    processor = models.load_processor(recipe)
    with accelerator.main_process_first():  # the others then find the data sets' cache filled
        data = load_data(recipe, processor)
    objectives = build_objectives(recipe) if data.train is not None else {}
    # adapters go beside the weights that they started from; a checkpoint holds merged ones, and may be removed
    source = None if recipe.model.trains_beside else checkpoint
    student = models.load_student(recipe, str(source or recipe.model.model_name_or_path), data.classes)
    if recipe.model.untie_embeddings is not None and source is None:
        untie(student)
    shards = (accelerator.is_fsdp2 or zero.uses_deepspeed(accelerator)) and data.train is not None
    if recipe.model.offload_folder is None and not shards:  # shards go there when there are some
        student.to(accelerator.device)
    resumed_step = None if checkpoint is None else int(checkpoint.name.split("-")[-1])
    parts = Parts(
        recipe,
        accelerator,
        processor,
        student,
        _teacher(recipe, accelerator, student, objectives),
        models.pad_token_id(processor),
        None if data.validation is None else stream_of(data.validation, recipe, processor, shuffle=False),
        MetricsFile(recipe.output_dir, accelerator.is_main_process, resumed_step),
    )
    start_trackers(recipe, accelerator)
    with ending(accelerator):
        if data.train is None:
            return parts.evaluate(0, 0)
        return _train(parts, data.train, objectives, checkpoint, data.skipped)


@contextmanager
def ending(accelerator: Accelerator) -> Iterator[None]:
    """Close the trackers when all went well.

    The processes stay connected, for the next stage of a preset: a second connection through torchrun's store hangs.
    """
    yield
    for tracker in accelerator.trackers:
        tracker.finish()


def disconnect() -> None:
    """Close the connection between the processes, after the last run."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _prepare_folder(recipe: Recipe, accelerator: Accelerator) -> Path | None:
    """Create or clean output_dir; returns the checkpoint to resume from."""
    if accelerator.is_main_process:
        recipe.output_dir.mkdir(parents=True, exist_ok=True)
        checkpointing.clear_output(recipe.output_dir, everything=recipe.run.overwrite_output_dir)
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
    """The checkpoint to resume from, found intact; an error is returned, to be raised on all processes."""
    if wanted is None:
        return None
    if wanted == "latest":
        checkpoint = checkpointing.newest_intact_checkpoint(output_dir)
        if checkpoint is None:
            logger.warning("no checkpoint in %s: starting from the beginning", output_dir)
        return checkpoint
    damage = find_damage(Path(wanted))
    if damage is None:
        return Path(wanted)
    return TrainingError(
        f"`--resume_from_checkpoint {wanted}` is damaged: {damage}; give another one, or `latest`, "
        "which takes the newest that is intact"
    )


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
    parts: Parts,
    examples: Examples | StreamedExamples,
    objectives: dict[str, tuple[float, Objective]],
    checkpoint: Path | None,
    skipped: dict[str, int],
) -> dict[str, float]:
    recipe, accelerator = parts.recipe, parts.accelerator
    inputs = _train_inputs(parts, examples)
    if recipe.objective.disable_dropout:
        models.disable_dropout(parts.student)
    if recipe.optimization.gradient_checkpointing:
        _checkpoint_gradients(parts.student)
    plan = _plan(parts, inputs, objectives)
    if recipe.optimization.ema_decay is not None:
        parts.average = WeightAverage(parts.student, recipe.optimization.ema_decay)
    state = TrainingState()
    set_seed(recipe.run.seed + accelerator.process_index)  # dropout differs between processes, new heads do not
    if checkpoint is not None:
        state = plan.checkpointer.read_state(checkpoint)
    loop = TrainingLoop(parts, plan, state)
    if checkpoint is not None:
        plan.checkpointer.restore(checkpoint, loop.stateful)
        logger.info("resuming from %s: step %d of %d", checkpoint, state.step, plan.total_steps)
    figures = loop.train() or parts.evaluate(state.step, state.tokens)  # nothing was left to train: still say how good
    if recipe.run.load_best_model_at_end and state.best:  # none: nothing was trained since evaluations became others
        figures = _load_best(parts, state)
    with parts.final_weights():
        if recipe.model.untie_embeddings == "retie":
            parts.average = None  # it is in the weights now
            retie(parts.student)
            figures = parts.evaluate(state.step, state.tokens)
        weights = whole_weights(parts.student, keep=accelerator.is_main_process)
        if accelerator.is_main_process:
            done = {"steps": state.step, recipe.unit: state.tokens, "processes": accelerator.num_processes}
            done |= {"skipped_rows": skipped} if skipped else {}
            save_final(recipe, parts.student, parts.processor, recipe.summary() | done, figures, weights)
    accelerator.wait_for_everyone()
    return figures


def _train_inputs(parts: Parts, examples: Examples | StreamedExamples) -> TrainInputs:
    recipe, processor = parts.recipe, parts.processor
    source: Stream | StreamedExamples
    if isinstance(examples, StreamedExamples):
        examples.is_packed = examples.is_packed and _can_pack(parts)
        source = examples
    else:
        if isinstance(examples, PackedBlocks) and not recipe.data.join_documents and not _can_pack(parts):
            examples = examples.unpacked()
        source = stream_of(examples, recipe, processor, shuffle=True)
    return TrainInputs(source, recipe, parts.accelerator, masking_of(recipe, processor), parts.pad_token_id)


def _can_pack(parts: Parts) -> bool:
    """Whether student and teacher keep documents apart; attention weights are matched document by document."""
    if parts.recipe.objective.attention_map_weight:
        return False
    for model in (parts.student, *([parts.teacher.model] if parts.teacher else [])):
        if not keeps_documents_apart(model):
            logger.info("%s would mix packed documents: they are trained on one by one", type(model).__name__)
            return False
    return True


def _checkpoint_gradients(student: PreTrainedModel) -> None:
    if not student.supports_gradient_checkpointing:
        raise TrainingError(f"{type(student).__name__} cannot do `--gradient_checkpointing`; drop the option")
    student.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers makes the embeddings' output require gradients, for the reentrant form; here it would only have
    # frozen layers recomputed, and those that are observed computed as something else
    student.disable_input_require_grads()


def _load_best(parts: Parts, state: TrainingState) -> dict[str, float]:
    """The weights of the best evaluation, into the student; returns its figures."""
    step = state.best["step"]
    if step != state.step:
        checkpoint = parts.recipe.output_dir / f"checkpoint-{step}"
        saved = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True, mmap=True)
        if "trained" in saved:
            TrainedParameters(parts.student).load_state_dict(saved["trained"])
        else:
            best = models.load_student(parts.recipe, str(checkpoint), None)
            load_whole(parts.student.state_dict(keep_vars=True), best.state_dict())
        if parts.average is not None:
            parts.average.load_state_dict(saved["average"])
        logger.info("best model: step %d of %d", step, state.step)
    return state.best["figures"]


def _plan(parts: Parts, inputs: TrainInputs, objectives: dict[str, tuple[float, Objective]]) -> TrainingPlan:
    recipe, accelerator = parts.recipe, parts.accelerator
    optimization, total_steps = recipe.optimization, inputs.total_steps()
    warmup = optimization.warmup_steps or math.ceil(optimization.warmup_ratio * total_steps)
    if recipe.model.freeze_pattern is not None:
        freeze(parts.student, recipe.model.freeze_pattern)
    optimizer = torch.optim.AdamW(models.parameter_groups(parts.student, recipe))
    scheduler = get_scheduler(optimization.lr_scheduler_type, optimizer, warmup, total_steps)
    transfer = TransferLayers(parts.student, recipe.objective.transfer_layers, recipe.objective.layer_patience)
    module = StudentWithObjectives(parts.student, objectives, _hidden_layers(recipe, objectives), transfer)
    # the scheduler is not prepared: accelerate would advance it once per process; the student is in its place already
    if zero.uses_deepspeed(accelerator):
        wrapped, optimizer = zero.prepare(accelerator, parts.student, module, optimizer)
    else:
        wrapped, optimizer = accelerator.prepare(
            parts.student if accelerator.is_fsdp2 else module, optimizer, device_placement=[False, True]
        )
    if not accelerator.is_fsdp2:  # which shards the student in its place
        module = wrapped
    facts = _facts(recipe) | {
        **inputs.facts(),
        "world_size": accelerator.num_processes,
        "mixed_precision": accelerator.mixed_precision,
        "zero_stage": zero.zero_stage(accelerator),
    }
    checkpointer = Checkpointer(
        accelerator, recipe.output_dir, facts, recipe.run.save_total_limit, recipe.run.load_best_model_at_end
    )
    dropout = WindowDropout(parts.student, parse_rates(recipe.objective.window_dropout), total_steps)
    return TrainingPlan(
        inputs, total_steps, optimizer, scheduler, module, wrapped, objectives, checkpointer, dropout, transfer
    )


def _facts(recipe: Recipe) -> dict[str, Any]:
    """The recipe as checkpoints store it: paths absolute, so that resuming from another folder works."""
    names = (
        *("model_name_or_path", "teacher_name_or_path", "tokenizer_name"),
        *("dataset_name", "train_file", "validation_file"),
    )
    flat = recipe.flat() | {"metric_for_best_model": Selection(recipe).name}
    found = {name: str(Path(flat[name]).resolve()) for name in names if flat[name] and Path(flat[name]).exists()}
    return flat | found
