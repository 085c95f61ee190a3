"""What can go wrong with a command: it cannot be run as it was given, or its run cannot go on.

`command_line.run_command` turns each of them into one line on stderr and an exit code.
"""

from __future__ import annotations


class UsageError(ValueError):
    """What was asked for cannot be done: exit code 2.

    `problems` holds every problem found, so that one run shows them all.
    """

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        numbered = "; ".join(f"({number}) {text}" for number, text in enumerate(problems, 1))
        super().__init__(problems[0] if len(problems) == 1 else f"{len(problems)} problems: {numbered}")


class RunError(RuntimeError):
    """The run cannot go on: exit code 1, unless a subclass has another one."""

    exit_code = 1


class ConversionError(RunError):
    """The converted model is not what it should be."""


class TrainingError(RunError):
    """Data, model or checkpoint do not allow the training."""


class TerminatedError(TrainingError):
    """SIGTERM arrived; a checkpoint was written. Exit code 143 = 128 + 15, as a shell reports a terminated program."""

    exit_code = 143
