"""Options as a checked `Recipe`: from `sys.argv` and an optional YAML file, or by name from a preset or from Python.

One `UsageError` names every problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_linear_attention._common.command_line import Parser, given_options, typed_name
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.options import (
    COUNT,
    built,
    facts_of,
    kinds_of,
    option,
    out_of_bounds,
    typed_options,
)
from hf_linear_attention.training.arguments import FACTS, GROUPS
from hf_linear_attention.training.presets.preset import (
    BLOCK_SIZE,
    Preset,
    StageRun,
    is_transfer,
    load_preset,
    preset_names,
    stage_runs,
)
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.validation import fill_defaults, find_problems


# `--config` may name these files without their path.
CONFIGS = Path(__file__).with_name("configs")


@dataclass
class PresetArguments:
    """Options that choose a preset and how its stages are run."""

    preset: str | None = option(
        f"Preset of several training stages ({', '.join(preset_names())}), which share max_train_tokens.", None
    )
    layers_per_block: int | None = option(
        "With --preset: run the attention transfer of this many layers at a time, for models larger than memory.",
        None,
        bounds=COUNT,
    )


def build_parser(description: str | None = None) -> Parser:
    """The parser of every option of `training/finetune.py`; `description` is printed by `--help`."""
    return Parser(
        [*GROUPS, PresetArguments],
        prog=typed_name("python training/finetune.py"),
        usage="%(prog)s --task TASK --model_name_or_path MODEL --output_dir OUT [options]",
        description=description,
    )


def parse_options(argv: Sequence[str], description: str | None = None) -> Recipe | tuple[Preset, dict[str, Any]]:
    """What `argv` describes: one recipe, or a preset and the options given with it.

    Raises:
        UsageError: if the options cannot work; it names all problems (of the first stage that has any).
    """
    given = given_options(build_parser(description), [*GROUPS, PresetArguments], argv, CONFIGS)
    if (name := given.pop("preset", None)) is not None:
        preset = load_preset(name)
        check_stages(preset, given)
        return preset, given
    if BLOCK_SIZE in given:
        raise UsageError(f"`--{BLOCK_SIZE}` needs `--preset`; for a single stage, give `--transfer_layers` instead")
    return recipe_of(given)


def parse(argv: Sequence[str]) -> Recipe:
    """The recipe that `argv` describes, which names no preset.

    Raises:
        UsageError: as in `parse_options`.
    """
    recipe = parse_options(argv)
    if not isinstance(recipe, Recipe):
        raise UsageError("`--preset` has several stages; leave it out")
    return recipe


def check_stages(preset: Preset, given: dict[str, Any]) -> None:
    """Check the options of all stages of a preset before the first one.

    Args:
        preset: the preset.
        given: options for all stages, which become values of their types in place.

    Raises:
        UsageError: with all problems of the first stage that has any.
    """
    given |= typed_options(given, kinds_of(*GROUPS, PresetArguments))
    built(GROUPS, given)  # refuses what is missing
    if problems := list(out_of_bounds(facts_of(PresetArguments), {"preset": None, BLOCK_SIZE: None, **given})):
        raise UsageError(*problems)
    runs = stage_runs(preset, given)
    if unused := _unused(given, runs):
        place = f"has no effect in any stage of `--preset {preset.name}`; drop it"
        raise UsageError(*(f"`--{entry}` {place}" for entry in unused))
    # What is in the folder of a stage now may be of an older run, and is checked when the next stage begins.
    model = given["model_name_or_path"]
    *before, last = [{**run.options, "model_name_or_path": model} for run in runs]
    for options in before:
        recipe_of({**options, "overwrite_output_dir": True})
    about_folder = {"resume_from_checkpoint", "overwrite_output_dir"} & given.keys()
    recipe_of({**last, **{name: given[name] for name in about_folder}})


def _unused(given: dict[str, Any], runs: Sequence[StageRun]) -> list[str]:
    """The given options that no stage uses. A teacher may be given even if no stage learns from it."""
    taken = {name for run in runs for name in run.options} | {"teacher_name_or_path"}
    taken |= {name for name, fact in FACTS.items() if fact.is_per_stage}
    if any(is_transfer(run.stage) for run in runs):
        taken.add(BLOCK_SIZE)
    return [name for name, value in given.items() if value is not None and name not in taken]


def recipe_of(options: Mapping[str, Any]) -> Recipe:
    """The recipe with these options, completed by defaults.

    Raises:
        UsageError: if the options cannot work; it names all problems.
    """
    values = typed_options(options, kinds_of(*GROUPS))
    recipe = Recipe(*built(GROUPS, values), given=frozenset(values))
    fill_defaults(recipe)
    if problems := find_problems(recipe):
        raise UsageError(*problems)
    return recipe
