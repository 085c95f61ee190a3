"""KL against the definition in float64, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_linear_attention.training.losses.divergence import divergence


def naive(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    p = (teacher.double() / temperature).softmax(-1)
    q = (student.double() / temperature).softmax(-1)
    return (p * (p.log() - q.log())).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_values_and_gradients_equal_the_definition(temperature: float) -> None:
    student = torch.randn(2, 11, 7, dtype=torch.float64, requires_grad=True)
    teacher = 3 * torch.randn(2, 11, 7, dtype=torch.float64)
    value, expected = divergence(student, teacher, temperature), naive(student, teacher, temperature)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(value.sum(), student)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_half_precision_logits_are_compared_in_float32() -> None:
    """The log-softmax of bfloat16 logits in bfloat16 would be off by 1e-2."""
    student = (8 * torch.randn(64, 500)).bfloat16().requires_grad_()
    teacher = (8 * torch.randn(64, 500)).bfloat16()
    value = divergence(student, teacher)
    torch.testing.assert_close(value.double(), naive(student, teacher, 1.0), rtol=1e-5, atol=1e-5)
    value.sum().backward()
    assert student.grad is not None
    assert student.grad.dtype == torch.bfloat16


def test_excluded_teacher_tokens_count_nothing() -> None:
    teacher = torch.tensor([[1.0, float("-inf"), 0.0]], dtype=torch.float64)
    student = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    value = divergence(student, teacher).sum()
    p, log_q = teacher.softmax(-1)[0, [0, 2]], student.log_softmax(-1)[0, [0, 2]]
    torch.testing.assert_close(value, (p * (p.log() - log_q)).sum())
    (gradient,) = torch.autograd.grad(value, student)
    torch.testing.assert_close(gradient, student.softmax(-1) - teacher.softmax(-1))
