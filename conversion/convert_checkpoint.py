r"""Convert a softmax checkpoint to linear attention: one command, no edited files.

A causal language model, with 64 learned exponential features per head:

    %(prog)s --model_name_or_path SRC --output_dir OUT \
        --attention linear --feature_map exp --num_features 64

FAVOR+ random features in some of the layers; the others stay softmax:

    %(prog)s --model_name_or_path SRC --output_dir OUT \
        --attention performer --layers 0,2,4-7

A hybrid in the first four layers, `linear` in the others, with a longer window in the first two:

    %(prog)s --model_name_or_path SRC --output_dir OUT \
        --attention 0-3:hybrid,4-:linear --window_size 0-1:64,2-3:16 --num_features 32

An encoder (BERT, ViT, sentence-transformers ...) with Linformer:

    %(prog)s --model_name_or_path SRC --output_dir OUT \
        --attention linformer --projection_size 128 --projection_sharing headwise

Convert, train with the original as teacher, and measure on held-out text. The same command resumes a run that was
killed. The command `evaluate` measures any converted model in the same way:

    %(prog)s --model_name_or_path SRC --output_dir OUT --preset default \
        --train_file stories.jsonl --tokens 2M --validation_file held_out.txt
    hf-linear-attention evaluate --model_name_or_path OUT --teacher_name_or_path SRC --validation_file held_out.txt

Print what would be done, and write nothing:

    %(prog)s --model_name_or_path SRC --dry_run

An encoder-decoder without its relative position bias, which linear attention cannot have:

    %(prog)s --model_name_or_path T5 --output_dir OUT --drop position_bias

OUT can then be loaded with `AutoModel...from_pretrained(OUT, trust_remote_code=True)` where only torch and transformers
are installed. Exit codes: 0 done, 1 the conversion failed, 2 the request cannot be met, 130 interrupted, 143 SIGTERM.
With HF_LINEAR_ATTENTION_DEBUG=1, errors are shown with their traceback.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING


if not __package__:  # the file was started as a script, and its folder must not hide other packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import hf_linear_attention  # noqa: F401  (registers the Linear<X> classes)
from hf_linear_attention._common.command_line import ignore_interrupts, is_first_process, let_threads_sleep, run_command
from hf_linear_attention._common.logs import quiet_transformers, to_stderr
from hf_linear_attention.conversion.arguments import Request, parse


if TYPE_CHECKING:
    from hf_linear_attention.conversion.pipeline import Conversion

PACKAGE = "hf_linear_attention.conversion"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    let_threads_sleep()
    stopped = "--output_dir is complete, or as it was before"
    code = run_command("convert_checkpoint.py", lambda: _convert(words), stopped=stopped, speaks=is_first_process())
    if argv is None:
        ignore_interrupts()
    return code


def _convert(argv: Sequence[str]) -> None:
    """Do what the command line asks for, and print the result."""
    request = parse(argv, __doc__)
    if not is_first_process():
        logging.disable()
    with (
        to_stderr(PACKAGE, "hf_linear_attention._common", "hf_linear_attention.model_conversion"),
        quiet_transformers(),
    ):
        for text in _answers(request):
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()  # what follows may fail


def _answers(request: Request) -> Iterator[str]:
    """The texts to print. The imports are here because `--help` and errors about options need no model."""
    from hf_linear_attention.conversion.pipeline import prepare, run, writing, written_plan
    from hf_linear_attention.conversion.result_text import describe_result

    conversion = prepare(request)
    if not is_first_process():
        if conversion.training is not None and not request.arguments.dry_run:
            from hf_linear_attention.conversion.preset_run import take_part

            take_part(conversion, conversion.training)
        return
    chosen = _default_lines(conversion)
    if request.arguments.dry_run:
        yield "\n".join([*chosen, *_preview(conversion)])
        return
    with writing(conversion):
        if conversion.training is not None:
            from hf_linear_attention.conversion.preset_run import run_training  # needs the extra `train`

            text = run_training(conversion, conversion.training)
        else:
            report = run(conversion)
            plan = written_plan(conversion, report)
            text = describe_result(plan, conversion.source, str(conversion.output_dir), report)
    yield "\n".join([*chosen, text])
    name, folder = request.arguments.push_to_hub, conversion.output_dir
    if name is not None and folder is not None:
        from hf_linear_attention.conversion.output_folder import push

        yield f"\nPushed to {push(folder, name)}"


def _default_lines(conversion: Conversion) -> list[str]:
    """Which mechanism was taken and why, if the command names none."""
    if not conversion.request.is_default or not conversion.plan.layers:
        return []
    from hf_linear_attention.default_settings import REASONS, direction_of

    reason = REASONS[direction_of(conversion.plan.config, conversion.request.arguments.cross_attention)]
    return [f"No `--attention` was given: {reason}."]


def _preview(conversion: Conversion) -> list[str]:
    """What would be done, in lines."""
    from hf_linear_attention.conversion.calibration_data import keeps_exact_keys
    from hf_linear_attention.conversion.estimate import Estimate
    from hf_linear_attention.conversion.pipeline import calibration_tokens, divides_keys
    from hf_linear_attention.conversion.preset_plan import describe_stages
    from hf_linear_attention.conversion.result_text import describe
    from hf_linear_attention.conversion.softmax_choice import count_of

    arguments = conversion.request.arguments
    lines = [describe(conversion.plan, conversion.source)]
    if (count := count_of(arguments.softmax_layers)) is not None:
        lines.append(f"  softmax     in {count} of these layers, chosen on text")
    if conversion.plan.layers:
        estimate, inputs = Estimate(conversion.plan), conversion.inputs
        if inputs is not None and keeps_exact_keys(conversion.plan):
            tokens = calibration_tokens(conversion)
            cost = estimate.scores(tokens, divides_keys(conversion))
            lines.append(f"  scores      fitted on up to {tokens:,} tokens of {inputs.name}, {cost}")
        if conversion.training is not None:
            lines += describe_stages(conversion.training, estimate)
    return [*lines, "Nothing was written (--dry_run)."]


if __name__ == "__main__":
    sys.exit(main())
