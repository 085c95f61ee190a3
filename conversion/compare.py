r"""Compare mechanisms for one model: what each costs and keeps, measured here.

    hf-linear-attention compare --model_name_or_path SRC
    hf-linear-attention compare --model_name_or_path SRC --mechanisms hybrid,linear \
        --train_file stories.jsonl --tokens 50k --output_dir COMPARISON

Each mechanism has the settings of its preset. The distance to the original is measured before any training and, with
--train_file, after training on --tokens of it, on a tenth of that text that is not trained on. The minutes of the
whole preset are estimated from the speed of that training, or of ten steps of each stage where it has fewer or there is
none. The time of one attention layer is measured in this process, with the model's heads and dtype, beside torch's
softmax attention. With --output_dir, comparison.json and report.html are written there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import hf_linear_attention  # noqa: F401  (registers the Linear<X> classes)
from hf_linear_attention._common.command_line import Parser, run_command
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.folders import staging
from hf_linear_attention._common.logs import quiet_transformers, to_stderr
from hf_linear_attention._common.model_card import PAGE
from hf_linear_attention._common.options import unusable_texts
from hf_linear_attention.mechanisms.options import MECHANISM_OPTIONS


COMPARISON = "comparison.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    return run_command("hf-linear-attention compare", lambda: _compare(argv), stopped="nothing was written")


def _compare(argv: Sequence[str]) -> None:
    arguments = _parse(argv)
    from hf_linear_attention.conversion.comparison import compare_mechanisms, comparison_page, describe_comparison

    with to_stderr("hf_linear_attention.conversion"), quiet_transformers():
        content = compare_mechanisms(arguments)
        if arguments.output_dir is not None:
            with staging(Path(arguments.output_dir).expanduser().resolve()) as folder:
                (folder / COMPARISON).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
                (folder / PAGE).write_text(comparison_page(content), encoding="utf-8")
    sys.stdout.write(f"{describe_comparison(content)}\n")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options.

    Raises:
        UsageError: naming every one that is wrong.
    """
    parser = Parser([], prog="hf-linear-attention compare", description=__doc__)
    parser.add_argument("--model_name_or_path", required=True, help="the softmax checkpoint: a folder or a hub name")
    parser.add_argument("--mechanisms", help="names with commas (default: the usual ones for this kind of model)")
    parser.add_argument("--train_file", help="text to train on: .txt, .jsonl, .csv, .tsv or .parquet (column `text`)")
    parser.add_argument("--tokens", help="the number of tokens to train on, such as 50k (default) or 2M")
    parser.add_argument("--output_dir", help=f"a new folder for {COMPARISON} and {PAGE}")
    parser.add_argument("--overwrite", action="store_true", help="replace --output_dir if it holds a comparison")
    parser.add_argument("--trust_remote_code", action="store_true", help="run Python code that the checkpoint contains")
    parser.add_argument("--allow_pickle", action="store_true", help="read .bin files if there are no safetensors")
    arguments = parser.parse_args(argv)
    problems = list(unusable_texts(vars(arguments)))
    names = [] if arguments.mechanisms is None else [name.strip() for name in arguments.mechanisms.split(",")]
    if unknown := sorted(set(names) - set(MECHANISM_OPTIONS)):
        shown = ", ".join(map(repr, unknown))
        problems.append(f"`--mechanisms`: {shown} must be one of {', '.join(sorted(MECHANISM_OPTIONS))}")
    if arguments.tokens is not None and arguments.train_file is None:
        problems.append("`--tokens` needs text to train on; give a `--train_file`")
    if arguments.output_dir is not None:
        problems += _problems_of_output(arguments.output_dir, arguments.overwrite)
    elif arguments.overwrite:
        problems.append("`--overwrite` needs `--output_dir`")
    if problems:
        raise UsageError(*problems)

    from hf_linear_attention.conversion.calibration_data import check_text_file
    from hf_linear_attention.conversion.companions import check_output

    if arguments.output_dir is not None and not os.path.exists(os.path.expanduser(arguments.output_dir)):
        local = Path(arguments.model_name_or_path).expanduser().resolve()
        check_output(arguments.output_dir, False, local if local.is_dir() else None)
    if arguments.train_file is not None:
        check_text_file("train_file", arguments.train_file)
    return arguments


def _problems_of_output(name: str, overwrite: bool) -> list[str]:
    """Why the comparison cannot be written there: only another comparison may be replaced."""
    folder = Path(name).expanduser()
    if not os.path.exists(folder):  # which is False for a name that is too long
        return []
    if not overwrite:
        return [f"`--output_dir` = {name!r} exists; give `--overwrite` to replace it, or another name"]
    is_comparison = folder.is_dir() and {path.name for path in folder.iterdir()} <= {COMPARISON, PAGE}
    return [] if is_comparison else [f"`--overwrite`: {name!r} holds more than a comparison; give another name"]
