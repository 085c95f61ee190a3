"""Parsing of `sys.argv` and an optional YAML file into a checked `Recipe`; one `UsageError` names every problem."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_linear_attention._common.command_line import (
    CONFIG_HELP,
    Parser,
    as_typed,
    given_names,
    typed_name,
    value_of,
    words_of,
)
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.options import COUNT, facts_of, option, out_of_bounds, unusable_texts
from hf_linear_attention.training.arguments import FACTS, GROUPS
from hf_linear_attention.training.presets.preset import (
    BLOCK_SIZE,
    Preset,
    Stage,
    command_lines,
    is_transfer,
    load_preset,
    preset_names,
)
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.validation import fill_defaults, find_problems


OPTIONS = tuple(FACTS)
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
    """The parser of every option of `training/finetune.py`; `description` is printed by `--help` as it is."""
    groups = [*GROUPS, PresetArguments]
    parser = Parser(
        list[Any](groups),
        headings={name: _heading(group) for group in groups for name in group.__dataclass_fields__},
        prog=typed_name("finetune.py"),
        usage="%(prog)s --task TASK --model_name_or_path MODEL --output_dir OUT [options]",
        description=as_typed(description),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help=CONFIG_HELP)
    return parser


def _heading(group: type) -> str:
    """`DataArguments` -> `data`."""
    return group.__name__.removesuffix("Arguments").lower()


def parse_preset(argv: Sequence[str], description: str | None = None) -> tuple[Preset, dict[str, Any]] | None:
    """The preset that `argv` names and the options given with it; None if `argv` names no preset.

    Raises:
        UsageError: if the options cannot work; it names all problems of the first stage that has any.
    """
    if (name := value_of("preset", argv)) is None:
        return None
    preset = load_preset(name)
    words = _words(argv)
    namespace = build_parser(description).parse_args(words)
    known = [*OPTIONS, BLOCK_SIZE]
    given = {entry: getattr(namespace, entry) for entry in given_names(words) if entry in known}
    if problems := list(out_of_bounds(facts_of(PresetArguments), vars(namespace))):
        raise UsageError(*problems)
    lines = command_lines(preset, given)
    if unused := _unused(given, lines):
        place = f"has no effect in any stage of `--preset {name}`; drop it"
        raise UsageError(*(f"`--{entry}` {place}" for entry in unused))
    # What is in the folder of a stage now may be of an older run, and is checked when the next stage begins.
    model = f"--model_name_or_path={given['model_name_or_path']}"
    *before, last = [[*words, model] for _, _, words in lines]
    for words in before:
        parse([*words, "--overwrite_output_dir=true"])
    about_folder = {"resume_from_checkpoint", "overwrite_output_dir"} & given.keys()
    parse([*last, *(f"--{entry}={given[entry]}" for entry in about_folder)])
    return preset, given


def _unused(given: dict[str, Any], lines: Sequence[tuple[Stage, Path, list[str]]]) -> list[str]:
    """The given options that no stage uses. A teacher may be given even if no stage learns from it."""
    taken = {name for _, _, words in lines for name in given_names(words)} | {"teacher_name_or_path"}
    taken |= {name for name, fact in FACTS.items() if fact.is_per_stage}
    if any(is_transfer(stage) for stage, _, _ in lines):
        taken.add(BLOCK_SIZE)
    return [name for name, value in given.items() if value is not None and name not in taken]


def parse(argv: Sequence[str], description: str | None = None) -> Recipe:
    """The recipe that `argv` describes.

    Raises:
        UsageError: if the options cannot work; it names all problems.
    """
    argv = _words(argv)
    namespace = build_parser(description).parse_args(argv)
    if problems := list(unusable_texts(vars(namespace))):  # the checks below would stumble over these
        raise UsageError(*problems)
    if getattr(namespace, BLOCK_SIZE) is not None:
        raise UsageError(f"`--{BLOCK_SIZE}` needs `--preset`; for a single stage, give `--transfer_layers` instead")
    recipe = Recipe(*(_group(group, namespace) for group in GROUPS))
    recipe.given = frozenset(given_names(argv))
    fill_defaults(recipe)
    if problems := find_problems(recipe):
        raise UsageError(*problems)
    return recipe


def _group(group: type, namespace: argparse.Namespace) -> Any:
    return group(**{name: getattr(namespace, name) for name in group.__dataclass_fields__})


def _words(argv: Sequence[str]) -> list[str]:
    return words_of(argv, OPTIONS, only_in_argv=("preset", BLOCK_SIZE), named=CONFIGS)
