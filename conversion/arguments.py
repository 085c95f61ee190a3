"""The options of `convert_checkpoint.py`: a dataclass for the script, and one flag per option of every mechanism."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from conversion.errors import UsageError
from hf_linear_attention.configuration_linear_attention import DROPPABLE, parse_layers
from hf_linear_attention.mechanisms import MECHANISMS


DTYPES = ("auto", "float32", "bfloat16", "float16")


def option(text: str, default: Any = None, choices: Sequence[str] | None = None) -> Any:
    """A dataclass field with its help text (and the values that argparse allows)."""
    return field(default=default, metadata={"help": text, **({"choices": choices} if choices else {})})


@dataclass
class ConversionArguments:
    model_name_or_path: str = field(metadata={"help": "the softmax checkpoint: a folder or a hub name"})
    output_dir: str | None = option("the folder to write; may be left out with --dry_run or --spectrum")
    attention: str = option("the mechanism that replaces softmax", "linear", sorted(MECHANISMS))
    layers: str = option("the attention layers to convert: all, full_attention, none, or a list as 0,2,4-7", "all")
    drop: str | None = option(f"features of the attention that may be lost, a list out of {', '.join(DROPPABLE)}")
    cross_attention: bool = option("convert the cross-attention of an encoder-decoder too", False)
    dtype: str = option("of the weights written; auto keeps what the checkpoint has", "auto", DTYPES)
    calibration_file: str | None = option(
        "real inputs for --features favor++, which is fitted to them, and for --spectrum: .txt, .jsonl, .csv or .tsv "
        "(column `text`), or for a vision model a folder of images (default: built-in sentences)"
    )
    calibration_tokens: int | None = option("tokens or patches of it to calibrate on (default 4096)")
    spectrum: bool = option(
        "print, by layer, how near softmax attention is to a low rank, and the error of the untrained mechanism; by "
        "head in conversion_report.json. Without --output_dir only that",
        False,
    )
    seed: int | None = option("of everything drawn at random (default 0)")
    dry_run: bool = option("print what would be done and write nothing", False)
    no_verify: bool = option("do not compare the result with its source", False)
    overwrite: bool = option("replace an existing --output_dir, once the new one is complete", False)
    trust_remote_code: bool = option("run Python code that the checkpoint itself brings along", False)
    allow_pickle: bool = option("read .bin files where there are no safetensors", False)
    list_architectures: bool = option("print the tested architectures, and do nothing else", False)
    model_class: str | None = option("stock or Auto class to convert as; default: the one the checkpoint names")


def mechanism_arguments() -> type:
    """A dataclass with the options of all mechanisms, each None unless given: what fits is for the settings to say."""
    own = {entry.name for entry in fields(ConversionArguments)}
    users: dict[str, list[str]] = {}
    for mechanism, attention in MECHANISMS.items():
        for name in attention.options:
            users.setdefault(name, []).append(mechanism)
    generated = []
    for name, mechanisms in users.items():
        if name in own:
            continue
        entry = MECHANISMS[mechanisms[0]].options[name]
        choices = f": {', '.join(entry.choices)}" if entry.choices else ""
        several = "; or one a layer: 96,64,..." if entry.is_per_layer else ""
        text = f"{entry.help}{choices}{several} (of {', '.join(mechanisms)})"
        generated.append((name, (str if entry.is_per_layer else entry.kind) | None, option(text)))
    return make_dataclass("MechanismArguments", generated)


class Parser(HfArgumentParser):
    """HfArgumentParser that knows no abbreviations and raises instead of printing a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`--help` lists the options)")


@dataclass(frozen=True)
class Request:
    """A parsed command line: the script's own options, and the `linear_attention` settings it asks for."""

    arguments: ConversionArguments
    settings: dict[str, Any]


def parse(argv: Sequence[str], description: str | None = None) -> Request:
    """The request that `argv` and the file of its `--config` make.

    Raises:
        UsageError: naming every unknown option at once, or the first value of the wrong type.
    """
    groups = [ConversionArguments, mechanism_arguments()]
    names = [entry.name for group in groups for entry in fields(group)]
    parser = Parser(
        groups,  # type: ignore[arg-type]  # generated at run time, which the stub does not foresee
        allow_abbrev=False,
        prog="convert_checkpoint.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="defaults for these options; the command line wins")
    words = [*_yaml_words(_config_path(argv), names), *argv]
    _refuse_unknown(words, names)
    arguments, mechanism, _ = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    return Request(arguments, _settings(arguments, mechanism))


def _settings(arguments: ConversionArguments, mechanism: Any) -> dict[str, Any]:
    given = {name: value for name, value in vars(mechanism).items() if value is not None}
    given |= {name: parse_per_layer(name, text) for name, text in given.items() if _is_per_layer(name)}
    # The seed serves every mechanism; one that draws its function from it also stores it.
    if arguments.seed is not None and "seed" in MECHANISMS[arguments.attention].options:
        given["seed"] = arguments.seed
    try:
        layers = parse_layers(arguments.layers)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if arguments.drop is not None:
        given["drop"] = [feature.strip() for feature in arguments.drop.split(",")]
    if arguments.cross_attention:
        given["cross_attention"] = True
    return {"mechanism": arguments.attention, "layers": layers, **given}


def _is_per_layer(name: str) -> bool:
    return any(name in mechanism.options and mechanism.options[name].is_per_layer for mechanism in MECHANISMS.values())


def parse_per_layer(name: str, text: str) -> int | list[int]:
    """`128` -> 128 for every layer; `128,96,64` -> one number a layer.

    Raises:
        UsageError: if the text is neither.
    """
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError as error:
        message = f"`--{name} {text}`: give a whole number, or one a layer such as 128,96,64"
        raise UsageError(message) from error
    return values if "," in text else values[0]


def _config_path(argv: Sequence[str]) -> str | None:
    parser = Parser([], allow_abbrev=False, add_help=False)
    parser.add_argument("--config")
    return parser.parse_known_args(argv)[0].config


def _yaml_words(path: str | None, names: Sequence[str]) -> list[str]:
    """The YAML file as command-line words, so that both go through the same types and checks."""
    if path is None:
        return []
    if not Path(path).is_file():
        raise UsageError(f"`--config {path}`: there is no such file")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise UsageError(f"`--config {path}` is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UsageError(f"`--config {path}` holds a {type(values).__name__}; it must map options to values")
    if unknown := [str(name) for name in values if name not in names]:
        raise UsageError(*(f"`{name}` in {path} is not an option{_suggestion(name, names)}" for name in unknown))
    return [f"--{name}={_word(value)}" for name, value in values.items() if value is not None]


def _word(value: Any) -> str:
    return ",".join(str(item) for item in value) if isinstance(value, list) else str(value)


def _refuse_unknown(words: Sequence[str], names: Sequence[str]) -> None:
    known = {*names, "config", "help"}
    given = [word[2:].split("=", 1)[0].replace("-", "_") for word in words if word.startswith("--")]
    if unknown := [name for name in given if name not in known]:
        raise UsageError(*(f"`--{name}` is not an option{_suggestion(name, names)}" for name in unknown))


def _suggestion(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean `{close[0]}`?" if close else "; `--help` lists them"
