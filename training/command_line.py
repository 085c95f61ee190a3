"""From `sys.argv` and an optional YAML file to a checked `Recipe`; every problem ends in one `UsageError`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from hf_linear_attention.training.arguments import GROUPS, Recipe
from hf_linear_attention.training.errors import UsageError
from hf_linear_attention.training.presets import BLOCK_SIZE, Preset, command_lines, load_preset, preset_names
from hf_linear_attention.training.validation import fill_defaults, find_problems


PRESET_HELP = f"Recipe of several stages: {', '.join(preset_names())}; max_train_tokens is shared out between them."
BLOCK_HELP = "With --preset: attention transfer of K layers after the other, for models larger than memory."
CONFIG_HELP = "YAML file with defaults for these options; options on the command line win."


class Parser(HfArgumentParser):
    """HfArgumentParser that knows no abbreviations and raises instead of printing a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError([message])


def build_parser(description: str | None = None) -> Parser:
    parser = Parser(
        list[Any](GROUPS),
        allow_abbrev=False,
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
    if (name := _value_of("preset", argv)) is None:
        return None
    preset = load_preset(name)
    words, options = _words(argv)
    namespace = build_parser(description).parse_args(words)
    given = {option: getattr(namespace, option) for option in _given(words) if option in [*options, BLOCK_SIZE]}
    if given.get(BLOCK_SIZE, 1) < 1:
        raise UsageError([f"`--{BLOCK_SIZE} {given[BLOCK_SIZE]}`: allowed is 1 or more"])
    *before, last = [words for _, _, words in command_lines(preset, given)]
    for words in before:
        parse([*words, "--overwrite_output_dir=true"])
    about_folder = {"resume_from_checkpoint", "overwrite_output_dir"} & given.keys()
    parse([*last, *(f"--{option}={given[option]}" for option in about_folder)])
    return preset, given


def parse(argv: Sequence[str], description: str | None = None) -> Recipe:
    """The recipe that `argv` describes. Raises `UsageError` with all problems found."""
    argv, _ = _words(argv)
    namespace = build_parser(description).parse_args(argv)
    if getattr(namespace, BLOCK_SIZE) is not None:
        raise UsageError([f"`--{BLOCK_SIZE}` needs `--preset`; for one stage give `--transfer_layers`"])
    recipe = Recipe(*(_group(group, namespace) for group in GROUPS))
    recipe.given = frozenset(_given(argv))
    fill_defaults(recipe)
    if problems := find_problems(recipe):
        raise UsageError(problems)
    return recipe


def _group(group: type, namespace: argparse.Namespace) -> Any:
    return group(**{name: getattr(namespace, name) for name in group.__dataclass_fields__})


def _words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """`argv` after the words of its `--config` file, and the names of all options."""
    options = [name for group in GROUPS for name in group.__dataclass_fields__]
    words = [*_yaml_arguments(_value_of("config", argv), options), *argv]
    _refuse_unknown(words, options)
    return words, options


def _value_of(name: str, argv: Sequence[str]) -> str | None:
    parser = Parser([], allow_abbrev=False, add_help=False)
    parser.add_argument(f"--{name}")
    return getattr(parser.parse_known_args(argv)[0], name)


def _given(argv: Sequence[str]) -> list[str]:
    """Option names in `argv`, in the spelling of the dataclass fields."""
    return [word[2:].split("=", 1)[0].replace("-", "_") for word in argv if word.startswith("--")]


def _yaml_arguments(path: str | None, options: Sequence[str]) -> list[str]:
    """The YAML file as command-line words, so that both go through the same types and checks."""
    if path is None:
        return []
    settings = _read_yaml(path)
    unknown = [f"`{key}` in {path} is not an option{_suggestion(str(key), options)}" for key in settings]
    problems = [text for key, text in zip(settings, unknown, strict=True) if key not in options]
    problems += [
        f"`{key}` in {path} is {value!r}; allowed is one plain value"
        for key, value in settings.items()
        if key in options and isinstance(value, (list, dict))
    ]
    if problems:
        raise UsageError([*problems[:-1], f"{problems[-1]} (`--help` lists the options)"])
    return [f"--{key}={value}" for key, value in settings.items() if value is not None]


def _read_yaml(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise UsageError([f"`--config {path}`: there is no such file"])
    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UsageError([f"`--config {path}` is not valid YAML: {' '.join(str(error).split())}"]) from error
    if not isinstance(settings, dict):
        raise UsageError([f"`--config {path}` holds {type(settings).__name__}; allowed is a mapping of option: value"])
    return settings


def _refuse_unknown(argv: Sequence[str], options: Sequence[str]) -> None:
    known = {*options, "config", "preset", BLOCK_SIZE, "help"}
    unknown = [name for name in _given(argv) if name not in known]
    if unknown:
        named = [f"`--{name}` is not an option{_suggestion(name, options)}" for name in unknown]
        raise UsageError([*named[:-1], f"{named[-1]} (`--help` lists the options; abbreviations are not allowed)"])


def _suggestion(name: str, options: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, options, n=1)
    return f", did you mean `{close[0]}`?" if close else ""
