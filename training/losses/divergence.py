"""KL(teacher || student) of two sets of logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


LogitRows = Callable[[Tensor], Tensor]
"""A function from row numbers [r] to logits [r, V]."""


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) in nats of logits `[..., V]`, at this temperature: `[...]`, in float32 or float64.

    A class that the teacher excludes has log p = -inf and p = 0, and contributes 0.
    """
    log_q = _cooled(student, temperature).log_softmax(-1)
    log_p = _cooled(teacher, temperature).log_softmax(-1)
    p = log_p.exp()
    # In place, since every tensor here is one of the copies that `output_layer.py` counts.
    return (log_p - log_q).masked_fill_(p == 0, 0).mul_(p).sum(-1)


def _cooled(logits: Tensor, temperature: float) -> Tensor:
    return widened(logits) if temperature == 1 else widened(logits) / temperature


def widened(logits: Tensor) -> Tensor:
    """In float32, or as they are if that is float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
