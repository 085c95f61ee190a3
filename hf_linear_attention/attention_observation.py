# SPDX-License-Identifier: Apache-2.0
"""Observation of a converted model's layers while they compute their original softmax attention: `observe_attention`.

Calibration, diagnosis and attention transfer compare each mechanism with the softmax attention that it replaces, on the
same queries, keys and values. One forward pass of one model gives the teacher's own activations in every layer.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention.transformers_internals import attention_implementation, set_attention_implementation
from .mechanisms.base import MechanismInputs
from .modeling_linear_attention import linear_attention_modules, softmax_attention


IMPLEMENTATION = "observed_softmax_attention"


@dataclass(frozen=True)
class ObservedAttention:
    """One call of one converted layer: the inputs of its mechanism, and what softmax attention computes from them.

    `softmax_output` is `[B, N, H, D]`. `softmax_weights` is `[B, H, N, S]`, or None
    unless the layer runs with `attn_implementation` = `eager`.
    """

    module: Any
    inputs: MechanismInputs
    softmax_output: Tensor
    softmax_weights: Tensor | None = None

    @cached_property
    def output(self) -> Tensor:
        """The output of the mechanism, `[B, N, H, D]`, with gradients for whatever requires them."""
        with torch.autocast(device_type=self.inputs.value.device.type, enabled=False):
            return self.module._attend(self.inputs, None)

    @cached_property
    def far_log_odds(self) -> Tensor | None:
        """Logarithm of the far keys' share over that of the near keys, `[B, H, N]`; None if no denominator has both.

        Real tokens are at the right end, in order. It is computed with the output, so ask for it before that. Packed
        inputs raise NotImplementedError.
        """
        if self.inputs.is_packed:
            raise NotImplementedError("The shares of far keys are not known for packed input; join the documents.")
        mechanism: Any = self.module.linear_attention
        mix: Any = getattr(mechanism, "mix", None)
        found: list[Tensor] = []
        if not hasattr(mix, "log_odds"):
            return None
        hook = mix.register_forward_pre_hook(lambda mix, parts: found.append(mix.log_odds(*parts)))
        try:
            mechanism.joins_at_once = False
            self.__dict__["output"] = type(self).output.func(self)
        finally:
            mechanism.joins_at_once = True
            hook.remove()
        return found[0].flatten(1, 2).squeeze(-1)


@contextlib.contextmanager
def observe_attention(
    model: PreTrainedModel, observer: Callable[[ObservedAttention], None]
) -> Iterator[PreTrainedModel]:
    """A context in which the model computes its softmax attention, and every converted layer calls `observer`.

    As in `softmax_attention(model)`, a forward pass gives the outputs of the original model. Stock classes that compute
    their own softmax (ALiBi families) raise NotImplementedError.
    """
    modules = list(linear_attention_modules(model).values())
    with softmax_attention(model):
        for module in modules:
            _eager_function(module)
            module.config = copy.copy(module.config)
            set_attention_implementation(module.config, IMPLEMENTATION)
            module.linear_attention_observer = observer
        try:
            yield model
        finally:
            for module in modules:
                module.linear_attention_observer = None


def observe_batches(
    model: PreTrainedModel, observer: Callable[[ObservedAttention], None], batches: Iterable[Mapping[str, Any]]
) -> int:
    """Run the base model on all batches, keyword arguments of its forward, inside `observe_attention`; their number."""
    number = 0
    with observe_attention(model, observer):
        for batch in batches:
            model.base_model(**forward_arguments(model, batch))
            number += 1
    return number


def forward_arguments(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with which `model` computes a batch, on its device and without a cache."""
    given = {name: value.to(model.device) for name, value in batch.items()}
    if "use_cache" in inspect.signature(model.base_model.forward).parameters:
        given["use_cache"] = False
    return given


def _observed_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    gates: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that layers call inside `observe_attention`."""
    name = attention_implementation(module.model_config)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, _eager_function(module))
    output, weights = attend(module, query, key, value, attention_mask, **{**kwargs, "dropout": 0.0})
    inputs = module.mechanism_inputs(query, key, value, attention_mask, gates=gates, **kwargs)
    module.linear_attention_observer(ObservedAttention(module, inputs, output, weights))
    return output, weights


def _eager_function(module: Any) -> Callable[..., Any]:
    """The function that the stock forward passes to `get_interface` from its own file."""
    file = sys.modules[type(module).stock_class.forward.__module__]
    function = getattr(file, "eager_attention_forward", None)
    if function is None:
        raise NotImplementedError(
            f"{type(module).stock_class.__name__} computes its own softmax, so its attention cannot be observed; train "
            "on the model's logits or hidden states instead."
        )
    return function


AttentionInterface.register(IMPLEMENTATION, _observed_forward)
