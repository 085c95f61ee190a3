"""KL(teacher || student) of two sets of logits, of which the teacher's may be the largest of each row only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


def divergence(student: Tensor, teacher: Tensor | TopLogits, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) in nats of logits `[..., V]`, at this temperature: `[...]`, in float32 or float64.

    A class that the teacher excludes has log p = -inf and p = 0, and contributes 0.
    """
    log_q = _cooled(student, temperature).log_softmax(-1)
    whole = teacher.completed(log_q.detach()) if isinstance(teacher, TopLogits) else _cooled(teacher, temperature)
    log_p = whole.log_softmax(-1)
    p = log_p.exp()
    # In place, since every tensor here is one of the copies that `output_layer.py` counts.
    return (log_p - log_q).masked_fill_(p == 0, 0).mul_(p).sum(-1)


def _cooled(logits: Tensor, temperature: float) -> Tensor:
    return widened(logits) if temperature == 1 else widened(logits) / temperature


def widened(logits: Tensor) -> Tensor:
    """In float32, or as they are if that is float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
