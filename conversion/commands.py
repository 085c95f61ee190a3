"""The one command of this package: `hf-linear-attention convert | finetune | evaluate | compare | doctor | export ...`.

`python -m hf_linear_attention` is the same. A subcommand is one line of `COMMANDS` and a function that takes its words.
Here are those that have few options of their own. What loads models is imported where it is used, because `--help` and
errors about options need none.
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import hf_linear_attention
from hf_linear_attention._common.command_line import (
    PROGRAM,
    Parser,
    given_options,
    ignore_interrupts,
    not_essential,
    run_command,
    typed_as,
    typed_name,
)
from hf_linear_attention._common.errors import RunError, UsageError
from hf_linear_attention._common.folders import staging
from hf_linear_attention._common.logs import quiet_transformers, to_stderr
from hf_linear_attention._common.model_card import PAGE, REPORT
from hf_linear_attention._common.options import built, facts_of, out_of_bounds, unusable_texts, without_needs
from hf_linear_attention._common.reading import read_json
from hf_linear_attention.conversion.arguments import REMOVED, EvaluationArguments, changed_options
from hf_linear_attention.mechanisms.settings import MECHANISM_OPTIONS


logger = logging.getLogger(__name__)

LOGGED = "hf_linear_attention.conversion"
COMPARISON = "comparison.json"

EXAMPLES = f"""\
Make a pretrained Transformers model linear in the length of its input. SRC is a folder or a name on the Hub:

    {PROGRAM} convert --model_name_or_path SRC --output_dir OUT --preset default --train_file texts.txt
    {PROGRAM} evaluate --model_name_or_path OUT --teacher_name_or_path SRC --validation_file held_out.txt
"""
EVALUATE = r"""Compare a converted model with its original on held-out text, and write the figures into report and card.

    %(prog)s --model_name_or_path OUT --teacher_name_or_path SRC --validation_file held_out.txt

For an embedding model, with Spearman's correlation on pairs of sentences (columns sentence1, sentence2 and score):

    %(prog)s --model_name_or_path OUT --teacher_name_or_path SRC --validation_file held_out.txt \
        --pairs_file stsb_dev.tsv

Exit codes: 0 done, 1 failed, 2 the request cannot be met, 130 interrupted, 143 SIGTERM.
"""
COMPARE = r"""Compare mechanisms for one model: what each costs and keeps, measured here.

    %(prog)s --model_name_or_path SRC
    %(prog)s --model_name_or_path SRC --mechanisms hybrid,linear \
        --train_file stories.jsonl --tokens 50k --output_dir COMPARISON

Each mechanism has the settings of its preset, and is measured as `evaluate` does: untrained and, with --train_file,
after training on --tokens of it, on a tenth of that text that is not trained on. The minutes of the whole preset are
estimated from the speed of that training. With --output_dir, comparison.json is written there.
"""
DOCTOR = "Whether this installation works, and which code serves a converted model."


@dataclass(frozen=True)
class Subcommand:
    """Where the function of a subcommand is (`module:function`), and what the subcommand does."""

    place: str
    help: str


COMMANDS = {
    "convert": Subcommand(f"{LOGGED}.convert_checkpoint:main", "convert a checkpoint, and train it"),
    "finetune": Subcommand(f"{LOGGED}.commands:finetune", "train a converted model, or any model"),
    "evaluate": Subcommand(f"{LOGGED}.commands:evaluate", "compare a converted model with SRC"),
    "compare": Subcommand(f"{LOGGED}.commands:compare", "find the mechanism that suits a model"),
    "export": Subcommand(f"{LOGGED}.export.command:main", "write a form that other programs load"),
    "serve": Subcommand(f"{LOGGED}.serve:main", "serve a converted model (OpenAI-compatible)"),
    "doctor": Subcommand(f"{LOGGED}.commands:doctor", "check this installation, or a converted folder"),
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
        command: Callable[[list[str]], int] = pkgutil.resolve_name(COMMANDS[name].place)
        return command(words[1:])


def overview() -> str:
    """What `--help` prints: examples, then all subcommands."""
    lines = [f"  {name:<10} {command.help}" for name, command in COMMANDS.items()]
    end = f"`{PROGRAM} COMMAND --help` has the options of a command, `{PROGRAM} --version` the versions."
    return "\n".join([f"usage: {PROGRAM} COMMAND [options]", "", EXAMPLES, "Commands:", *lines, "", end, ""])


def versions() -> str:
    """This version, and those of the libraries on which results depend."""
    others = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"{PROGRAM} {hf_linear_attention.__version__} ({others}, Python {sys.version.split()[0]})"


# ---- `evaluate`


def evaluate(argv: Sequence[str]) -> int:
    """Run `evaluate` and return its exit code."""
    return run_command(f"{PROGRAM} evaluate", lambda: _evaluate(argv), stopped="nothing was written")


def _evaluate(argv: Sequence[str]) -> None:
    arguments = evaluation_arguments(argv)
    with to_stderr(LOGGED), quiet_transformers():
        from hf_linear_attention.conversion.quality import evaluate

        text = evaluate(arguments)
    sys.stdout.write(f"{text}\n")


def evaluation_arguments(argv: Sequence[str]) -> EvaluationArguments:
    """The options of `evaluate` in `argv`, with the original that the report of the model names.

    Raises:
        UsageError: for options that are unknown or wrong, or a model whose original is not known.
    """
    groups = [EvaluationArguments]
    usage = "%(prog)s --model_name_or_path OUT --validation_file held_out.txt [options]"
    parser = Parser(groups, prog=f"{PROGRAM} evaluate", usage=usage, description=EVALUATE, removed=REMOVED)
    (arguments,), facts = built(groups, given_options(parser, groups, argv)), facts_of(*groups)
    problems = [
        *out_of_bounds(facts, vars(arguments)),
        *without_needs(facts, vars(arguments), changed_options(arguments)),
    ]
    if arguments.validation_file is None:
        problems.append("`--validation_file` is missing; name a file of held-out text")
    if problems:
        raise UsageError(*problems)
    if arguments.teacher_name_or_path is None:
        model = arguments.model_name_or_path
        path = Path(model).expanduser() / REPORT
        report = read_json(path) if path.is_file() else {}
        if not isinstance(report.get("base_model"), str):
            raise UsageError(
                f"`--model_name_or_path {model}` has no {REPORT} that names its original; give a "
                "`--teacher_name_or_path`"
            )
        arguments.teacher_name_or_path = report["base_model"]
    return arguments


# ---- `compare`


def compare(argv: Sequence[str]) -> int:
    """Run `compare` and return its exit code."""
    return run_command(f"{PROGRAM} compare", lambda: _compare(argv), stopped="nothing was written")


def _compare(argv: Sequence[str]) -> None:
    arguments = _comparison_arguments(argv)
    from hf_linear_attention.conversion.comparison import compare_mechanisms, describe_comparison

    with to_stderr(LOGGED), quiet_transformers():
        content = compare_mechanisms(arguments)
        if arguments.output_dir is not None:
            with staging(Path(arguments.output_dir).expanduser().resolve()) as folder:
                (folder / COMPARISON).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{describe_comparison(content)}\n")


def _comparison_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The options of `compare`.

    Raises:
        UsageError: naming every one that is wrong.
    """
    parser = Parser([], prog=f"{PROGRAM} compare", description=COMPARE)
    parser.add_argument("--model_name_or_path", required=True, help="the softmax checkpoint: a folder or a hub name")
    parser.add_argument("--mechanisms", help="names with commas (default: the usual ones for this kind of model)")
    parser.add_argument("--train_file", help="text to train on: .txt, .jsonl, .csv, .tsv or .parquet (column `text`)")
    parser.add_argument("--tokens", help="the number of tokens to train on, such as 50k (default) or 2M")
    parser.add_argument("--output_dir", help=f"a new folder for {COMPARISON}")
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
    from hf_linear_attention.conversion.output_folder import check_output

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
    is_comparison = folder.is_dir() and {path.name for path in folder.iterdir()} <= {COMPARISON}
    return [] if is_comparison else [f"`--overwrite`: {name!r} holds more than a comparison; give another name"]


