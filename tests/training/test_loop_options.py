"""Options of the loop: recomputed activations, trackers, the plot."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import LoggerType
from runs import changed


@pytest.fixture
def student(converted: Any, llama_teacher: str) -> Path:
    return converted(llama_teacher, mechanism="hybrid", window_size=4, num_features=8)


@pytest.fixture
def causal(student: Path, files: Path) -> list[Any]:
    data = ["--train_file", files / "train.jsonl", "--max_length", 32, "--max_train_steps", 4, "--logging_steps", 1]
    return ["--model_name_or_path", student, "--task", "causal_lm", *data, "--learning_rate", "1e-2"]


DISTILLATION = ["--logits_kl_weight", 1, "--hidden_state_weight", 1]
TRANSFER = ["--attention_transfer_weight", 1, "--trainable", "mechanism"]


@pytest.mark.parametrize("objectives", [DISTILLATION, TRANSFER], ids=["distillation", "transfer"])
def test_recomputed_activations_change_nothing(
    objectives: list[Any], finetune, causal: list[Any], llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, because recomputation does the same operations. Attention transfer sees every layer once, and keeps
    nothing that could be recomputed."""
    teacher = ["--teacher_name_or_path", llama] if objectives is DISTILLATION else []
    recomputed: list[int] = []
    checkpointed = torch.utils.checkpoint.checkpoint
    count = lambda *a, **k: recomputed.append(1) or checkpointed(*a, **k)  # noqa: E731 (one line of bookkeeping)
    monkeypatch.setattr("transformers.modeling_utils.checkpoint", count)
    plain = finetune(*causal, *objectives, *teacher, output_dir=tmp_path / "plain")
    assert not recomputed
    lean = finetune(*causal, *objectives, *teacher, "--gradient_checkpointing", output_dir=tmp_path / "lean")
    assert len(recomputed) == (4 * 2 if objectives is DISTILLATION else 0)  # steps x layers
    for mine, yours in zip(lean, plain, strict=True):
        assert {**mine, "tokens_per_second": 0} == {**yours, "tokens_per_second": 0}
    assert not changed(tmp_path / "plain", tmp_path / "lean")


def test_trackio(finetune, causal: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate's own tracker, on a module with the four things of trackio that it calls."""
    runs, logged, settings, finished = [], [], {}, []
    module = types.ModuleType("trackio")
    module.config = types.SimpleNamespace(update=lambda values, allow_val_change: settings.update(values))
    run = types.SimpleNamespace(
        log=lambda values, step=None: logged.append({"step": step, **values}), finish=lambda: finished.append(True)
    )
    module.init = lambda project: runs.append(project) or run
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: [LoggerType.TRACKIO])
    events = finetune(*causal, "--report_to", "trackio")
    assert logged == events
    assert (runs, finished, settings["max_length"]) == (["out"], [True], 32)


def test_the_losses_are_drawn(finetune, causal: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    finetune(*causal)
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "![Loss by tokens](loss.png)" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
