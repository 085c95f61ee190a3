"""The parts that both commands share: reading options and a YAML file with their defaults, and reporting errors."""

from __future__ import annotations

import argparse
import contextlib
import contextvars
import difflib
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser

from hf_linear_attention._common.errors import RunError, TerminatedError, UsageError, one_line
from hf_linear_attention._common.options import unusable_texts
from hf_linear_attention._common.reading import require_permission
from hf_linear_attention._common.safe_yaml import load_yaml


logger = logging.getLogger(__name__)

DEBUG = "HF_LINEAR_ATTENTION_DEBUG"
# The libraries of the extra `train`, which only training, evaluation and data files need.
TRAINING_LIBRARIES = ("accelerate", "datasets", "evaluate")
CONFIG_HELP = "YAML file with defaults for these options; options on the command line take precedence."
PROGRAM = "hf-linear-attention"
# The scripts of a checkout, and what one types for them where the package is installed.
SUBCOMMANDS = {"python conversion/convert_checkpoint.py": "convert", "python training/finetune.py": "finetune"}
_TYPED: contextvars.ContextVar[str | None] = contextvars.ContextVar("the command as it was typed", default=None)


@contextlib.contextmanager
def typed_as(command: str) -> Iterator[None]:
    """A context in which errors, hints and help name this command instead of a script."""
    token = _TYPED.set(command)
    try:
        yield
    finally:
        _TYPED.reset(token)


def typed_name(script: str) -> str:
    """The command as the user typed it: `hf-linear-attention convert`, an installed script, or else `script`."""
    started = Path(sys.argv[0]).name
    return _TYPED.get() or (started if started.startswith(f"{PROGRAM}-") else script)


def as_typed(text: str | None) -> str | None:
    """A help text in the words of the command that was typed; unchanged for a script of a checkout."""
    if text is None or not typed_name("").startswith(PROGRAM):
        return text
    for script, name in SUBCOMMANDS.items():
        text = text.replace(script, f"{PROGRAM} {name}")
    # A launcher takes a module too, and `--config` the name of a file that the package contains.
    text = text.replace("training/finetune.py", "-m hf_linear_attention.training.finetune")
    return re.sub(r"--config training/configs/(\w+)\.yaml", r"--config \1", text)


class Parser(HfArgumentParser):
    """An HfArgumentParser that accepts no abbreviations and raises an error instead of printing the usage.

    Args:
        headings: for each option, the heading under which `--help` lists it, if its facts name no group.
        order: the headings in the order of `--help`; others follow.
    """

    def __init__(
        self, *arguments: Any, headings: Mapping[str, str] | None = None, order: Sequence[str] = (), **options: Any
    ) -> None:
        self.headings, self.order, self.groups = dict(headings or {}), list(order), dict[str, Any]()
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def add_argument(self, *names: Any, facts: Any = None, **options: Any) -> argparse.Action:
        """As in argparse, under the heading of the option, and without its `facts`, which argparse does not know."""
        heading = getattr(facts, "group", None) or self.headings.get(str(names[0]).removeprefix("--"))
        if heading is None:
            return super().add_argument(*names, **options)
        for name in [*self.order, heading]:
            if name not in self.groups:
                self.groups[name] = self.add_argument_group(name)
        return self.groups[heading].add_argument(*names, **options)

    def parse_args_into_dataclasses(self, *arguments: Any, **options: Any) -> Any:
        """As in transformers, with a `UsageError` for words that belong to no option."""
        try:
            return super().parse_args_into_dataclasses(*arguments, **options)
        except ValueError as error:
            raise (
                error if isinstance(error, UsageError) else UsageError(f"{error} (`--help` lists the options)")
            ) from None

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, with every option that there is not in one `UsageError`."""
        known = [name[2:].replace("-", "_") for action in self._actions for name in action.option_strings]
        if unknown := [name for name in given_names(sys.argv[1:] if args is None else args) if name not in known]:
            raise UsageError(*(f"`--{name}` is not an option{_suggestion(name, known)}" for name in unknown))
        values = super().parse_args(args, namespace)
        if problems := list(unusable_texts(vars(values))):
            places = [action.dest for action in self._actions if not action.option_strings]
            for place in places:  # what stands without an option
                problems = [problem.replace(f"`--{place} ", f"`{place.upper()} ") for problem in problems]
            raise UsageError(*problems)
        return values

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` instead of printing the usage."""
        raise UsageError(f"{message} (`--help` lists the options)")


