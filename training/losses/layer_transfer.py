"""Attention transfer by layer: which layers learn (`--transfer_layers`), and when one has learnt what it can
(`--layer_patience`). Every layer learns from the softmax model's own activations, so one stops without the others
noticing, and layers behind the last that learns need not be computed at all.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from hf_linear_attention._common.errors import TrainingError
from hf_linear_attention.attention_observation import ObservedAttention
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.recipe import parse_layer_numbers


logger = logging.getLogger(__name__)


class LastLayerReachedError(Exception):
    """Ends a forward pass of which nothing more is needed."""


def layer_name(objective: str, layer: int) -> str:
    """Of a layer's own error, in metrics.jsonl."""
    return f"{objective}.layer_{layer}"


class TransferLayers:
    """The layers that still learn; how low the error of each has been, and for how many log lines it was not lower."""

    def __init__(self, model: nn.Module, chosen: str | None = None, patience: int | None = None) -> None:
        """
        Raises:
            TrainingError: if `chosen` (such as `0,2,4-7`) names layers that are not converted.
        """
        modules = linear_attention_modules(model).values()
        self.learning = list(dict.fromkeys(module.linear_attention.shape.layer for module in modules))
        if chosen is not None:
            self.learning = _chosen(chosen, self.learning)
        self.patience = patience
        # a module that is called several times (ALBERT) is its own last layer
        self.last = [module.linear_attention.shape.layer for module in modules][-1:]
        self.lowest: dict[int, float] = {}
        self.waited: dict[int, int] = {}

    def observe(self, seen: list[ObservedAttention], call: ObservedAttention) -> None:
        """Keep the call of a layer that learns.

        Raises:
            LastLayerReachedError: behind the last of them.
        """
        layer = layer_of(call)
        if layer in self.learning:
            seen.append(call)
            if layer == self.learning[-1] and [layer] != self.last:
                raise LastLayerReachedError

    def note(self, errors: Mapping[int, float]) -> None:
        """Enter the mean errors since the last log line; layers beyond the patience learn no more."""
        if self.patience is None:
            return
        for layer, error in errors.items():
            is_lower = error < self.lowest.get(layer, float("inf"))
            self.lowest[layer] = min(error, self.lowest.get(layer, error))
            self.waited[layer] = 0 if is_lower else self.waited[layer] + 1
            if self.waited[layer] >= self.patience:
                logger.info("layer %d: no lower error than %.4g, it learns no more", layer, self.lowest[layer])
                self.learning.remove(layer)

    @property
    def is_over(self) -> bool:
        return self.patience is not None and not self.learning

    def state_dict(self) -> dict[str, Any]:
        return {"learning": list(self.learning), "lowest": dict(self.lowest), "waited": dict(self.waited)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.learning[:] = state["learning"]
        self.lowest, self.waited = dict(state["lowest"]), dict(state["waited"])


def layer_of(call: ObservedAttention) -> int:
    return call.module.linear_attention.shape.layer


def _chosen(text: str, converted: Collection[int]) -> list[int]:
    wanted = parse_layer_numbers(text)
    if unknown := sorted(set(wanted) - set(converted)):
        raise TrainingError(
            f"`--transfer_layers {text}`: not converted are {', '.join(map(str, unknown))}; allowed are "
            f"{', '.join(map(str, converted))}"
        )
    return [layer for layer in converted if layer in wanted]
