"""The two failures of a conversion: a command line that cannot be run, and a run that cannot go on."""

from __future__ import annotations


class UsageError(ValueError):
    """What was asked for cannot be done: one message on stderr, exit code 2.

    `problems` holds every problem found, so that one run shows them all.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        numbered = "; ".join(f"({number}) {text}" for number, text in enumerate(problems, 1))
        super().__init__(problems[0] if len(problems) == 1 else f"{len(problems)} problems: {numbered}")


class ConversionError(RuntimeError):
    """The conversion went wrong on the way: one message on stderr, exit code 1."""