def value_of(name: str, argv: Sequence[str]) -> str | None:
    """The value of one option in `argv`, ignoring all others; None if the option is missing."""
    parser = Parser([], add_help=False)
    parser.add_argument(f"--{name}")
    return getattr(parser.parse_known_args(argv)[0], name)


def given_names(argv: Sequence[str]) -> list[str]:
    """The names of the options in `argv`, spelled like the dataclass fields."""
    return [word[2:].split("=", 1)[0].replace("-", "_") for word in argv if word.startswith("--")]


def words_of(
    argv: Sequence[str],
    names: Sequence[str],
    *,
    only_in_argv: Sequence[str] = (),
    joins_lists: bool = False,
    named: Path | None = None,
) -> list[str]:
    """The options of the YAML file that `--config` names, as words, followed by `argv`: one parser checks them all.

    Args:
        names: the options that the file may contain.
        only_in_argv: further options that only the command line may contain, besides `config` and `help`.
        joins_lists: whether a list in the file becomes one value with commas; otherwise it is refused.
        named: a folder with files that `--config` may name without their path.

    Raises:
        UsageError: naming every unknown option at once.
    """
    words = [*_yaml_words(_config_path(value_of("config", argv), named), names, joins_lists), *argv]
    known = [*names, *only_in_argv, "config", "help"]
    if unknown := [name for name in given_names(words) if name not in known]:
        raise UsageError(*(f"`--{name}` is not an option{_suggestion(name, known)}" for name in unknown))
    return words


def _config_path(path: str | None, named: Path | None) -> str | None:
    """The file that `--config` names: a path, or the name of a file in the folder `named`.

    Raises:
        UsageError: if there is no such file.
    """
    if path is None or os.path.isfile(path):
        return path
    known = {} if named is None else {file.stem: str(file) for file in sorted(named.glob("*.yaml"))}
    if (name := Path(path).name.removesuffix(".yaml")) in known:
        return known[name]
    names = f", and no file of the package has this name; it has {', '.join(known)}" if known else ""
    raise UsageError(f"`--config {path}`: there is no such file{names}")


def _yaml_words(path: str | None, names: Sequence[str], joins_lists: bool) -> list[str]:
    if path is None:
        return []
    values = _read_yaml(path)
    problems = [
        f"`{name}` in {path} is not an option{_suggestion(str(name), names)}" for name in values if name not in names
    ]
    if not joins_lists:
        problems += [
            f"`{name}` in {path} is {value!r}; give a single value"
            for name, value in values.items()
            if isinstance(value, (list, dict))
        ]
    if problems:
        raise UsageError(*problems)
    return option_words(values, f" in {path}")


def option_words(values: Mapping[str, Any], place: str = "") -> list[str]:
    """Options as words: a list with commas, values by layer as `0-3:64,4-:16`; None leaves an option out.

    Args:
        place: of the options, for errors, as in " in recipe.yaml".

    Raises:
        UsageError: for lists in lists, and for a dict whose keys are no layers.
    """
    words = []
    for name, value in values.items():
        parts = [value]
        if isinstance(value, Mapping):
            parts = [part for pair in value.items() for part in pair]
            text = ",".join(f"{layers}:{part}" for layers, part in value.items())
            if not all(re.fullmatch(r"[\d -]+", str(layers)) for layers in value):
                raise UsageError(f"`{name}`{place} is {dict(value)!r}; give a single value, or values by layer")
        elif isinstance(value, (list, tuple)):
            parts, text = list(value), ",".join(map(str, value))
        else:
            text = str(value)
        if any(isinstance(part, (Mapping, list, tuple, set)) for part in parts):
            raise UsageError(
                f"`{name}`{place} is {value!r}, which has lists in it; give it as on the command line, in one text"
            )
        if value is not None:
            words.append(f"--{name}={text}")
    return words


