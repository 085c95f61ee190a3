"""`hf-linear-attention doctor [FOLDER]`: whether this installation works, and whether a converted model is in order."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hf_linear_attention._common.command_line import Parser, run_command
from hf_linear_attention._common.errors import RunError, UsageError
from hf_linear_attention._common.logs import quiet_transformers


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if something is broken."""
    return run_command("hf-linear-attention doctor", lambda: _doctor(argv), stopped="nothing was written")


def _doctor(argv: Sequence[str] | None) -> None:
    parser = Parser([], prog="hf-linear-attention doctor", description=__doc__)
    parser.add_argument("folder", nargs="?", help="a converted model to examine too")
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="also load the model with the code in its folder, without this package; this runs that code",
    )
    arguments = parser.parse_args(argv)
    if arguments.trust_remote_code and arguments.folder is None:
        raise UsageError("`--trust_remote_code` runs the code in a folder; name the folder of a converted model")
    from hf_linear_attention.conversion.findings import BROKEN, environment_findings, folder_findings

    broken = 0
    with quiet_transformers():
        findings = list(environment_findings())
        if arguments.folder is not None:
            findings += folder_findings(Path(arguments.folder).expanduser(), arguments.trust_remote_code)
        for finding in findings:
            sys.stdout.write(f"{finding.kind:<7} {finding.topic:<13} {finding.text}\n")
            broken += finding.kind == BROKEN
    if broken:
        raise RunError(f"{broken} thing{'s are' if broken > 1 else ' is'} broken; see the lines `{BROKEN}` above")
    sys.stdout.write("Nothing is broken.\n")
