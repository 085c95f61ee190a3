"""KL(teacher || student) of two sets of logits, computed in chunks of rows.

For one row with teacher probabilities p and student probabilities q, both at temperature T:

    KL = sum_v p_v (log p_v - log q_v)          dKL / d(student logit v) = (q_v - p_v) / T

and the value is multiplied by T^2, so that the gradient does not shrink with T (Hinton et al. 2015, arXiv:1503.02531,
section 2). Only one chunk of rows at a time is in float32 for both models, and the teacher's logits need not exist as a
whole: they are requested by row, so that a teacher can apply its output layer chunk by chunk (`teacher.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TopLogits:
    """The logarithms of the k largest probabilities of each row, and of the sum of the others."""

    values: Tensor  # [r, k]
    ids: Tensor  # [r, k]: their classes
    others: Tensor  # [r, 1]

    def completed(self, log_q: Tensor) -> Tensor:
        """Logits [r, V], in which the other classes have the proportions of the student, whose log q is [r, V].

        So the KL is that of k + 1 classes, one of which stands for all others; it is at most the KL of all classes.
        """
        is_kept = torch.zeros_like(log_q, dtype=torch.bool).scatter_(1, self.ids, True)
        others = log_q.masked_fill(is_kept, -torch.inf).logsumexp(-1, keepdim=True)
        return (log_q + (self.others - others)).scatter(1, self.ids, self.values.to(log_q.dtype))


LogitRows = Callable[[Tensor], Tensor | TopLogits]
"""A function from row numbers [r] to logits [r, V]."""

CHUNK_ELEMENTS = 2**24  # logits per chunk at most, which is 64 MiB per float32 copy
# A chunk has about ten copies at its peak, while the student's activations and two tensors [R, V] are in memory. So
# they take less than one more such tensor, unless that is too small to matter.
PARTS, FEW_ELEMENTS = 16, 2**18

ONE_DERIVATIVE = (
    "The chunked KL of logits can be differentiated once, by `backward()` or `torch.autograd.grad()`: it has no second "
    "derivative, which `create_graph=True` asks for, and supports no transform of `torch.func`. For those, use "
    "`torch.nn.functional.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, "
    'reduction="sum")`, which keeps all logits in memory.'
)


class _ChunkedKL(torch.autograd.Function):
    """The KL over chunks, whose gradient is computed together with the value and kept for the backward pass.

    The gradient has the dtype of the student's logits. It has to exist anyway, so it needs no additional memory, and
    nothing is computed twice. The student's logits, which a second derivative would need, are not kept, so a graph of
    the gradient is refused. The incoming gradient cannot tell whether a second derivative is wanted, because that of a
    scalar loss requires no gradient.
    """

    @staticmethod
    def forward(
        student: Tensor, teacher: LogitRows, rows: Tensor, temperature: float, chunk_rows: int, is_trained: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The value and, with `is_trained`, its gradient [R, V]."""
        total = torch.zeros((), dtype=torch.promote_types(student.dtype, torch.float32), device=student.device)
        gradient = torch.zeros_like(student) if is_trained else None
        for chunk in rows.split(chunk_rows):
            value, slope = _chunk(student[chunk], teacher(chunk), temperature, is_trained)
            total += value
            if gradient is not None:
                gradient[chunk] = slope.to(gradient.dtype)
        return total * temperature**2, gradient

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        if output[1] is not None:
            ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(ONE_DERIVATIVE)
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(ONE_DERIVATIVE)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        raise NotImplementedError(ONE_DERIVATIVE)


def _chunk(student: Tensor, teacher: Tensor | TopLogits, temperature: float, slope: bool) -> tuple[Tensor, Tensor]:
    """The sum of the KL over rows [R, V] without the factor T^2, and the gradient T (q - p) of the value with it."""
    wide = torch.promote_types(student.dtype, torch.float32)
    log_q = torch.log_softmax(student.to(wide) / temperature, dim=-1)
    whole = teacher.completed(log_q) if isinstance(teacher, TopLogits) else teacher.to(wide) / temperature
    log_p = torch.log_softmax(whole, dim=-1)
    p = log_p.exp()
    # A teacher that excludes a token has log p = -inf and p = 0; the token contributes 0 then, not NaN.
    value = torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p)).sum()
    return value, (log_q.exp_() - p) * temperature if slope else p


def chunked_kl(
    student: Tensor, teacher: LogitRows, mask: Tensor, temperature: float = 1.0, chunk_rows: int | None = None
) -> Tensor:
    """The sum of T^2 KL(teacher || student), at temperature T, over the rows for which `mask` is true.

    Args:
        student: logits [R, V] of all R rows.
        teacher: a function from row numbers [r] to logits [r, V].
        mask: bool [R].
        temperature: T.
        chunk_rows: rows per chunk; by default a sixteenth of R, within `FEW_ELEMENTS` and `CHUNK_ELEMENTS`.

    Raises:
        NotImplementedError: in a backward pass with `create_graph=True`, which asks for a second derivative.
    """
    rows = mask.nonzero().squeeze(-1)
    elements = min(CHUNK_ELEMENTS, max(FEW_ELEMENTS, student.numel() // PARTS))
    chunk_rows = chunk_rows or max(1, elements // student.shape[-1])
    is_trained = student.requires_grad and torch.is_grad_enabled()
    return _ChunkedKL.apply(student, teacher, rows, temperature, chunk_rows, is_trained)[0]