def _read_yaml(path: str) -> dict[Any, Any]:
    try:
        require_permission(Path(path))
        values = load_yaml(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"`--config {path}` is not valid YAML: {' '.join(str(error).split())}") from error
    if values is None:  # the file is empty or has only comments
        return {}
    if not isinstance(values, dict):
        raise UsageError(f"`--config {path}` contains a {type(values).__name__}; it must map options to values")
    return values


def _suggestion(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"; did you mean `{close[0]}`?"
    return "; `--help` lists the options, and abbreviations are not allowed"


def run_command(name: str, action: Callable[[], object], *, stopped: str, speaks: bool = True) -> int:
    """Run `action`, report any error as one line on stderr, and return the exit code of the command.

    The code is 2 for a request that cannot be met, 1 (or the error's own `exit_code`) for a failure, 130 after Ctrl-C,
    and 143 after SIGTERM, which ends `action` as Ctrl-C does. With HF_LINEAR_ATTENTION_DEBUG=1, an error is raised with
    its traceback.

    Args:
        name: the name of the script, in place of which errors show the command that was typed (`typed_name`).
        stopped: what to tell a user who has stopped the command.
        speaks: whether this process reports the errors that every process of a launch has in common.
    """
    name = typed_name(name)
    try:
        with _terminable():
            action()
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has enough; what Python would still print there must not fail
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    # This is the outermost level: any error is reported in one line instead of a traceback.
    except Exception as error:
        return _report(name, error, speaks)
    except TerminatedError as error:
        return _say(f"{name}: terminated; {str(error) or stopped}", 143, speaks)
    except KeyboardInterrupt:
        return _say(f"{name}: interrupted; {stopped}", 130, speaks)
    return 0


def ignore_interrupts() -> None:
    """Ignore Ctrl-C from now on: the command is done, and Python would end in a traceback while it cleans up."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def not_essential(what: str) -> Iterator[None]:
    """A context for what accompanies a finished model: if it cannot be written, that is said, and the model is kept."""
    try:
        yield
    except Exception as error:  # whatever it is, it must not cost the weights
        logger.warning("%s could not be written (%s: %s); the model is complete without it", what,
                       type(error).__name__, one_line(error))  # fmt: skip


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """A context in which SIGTERM raises `TerminatedError`; afterwards it has its earlier effect."""
    if threading.current_thread() is not threading.main_thread():  # other threads cannot set signal handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: object) -> None:
    raise TerminatedError("")


def _report(name: str, error: Exception, speaks: bool) -> int:
    if os.environ.get(DEBUG):
        raise error
    if isinstance(error, ModuleNotFoundError) and error.name in TRAINING_LIBRARIES:
        error = UsageError(
            f"this needs the library `{error.name}`, which is not installed; install the libraries for training and "
            'data files with `pip install "hf-linear-attention[train]"`'
        )
    # what only this process may have met
    is_expected = isinstance(error, (UsageError, RunError, OSError))
    if isinstance(error, MemoryError) or re.search("can't allocate memory|out of memory", str(error)):
        error = RunError(f"not enough memory ({one_line(error)[:200]}); choose smaller batches, lengths or models")
    message = one_line(error)
    hint = (
        ""
        if isinstance(error, (UsageError, RunError, OSError))
        else f" ({type(error).__name__}; {DEBUG}=1 shows where)"
    )
    word = "error" if isinstance(error, UsageError) else "failed"
    return _say(f"{name}: {word}: {message}{hint}", getattr(error, "exit_code", 1), speaks or not is_expected)


def _say(line: str, code: int, speaks: bool) -> int:
    line = re.sub(r"\S{500,}", lambda found: f"{found[0][:200]}...", line)  # a name of thousands of characters
    if speaks:
        sys.stderr.write(f"{line}\n")
    return code
