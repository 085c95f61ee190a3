"""Options as data: everything that holds for an option stands once, in the metadata of its dataclass field.

    learning_rate: float = option("Peak learning rate.", 5e-5, bounds=POSITIVE, on_resume=OnResume.WARNED)

The parser reads the help text and the choices; what else there is (`Facts`) is asked for by name, never listed again.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class OnResume(enum.Flag):
    """What it means that a run goes on with another value of an option than it had before."""

    FREE = 0
    REFUSED = enum.auto()  # it would be another run
    WARNED = enum.auto()  # it goes on, but not as the run that it would have been
    INCOMPARABLE = enum.auto()  # evaluations before and after cannot be compared


@dataclass(frozen=True)
class Bounds:
    """The numbers that an option takes: at least `least`, or above `above`, and below `below`."""

    least: float | None = None
    above: float | None = None
    below: float | None = None
    such_as: float | None = None

    def hold(self, value: float) -> bool:
        """Whether `value` is allowed; NaN is not."""
        checks = (
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
NOT_NEGATIVE = Bounds(least=0)
POSITIVE = Bounds(above=0)
BELOW_ONE = Bounds(least=0, below=1)
PROBABILITY = Bounds(above=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What holds for an option, beside its type, its default, its choices and its help text.

    Args:
        bounds: the numbers that it takes.
        needs: options of which one must be set, or this one would do nothing.
        tasks: the values of `--task` for which it does something; none named: all.
        off: the value that switches it off, beside None and false.
        on_resume: what another value means for a run that goes on, or a function of all its values that says so. By
            default it is refused: an option decides the result until somebody has made sure that it does not.
        for_evaluation: it means something where a model is only evaluated.
        is_path: its value may be a file or folder, whose place does not depend on the working directory.
        is_per_stage: every stage of a preset has its own value.
    """

    bounds: Bounds | None = None
    needs: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    off: Any = None
    on_resume: OnResume | Callable[[Mapping[str, Any]], OnResume] = OnResume.REFUSED
    for_evaluation: bool = False
    is_path: bool = False
    is_per_stage: bool = False

    def meaning_on_resume(self, values: Mapping[str, Any]) -> OnResume:
        """What another value means for a run whose options have these `values`."""
        return self.on_resume(values) if callable(self.on_resume) else self.on_resume

    def is_on(self, value: Any) -> bool:
        """Whether this value asks for something."""
        return value is not None and value is not False and not (self.off is not None and value == self.off)


def option(text: str, default: Any = dataclasses.MISSING, choices: Sequence[str] | None = None, **facts: Any) -> Any:
    """A dataclass field that is an option, required without `default`.

    Args:
        text: its help.
        choices: the values that are allowed, where its type does not say so.
        **facts: see `Facts`.
    """
    metadata = {"help": text, "facts": Facts(**facts), **({"choices": choices} if choices else {})}
    return dataclasses.field(default=default, metadata=metadata)


def facts_of(*groups: type) -> dict[str, Facts]:
    """The facts of every option of these dataclasses, by its name."""
    return {entry.name: entry.metadata["facts"] for group in groups for entry in dataclasses.fields(group)}


def out_of_bounds(facts: Mapping[str, Facts], values: Mapping[str, Any]) -> Iterator[str]:
    """One sentence for every number that its option does not take."""
    for name, fact in facts.items():
        value = values[name]
        if fact.bounds is not None and value is not None and not fact.bounds.hold(value):
            yield f"`--{name} {value}`: allowed is {fact.bounds}"


def without_needs(facts: Mapping[str, Facts], values: Mapping[str, Any], given: Collection[str]) -> Iterator[str]:
    """One sentence for every option in `given` that does nothing, because another one is missing."""
    for name in sorted(given):
        fact = facts.get(name)
        if fact is None or not fact.needs or not fact.is_on(values[name]):
            continue
        if not any(facts[other].is_on(values[other]) for other in fact.needs):
            got = f"`--{name}`" if values[name] is True else f"`--{name} {values[name]}`"
            yield f"{got} needs {_listed(fact.needs)}; give that too, or leave `--{name}` out"


def without_task(facts: Mapping[str, Facts], given: Collection[str], task: str) -> Iterator[str]:
    """One sentence for every option in `given` that does nothing for this `--task`."""
    for name in sorted(given):
        tasks = facts[name].tasks if name in facts else ()
        if tasks and task not in tasks:
            yield f"`--{name}` does nothing for `--task {task}`; leave it out, or use {' or '.join(tasks)}"


def _listed(names: Sequence[str]) -> str:
    return " or ".join(f"`--{name}`" for name in names)
