r"""Compare a converted model with its original on held-out text, and write the figures into its report and its card.

    %(prog)s --model_name_or_path OUT --teacher_name_or_path SRC --validation_file held_out.txt

For an embedding model, with Spearman's correlation on pairs of sentences (columns sentence1, sentence2 and score):

    %(prog)s --model_name_or_path OUT --teacher_name_or_path SRC --validation_file held_out.txt \
        --pairs_file stsb_dev.tsv

Exit codes: 0 done, 1 failed, 2 the request cannot be met, 130 interrupted, 143 SIGTERM.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hf_linear_attention._common.command_line import PROGRAM, Parser, given_options, run_command
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.logs import quiet_transformers, to_stderr
from hf_linear_attention._common.model_card import REPORT
from hf_linear_attention._common.options import built, facts_of, out_of_bounds, without_needs
from hf_linear_attention._common.reading import read_json
from hf_linear_attention.conversion.options import EvaluationArguments, changed_options


NAME = f"{PROGRAM} evaluate"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(NAME, lambda: _evaluate(words), stopped="nothing was written")


def _evaluate(argv: Sequence[str]) -> None:
    arguments = parse(argv)
    with to_stderr("hf_linear_attention.conversion"), quiet_transformers():
        from hf_linear_attention.conversion.quality import evaluate  # it imports what loads models

        text = evaluate(arguments)
    sys.stdout.write(f"{text}\n")


def parse(argv: Sequence[str]) -> EvaluationArguments:
    """The options in `argv`, with the original that the report of the model names.

    Raises:
        UsageError: for options that are unknown or wrong, or a model whose original is not known.
    """
    groups = [EvaluationArguments]
    usage = "%(prog)s --model_name_or_path OUT --validation_file held_out.txt [options]"
    values = given_options(Parser(groups, prog=NAME, usage=usage, description=__doc__), groups, argv)
    (arguments,), facts = built(groups, values), facts_of(*groups)
    problems = [
        *out_of_bounds(facts, vars(arguments)),
        *without_needs(facts, vars(arguments), changed_options(arguments)),
    ]
    if arguments.validation_file is None:
        problems.append("`--validation_file` is missing; name a file of held-out text")
    if problems:
        raise UsageError(*problems)
    if arguments.teacher_name_or_path is None:
        arguments.teacher_name_or_path = _original_of(arguments.model_name_or_path)
    return arguments


def _original_of(model: str) -> str:
    path = Path(model).expanduser() / REPORT
    report = read_json(path) if path.is_file() else {}
    if not isinstance(report.get("base_model"), str):
        raise UsageError(
            f"`--model_name_or_path {model}` has no {REPORT} that names its original; give a `--teacher_name_or_path`"
        )
    return report["base_model"]


if __name__ == "__main__":
    sys.exit(main())
