"""Resuming with other options: what ends the run, what is said, and evaluations that cannot be compared."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_linear_attention._common.model_card import HISTORY
from hf_linear_attention._common.options import OnResume
from hf_linear_attention.training.checkpoints import changed_settings
from hf_linear_attention.training.evaluation.evaluator import SCORES
from hf_linear_attention.training.loop import TrainingLoop


RESUME = ["--resume_from_checkpoint", "latest"]


def same_weights(mine: Path, yours: Path) -> bool:
    a, b = load_file(mine / "model.safetensors"), load_file(yours / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def options(named_classifier: str, files: Path) -> list[Any]:
    model = ["--model_name_or_path", named_classifier, "--task", "sequence_classification"]
    data = ["--train_file", files / "train.tsv", "--max_length", 32, "--learning_rate", "1e-3"]
    steps = ["--max_train_steps", 10, "--checkpointing_steps", 2, "--eval_steps", 2]
    return [*model, *data, *steps, "--per_device_train_batch_size", 2, "--load_best_model_at_end"]


@pytest.fixture
def accuracies(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """To be filled with what evaluations say; each takes the first."""
    values: list[float] = []

    def compute(*_: Any, **__: Any) -> dict[str, float]:
        value = values.pop(0)
        return {"accuracy": value, "f1": value}

    monkeypatch.setitem(SCORES, "sequence_classification", (SCORES["sequence_classification"][0], compute))
    return values


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function: run this, and kill it when it has logged step 5."""

    def run(finetune: Any, *options: Any) -> None:
        def stop(self: TrainingLoop, progress: Any) -> None:
            if self.state.step == 5:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(TrainingLoop, "_log", stop)
            finetune(*options, "--logging_steps", 1, expect=130)

    return run


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (["--validation_file", "valid.tsv"], ["--validation_file", "train.tsv"], "validation_file"),
        (["--metric_for_best_model", "accuracy"], ["--metric_for_best_model", "f1"], "metric_for_best_model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_figures_of_other_evaluations_are_not_compared(
    before: list[Any],
    after: list[Any],
    name: str,
    finetune,
    options: list[Any],
    accuracies: list[float],
    killed,
    files: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No later accuracy reaches those before, which are of another evaluation."""

    def with_data(words: list[Any]) -> list[Any]:
        words = words if "--validation_file" in words else [*words, "--validation_file", "valid.tsv"]
        return [files / word if str(word).endswith(".tsv") else word for word in words]

    accuracies[:] = [0.9, 0.99, 0.98]  # before training, which does not count, and of steps 2 and 4
    killed(finetune, *options, *with_data(before))
    accuracies[:] = [0.5, 0.7, 0.6]  # of steps 6, 8 and 10
    with caplog.at_level(logging.WARNING):
        finetune(*options, *with_data(after), *RESUME)
    assert not accuracies
    assert f"{name}: " in caplog.text
    assert "the best evaluation so far (step 2) cannot be compared" in caplog.text
    assert same_weights(tmp_path / "out", tmp_path / "out" / "checkpoint-8")


def test_the_same_evaluation_goes_on_being_compared(
    finetune, options: list[Any], accuracies: list[float], killed, files: Path, tmp_path: Path, monkeypatch, caplog
) -> None:
    """The same file by a relative path, the metric that is the default by name, and batches of another size."""
    accuracies[:] = [0.9, 0.99, 0.98]
    killed(finetune, *options, "--validation_file", files / "valid.tsv")
    accuracies[:] = [0.5, 0.7, 0.6]
    same = ["--metric_for_best_model", "eval_accuracy", "--per_device_eval_batch_size", 3]
    monkeypatch.chdir(files)
    with caplog.at_level(logging.WARNING):
        finetune(*options, *same, "--validation_file", "valid.tsv", *RESUME)
    assert "cannot be compared" not in caplog.text
    assert same_weights(tmp_path / "out", tmp_path / "out" / "checkpoint-2")


def test_with_nothing_left_to_train_and_another_evaluation_the_last_weights_are_taken(
    finetune, options: list[Any], files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune(*options, "--validation_file", files / "valid.tsv")
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    other = [*options, "--validation_file", files / "train.tsv", *RESUME]
    finetune(*other, "--seed", 1, expect=2)
    assert "seed: 42 -> 1" in capsys.readouterr().err
    finetune(*other)
    assert same_weights(tmp_path / "out", tmp_path / "out" / "checkpoint-10")
    figures = json.loads((tmp_path / "out" / HISTORY).read_text(encoding="utf-8"))["runs"][-1]["metrics"]
    assert figures["eval_samples"] == 60


@pytest.mark.parametrize(("task", "evaluation"), [("embedding", ["teacher_name_or_path: a -> b"]), ("causal_lm", [])])
def test_another_teacher_is_another_evaluation_of_embeddings(task: str, evaluation: list[str]) -> None:
    """They are compared with the teacher's."""
    changed = changed_settings(*({"task": task, "teacher_name_or_path": teacher} for teacher in "ab"))
    assert changed[OnResume.REFUSED] == []
    assert changed[OnResume.WARNED] == ["teacher_name_or_path: a -> b"]
    assert changed[OnResume.INCOMPARABLE] == evaluation


def test_a_run_with_an_option_that_is_gone_is_refused() -> None:
    """But not one that had its default, or that chose only where and when to evaluate."""
    old = {"loss_on": "answers", "on_bad_rows": "raise", "streaming": False, "doc_stride": None, "max_eval_samples": 9}
    assert changed_settings(old, {})[OnResume.REFUSED] == []
    refused = changed_settings({**old, "loss_on": "all"}, {})[OnResume.REFUSED]
    assert refused == ["loss_on: all -> not an option of this version"]


def test_what_decides_data_order_or_model_is_refused() -> None:
    fixed = {"task", "model_name_or_path", "train_file", "max_length", "seed", "trainable", "use_peft", "lora_r"}
    free = {"eval_steps", "output_dir", "report_to", "per_device_eval_batch_size", "gradient_checkpointing"}
    names = fixed | free | {"train_examples", "sequences_per_step"}
    changed = changed_settings({}, dict.fromkeys(names, 1))
    assert {text.split(":")[0] for text in changed[OnResume.REFUSED]} == names - free
    assert changed[OnResume.WARNED] == changed[OnResume.INCOMPARABLE] == []
    for stage, place in ((None, OnResume.WARNED), (2, OnResume.REFUSED)):
        changed = changed_settings({"zero_stage": stage, "world_size": 1}, {"zero_stage": stage, "world_size": 2})
        assert changed[place] == ["world_size: 1 -> 2"]
