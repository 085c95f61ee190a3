"""A preset of `training` in one conversion: its settings, its stages, and the checks before any work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.options import facts_of, without_needs
from hf_linear_attention.configuration_linear_attention import entries_of
from hf_linear_attention.conversion.arguments import (
    CONVERSION_FACTS,
    ConversionArguments,
    MeasuringArguments,
    changed_options,
    parse_tokens,
)
from hf_linear_attention.conversion.calibration_data import check_pairs_file
from hf_linear_attention.conversion.estimate import Estimate
from hf_linear_attention.conversion.plan import Plan, stock_config
from hf_linear_attention.conversion.source import Source
from hf_linear_attention.default_settings import direction_of
from hf_linear_attention.training.data.pooling import pooling_of
from hf_linear_attention.training.data.processors import default_length
from hf_linear_attention.training.presets import (
    EPOCHS,
    Preset,
    fit_to,
    load_preset,
    preset_names,
    settings_for,
    stages_of,
)
from hf_linear_attention.training.recipe_parser import check_stages
from hf_linear_attention.training.tasks import unit_of


CONVERTED, TRAINED, CONTROL = "converted", "trained", "control"  # inside the work folder


@dataclass(frozen=True)
class Training:
    """The training of one conversion.

    `given` are options of `training/finetune.py` for all stages; `heals_control` says whether the window of the same
    bytes is trained too.
    """

    preset: Preset
    given: dict[str, Any]
    output_dir: Path
    heals_control: bool = False

    @property
    def work(self) -> Path:
        """The work folder."""
        return work_folder(self.output_dir)


def work_folder(output_dir: Path) -> Path:
    """The folder in which a run works, and in which a killed run is resumed."""
    return output_dir.with_name(f"{output_dir.name}.unfinished")


def check_training_options(arguments: ConversionArguments) -> None:
    """Check the options of training.

    Raises:
        UsageError: naming those that are missing or would have no effect.
    """
    problems = list(without_needs(CONVERSION_FACTS, vars(arguments), changed_options(arguments)))
    if arguments.preset is not None and arguments.train_file is None:
        problems.append(f"`--preset {arguments.preset}` needs data to train on; give a `--train_file`")
    if problems:
        raise UsageError(*problems)


def check_measuring(arguments: MeasuringArguments, task: str, folder: Path) -> None:
    """Check the options of what is measured against the model, before any work.

    The files of sentence-transformers are in `folder`.

    Raises:
        UsageError: for options that have no effect for this task, or a file or a pooling that cannot be used.
    """
    facts = facts_of(type(arguments))
    tasks = {name: facts[name].tasks for name in sorted(changed_options(arguments))}
    problems = [
        f"`--{name}` is only for {', '.join(able)}, but the task of this model is {task}; leave it out"
        for name, able in tasks.items()
        if able and task not in able
    ]
    if problems:
        raise UsageError(*problems)
    if task != "embedding":
        return
    if arguments.pairs_file is not None:
        check_pairs_file(arguments.pairs_file)
    pooling_of(str(folder))  # refuses one of another kind


def preset_settings(
    name: str, source: Source, trust_remote_code: bool, cross_attention: bool = False
) -> dict[str, Any]:
    """The settings of the attention in a preset, for a causal or bidirectional model.

    Args:
        cross_attention: whether cross-attention is converted too, for which a preset may have settings of its own.

    Raises:
        UsageError: if there is no such preset or no config, or the preset is not for such models.
    """
    config = stock_config(source, trust_remote_code)
    preset, direction = load_preset(name), direction_of(config)
    settings = settings_for(preset, direction_of(config, cross_attention)) or settings_for(preset, direction)
    if settings is None:
        able = ", ".join(other for other in preset_names() if settings_for(load_preset(other), direction))
        raise UsageError(
            f"`--preset {name}` has no settings for {direction} models such as {config.model_type}; use one of {able}"
        )
    return settings


def with_healed_frequencies(settings: Any, plan: Plan, preset: str) -> Any:
    """The settings, of which those with `rope` = `partial` get the `rope_frequencies` that the stages can train.

    These make a full turn within the longest sequence of the stages. Settings do not change if this sequence is at
    least as long as the trained length.

    Args:
        settings: the settings from which the plan was made, a dict or a list of dicts.
    """
    stages = load_preset(preset).stages.get(str(plan.head.task), [])
    longest = max((stage.options.get("max_length", default_length(plan.config)) for stage in stages), default=None)
    result = []
    for entry, complete in zip(entries_of(settings), entries_of(plan.config.linear_attention), strict=True):
        kept = _healed_frequencies(complete, longest)
        result.append({**entry} if kept is None else {**entry, "rope_frequencies": kept})
    return result[0] if isinstance(settings, Mapping) else result


def _healed_frequencies(settings: Mapping[str, Any], longest: int | None) -> list[int] | None:
    trained = settings.get("trained_length")
    if settings.get("rope") != "partial" or longest is None or trained is None or trained <= longest:
        return None
    kept = [0] * len(settings["rope_frequencies"])
    for entry in settings["rotary"]:
        for layer in entry["layers"]:
            kept[layer] = sum(2 * math.pi <= abs(f) * longest for f in entry["inverse_frequencies"])
    return kept


def plan_training(arguments: ConversionArguments, source: Source, plan: Plan, output_dir: Path | None) -> Training:
    """The stages for the head of the model; the options of each stage are checked.

    Raises:
        UsageError: with all problems of the first stage that has problems.
    """
    _check_task(plan, sorted(load_preset(str(arguments.preset)).stages), str(arguments.preset))
    # --dry_run needs no output folder, because nothing is written
    output = output_dir or Path("OUT")
    check_measuring(arguments, str(plan.head.task), source.root)
    options = _options(arguments, source, str(plan.head.task), work_folder(output))
    given = {name: value for name, value in options.items() if value is not None}
    preset = load_preset(str(arguments.preset))
    preset = fit_to(preset, plan.model, given.get("max_train_tokens"))
    check_stages(preset, given)
    if unit_of(str(plan.head.task)) == "tokens":
        given = {"max_train_tokens": preset.tokens, **given}
    return Training(preset, given, output, arguments.controls == "healed")


def _check_task(plan: Plan, tasks: list[str], preset: str) -> None:
    name, task = plan.stock_class.__name__, plan.head.task
    if task not in tasks:
        has = "there is no recipe to train it" if task is None else f"its task is {task}"
        raise UsageError(
            f"`--preset {preset}` has stages for {', '.join(tasks)}, but not for {name} ({has}). Convert without "
            "`--preset`, then train with " + ("`Trainer` of transformers" if task is None else "training/finetune.py")
        )
    if not plan.layers:
        raise UsageError(
            f"`--preset {preset}` trains the converted layers, but `--layers` selects none; give some layers"
        )


def _options(arguments: ConversionArguments, source: Source, task: str, work: Path) -> dict[str, Any]:
    counts_tokens = unit_of(task) == "tokens"
    return {
        "task": task,
        "model_name_or_path": str(work / CONVERTED),
        "teacher_name_or_path": source.loadable,
        "trust_remote_code": arguments.trust_remote_code or None,
        "train_file": arguments.train_file,
        "validation_file": arguments.validation_file,
        "max_eval_tokens": arguments.max_eval_tokens if arguments.validation_file and counts_tokens else None,
        "max_train_tokens": parse_tokens(arguments.tokens) if arguments.tokens is not None else None,
        "num_train_epochs": arguments.epochs,
        "seed": arguments.seed,
        "checkpointing_steps": arguments.checkpointing_steps,
        "save_total_limit": 1,
        "output_dir": str(work / TRAINED),
        "resume_from_checkpoint": "latest",
    }


def describe_stages(training: Training, estimate: Estimate) -> list[str]:
    """One line per stage, for `--dry_run`."""
    preset, task = training.preset, training.given["task"]
    stages, tokens = stages_of(preset, task), training.given.get("max_train_tokens")
    epochs = training.given.get("num_train_epochs", EPOCHS)
    lines = [f"  preset      {preset.name}: {preset.description}"]
    for number, stage in enumerate(stages, 1):
        options = ", ".join(f"{name}={value}" for name, value in stage.options.items())
        length = f"{epochs * stage.share:g} epochs"
        if tokens is not None:
            cost = estimate.stage({**stage.options, **training.given}, tokens * stage.share)
            length = f"{tokens * stage.share:,.0f} tokens, {cost}"
        lines.append(f"  stage {number} of {len(stages)}  {stage.name}: {length}; {options}")
    if training.heals_control:
        lines.append(f"  control     a window of the same bytes, trained on {tokens:,} tokens too")
    return lines
