"""What models write, against full passes without a cache and against `generate`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from hf_linear_attention import convert
from hf_linear_attention.training.evaluation.retention import (
    agreement_length,
    continued,
    drawn,
    generation_figures,
    nats_of_samples,
    repeated_share,
)


STREAM = np.random.default_rng(0).integers(5, 300, 400)
PROMPTS = torch.from_numpy(np.stack([STREAM[:20], STREAM[50:70], STREAM[90:110]]))


@pytest.fixture
def teacher(llama_teacher: str) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(llama_teacher).eval()


@pytest.fixture
def student(teacher):
    return convert(teacher, mechanism="hybrid", window_size=4, num_sinks=2, num_features=8)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def test_greedy_is_what_generate_writes(teacher, student) -> None:
    for model in (teacher, student):
        model.generation_config.eos_token_id = None
        expected = model.generate(PROMPTS, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert torch.equal(continued(model, PROMPTS, 12, greedy), expected[:, 20:])


@torch.no_grad()
def test_agreement_ends_with_the_first_difference(teacher, student) -> None:
    mine, yours = (continued(model, PROMPTS, 12, greedy).tolist() for model in (student, teacher))
    lengths = []
    for row, other in zip(mine, yours, strict=True):
        same = [a == b for a, b in zip(row, other)]
        lengths.append(same.index(False) if False in same else 12)
    assert agreement_length(teacher, PROMPTS, torch.tensor(mine)) == pytest.approx(sum(lengths) / 3)
    assert agreement_length(teacher, PROMPTS, torch.tensor(yours)) == 12
    changed = torch.tensor(yours)
    changed[:, 5] = (changed[:, 5] + 1) % 300
    assert agreement_length(teacher, PROMPTS, changed) == 5


@torch.no_grad()
def test_draws_follow_softmax_and_are_the_same_for_equal_models(teacher) -> None:
    copy = convert(teacher, mechanism="linear", layers="none")
    samples = continued(teacher, PROMPTS, 10, drawn(0))
    assert torch.equal(continued(copy, PROMPTS, 10, drawn(0)), samples)
    assert not torch.equal(continued(teacher, PROMPTS, 10, drawn(1)), samples)
    logits, draw = torch.tensor([[0.0, 1.0, -1.0]]).expand(20_000, 3), drawn(0)
    shares = draw(logits).bincount(minlength=3) / 20_000
    torch.testing.assert_close(shares, logits[0].softmax(-1), atol=0.015, rtol=0)  # 4 standard errors


@torch.no_grad()
def test_nats_of_samples_are_those_of_the_teacher_alone(teacher) -> None:
    samples = continued(teacher, PROMPTS, 10, drawn(0))
    whole = torch.cat((torch.full((3, 1), 1), PROMPTS, samples), dim=1)
    logits = teacher(whole).logits.log_softmax(-1)
    expected = -logits[:, 20:-1].gather(-1, samples.unsqueeze(-1)).mean().item()
    prompts = whole[:, :21]
    assert nats_of_samples(teacher, prompts, samples, 1, 64) == pytest.approx(expected, rel=1e-5)
    # longer than the trained length: by windows of it, so that no position is beyond it
    seen = []
    handle = teacher.model.register_forward_pre_hook(
        lambda _, __, keywords: seen.append(keywords["input_ids"].shape[1]), with_kwargs=True
    )
    shorter = nats_of_samples(teacher, prompts, samples, 1, 16)
    handle.remove()
    assert max(seen) == 16
    assert shorter != pytest.approx(expected, rel=1e-5)


def test_repeated_grams() -> None:
    assert repeated_share([[1, 2, 3, 4, 5, 6]]) == 0
    # 1234 2341 3412 4123 1234 2341: two of six came before
    assert repeated_share([[1, 2, 3, 4, 1, 2, 3, 4, 1]]) == pytest.approx(2 / 6)
    assert repeated_share([[7] * 8, [1, 2, 3, 4]]) == pytest.approx((4 / 5) / 2)


@torch.no_grad()
def test_lengths_and_an_equal_model(teacher, student) -> None:
    rows = generation_figures(teacher, student, STREAM, 1, 32, 10_000)
    assert [(row["length"], row["sampled"]) for row in rows] == [(32, 16), (128, 64)]
    rows = generation_figures(teacher, student, STREAM, 1, 32, 60)
    assert [row["length"] for row in rows] == [32, 60]
    equal = convert(teacher, mechanism="linear", layers="none")
    (row,) = generation_figures(teacher, equal, STREAM, None, 32, 32)
    assert row["agreement_length"] == row["greedy"] == 16
    assert row["teacher_on_student"] == row["teacher_on_teacher"]
    assert row["repeated_student"] == row["repeated_teacher"]
