r"""Compare a converted model with its original on held-out text, and write the figures into its report and its card.

    hf-linear-attention evaluate --model_name_or_path OUT --teacher_name_or_path SRC --validation_file held_out.txt

For an embedding model, with Spearman's correlation on pairs of sentences (columns sentence1, sentence2 and score):

    hf-linear-attention evaluate --model_name_or_path OUT --teacher_name_or_path SRC --validation_file held_out.txt \
        --pairs_file stsb_dev.tsv

Exit codes: 0 done, 1 failed, 2 the request cannot be met, 130 interrupted, 143 SIGTERM.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import fields, make_dataclass
from pathlib import Path

from hf_linear_attention._common.command_line import CONFIG_HELP, Parser, run_command, typed_name, words_of
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.logs import quiet_transformers, to_stderr
from hf_linear_attention._common.model_card import REPORT
from hf_linear_attention._common.options import option
from hf_linear_attention._common.reading import read_json
from hf_linear_attention.conversion.request import CONVERSION_FACTS, ConversionArguments, Request, parse


# What `convert --evaluate` calls them, and what they are called here.
NAMES = {"model_name_or_path": "teacher_name_or_path", "output_dir": "model_name_or_path"}
OWN = [
    ("model_name_or_path", str, option("the converted model: a folder")),
    ("teacher_name_or_path", str | None, option("its original (default: the one that its report names)", None)),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    return run_command("evaluate_model.py", lambda: _evaluate(words), stopped="nothing was written")


def _evaluate(argv: Sequence[str]) -> None:
    with to_stderr("hf_linear_attention.conversion"), quiet_transformers():
        request = request_of(argv)
        from hf_linear_attention.conversion.quality import evaluate  # it imports what loads models

        try:
            text = evaluate(request)
        except UsageError as error:
            raise UsageError(*(_in_words_of_this(problem) for problem in error.problems)) from error
    sys.stdout.write(f"{text}\n")


def request_of(argv: Sequence[str]) -> Request:
    """The request of `convert --evaluate` that means the same as `argv`.

    Raises:
        UsageError: for options that are unknown or wrong, or a model whose original is not known.
    """
    shared = [
        (entry.name, entry.type, option(entry.metadata["help"], entry.default, entry.metadata.get("choices")))
        for entry in fields(ConversionArguments)
        if CONVERSION_FACTS[entry.name].for_evaluation and entry.name not in (*NAMES, "evaluate")
    ]
    arguments = make_dataclass("EvaluationArguments", [*OWN, *shared], namespace={"__module__": __name__})
    parser = Parser(
        [arguments],  # type: ignore[list-item]  # generated at run time, which the stub does not foresee
        prog=typed_name("evaluate_model.py"),
        usage="%(prog)s --model_name_or_path OUT --validation_file held_out.txt [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help=CONFIG_HELP)
    given = vars(parser.parse_args(words_of(argv, [entry.name for entry in fields(arguments)])))
    del given["config"]
    if given["validation_file"] is None:
        raise UsageError("`--validation_file` is missing; name a file of held-out text")
    model, teacher = given.pop("model_name_or_path"), given.pop("teacher_name_or_path")
    asked = {"model_name_or_path": teacher or _original_of(model), "output_dir": model, "evaluate": True, **given}
    return parse([f"--{name}={value}" for name, value in asked.items() if value is not None])


def _original_of(model: str) -> str:
    path = Path(model).expanduser() / REPORT
    report = read_json(path) if path.is_file() else {}
    if not isinstance(report.get("base_model"), str):
        raise UsageError(
            f"`--model_name_or_path {model}` has no {REPORT} that names its original; give a `--teacher_name_or_path`"
        )
    return report["base_model"]


def _in_words_of_this(problem: str) -> str:
    pattern = "|".join(rf"--{name}\b" for name in NAMES)
    return re.sub(pattern, lambda found: f"--{NAMES[found[0][2:]]}", problem).replace(", then `--evaluate`", "")


if __name__ == "__main__":
    sys.exit(main())
