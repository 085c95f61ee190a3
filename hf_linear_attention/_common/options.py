"""Options as data: everything about an option is in one place, the metadata of its dataclass field.

    learning_rate: float = option("Peak learning rate.", 5e-5, bounds=POSITIVE, on_resume=OnResume.WARNED)

The parser reads the help text and the choices; other code looks up the remaining metadata (`Facts`) by name.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_linear_attention._common.errors import one_line


class OnResume(enum.Flag):
    """What happens when a run is resumed with a changed value of an option."""

    FREE = 0  # the result does not depend on the option
    REFUSED = enum.auto()  # it would be a different run
    WARNED = enum.auto()  # the run continues, with a result that differs from that of an uninterrupted run
    INCOMPARABLE = enum.auto()  # evaluations before and after cannot be compared


@dataclass(frozen=True)
class Bounds:
    """The allowed numbers: at least `least` or above `above`, and below `below`; `such_as` is an example."""

    least: float | None = None
    above: float | None = None
    below: float | None = None
    such_as: float | None = None

    def hold(self, value: float) -> bool:
        """Whether `value` is allowed; NaN and infinity are not."""
        checks = (
            not isinstance(value, float) or math.isfinite(value),
            self.least is None or value >= self.least,
            self.above is None or value > self.above,
            self.below is None or value < self.below,
        )
        return all(checks)

    def __str__(self) -> str:
        example = "" if self.such_as is None else f", such as {self.such_as}"
        if self.below is None:
            return (f"{self.least} or more" if self.above is None else f"a number above {self.above}") + example
        if self.above is None:
            return f"a number from {self.least} to below {self.below}{example}"
        return f"a number between {self.above} and {self.below}{example}"


COUNT = Bounds(least=1)
BYTES = Bounds(least=1, below=2**50)
SIZE = Bounds(least=1, below=2**20)  # of a batch and the like: more would exhaust any memory
POSITIONS = Bounds(least=1, below=2**31)  # as in any config.json
SEED = Bounds(least=0, below=2**32)  # what NumPy accepts
NOT_NEGATIVE = Bounds(least=0)
POSITIVE = Bounds(above=0)
BELOW_ONE = Bounds(least=0, below=1)
PROBABILITY = Bounds(above=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about an option other than its type, its default, its choices and its help text.

    Args:
        bounds: the numbers that the option allows.
        needs: options of which at least one must be set; otherwise this option has no effect.
        tasks: the values of `--task` for which the option has an effect; empty for all.
        off: the value, besides None and false, that switches the option off.
        on_resume: what happens when a run is resumed with another value, or a function of all values that returns this.
            By default another value is refused, because an option is assumed to change the result.
        for_evaluation: whether the option has an effect when a model is only evaluated.
        is_path: whether the value may be a file or folder, which is compared as an absolute path.
        is_per_stage: whether every stage of a preset has its own value.
        group: the heading under which `--help` lists the option.
    """

    bounds: Bounds | None = None
    needs: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    off: Any = None
    on_resume: OnResume | Callable[[Mapping[str, Any]], OnResume] = OnResume.REFUSED
    for_evaluation: bool = False
    is_path: bool = False
    is_per_stage: bool = False
    group: str | None = None

    def meaning_on_resume(self, values: Mapping[str, Any]) -> OnResume:
        """What happens when a run whose options have these `values` is resumed with another value of this option."""
        return self.on_resume(values) if callable(self.on_resume) else self.on_resume

    def is_on(self, value: Any) -> bool:
        """Whether this value switches the option on."""
        return value is not None and value is not False and not (self.off is not None and value == self.off)


def option(text: str, default: Any = dataclasses.MISSING, choices: Sequence[str] | None = None, **facts: Any) -> Any:
    """A dataclass field for an option, which is required unless it has a `default`.

    Args:
        text: the help text.
        choices: the allowed values, if the type does not tell them.
        **facts: see `Facts`.
    """
    metadata = {"help": text, "facts": Facts(**facts), **({"choices": choices} if choices else {})}
    return dataclasses.field(default=default, metadata=metadata)


def facts_of(*groups: type) -> dict[str, Facts]:
    """The facts about every option of these dataclasses, by name."""
    return {entry.name: entry.metadata["facts"] for group in groups for entry in dataclasses.fields(group)}


def out_of_bounds(facts: Mapping[str, Facts], values: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for every number that is out of the bounds of its option."""
    for name, fact in facts.items():
        value = values[name]
        if fact.bounds is not None and value is not None and not fact.bounds.hold(value):
            yield f"`--{name} {value}`: it must be {fact.bounds}"


PATH_NAMES = ("folder", "_path", "_file", "_dir", "_folder", "dataset_name", "tokenizer_name", "_checkpoint")


def unusable_texts(values: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for every option that is an empty text, or a path that no file system can have."""
    for name, value in values.items():
        if value == "":
            yield f"`--{name}` is empty; give a value, or leave it out"
        elif isinstance(value, str) and name.endswith(PATH_NAMES) and (problem := _path_problem(value)):
            shown = value if len(value) <= 500 else f"{value[:60]}..."
            yield f"`--{name} {shown.encode(errors='replace').decode()}` is no usable name: {problem}"


def _path_problem(text: str) -> str | None:
    """Why no file can have this path, or no temporary folder can be beside it; or None."""
    if "\0" in text or any(len(part.encode(errors="replace")) > 225 for part in text.split("/")):
        return "a part of it has more than 225 bytes, or a NUL"
    try:
        text.encode()
        os.stat(text)
    except UnicodeEncodeError:
        return "it is not UTF-8"
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            return one_line(error.strerror)
        if text.startswith("~") and os.path.expanduser(text).startswith("~"):
            return f"there is no user {text.split('/')[0][1:]}"
    return None


def without_needs(facts: Mapping[str, Facts], values: Mapping[str, Any], given: Collection[str]) -> Iterator[str]:
    """One sentence for every option in `given` that has no effect because another option is missing."""
    for name in sorted(given):
        fact = facts.get(name)
        if fact is None or not fact.needs or not fact.is_on(values[name]):
            continue
        if not any(facts[other].is_on(values[other]) for other in fact.needs):
            got = f"`--{name}`" if values[name] is True else f"`--{name} {values[name]}`"
            yield f"{got} needs {_listed(fact.needs)}; give that as well, or leave out `--{name}`"


def without_task(facts: Mapping[str, Facts], given: Collection[str], task: str) -> Iterator[str]:
    """One sentence for every option in `given` that has no effect for this `--task`."""
    for name in sorted(given):
        tasks = facts[name].tasks if name in facts else ()
        if tasks and task not in tasks:
            yield f"`--{name}` has no effect for `--task {task}`; leave it out, or use {' or '.join(tasks)}"


def _listed(names: Sequence[str]) -> str:
    return " or ".join(f"`--{name}`" for name in names)
