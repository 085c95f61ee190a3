"""The parts that both commands share: reading options and a YAML file with their defaults, and reporting errors."""

from __future__ import annotations

import argparse
import contextlib
import contextvars
import dataclasses
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

from hf_linear_attention._common.errors import RunError, TerminatedError, UsageError, is_out_of_memory, one_line
from hf_linear_attention._common.options import NOTHING, kinds_of, typed_options, unknown_option, unusable_texts
from hf_linear_attention._common.reading import require_permission
from hf_linear_attention._common.safe_yaml import load_yaml


logger = logging.getLogger(__name__)

DEBUG = "HF_LINEAR_ATTENTION_DEBUG"
# The libraries of the extra `train`, which only training, evaluation and data files need.
TRAINING_LIBRARIES = ("accelerate", "datasets", "evaluate")
CONFIG_HELP = "YAML file with defaults for these options; options on the command line take precedence."
PROGRAM = "hf-linear-attention"
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


class Parser(argparse.ArgumentParser):
    """A parser that accepts no abbreviations and raises a `UsageError` instead of printing the usage.

    Args:
        groups: dataclasses whose fields are options. Their values stay texts; `given_options` gives them their types.
        order: the headings in the order of `--help`; others follow.
        removed: options that there are no more, and what to do instead.
        **options: as in argparse.
    """

    def __init__(
        self,
        groups: Sequence[type] = (),
        *,
        order: Sequence[str] = (),
        removed: Mapping[str, str] = NOTHING,
        **options: Any,
    ) -> None:
        self.removed = removed
        super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **options})
        headings = {heading: self.add_argument_group(heading) for heading in order}
        for group in groups:
            kinds = kinds_of(group)
            for entry in dataclasses.fields(group):
                # `DataArguments` -> `data`
                heading = entry.metadata["facts"].group or group.__name__.removesuffix("Arguments").lower()
                if heading not in headings:
                    headings[heading] = self.add_argument_group(heading)
                _add_option(headings[heading], entry, *kinds[entry.name])
        if groups:
            self.add_argument("--config", metavar="FILE.yaml", help=CONFIG_HELP, default=argparse.SUPPRESS)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in argparse, with every option that there is not in one `UsageError`, and no text that none can use."""
        known = [name[2:].replace("-", "_") for action in self._actions for name in action.option_strings]
        words = sys.argv[1:] if args is None else args
        given = [word[2:].split("=", 1)[0].replace("-", "_") for word in words if word.startswith("--")]
        if unknown := [name for name in given if name not in known]:
            raise UsageError(*(unknown_option(name, known, self.removed) for name in unknown))
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


def _add_option(heading: Any, entry: dataclasses.Field, kind: Any, choices: Sequence[str] | None) -> None:
    text = entry.metadata["help"]
    names = dict.fromkeys([f"--{entry.name}", f"--{entry.name.replace('_', '-')}"])
    metavar = f"{{{','.join(choices)}}}" if choices else entry.name.upper()
    values: dict[str, Any] = {"nargs": "?", "const": True} if kind is bool else {}
    heading.add_argument(*names, metavar=metavar, help=text, default=argparse.SUPPRESS, **values)


def given_options(
    parser: Parser, groups: Sequence[type], argv: Sequence[str], named: Path | None = None
) -> dict[str, Any]:
    """The options that `argv` gives, and those that it does not from the YAML file of its `--config`, in their types.

    `named` is a folder with files that `--config` may name without their path. UsageError names every option that there
    is not, and every value that cannot be used.
    """
    values, kinds = vars(parser.parse_args(list(argv))), kinds_of(*groups)
    path = _config_path(values.pop("config", None), named)
    from_file = {} if path is None else typed_options(_read_yaml(path), kinds, f" in {path}", parser.removed)
    return from_file | typed_options(values, kinds, removed=parser.removed)


def _config_path(path: str | None, named: Path | None) -> str | None:
    """The file that `--config` names, by its path or its name in the folder `named`; UsageError if there is none."""
    if path is None or os.path.isfile(path):
        return path
    known = {} if named is None else {file.stem: str(file) for file in sorted(named.glob("*.yaml"))}
    if (name := Path(path).name.removesuffix(".yaml")) in known:
        return known[name]
    names = f", and no file of the package has this name; it has {', '.join(known)}" if known else ""
    raise UsageError(f"`--config {path}`: there is no such file{names}")


def _read_yaml(path: str) -> dict[Any, Any]:
    try:
        require_permission(Path(path))
        values = load_yaml(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"`--config {path}` is not valid YAML: {' '.join(str(error).split())}") from error
    if values is None:
        raise UsageError(f"`--config {path}` has no options: it is empty, or has only comments")
    if not isinstance(values, dict):
        raise UsageError(f"`--config {path}` contains a {type(values).__name__}; it must map options to values")
    return values


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


def let_threads_sleep() -> None:
    """Have torch's threads sleep while they wait for each other; it has to be called before torch is loaded.

    By default they spin: beside other work, two threads took four times the CPU seconds of one, and of the wall clock.
    Where torch is there already, as in a user's own process, nothing changes.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def is_first_process() -> bool:
    """Whether this is the first of the processes that `accelerate launch` has started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


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
    # Others are what only this process may have met.
    is_expected = isinstance(error, (UsageError, RunError, OSError))
    if is_out_of_memory(error):
        error = RunError(
            f"not enough memory ({one_line(error)[:200]}); choose smaller batches, shorter rows "
            "(`finetune --max_length`) or a smaller model"
        )
    is_ours = isinstance(error, (UsageError, RunError, OSError))
    hint = "" if is_ours else f" ({type(error).__name__}; {DEBUG}=1 shows where)"
    word = "error" if isinstance(error, UsageError) else "failed"
    line = f"{name}: {word}: {one_line(error)}{hint}{_version_note(error)}"
    return _say(line, getattr(error, "exit_code", 1), speaks or not is_expected)


def _version_note(error: Exception) -> str:
    """What `untested_version` says, unless the error is one of arguments alone."""
    if "transformers" not in sys.modules or (isinstance(error, UsageError) and error.__cause__ is None):
        return ""
    from ..attention.transformers_internals import untested_version  # imports torch, which transformers has done too

    note = untested_version()
    return f". {note}" if note else ""


def _say(line: str, code: int, speaks: bool) -> int:
    line = re.sub(r"\S{500,}", lambda found: f"{found[0][:200]}...", line)  # a name of thousands of characters
    if speaks:
        sys.stderr.write(f"{line}\n")
    return code
