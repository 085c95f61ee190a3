"""The one command of this package: `hf-linear-attention convert | finetune | evaluate | compare | doctor | serve`.

`python -m hf_linear_attention` is the same. A subcommand is one line of `COMMANDS` and a function `main(argv)` in its
module, which is imported only when the subcommand is used.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from hf_linear_attention import __version__
from hf_linear_attention._common.command_line import PROGRAM, ignore_interrupts, typed_as


EXAMPLES = f"""\
Make a pretrained Transformers model linear in the length of its input. SRC is a folder or a name on the Hub:

    {PROGRAM} convert --model_name_or_path SRC --output_dir OUT --preset default --train_file texts.txt
    {PROGRAM} evaluate --model_name_or_path OUT --teacher_name_or_path SRC --validation_file held_out.txt
"""


@dataclass(frozen=True)
class Subcommand:
    """The module with the function `main` of a subcommand, and what the subcommand does."""

    module: str
    help: str


COMMANDS = {
    "convert": Subcommand("hf_linear_attention.conversion.convert_checkpoint", "convert a checkpoint, and train it"),
    "finetune": Subcommand("hf_linear_attention.conversion.finetune_command", "train a converted model, or any model"),
    "evaluate": Subcommand("hf_linear_attention.conversion.evaluate_model", "compare a converted model with SRC"),
    "compare": Subcommand("hf_linear_attention.conversion.compare", "find the mechanism that suits a model"),
    "serve": Subcommand("hf_linear_attention.conversion.serve", "serve a converted model (OpenAI-compatible)"),
    "doctor": Subcommand("hf_linear_attention.conversion.doctor", "check this installation, or a converted folder"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that `argv` names (by default that of the process), and return its exit code."""
    code = _run(list(sys.argv[1:] if argv is None else argv))
    if argv is None:
        ignore_interrupts()
    return code


def _run(words: list[str]) -> int:
    name = words[0] if words else ""
    if name in ("", "-h", "--help"):
        (sys.stdout if name else sys.stderr).write(overview())
        return 0 if name else 2
    if name == "--version":
        sys.stdout.write(f"{versions()}\n")
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"choose one of {', '.join(COMMANDS)}"
        name = name if len(name) <= 60 else f"{name[:60]}..."
        sys.stderr.write(f"{PROGRAM}: error: `{name}` is not a command; {hint}\n")
        return 2
    with typed_as(f"{PROGRAM} {name}"):
        return importlib.import_module(COMMANDS[name].module).main(words[1:])


def overview() -> str:
    """What `--help` prints: examples, then all subcommands."""
    lines = [f"  {name:<10} {command.help}" for name, command in COMMANDS.items()]
    end = f"`{PROGRAM} COMMAND --help` has the options of a command, `{PROGRAM} --version` the versions."
    return "\n".join([f"usage: {PROGRAM} COMMAND [options]", "", EXAMPLES, "Commands:", *lines, "", end, ""])


def versions() -> str:
    """This version, and those of the libraries on which results depend."""
    others = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"{PROGRAM} {__version__} ({others}, Python {sys.version.split()[0]})"


if __name__ == "__main__":
    sys.exit(main())
