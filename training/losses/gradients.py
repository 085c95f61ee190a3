"""Losses whose gradients are computed together with them, so that what those need can be freed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


# In float16, products of small gradients would become 0, because the scale of mixed precision comes only afterwards.
# Where a `GradScaler` adapts that scale, it is taken instead: what overflows now overflows for it as well.
GRADIENT_SCALE = 2.0**12


def gradients_of(loss: Tensor, parameters: list[nn.Parameter], scale: float = GRADIENT_SCALE) -> list[Tensor | None]:
    """The gradient of the loss in each of the parameters, times `scale`; None in those that are frozen or not used.

    They are computed at once, so that what they need can be freed.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not loss.requires_grad:
        return [None] * len(parameters)
    found = iter(torch.autograd.grad(loss * scale, trained, allow_unused=True))
    return [next(found) if parameter.requires_grad else None for parameter in parameters]


def with_gradients(loss: Tensor, gradients: list[Tensor], sources: list[Any], scale: float) -> Tensor:
    """A loss whose gradients of its sources are these, divided by `scale`."""
    return _Differentiated.apply(loss, gradients, scale, *sources)


class _Differentiated(torch.autograd.Function):
    """A loss with its gradients."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], scale: float, *sources: Tensor) -> Tensor:
        ctx.gradients, ctx.scale = gradients, scale
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError("losses of training have no second derivative; `create_graph=True` asks for it")
        return None, None, None, *(gradient * (grad_outputs[0] / ctx.scale) for gradient in ctx.gradients)
