"""Every shipped recipe trains a converted model on two processes, on real text."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import yaml
from safetensors.torch import load_file
from task_twins import TWINS

from hf_linear_attention.training.tasks import TASKS
from hf_linear_attention.training.tracking import read_metrics


RECIPES = sorted((Path(__file__).resolve().parents[2] / "training" / "configs").glob("*.yaml"))


@pytest.fixture
def originals(request: pytest.FixtureRequest, files: Path) -> Callable[[str], tuple[str, Path, str]]:
    """An original for a task, and the folder and suffix of its data files."""

    def original(task: str) -> tuple[str, Path, str]:
        if task == "image_classification":
            return request.getfixturevalue("vision_teacher"), request.getfixturevalue("pictures"), "jsonl"
        if task in TWINS:
            folder = request.getfixturevalue("twin")(task)
            return str(folder / "original"), folder, "jsonl"
        if task == "sequence_classification":
            return request.getfixturevalue("named_classifier"), files, "tsv"
        names = {"causal_lm": "llama_teacher", "masked_lm": "masked_teacher", "embedding": "bert_teacher"}
        return request.getfixturevalue(names[task]), files, "jsonl"

    return original


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_trains_on_two_processes(
    recipe: Path, originals: Callable[[str], tuple[str, Path, str]], converted: Any, tmp_path: Path, dataset_cache: Path
) -> None:
    task = yaml.safe_load(recipe.read_text(encoding="utf-8"))["task"]
    original, files, suffix = originals(task)
    settings = {"drop": ["position_bias"]} if task == "seq2seq_lm" else {}
    student, out = converted(original, mechanism="linear", feature_map="exp", **settings), tmp_path / "out"
    options: list[Any] = ["--config", recipe, "--model_name_or_path", student, "--teacher_name_or_path", original]
    options += ["--train_file", files / f"train.{suffix}", "--validation_file", files / f"valid.{suffix}"]
    options += ["--output_dir", out, "--max_train_steps", 2, "--logging_steps", 1]
    options += ["--per_device_train_batch_size", 4, *(["--max_length", 64] if TASKS[task].inputs == "text" else [])]
    log = tmp_path / "stderr"
    run = processes.start(processes.finetune, dataset_cache, options, ranks=2, stderr=log)
    assert processes.finish(run) == [0, 0], (tmp_path / "stderr-0").read_text(encoding="utf-8")[-2000:]
    events = read_metrics(out / "metrics.jsonl")
    losses = [event["loss"] for event in events if "loss" in event]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    assert [event["step"] for event in events if any(name.startswith("eval_") for name in event)] == [0, 2]
    before, after = (load_file(folder / "model.safetensors") for folder in (student, out))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert any(".linear_attention." in name for name in changed)
    assert any(".linear_attention." not in name for name in changed)
