"""Two connected processes on this machine give what one gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_linear_attention.training.tracking import read_metrics


ROOT = Path(__file__).resolve().parents[3]


def test_two_processes_equal_one(
    finetune, bert: str, bert_teacher: str, files: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Ragged texts, accumulation, an unused pooler, 21 evaluation texts on 2 processes.

    Tolerance: AdamW turns rounding in tiny gradients into up to lr = 1e-3 a step; gradients that were averaged per
    process instead of per unit would move the logged losses in the second digit.
    """
    models = ["--model_name_or_path", bert, "--teacher_name_or_path", bert_teacher, "--task", "embedding"]
    data = ["--train_file", f"{files}/train.txt", "--validation_file", f"{files}/valid.txt"]
    steps = ["--max_train_steps", "4", "--learning_rate", "1e-3", "--logging_steps", "1", "--eval_steps", "2"]
    options = [*models, *data, *steps]
    one, two = tmp_path / "one", tmp_path / "two"
    expected = finetune(*options, "--per_device_train_batch_size", 4, output_dir=one)
    config = ROOT / "training" / "launch" / "cpu2.yaml"
    launch = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file", str(config)]
    split = ["--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "2", "--checkpointing_steps", "3"]
    script = ["--main_process_port", "0", str(ROOT / "training" / "finetune.py")]
    command = [*launch, *script, *options, *split, "--output_dir", str(two)]
    clean = {name: value for name, value in environment.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    done = subprocess.run(command, env=clean, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 process(es)" in done.stderr
    assert done.stderr.count("no checkpoint") == 0
    got = read_metrics(two / "metrics.jsonl")
    assert len(got) == len(expected) == 7
    for mine, yours in zip(got, expected, strict=True):
        mine.pop("tokens_per_second", None)
        yours.pop("tokens_per_second", None)
        assert mine == pytest.approx(yours, rel=5e-5)
    weights, others = load_file(two / "model.safetensors"), load_file(one / "model.safetensors")
    assert all((weights[name] - others[name]).abs().max() < 5e-5 for name in others)
    saved = sorted(path.name for path in (two / "checkpoint-3").glob("random_states_*.pkl"))
    assert saved == ["random_states_0.pkl", "random_states_1.pkl"]
    generators = [torch.load(two / "checkpoint-3" / name, weights_only=False)["torch_manual_seed"] for name in saved]
    assert not torch.equal(*generators)
    assert os.path.exists(two / "README.md")
