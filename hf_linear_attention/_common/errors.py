"""The errors of the commands: a command cannot be run as given, or its run cannot continue.

`command_line.run_command` turns each of them into one line on stderr and an exit code.
"""

from __future__ import annotations

import re


class UsageError(ValueError):
    """The command cannot do what its arguments ask for: exit code 2.

    `problems` holds every problem that was found, so that one run shows all of them.
    """

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        numbered = "; ".join(f"({number}) {text}" for number, text in enumerate(problems, 1))
        super().__init__(problems[0] if len(problems) == 1 else f"{len(problems)} problems: {numbered}")


class RunError(RuntimeError):
    """The run cannot continue: exit code 1, unless a subclass has another one."""

    exit_code = 1


class ConversionError(RunError):
    """The converted model is not correct."""


class TrainingError(RunError):
    """The data, the model or a checkpoint makes the training impossible."""


class SetupError(UsageError, TrainingError):
    """The model, the options or the launch do not fit together: exit code 2, because the user gave them."""


class DataError(UsageError, TrainingError):
    """The data cannot be used as it is: exit code 2, because the user gave it."""


class TerminatedError(SystemExit):
    """SIGTERM arrived: exit code 143 = 128 + 15, as shells report a terminated program.

    As with `KeyboardInterrupt`, cleanup code runs, and no `except Exception` stops it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = 143

    def __str__(self) -> str:
        """The message, which `SystemExit` would have as its code."""
        return str(self.args[0])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error of Python, torch or our kernels says that there is no memory for a tensor."""
    texts = "(allocate|out of|not enough) memory|alloc_failed|bad_alloc"
    return isinstance(error, MemoryError) or re.search(texts, str(error), re.IGNORECASE) is not None


def one_line(error: object) -> str:
    """The message of an error on one line, also if it is a list; the name of its type if it has no message."""
    text = " ".join(str(error).replace(":\n  - ", ": ").replace("\n  - ", "; ").split())
    return text or type(error).__name__
