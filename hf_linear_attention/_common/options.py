"""Options as data: everything about an option is in one place, the metadata of its dataclass field.

    learning_rate: float = option("Peak learning rate.", 5e-5, bounds=POSITIVE, on_resume=OnResume.WARNED)

The parser reads the help text and the choices; other code looks up the remaining metadata (`Facts`) by name. Whatever
names options (a command line, YAML, a dict of Python, a stage of a preset) becomes values by `typed_options`.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import errno
import functools
import math
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hf_linear_attention._common.errors import UsageError, one_line


T = TypeVar("T")


class OnResume(enum.Flag):
    """What happens when a run is resumed with a changed value of an option."""

    FREE = 0  # the result does not depend on the option
    REFUSED = enum.auto()  # it would be a different run
    WARNED = enum.auto()  # the run continues, with a result that differs from that of an uninterrupted run
    INCOMPARABLE = enum.auto()  # evaluations before and after cannot be compared


@dataclass(frozen=True)
class Bounds:
    """The allowed numbers: at least `least` or above `above`, and below `below`."""

    least: float | None = None
    above: float | None = None
    below: float | None = None

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
        if self.below is None:
            return f"{self.least} or more" if self.above is None else f"a number above {self.above}"
        if self.above is None:
            return f"a number from {self.least} to below {self.below}"
        return f"a number between {self.above} and {self.below}"


COUNT = Bounds(least=1)
SIZE = Bounds(least=1, below=2**20)  # of a batch and the like: more would exhaust any memory
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
    """A dataclass field for an option, required unless it has a `default`; `choices` if the type does not tell them."""
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


PATH_NAMES = ("folder", "_path", "_file", "_dir", "_folder", "dataset_name", "_checkpoint")


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
        known = [other for other in fact.needs if other in facts]  # of a shared option, another command has others
        if known and not any(facts[other].is_on(values[other]) for other in known):
            got = f"`--{name}`" if values[name] is True else f"`--{name} {values[name]}`"
            needed = " or ".join(f"`--{other}`" for other in known)
            yield f"{got} needs {needed}; give that as well, or leave out `--{name}`"


def without_task(facts: Mapping[str, Facts], given: Collection[str], task: str) -> Iterator[str]:
    """One sentence for every option in `given` that has no effect for this `--task`."""
    for name in sorted(given):
        tasks = facts[name].tasks if name in facts else ()
        if tasks and task not in tasks:
            yield f"`--{name}` has no effect for `--task {task}`; leave it out, or use {' or '.join(tasks)}"


Kind = tuple[Any, tuple[str, ...] | None]
"""The type of an option's value (`Any`: whoever reads the option turns it into its own type), and its choices."""


NOTHING: Mapping[str, str] = types.MappingProxyType({})
TRUE, FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")
NEEDED = {int: "a whole number", float: "a number", bool: "true or false"}


def kinds_of(*groups: type) -> dict[str, Kind]:
    """The kind of every option of these dataclasses, by name."""
    return {name: kind for group in groups for name, kind in _kinds(group).items()}


@functools.cache
def _kinds(group: type) -> dict[str, Kind]:
    hints = typing.get_type_hints(group)
    return {entry.name: _kind(hints[entry.name], entry.metadata.get("choices")) for entry in dataclasses.fields(group)}


def _kind(hint: Any, choices: Sequence[str] | None) -> Kind:
    if typing.get_origin(hint) is typing.Literal:
        return str, typing.get_args(hint)
    inner = [part for part in typing.get_args(hint) if part is not type(None)]
    return _kind(inner[0], choices) if inner else (hint, tuple(choices) if choices else None)


def typed_options(
    values: Mapping[Any, Any], kinds: Mapping[str, Kind], place: str = "", removed: Mapping[str, str] = NOTHING
) -> dict[str, Any]:
    """The options with values of their own types, from texts of a command line or values of YAML or Python.

    Lists and values by layer become a text with commas, unless the type of the option is `Any`. An option that is None
    is left out. UsageError names every option that there is not, and every value that cannot be used.

    Args:
        kinds: all options that there are.
        place: where the values stand, for errors, as in " in recipe.yaml".
        removed: options that there are no more, or values (as `option value`), and what to do instead.
    """
    problems = [unknown_option(str(name), kinds, removed, place) for name in values if name not in kinds]
    found = {}
    for name, value in values.items():
        if name in kinds and value is not None:
            try:
                found[name] = _typed(value, *kinds[name])
            except ValueError as error:
                shown = value if isinstance(value, (str, int, float)) else repr(value)
                problems.append(f"`--{name} {shown}`{place}: {removed.get(f'{name} {shown}', error)}")
    if problems := [*problems, *unusable_texts(found)]:
        raise UsageError(*problems)
    return found


def _typed(value: Any, kind: Any, choices: tuple[str, ...] | None) -> Any:
    """The value in its type, or ValueError with what to give."""
    if kind is Any or type(value) is kind:
        result = value
    elif kind is str:
        result = option_text(value)
    elif kind is bool:
        text = str(value).lower()
        result = text in TRUE
        if text not in (*TRUE, *FALSE):
            raise ValueError(f"give {NEEDED[bool]}")
    else:
        try:
            result = kind(str(value))
        except ValueError:
            raise ValueError(f"give {NEEDED[kind]}") from None
    if choices is not None and result not in choices:
        raise ValueError(f"it must be one of {', '.join(choices)}")
    return result


def option_text(value: Any) -> str:
    """A value as one types it: a list with commas, values by layer as `0-3:64,4-:16`, others as they are.

    ValueError for lists in lists, and for a dict whose keys are no layers.
    """
    parts, texts = [value], [str(value)]
    if isinstance(value, Mapping):
        parts, texts = list(value.values()), [f"{layers}:{part}" for layers, part in value.items()]
        if not all(re.fullmatch(r"[\d -]+", str(layers)) for layers in value):
            raise ValueError("give a single value, or values by layer")
    elif isinstance(value, (list, tuple)):
        parts, texts = list(value), list(map(str, value))
    if any(isinstance(part, (Mapping, list, tuple, set)) for part in parts):
        raise ValueError("it has lists in it; give it as on the command line, in one text")
    return ",".join(texts)


def built(groups: Sequence[type], values: Mapping[str, Any]) -> list[Any]:
    """These dataclasses, each with those of its options that are in `values`; UsageError naming every missing one."""
    entries = {group: dataclasses.fields(group) for group in groups}
    required = [part.name for found in entries.values() for part in found if part.default is dataclasses.MISSING]
    if missing := [f"`--{name}`" for name in required if name not in values]:
        raise UsageError(f"{', '.join(missing)} must be given (`--help` lists the options)")
    return [
        group(**{part.name: values[part.name] for part in found if part.name in values})
        for group, found in entries.items()
    ]


def unknown_option(name: str, names: Iterable[str], removed: Mapping[str, str] = NOTHING, place: str = "") -> str:
    """A sentence about an option that there is not: what replaces it, or what may have been meant."""
    if name in removed:
        return f"`--{name}`{place} is not an option any more; {removed[name]}"
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean `{close[0]}`?" if close else "`--help` lists the options, and abbreviations are not allowed"
    return f"`--{name}`{place} is not an option; {hint}"
