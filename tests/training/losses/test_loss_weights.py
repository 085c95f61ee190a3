"""The weights of the objectives: what is minimised, what is stepped with and what is logged are one weighted sum."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import recipe_of
from runs import losses
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from hf_linear_attention import convert
from hf_linear_attention.training.losses.objectives import (
    OBJECTIVES,
    StudentWithObjectives,
    build_objectives,
)
from hf_linear_attention.training.losses.teacher import Teacher


OBSERVING = ("attention_transfer", "far_share")
DISTILLING = tuple(name for name in OBJECTIVES if name not in OBSERVING)
# Every objective with each other that it can be combined with.
PAIRS = [(a, b) for kind in (DISTILLING, OBSERVING) for a in kind for b in kind if a < b]


def batch_of_text() -> dict[str, Tensor]:
    ids = torch.randint(5, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "index": torch.arange(len(ids))}


def hybrid(llama: str) -> Any:
    """A converted Llama whose far keys have a share that is too small."""
    student = convert(LlamaForCausalLM.from_pretrained(llama).eval(), mechanism="hybrid", window_size=3, num_sinks=1)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "far_log_scale" in name:
                parameter -= 6
    return student


def gradient_of(student: nn.Module, teacher: Teacher, weights: dict[str, float]) -> tuple[Tensor, Tensor]:
    """Loss and gradient of all parameters, flat and in float64."""
    every = {f"{name}_weight": weights.get(name, 0.0) for name in OBJECTIVES}
    objectives = build_objectives(recipe_of("causal_lm", **every))
    assert set(objectives) == set(weights)
    batch = batch_of_text()
    scales = {name: 1 / objective.units(batch) for name, (_, objective) in objectives.items()}
    student.zero_grad()
    loss, _ = StudentWithObjectives(student, objectives, "all")(batch, teacher(batch), scales)
    loss.backward()
    flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in student.parameters()]
    return loss.detach().double(), torch.cat([gradient.flatten().double() for gradient in flat])


@pytest.fixture(scope="module")
def teacher(llama_teacher: str) -> Teacher:
    model = LlamaForCausalLM.from_pretrained(llama_teacher).eval()
    return Teacher(model, nullcontext, layers="all")


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_gradient_is_the_weighted_sum_of_the_gradients(pair: tuple[str, str], teacher: Teacher, llama: str) -> None:
    student = LlamaForCausalLM.from_pretrained(llama).eval()
    if pair[0] in OBSERVING:
        student = hybrid(llama)
    apart = [gradient_of(student, teacher, {name: 1.0}) for name in pair]
    assert all(gradient.norm() > 1e-4 for _, gradient in apart)
    loss, gradient = gradient_of(student, teacher, {pair[0]: 0.25, pair[1]: 30.0})
    torch.testing.assert_close(loss, 0.25 * apart[0][0] + 30 * apart[1][0], rtol=1e-5, atol=0)
    expected = 0.25 * apart[0][1] + 30 * apart[1][1]
    assert (gradient - expected).norm() < 1e-5 * expected.norm()  # float32 sums in another order
    # the test can fail: each weight moves the sum by more than that
    for weight, (_, own) in zip((0.25, 30.0), apart, strict=True):
        assert (weight - 1) ** 2 * own.norm() ** 2 > (1e-4 * expected.norm()) ** 2


def test_the_logged_loss_is_the_mean_of_what_was_minimised(
    finetune, converted, llama: str, llama_teacher: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two objectives, three steps in a line: the mean of the losses whose gradients were taken."""
    minimised: list[float] = []
    forward = StudentWithObjectives.forward

    def recorded(self: StudentWithObjectives, *inputs: Any) -> Any:
        loss, parts = forward(self, *inputs)
        minimised.append(loss.item())
        return loss, parts

    monkeypatch.setattr(StudentWithObjectives, "forward", recorded)
    student = converted(llama, mechanism="hybrid", window_size=3, num_sinks=1)
    models = ["--model_name_or_path", student, "--teacher_name_or_path", llama_teacher, "--task", "causal_lm"]
    steps = ["--train_file", files / "train.jsonl", "--max_length", 32, "--max_train_steps", 3, "--logging_steps", 3]
    weights = ["--task_loss_weight", 0.25, "--logits_kl_weight", 7]
    (event,) = losses(finetune(*models, *steps, *weights))
    assert len(minimised) == 3
    assert event["loss"] == pytest.approx(sum(minimised) / 3, rel=1e-6)
    assert event["loss"] == pytest.approx(0.25 * event["task_loss"] + 7 * event["logits_kl"], rel=1e-5)