# ---- `finetune`: training/finetune.py, then report.html of its result, and `--push_to_hub NAME`


def finetune(argv: Sequence[str] | None = None) -> int:
    """Run `finetune` and return its exit code."""
    from hf_linear_attention.training import finetune as script

    command = "finetune.py"
    parser = argparse.ArgumentParser(
        prog=typed_name(command), add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS
    )
    parser.add_argument("--push_to_hub", metavar="NAME")
    own, words = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if (name := own.push_to_hub) is not None:
        from hf_linear_attention.conversion.output_folder import check_hub_name

        if code := run_command(command, lambda: check_hub_name(name), stopped="nothing was written"):
            return code
    return script.main(words, lambda folder: _finish_training(folder, name))


def _finish_training(folder: Path, name: str | None) -> None:
    """Write report.html into the folder of a trained model that was converted before, and push it if it has a `name`.

    Raises:
        RunError: if there is no model to push, or the Hub refuses.
    """
    from hf_linear_attention.conversion.output_folder import push
    from hf_linear_attention.conversion.page import write_page

    has_model = (folder / "config.json").is_file()
    if has_model and (folder / REPORT).is_file():
        with not_essential(PAGE):
            write_page(folder)
    if name is None:
        return
    if not has_model:
        raise RunError(f"`--push_to_hub {name}`: nothing was trained, so {folder} has no model; give a `--train_file`")
    logger.info("pushed to %s", push(folder, name))


# ---- `doctor`


def doctor(argv: Sequence[str]) -> int:
    """Run `doctor` and return its exit code: 1 if something is broken."""
    return run_command(f"{PROGRAM} doctor", lambda: _doctor(argv), stopped="nothing was written")


def _doctor(argv: Sequence[str]) -> None:
    parser = Parser([], prog=f"{PROGRAM} doctor", description=DOCTOR)
    parser.add_argument("folder", nargs="?", help="a converted model to examine too")
    arguments = parser.parse_args(argv)
    from hf_linear_attention.conversion.doctor import BROKEN, environment_findings, folder_findings

    broken = 0
    with quiet_transformers():
        findings = list(environment_findings())
        if arguments.folder is not None:
            findings += folder_findings(Path(arguments.folder).expanduser())
        for finding in findings:
            sys.stdout.write(f"{finding.kind:<7} {finding.topic:<13} {finding.text}\n")
            broken += finding.kind == BROKEN
    if broken:
        raise RunError(f"{broken} thing{'s are' if broken > 1 else ' is'} broken; see the lines `{BROKEN}` above")
    sys.stdout.write("Nothing is broken.\n")


if __name__ == "__main__":
    sys.exit(main())
