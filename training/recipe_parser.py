"""From `sys.argv` and an optional YAML file to a checked `Recipe`; every problem ends in one `UsageError`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hf_linear_attention._common.command_line import CONFIG_HELP, Parser, given_names, value_of, words_of
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.training.presets.preset import BLOCK_SIZE, Preset, command_lines, load_preset, preset_names
from hf_linear_attention.training.recipe import GROUPS, Recipe
from hf_linear_attention.training.validation import fill_defaults, find_problems


OPTIONS = tuple(name for group in GROUPS for name in group.__dataclass_fields__)
PRESET_HELP = f"Recipe of several stages: {', '.join(preset_names())}; max_train_tokens is shared out between them."
BLOCK_HELP = "With --preset: attention transfer of K layers after the other, for models larger than memory."


def build_parser(description: str | None = None) -> Parser:
    parser = Parser(
        list[Any](GROUPS),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help=CONFIG_HELP)
    parser.add_argument("--preset", metavar="NAME", help=PRESET_HELP)
    parser.add_argument(f"--{BLOCK_SIZE}", metavar="K", type=int, help=BLOCK_HELP)
    return parser


def parse_preset(argv: Sequence[str], description: str | None = None) -> tuple[Preset, dict[str, Any]] | None:
    """The preset that `argv` names and the options given beside it; None without one.

    Raises:
        UsageError: with all problems of the first command line that one of its stages would have.
    """
    if (name := value_of("preset", argv)) is None:
        return None
    preset = load_preset(name)
    words = _words(argv)
    namespace = build_parser(description).parse_args(words)
    given = {option: getattr(namespace, option) for option in given_names(words) if option in [*OPTIONS, BLOCK_SIZE]}
    if given.get(BLOCK_SIZE, 1) < 1:
        raise UsageError(f"`--{BLOCK_SIZE} {given[BLOCK_SIZE]}`: allowed is 1 or more")
    *before, last = [words for _, _, words in command_lines(preset, given)]
    for words in before:
        parse([*words, "--overwrite_output_dir=true"])
    about_folder = {"resume_from_checkpoint", "overwrite_output_dir"} & given.keys()
    parse([*last, *(f"--{option}={given[option]}" for option in about_folder)])
    return preset, given


def parse(argv: Sequence[str], description: str | None = None) -> Recipe:
    """The recipe that `argv` describes. Raises `UsageError` with all problems found."""
    argv = _words(argv)
    namespace = build_parser(description).parse_args(argv)
    if getattr(namespace, BLOCK_SIZE) is not None:
        raise UsageError(f"`--{BLOCK_SIZE}` needs `--preset`; for one stage give `--transfer_layers`")
    recipe = Recipe(*(_group(group, namespace) for group in GROUPS))
    recipe.given = frozenset(given_names(argv))
    fill_defaults(recipe)
    if problems := find_problems(recipe):
        raise UsageError(*problems)
    return recipe


def _group(group: type, namespace: argparse.Namespace) -> Any:
    return group(**{name: getattr(namespace, name) for name in group.__dataclass_fields__})


def _words(argv: Sequence[str]) -> list[str]:
    return words_of(argv, OPTIONS, only_in_argv=("preset", BLOCK_SIZE))
