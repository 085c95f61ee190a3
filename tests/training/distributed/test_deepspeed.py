"""`finetune.py` under DeepSpeed's ZeRO-2 and ZeRO-3 on two CPU processes, against one process without it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import sharding
import torch
from accelerate.utils import is_deepspeed_available
from runs import changed


pytestmark = pytest.mark.skipif(not is_deepspeed_available(), reason="needs `pip install deepspeed`, which CI has not")

Sharded = Callable[..., str]


@pytest.fixture
def sharded(dataset_cache: Path, tmp_path: Path) -> Sharded:
    """`finetune.py` under a ZeRO stage; what it wrote to stderr."""

    def run(stage: int, *options: Any, codes: tuple[int, int] = (0, 0)) -> str:
        group = processes.start(
            sharding.zero_finetune, dataset_cache, stage, list(options), ranks=2, stderr=tmp_path / "stderr"
        )
        found, text = processes.finish(group), (tmp_path / "stderr-0").read_text(encoding="utf-8")
        assert tuple(found) == codes, text[-3000:]
        return text

    return run


@pytest.mark.parametrize(
    ("stage", "precision", "rel", "atol"),
    [
        (2, "no", 1e-4, 5e-5),
        # 8 bits of mantissa: 4e-3 a product; each of 4 steps may turn the sign of a tiny gradient, lr = 1e-3 twice
        (3, "bf16", 2e-2, 8e-3),
    ],
)
def test_the_run_of_one_process(
    stage: int, precision: str, rel: float, atol: float, finetune, sharded, llama_teacher: str, files: Path, tmp_path
) -> None:
    """Accumulation, clipping, recomputation, evaluation of 21 texts on 2 processes, and a resumption bit by bit."""
    kind = {} if precision == "no" else {"mechanism": "linear"}
    options = sharding.distillation(tmp_path / "source", llama_teacher, files, **kind)
    options += ["--mixed_precision", precision]
    one, two, again = (tmp_path / name for name in ("one", "two", "again"))
    finetune(*options, "--per_device_train_batch_size", 4, output_dir=one)
    split = [*options, "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 2]
    split += ["--gradient_checkpointing"]
    sharded(stage, *split, "--output_dir", two)
    saved = sharding.assert_same_run(two, one, rel, atol)
    assert {value.dtype for value in saved.values()} == {torch.float32}

    shutil.copytree(two / "checkpoint-2", again / "checkpoint-2")
    sharded(stage, *split, "--output_dir", again, "--resume_from_checkpoint", "latest")
    assert not changed(two, again)
    other = sharded(5 - stage, *split, "--output_dir", two, "--resume_from_checkpoint", "latest", codes=(1, 1))
    assert f"zero_stage: {stage} -> {5 - stage}" in other


@pytest.mark.parametrize("stage", [3])
def test_what_is_not_finite_stops_the_run(
    stage: int, sharded: Sharded, llama_teacher: str, files: Path, tmp_path: Path
) -> None:
    options = sharding.distillation(tmp_path / "source", llama_teacher, files)
    text = sharded(stage, *options, "--learning_rate", "1e30", "--output_dir", tmp_path / "out", codes=(1, 1))
    assert "is not finite" in text
    assert "nothing was overwritten" in text


@pytest.mark.parametrize("stage", [3])
def test_the_best_weights_are_what_is_saved(
    stage: int, sharded: Sharded, llama_teacher: str, files: Path, tmp_path: Path
) -> None:
    out, options = tmp_path / "out", sharding.distillation(tmp_path / "source", llama_teacher, files)
    options += ["--load_best_model_at_end"]
    options += ["--learning_rate", 0.6, "--warmup_ratio", 0.5]  # worse with every step
    sharded(stage, *options, "--output_dir", out)
    assert not changed(out, out / "checkpoint-2")
    assert changed(out, out / "checkpoint-4")
