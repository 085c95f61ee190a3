r"""Heal a converted model by distillation from the original, or fine-tune any model of the Auto classes.

Distil a causal language model from its softmax original (KL of the logits), all parameters:

    python training/finetune.py --task causal_lm --model_name_or_path CONVERTED --teacher_name_or_path ORIGINAL \
        --train_file train.jsonl --validation_file valid.txt --output_dir OUT \
        --learning_rate 1e-3 --max_train_tokens 1000000 --lr_scheduler_type cosine --warmup_ratio 0.05

The same from a recipe file; options on the command line win over it:

    python training/finetune.py --config training/configs/distil_causal_lm.yaml --model_name_or_path CONVERTED \
        --teacher_name_or_path ORIGINAL --train_file train.jsonl --output_dir OUT

Both stages of the default recipe, attention transfer and distillation; --resume_from_checkpoint latest goes on:

    python training/finetune.py --preset default --task causal_lm --model_name_or_path CONVERTED \
        --teacher_name_or_path ORIGINAL --train_file train.jsonl --output_dir OUT --max_train_tokens 2000000

A sentence-embedding model (hidden states and pooled embedding), from unlabelled text:

    python training/finetune.py --config training/configs/distil_embedding.yaml --model_name_or_path CONVERTED \
        --teacher_name_or_path ORIGINAL --train_file texts.txt --validation_file other.txt --output_dir OUT

Two processes, with or without GPUs (`accelerate launch --cpu --num_processes 2` starts only one):

    accelerate launch --config_file training/launch/cpu2.yaml training/finetune.py ...

Go on after an interruption, exactly as if there had been none (needs --checkpointing_steps):

    python training/finetune.py ... --resume_from_checkpoint latest

Only evaluate:

    python training/finetune.py --task causal_lm --model_name_or_path MODEL --validation_file valid.txt --output_dir OUT

Exit codes: 0 done, 1 the run failed, 2 the command line is wrong, 130 interrupted, 143
SIGTERM (while it trains, a checkpoint is written first). With HF_LINEAR_ATTENTION_DEBUG=1 errors come with their
traceback.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


if not __package__:  # started as a file: its own folder must not hide other packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import hf_linear_attention  # noqa: F401  (registers the Linear<X> classes)
from hf_linear_attention._common.command_line import run_command
from hf_linear_attention.training.presets.preset import Preset
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.recipe_parser import parse, parse_preset


logger = logging.getLogger("finetune")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    # the launcher starts the same command several times; one copy of every message is enough
    speaks = os.environ.get("LOCAL_RANK", "0") in ("0", "-1")
    argv = sys.argv[1:] if argv is None else argv
    stopped = "complete checkpoints are kept, and `--resume_from_checkpoint latest` goes on from the newest"
    return run_command("finetune.py", lambda: _finetune(argv, speaks), stopped=stopped, speaks=speaks)


def _finetune(argv: Sequence[str], speaks: bool) -> None:
    """Do what was asked."""
    asked = parse_preset(argv, __doc__) or parse(argv, __doc__)
    level = logging.INFO if speaks else logging.ERROR
    logging.basicConfig(level=level, format="%(asctime)s %(name)s: %(message)s")
    logger.info("done: %s", _run(asked))


def _run(asked: Recipe | tuple[Preset, dict[str, Any]]) -> dict[str, float]:
    """Import what trains only now: `--help`, and the error of a wrong option, need none of it."""
    import datasets
    from transformers.utils.logging import disable_progress_bar

    from hf_linear_attention.training.distributed.launching import disconnect
    from hf_linear_attention.training.presets.stages import run_stages
    from hf_linear_attention.training.run import run

    datasets.disable_progress_bars()  # one bar: the training's
    disable_progress_bar()
    figures = run(asked) if isinstance(asked, Recipe) else run_stages(*asked, parse, run)
    disconnect()
    return figures


if __name__ == "__main__":
    sys.exit(main())
