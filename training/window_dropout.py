"""Window dropout: some batches are computed without the windows of `hybrid` layers, so that the linear part is trained.

Published hybrids rely on the window almost alone (arXiv 2510.05901, "Untangling component imbalance in hybrid linear
attention conversion methods"); this is the scheduled window dropout of that paper.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from hf_linear_attention._common.errors import SetupError
from hf_linear_attention.mechanisms.hybrid import HybridAttention
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


class WindowDropout:
    """Shortens the windows of a model to the token itself, with probability `rates[i]` in the i-th part of a run.

    The parts are equally long.
    """

    def __init__(self, model: nn.Module, rates: tuple[float, ...], total_steps: int) -> None:
        """Find the `hybrid` layers of `model`.

        Raises:
            SetupError: if `rates` are given and no layer is a `hybrid`.
        """
        mechanisms = [module.linear_attention for module in linear_attention_modules(model).values()]
        # Others have nothing beside their window that could be trained (`window`), or positions in it (`aft`).
        self.mechanisms = [mechanism for mechanism in mechanisms if isinstance(mechanism, HybridAttention)]
        self.rates, self.total_steps = rates, total_steps
        if rates and not self.mechanisms:
            found = ", ".join(sorted({mechanism.settings["mechanism"] for mechanism in mechanisms})) or "softmax"
            raise SetupError(
                f"`--window_dropout` needs `hybrid` layers, and those of the model are {found}; drop the option"
            )

    def rate(self, step: int) -> float:
        """The probability of a batch without windows at optimizer step `step`, counted from 0."""
        return self.rates[min(step * len(self.rates) // self.total_steps, len(self.rates) - 1)] if self.rates else 0.0

    @contextlib.contextmanager
    def drawn(self, step: int) -> Iterator[None]:
        """Draw whether the forward and backward passes inside the context use the windows."""
        rate = self.rate(step)
        # The state of this generator is in every checkpoint, so a resumed run draws the same.
        if not rate or torch.rand(()).item() >= rate:
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
