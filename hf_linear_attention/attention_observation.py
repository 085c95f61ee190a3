# SPDX-License-Identifier: Apache-2.0
"""Watching a converted model's layers while they compute their original softmax attention: `observe_attention`.

One model, one forward pass, the teacher's own activations in every layer: calibration, diagnosis and attention transfer
compare each mechanism with the softmax that it replaces on the same queries, keys and values.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention_layer import MechanismInputs
from .modeling_linear_attention import linear_attention_modules, softmax_attention
from .transformers_internals import attention_implementation, set_attention_implementation


IMPLEMENTATION = "observed_softmax_attention"


@dataclass(frozen=True)
class ObservedAttention:
    """One call of one converted layer: what its mechanism would get, and what softmax attention made of it.

    `value` is `[B, Hkv, S, D]`, `softmax_output` `[B, N, H, D]`, `softmax_weights` `[B, H, N, S]` or, where the layer
    runs anything but `attn_implementation` = `eager`, None.
    """

    module: Any
    inputs: MechanismInputs
    value: torch.Tensor
    softmax_output: torch.Tensor
    softmax_weights: torch.Tensor | None = None

    @cached_property
    def output(self) -> torch.Tensor:
        """Of the mechanism, `[B, N, H, D]`, with gradients for whatever requires them."""
        with torch.autocast(device_type=self.value.device.type, enabled=False):
            query, key, *masks_and_mode = self.inputs
            return self.module._attend(query, key, self.value, *masks_and_mode, None)

    def weights(self) -> torch.Tensor:
        """Of the mechanism, `[B, H, N, S]`, with gradients like `output`.

        Raises:
            NotImplementedError: if the mechanism has no matrix of weights per head, or the input is packed.
        """
        mechanism, inputs = self.module.linear_attention, self.inputs
        if inputs.segments is not None or not mechanism.supports("weights", mechanism.settings):
            raise NotImplementedError(
                f"{type(mechanism).__name__} shows no attention weights here; train on its outputs "
                "(attention_transfer_weight) instead."
            )
        with torch.autocast(device_type=self.value.device.type, enabled=False):
            options = {} if inputs.positions is None else {"positions": inputs.positions}
            return mechanism.attention_weights(
                inputs.query,
                inputs.key,
                attention_mask=inputs.key_mask,
                scaling=inputs.scaling,
                is_causal=inputs.is_causal,
                **options,
            )


@contextlib.contextmanager
def observe_attention(
    model: PreTrainedModel, observer: Callable[[ObservedAttention], None]
) -> Iterator[PreTrainedModel]:
    """Inside, as inside `softmax_attention(model)`, a forward pass is the original one; `observer` sees every layer.

    Raises:
        NotImplementedError: if a converted layer's stock class computes its own softmax (ALiBi families).
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


def _observed_forward(module, query, key, value, attention_mask, **kwargs):
    """The attention function registered for the layers inside `observe_attention`."""
    name = attention_implementation(module.model_config)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, _eager_function(module))
    output, weights = attend(module, query, key, value, attention_mask, **{**kwargs, "dropout": 0.0})
    inputs = module.mechanism_inputs(query, key, attention_mask, **kwargs)
    module.linear_attention_observer(ObservedAttention(module, inputs, value, output, weights))
    return output, weights


def _eager_function(module: Any) -> Callable[..., Any]:
    # The stock forward hands it to `get_interface`, from its own file.
    file = sys.modules[type(module).stock_class.forward.__module__]
    function = getattr(file, "eager_attention_forward", None)
    if function is None:
        raise NotImplementedError(
            f"{type(module).stock_class.__name__} computes its own softmax, so its attention cannot be observed; train "
            "on the model's logits or hidden states instead."
        )
    return function


AttentionInterface.register(IMPLEMENTATION, _observed_forward)
