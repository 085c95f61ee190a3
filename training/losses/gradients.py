"""Losses whose gradients are computed together with them, so that what those need can be freed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


# In float16, products of small gradients would become 0, because the scale of mixed precision comes only afterwards.
# Where a `GradScaler` adapts that scale, it is taken instead: what overflows now overflows for it as well.
GRADIENT_SCALE = 2.0**12


def differentiated(loss: Tensor, parameters: Iterable[nn.Parameter], scale: float = GRADIENT_SCALE) -> Tensor:
    """The same loss, whose gradients of `parameters` are computed at once, so that what they need can be freed.

    Args:
        scale: by how much they are larger until the backward pass.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not loss.requires_grad:
        return loss.detach()
    found = zip(trained, torch.autograd.grad(loss * scale, trained, allow_unused=True), strict=True)
    used = {parameter: gradient for parameter, gradient in found if gradient is not None}
    return with_gradients(loss.detach(), list(used.values()), list(used), scale)


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
