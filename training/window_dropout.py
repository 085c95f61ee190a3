"""Training `hybrid` layers without their window now and then, so that their linear part learns to carry the weight.

Published hybrids lean on the window alone (arXiv 2510.05901, "Untangling component imbalance in hybrid linear
attention conversion methods", whose scheduled dropout of the window this is).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from hf_linear_attention._common.errors import TrainingError
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


class WindowDropout:
    """With the probability `rates[i]` in the i-th of equal parts of a run, the window is the token itself alone."""

    def __init__(self, model: nn.Module, rates: tuple[float, ...], total_steps: int) -> None:
        """
        Raises:
            TrainingError: if no layer of the model has a window.
        """
        mechanisms = [module.linear_attention for module in linear_attention_modules(model).values()]
        self.mechanisms = [mechanism for mechanism in mechanisms if hasattr(mechanism, "window_size")]
        self.rates, self.total_steps = rates, total_steps
        if rates and not self.mechanisms:
            raise TrainingError("`--window_dropout`: no layer of the model has a window, as `hybrid` has; drop it")

    def rate(self, step: int) -> float:
        return self.rates[min(step * len(self.rates) // self.total_steps, len(self.rates) - 1)] if self.rates else 0.0

    @contextlib.contextmanager
    def drawn(self, step: int) -> Iterator[None]:
        """Inside, forward and backward passes are with the windows or without them, as this draw says."""
        rate = self.rate(step)
        if not rate or torch.rand(()).item() >= rate:  # the generator of a checkpoint: resuming draws the same
            yield
            return
        sizes = [mechanism.window_size for mechanism in self.mechanisms]
        try:
            for mechanism in self.mechanisms:
                mechanism.window_size = 1
            yield
        finally:
            for mechanism, size in zip(self.mechanisms, sizes, strict=True):
                mechanism.window_size = size
