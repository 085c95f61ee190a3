r"""Write a converted model in a form that other programs load without this package.

    %(prog)s OUT --to qwen3_5 --output_dir STOCK
    %(prog)s OUT --to onnx --output_dir ONNX

    qwen3_5   from `--attention gated_delta --form qwen3_5`
    onnx      any decoder or encoder, for ONNX Runtime; in plain operators with `--opset plain`

Qwen3.5 is an architecture of transformers. Its checkpoints need no code, so vLLM and other engines load them too.
Before one is written, its logits and its greedy text are compared with those of OUT.

Exit codes: 0 done, 1 failed, 2 the request cannot be met, 130 interrupted, 143 SIGTERM.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_linear_attention._common.command_line import PROGRAM, Parser, run_command
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.logs import quiet_transformers, to_stderr


PACKAGE = "hf_linear_attention.conversion.export"
# The modules of this folder: `write(request)` of each writes a form, and returns the text to print.
TARGETS = ("qwen3_5", "onnx")
OPSETS = ("microsoft", "plain")


@dataclass(frozen=True)
class ExportRequest:
    """What to write of the converted model in `folder`: one of `TARGETS`, an ONNX graph with one of `OPSETS`."""

    folder: Path
    target: str
    output_dir: Path
    opset: str = OPSETS[0]
    overwrite: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_command(f"{PROGRAM} export", lambda: _export(words), stopped="nothing was written")


def _export(words: Sequence[str]) -> None:
    request = parse(words)
    with to_stderr("hf_linear_attention.conversion"), quiet_transformers():
        text = importlib.import_module(f"{PACKAGE}.{request.target}").write(request)
    sys.stdout.write(f"{text}\n")


def parse(words: Sequence[str]) -> ExportRequest:
    """The request in these words.

    Raises:
        UsageError: naming every option that is wrong.
    """
    parser = Parser([], prog=f"{PROGRAM} export", description=__doc__)
    parser.add_argument("folder", metavar="OUT", help="the converted model: a folder")
    parser.add_argument("--to", required=True, choices=TARGETS, help="the form to write")
    parser.add_argument("--output_dir", required=True, help="the folder to write")
    parser.add_argument("--opset", choices=OPSETS, help=f"the operators of an ONNX graph (default: {OPSETS[0]})")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --output_dir")
    given: argparse.Namespace = parser.parse_args(list(words))
    folder = Path(given.folder).expanduser().resolve()
    problems = []
    if not (folder / "config.json").is_file():
        problems.append(f"`{given.folder}` is no folder with a config.json; give the folder of a converted model")
    if given.opset is not None and given.to != "onnx":
        problems.append("`--opset` is for `--to onnx`; leave it out")
    if problems:
        raise UsageError(*problems)
    from hf_linear_attention.conversion.output_folder import check_output

    output_dir = check_output(given.output_dir, given.overwrite, folder)
    return ExportRequest(folder, given.to, output_dir, given.opset or OPSETS[0], given.overwrite)
