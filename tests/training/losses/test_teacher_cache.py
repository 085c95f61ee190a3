"""The teacher's outputs on disk: what is kept, when it is read, and that it is never those of something else."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import changed

from hf_linear_attention.training.losses.divergence import TopLogits, divergence
from hf_linear_attention.training.losses.outputs import Outputs
from hf_linear_attention.training.losses.teacher import Teacher
from hf_linear_attention.training.losses.teacher_cache import HiddenStates, Logits, RowFile


HYBRID = {"mechanism": "hybrid", "window_size": 4}
AGAIN = ["--overwrite_output_dir"]
TRANSFER = ["--attention_transfer_weight", 1, "--trainable", "mechanism"]


@pytest.fixture
def causal(converted: Any, llama: str, files: Path, tmp_path: Path) -> list[Any]:
    """Options for a converted model, and its cache."""
    student = converted(llama, **HYBRID)
    data = ["--train_file", f"{files}/train.jsonl", "--max_length", 32, "--max_train_steps", 4]
    logs = ["--logging_steps", 1, "--learning_rate", 1e-3, "--cache_teacher", tmp_path / "cache"]
    return ["--model_name_or_path", student, "--task", "causal_lm", *data, *logs]


def losses(events: list[dict[str, Any]]) -> list[float]:
    return [event["loss"] for event in events if "loss" in event]


def never(self: Teacher, batch: Any) -> Outputs:
    raise AssertionError("the teacher is run")


def test_distillation_reads_what_transfer_has_computed(
    finetune: Any, converted: Any, causal: list[Any], llama: str, llama_teacher: str, tmp_path: Path, monkeypatch: Any
) -> None:
    finetune(*causal, *TRANSFER)
    cache, far = causal[-2:], converted(llama_teacher, **HYBRID)  # whose losses are not about 0
    distil = [*causal[:-2], *AGAIN, "--model_name_or_path", far, "--teacher_name_or_path"]
    plain = losses(finetune(*distil, llama))
    with monkeypatch.context() as patch:
        patch.setattr(Teacher, "__call__", never)
        read = losses(finetune(*distil, llama, *cache))
    assert read == pytest.approx(plain, rel=1e-2)
    finetune(*distil, llama_teacher, *cache)
    assert len(list((tmp_path / "cache").iterdir())) == 2  # another teacher has a folder of its own


def test_a_resumed_run_and_damaged_rows(finetune: Any, causal: list[Any], llama: str, tmp_path: Path) -> None:
    """Reading gives the bits that writing gave, and bytes that do not fit their checksum are not used."""
    options = [*causal, "--teacher_name_or_path", llama, "--checkpointing_steps", 2]
    finetune(*options)
    shutil.copytree(tmp_path / "out", tmp_path / "whole")
    (rows,) = (tmp_path / "cache").rglob("*.rows")
    for is_damaged in (False, True):
        if is_damaged:
            rows.write_bytes(b"\1" * rows.stat().st_size)
        finetune(*options, "--resume_from_checkpoint", tmp_path / "out" / "checkpoint-2")
        assert not changed(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize("size", [0, 3, 4, 1000])
def test_damaged_checksums_are_rows_that_are_not_there(size: int, tmp_path: Path) -> None:
    kind, kept = Logits(8, 1.0), torch.arange(48, dtype=torch.uint8).view(3, 16)
    with closing(RowFile(tmp_path, kind, np.array([3, 3]))) as file:
        for row in range(2):
            file.write(row, b"tokens", kept)
        assert file.count() == 2
    assert file.rows.closed
    assert file.sums.closed
    os.truncate(tmp_path / "logits.sums", size)
    with closing(RowFile(tmp_path, kind, np.array([3, 3]))) as file:
        assert file.count() == (2 if size == 1000 else size // 4)
        assert (file.read(1, b"tokens") is None) == (size < 1000)
        file.write(1, b"tokens", kept)
        assert torch.equal(file.read(1, b"tokens"), kept)
        assert file.read(1, b"others") is None


def test_embeddings(
    finetune: Any, converted: Any, bert: str, bert_teacher: str, files: Path, tmp_path, monkeypatch
) -> None:
    near, far = (converted(path, **HYBRID) for path in (bert, bert_teacher))
    options = ["--task", "embedding", "--teacher_name_or_path", bert, "--logging_steps", 1, *AGAIN]
    options += ["--train_file", f"{files}/train.jsonl", "--max_length", 32, "--max_train_steps", 3]
    plain = losses(finetune(*options, "--model_name_or_path", far))
    options += ["--cache_teacher", tmp_path / "cache"]
    finetune(*options, *TRANSFER, "--model_name_or_path", near)
    monkeypatch.setattr(Teacher, "__call__", never)
    assert losses(finetune(*options, "--model_name_or_path", far)) == pytest.approx(plain, rel=1e-2)


def test_the_largest_logits_of_many_classes() -> None:
    """The KL is that of the kept classes and one more, as are its gradients, in float64."""
    temperature = 2.0
    torch.manual_seed(0)
    teacher, student = 3 * torch.randn(5, 60_000), 3 * torch.randn(5, 60_000, requires_grad=True)
    kind = Logits(60_000, temperature)
    kept = kind.encode(Outputs(lambda rows: teacher[rows]), torch.arange(5))
    assert kept.shape == (5, kind.size) == (5, 1026)
    top = kind.decode(kept)
    assert isinstance(top, TopLogits)
    exact = (teacher.double() / temperature).log_softmax(-1)
    torch.testing.assert_close(top.values.double(), exact.gather(1, top.ids), rtol=1e-3, atol=1e-3)
    assert torch.equal(top.ids, teacher.topk(256).indices)

    value = temperature**2 * divergence(student, top, temperature).sum()
    (gradient,) = torch.autograd.grad(value, student)
    log_q = (student.double() / temperature).log_softmax(-1)
    others = torch.ones_like(log_q, dtype=torch.bool).scatter(1, top.ids, False)
    coarse_q = torch.cat((log_q.gather(1, top.ids), log_q.masked_fill(~others, -torch.inf).logsumexp(-1, True)), -1)
    coarse_p = torch.cat((exact.gather(1, top.ids), exact.masked_fill(~others, -torch.inf).logsumexp(-1, True)), -1)
    expected = temperature**2 * (coarse_p.exp() * (coarse_p - coarse_q)).sum()
    torch.testing.assert_close(value.double(), expected, rtol=2e-3, atol=1e-3)
    (slope,) = torch.autograd.grad(expected, student)
    torch.testing.assert_close(gradient, slope, rtol=1e-2, atol=1e-4)


def test_what_float16_keeps() -> None:
    torch.manual_seed(0)
    logits, states = 5 * torch.randn(6, 300), (torch.randn(2, 3, 8), 100 * torch.randn(2, 3, 8))
    outputs = Outputs(lambda rows: logits[rows], states)
    kind, hidden = Logits(300, 1.0), HiddenStates("all", 2, 8)
    found = kind.decode(kind.encode(outputs, torch.arange(6)))
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, logits.log_softmax(-1), rtol=1e-3, atol=1e-3)
    back = hidden.decode(hidden.encode(outputs, torch.arange(6)).view(2, 3, -1))
    for mine, yours in zip(back, states, strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-3, atol=1e-6)
