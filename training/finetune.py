r"""Train a converted model to imitate its original again (healing), or fine-tune any model of the Auto classes.

Distil a causal language model from its softmax original (KL divergence of the logits), training all parameters:

    %(prog)s --task causal_lm --model_name_or_path CONVERTED --teacher_name_or_path ORIGINAL \
        --train_file train.jsonl --validation_file valid.txt --output_dir OUT \
        --learning_rate 1e-3 --max_train_tokens 1000000 --lr_scheduler_type cosine --warmup_ratio 0.05

Do the same from a recipe file; options on the command line override those in the file:

    %(prog)s --config distil_causal_lm --model_name_or_path CONVERTED \
        --teacher_name_or_path ORIGINAL --train_file train.jsonl --output_dir OUT

Run both stages of the default preset, attention transfer and distillation; --resume_from_checkpoint latest resumes it:

    %(prog)s --preset default --task causal_lm --model_name_or_path CONVERTED \
        --teacher_name_or_path ORIGINAL --train_file train.jsonl --output_dir OUT --max_train_tokens 2000000

Distil a sentence-embedding model (hidden states and pooled embedding) on unlabelled text:

    %(prog)s --config distil_embedding --model_name_or_path CONVERTED \
        --teacher_name_or_path ORIGINAL --train_file texts.txt --validation_file other.txt --output_dir OUT

Train with two processes, with or without GPUs (`accelerate launch --cpu --num_processes 2` starts only one):

    accelerate launch --config_file training/launch/cpu2.yaml -m hf_linear_attention.training.finetune ...

Resume after an interruption, exactly as if there had been none (this needs --checkpointing_steps):

    %(prog)s ... --resume_from_checkpoint latest

Evaluate a model without training it:

    %(prog)s --task causal_lm --model_name_or_path MODEL --validation_file valid.txt --output_dir OUT

`hf-linear-attention finetune`, or `accelerate launch --module hf_linear_attention finetune`, takes the same options. It
also writes report.html into OUT, if the model was converted before, and with --push_to_hub NAME uploads OUT to the Hub.

Exit codes: 0, the run is done; 1, it failed; 2, the options, the model or the data do not allow it; 130, it was
interrupted; 143, it received SIGTERM (during training, a checkpoint is written first). With
HF_LINEAR_ATTENTION_DEBUG=1, errors are printed with their traceback.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any


if not __package__:  # started as a file: its own folder must not hide other packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import hf_linear_attention  # noqa: F401  (registers the Linear<X> classes)
from hf_linear_attention._common.command_line import is_first_process, let_threads_sleep, run_command
from hf_linear_attention._common.folders import only_writer
from hf_linear_attention.training.presets import Preset
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.recipe_parser import parse_options


logger = logging.getLogger("finetune")


def main(argv: Sequence[str] | None = None, finished: Callable[[Path], None] | None = None) -> int:
    """Run the command with the arguments `argv` (by default those of the process), and return its exit code.

    `finished` is called with the output folder after the run, in the first process.
    """
    # The launcher starts the same command several times; one copy of every message is enough.
    speaks = os.environ.get("LOCAL_RANK", "0") in ("0", "-1")
    argv = sys.argv[1:] if argv is None else argv
    let_threads_sleep()
    stopped = "complete checkpoints are kept, and `--resume_from_checkpoint latest` resumes from the newest"
    return run_command("finetune.py", lambda: _finetune(argv, speaks, finished), stopped=stopped, speaks=speaks)


def _finetune(argv: Sequence[str], speaks: bool, finished: Callable[[Path], None] | None) -> None:
    """Train or evaluate as `argv` asks, and log the final figures."""
    asked = parse_options(argv, __doc__)
    level = logging.INFO if speaks else logging.ERROR
    logging.basicConfig(level=level, format="%(asctime)s %(name)s: %(message)s")
    is_first = is_first_process()
    logging.getLogger("accelerate.checkpointing").setLevel(logging.WARNING)  # it would name every file of a checkpoint
    folder = asked.output_dir if isinstance(asked, Recipe) else Path(asked[1]["output_dir"])
    with only_writer(folder.resolve()) if is_first else nullcontext():
        figures = _run(asked)
        if finished is not None and is_first:
            finished(folder)
    logger.info("done: %s", figures)


def _run(asked: Recipe | tuple[Preset, dict[str, Any]]) -> dict[str, float]:
    """Import the training code only now: `--help` and the error for a wrong option do not need it."""
    import datasets
    from transformers.utils.logging import disable_progress_bar

    from hf_linear_attention.training.distributed import disconnect
    from hf_linear_attention.training.run import run, run_stages

    datasets.disable_progress_bars()  # the only progress bar is that of the training loop
    disable_progress_bar()
    figures = run(asked) if isinstance(asked, Recipe) else run_stages(*asked, run)
    disconnect()
    return figures


if __name__ == "__main__":
    sys.exit(main())
