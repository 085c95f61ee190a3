"""KL by chunks against the definition in float64, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_linear_attention.training.losses.divergence import chunked_kl


def naive(student: Tensor, teacher: Tensor, mask: Tensor, temperature: float) -> Tensor:
    p = (teacher.double() / temperature).softmax(-1)
    q = (student.double() / temperature).softmax(-1)
    return temperature**2 * (p * (p.log() - q.log())).sum(-1)[mask].sum()


@pytest.mark.parametrize(("temperature", "chunk_rows"), [(1.0, 100), (2.5, 4)])
def test_values_and_gradients_equal_the_definition(temperature: float, chunk_rows: int) -> None:
    student = torch.randn(11, 7, dtype=torch.float64, requires_grad=True)
    teacher = 3 * torch.randn(11, 7, dtype=torch.float64)
    mask = torch.rand(11) > 0.3
    value = chunked_kl(student, lambda rows: teacher[rows], mask, temperature, chunk_rows)
    expected = naive(student, teacher, mask, temperature)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(1.7 * value, student)
    (expected_gradient,) = torch.autograd.grad(1.7 * expected, student)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
    assert gradient[~mask].abs().max() == 0


def test_a_chunk_has_a_sixteenth_of_the_rows() -> None:
    """The ten copies of a chunk stand in memory beside the activations of the student and the logits of all rows."""
    student = torch.randn(1600, 4096, requires_grad=True)
    teacher, mask, asked = torch.randn(1600, 4096), torch.arange(1600) % 7 > 0, []

    def rows_of(rows: Tensor) -> Tensor:
        asked.append(rows)
        return teacher[rows]

    value = chunked_kl(student, rows_of, mask)
    torch.testing.assert_close(value.double(), naive(student, teacher, mask, 1.0), rtol=1e-5, atol=0)
    assert max(map(len, asked)) == 1600 // 16
    assert torch.equal(torch.cat(asked), mask.nonzero().squeeze(-1))


def test_half_precision_logits_are_compared_in_float32() -> None:
    """The log-softmax of bfloat16 logits in bfloat16 would be off by 1e-2."""
    student = (8 * torch.randn(64, 500)).bfloat16().requires_grad_()
    teacher = (8 * torch.randn(64, 500)).bfloat16()
    mask = torch.ones(64, dtype=torch.bool)
    value = chunked_kl(student, lambda rows: teacher[rows], mask)
    torch.testing.assert_close(value.double(), naive(student, teacher, mask, 1.0), rtol=1e-5, atol=0)
    value.backward()
    assert student.grad is not None
    assert student.grad.dtype == torch.bfloat16


def test_rows_outside_the_mask_are_never_looked_at() -> None:
    student = torch.randn(3, 5)
    student[1] = float("nan")
    student.requires_grad_()
    teacher = torch.randn(3, 5)
    value = chunked_kl(student, lambda rows: teacher[rows], torch.tensor([True, False, True]))
    value.backward()
    assert value.isfinite()
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_excluded_teacher_tokens_count_nothing() -> None:
    teacher = torch.tensor([[1.0, float("-inf"), 0.0]], dtype=torch.float64)
    student = torch.randn(1, 3, dtype=torch.float64, requires_grad=True)
    value = chunked_kl(student, lambda rows: teacher[rows], torch.tensor([True]))
    p, log_q = teacher.softmax(-1)[0, [0, 2]], student.log_softmax(-1)[0, [0, 2]]
    torch.testing.assert_close(value, (p * (p.log() - log_q)).sum())


def twice_by_create_graph(loss: Callable[[Tensor], Tensor], student: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss(student), student, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), student)[0]


@pytest.mark.parametrize(
    "twice",
    [
        twice_by_create_graph,
        lambda loss, student: torch.func.grad(loss)(student.detach()),
        lambda loss, student: torch.func.jvp(loss, (student.detach(),), (student.detach(),)),
        lambda loss, student: torch.func.vmap(loss)(student.detach().expand(3, 5, 4)),
    ],
    ids=["create_graph", "func.grad", "func.jvp", "func.vmap"],
)
def test_second_derivatives_are_refused_and_never_wrong(twice: Callable[..., Tensor]) -> None:
    """The incoming gradient of a scalar loss does not require one itself, and still is differentiated twice."""
    student = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    teacher, mask = torch.randn(5, 4, dtype=torch.float64), torch.tensor([True, False, True, True, True])
    with pytest.raises(NotImplementedError, match=r"second derivative.*torch\.nn\.functional\.kl_div"):
        twice(lambda x: chunked_kl(x, lambda rows: teacher[rows], mask, 2.0, 2), student)
