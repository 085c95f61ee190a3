"""Attention transfer by layer: which layers are trained (`--transfer_layers`), and until when (`--layer_patience`).

Every layer is trained on the softmax model's activations. So a layer can stop without an effect on the others, and
layers after the last one that is trained need not be computed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.attention_observation import ObservedAttention
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.recipe import parse_layer_numbers


logger = logging.getLogger(__name__)


class LastLayerReachedError(Exception):
    """Ends a forward pass after the last layer that is needed."""


def layer_name(objective: str, layer: int) -> str:
    """The name of a layer's error in metrics.jsonl."""
    return f"{objective}.layer_{layer}"


class TransferLayers:
    """The layers that are still trained.

    `lowest` is the lowest error of each layer so far, and `waited` the number of log lines since then.
    """

    def __init__(
        self, model: nn.Module, chosen: str | None = None, patience: int | None = None, is_sharded: bool = False
    ) -> None:
        """Choose the layers of `model` to train, by default all that are converted.

        Args:
            model: the student.
            chosen: the layers, such as `0,2,4-7`.
            patience: after how many log lines without improvement a layer stops.
            is_sharded: whether the model has hooks after its layers that must run in every pass.

        Raises:
            TrainingError: if `chosen` names layers that are not converted.
        """
        modules = linear_attention_modules(model).values()
        self.learning = list(dict.fromkeys(module.linear_attention.shape.layer for module in modules))
        if chosen is not None:
            self.learning = _chosen(chosen, self.learning)
        self.patience = patience
        # If a module is called several times (ALBERT), the pass must not end after its first call.
        self.last = [module.linear_attention.shape.layer for module in modules][-1:]
        self.modules, self.called, self.is_sharded = list(modules), list[nn.Module](), is_sharded
        self.final: nn.Module | None = None  # after whose call a pass can end
        self.lowest: dict[int, float] = {}
        self.waited: dict[int, int] = {}

    def observe(self, seen: list[ObservedAttention], call: ObservedAttention) -> None:
        """Append `call` to `seen` if its layer is trained.

        Raises:
            LastLayerReachedError: after the last layer that is trained, if other layers or `final` follow.
        """
        layer = layer_of(call)
        self.called.append(call.module)
        if layer in self.learning:
            seen.append(call)
            if layer == self.learning[-1] and ([layer] != self.last or call.module is self.final):
                raise LastLayerReachedError

    def begin_pass(self) -> None:
        """Forget the calls of the last pass."""
        self.called.clear()

    def end_whole_pass(self) -> None:
        """Let later passes end in the last module if it was called last, and once, in this whole pass."""
        last = self.modules[-1]
        if not self.is_sharded and self.called[-1:] == [last] and self.called.count(last) == 1:
            self.final = last

    def note(self, errors: Mapping[int, float]) -> None:
        """Record the mean error of each layer since the last log line, and stop those whose patience is used up."""
        if self.patience is None:
            return
        for layer, error in errors.items():
            is_lower = error < self.lowest.get(layer, float("inf"))
            self.lowest[layer] = min(error, self.lowest.get(layer, error))
            self.waited[layer] = 0 if is_lower else self.waited[layer] + 1
            if self.waited[layer] >= self.patience:
                logger.info("layer %d is trained no further; its lowest error was %.4g", layer, self.lowest[layer])
                self.learning.remove(layer)

    @property
    def is_over(self) -> bool:
        """Whether `--layer_patience` has stopped every layer."""
        return self.patience is not None and not self.learning

    def state_dict(self) -> dict[str, Any]:
        """The progress, for a checkpoint."""
        return {"learning": list(self.learning), "lowest": dict(self.lowest), "waited": dict(self.waited)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the progress from `state_dict`."""
        self.learning[:] = state["learning"]
        self.lowest, self.waited = dict(state["lowest"]), dict(state["waited"])


def layer_of(call: ObservedAttention) -> int:
    """The number of the layer that made the call."""
    return call.module.linear_attention.shape.layer


def _chosen(text: str, converted: Collection[int]) -> list[int]:
    wanted = parse_layer_numbers(text)
    if unknown := sorted(set(wanted) - set(converted)):
        raise UsageError(
            f"`--transfer_layers {text}`: layers {', '.join(map(str, unknown))} are not converted; choose from "
            f"{', '.join(map(str, converted))}"
        )
    return [layer for layer in converted if layer in wanted]
