"""The two failures a user can cause: a command line that cannot be run, and a run that cannot go on."""

from __future__ import annotations


class UsageError(ValueError):
    """The command line is wrong: reported as one line, exit code 2.

    `problems` holds every problem found, so that one run shows them all.
    """

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        numbered = "; ".join(f"({number}) {text}" for number, text in enumerate(problems, 1))
        super().__init__(problems[0] if len(problems) == 1 else f"{len(problems)} problems: {numbered}")


class TrainingError(RuntimeError):
    """Data, model or checkpoint do not allow the run: reported as one line, exit code 1."""

    exit_code = 1


class TerminatedError(TrainingError):
    """SIGTERM arrived; a checkpoint was written. Exit code 143 = 128 + 15, as a shell reports a terminated program."""

    exit_code = 143
