"""Exponential moving average of the trained weights: average <- decay * average + (1 - decay) * weights, at every step
(Polyak and Juditsky 1992; the decay is that of `torch.optim.swa_utils.get_ema_multi_avg_fn`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hf_linear_attention.training.sharding import load_whole


class WeightAverage:
    """Starts at the weights of `model` that require gradients, beside which it takes as much memory again."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.average = {name: value.detach().clone() for name, value in self.weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step."""
        torch._foreach_lerp_(list(self.average.values()), list(self.weights.values()), 1 - self.decay)

    @contextmanager
    @torch.no_grad()
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights."""
        trained = {name: value.clone() for name, value in self.weights.items()}
        self._set(self.average)
        try:
            yield
        finally:
            with torch.no_grad():
                self._set(trained)

    def _set(self, values: dict[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(values[name])

    def state_dict(self) -> dict[str, Tensor]:
        return self.average

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        load_whole(self.average, state)
