"""KL(teacher || student) of two sets of logits, over chunks of rows.

For one row with teacher probabilities p and student probabilities q, both at temperature T:

    KL = sum_v p_v (log p_v - log q_v)          dKL / d(student logit v) = (q_v - p_v) / T

and the value is multiplied by T^2, which keeps the gradient's size (Hinton et al. 2015, arXiv:1503.02531, section 2).
Only a chunk of rows is ever in float32 for both models, and the teacher's logits need not exist as a whole: they are
asked for by row, so that a teacher can apply its output layer chunk by chunk (`teacher.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


LogitRows = Callable[[Tensor], Tensor]
"""Row numbers [R] -> logits [R, V]."""

CHUNK_ELEMENTS = 2**24  # logits in a chunk: 64 MiB a float32 copy


class _ChunkedKL(torch.autograd.Function):
    """The gradient is computed with the value, in the dtype of the student's logits, and kept for the backward pass:
    as large as the gradient that has to exist anyway, and nothing is computed twice."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: LogitRows, rows: Tensor, temperature: float, chunk_rows: int
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.promote_types(student.dtype, torch.float32), device=student.device)
        gradient = torch.zeros_like(student) if ctx.needs_input_grad[0] else None  # [T, V]
        for chunk in rows.split(chunk_rows):
            value, slope = _chunk(student[chunk], teacher(chunk), temperature, gradient is not None)
            total += value
            if gradient is not None:
                gradient[chunk] = slope.to(gradient.dtype)
        ctx.save_for_backward(gradient)
        return total * temperature**2

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype), None, None, None, None


def _chunk(student: Tensor, teacher: Tensor, temperature: float, slope: bool) -> tuple[Tensor, Tensor]:
    """Sum of the KL over rows [R, V], without the factor T^2, and the slope T (q - p) of the value with it."""
    wide = torch.promote_types(student.dtype, torch.float32)
    log_q = torch.log_softmax(student.to(wide) / temperature, dim=-1)
    log_p = torch.log_softmax(teacher.to(wide) / temperature, dim=-1)
    p = log_p.exp()
    # a teacher that excludes a token has log p = -inf and p = 0: its share is 0, not NaN
    value = torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p)).sum()
    return value, (log_q.exp_() - p) * temperature if slope else p


def chunked_kl(
    student: Tensor, teacher: LogitRows, mask: Tensor, temperature: float = 1.0, chunk_rows: int | None = None
) -> Tensor:
    """Sum over the rows where `mask` of T^2 KL(teacher || student).

    student: logits [T, V]; teacher: row numbers [R] -> logits [R, V]; mask: [T], True where a row counts.
    """
    rows = mask.nonzero().squeeze(-1)
    chunk_rows = chunk_rows or max(1, CHUNK_ELEMENTS // student.shape[-1])
    return _ChunkedKL.apply(student, teacher, rows, temperature, chunk_rows)
