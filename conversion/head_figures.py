"""Figures of single heads: how far each is from its softmax attention, and after how many tokens it forgets.

They are measured in every conversion, on one built-in input.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attention.attention_observation import ObservedAttention, observe_attention
from hf_linear_attention.configuration_linear_attention import max_length_of
from hf_linear_attention.conversion.samples import built_in_text, samples_of
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.positions.rotary import LearnedDecay
from hf_linear_attention.training.losses.objectives import relative_head_error


MOST_TOKENS = 512


@torch.no_grad()
def head_figures(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any] | None:
    """The `inputs` in words, and `layers`: of each the `error` and, with a learned decay, the `half_life` of its heads.

    An error is |mechanism - softmax| / |softmax| of a head's output, on the same queries, keys and values; it is left
    out where attention cannot be observed (ALiBi families). Half-lives are in tokens, of the heads of keys and values.

    Returns:
        None for an encoder-decoder, in which two layers have the same number, or if there is nothing to report.
    """
    if model.config.is_encoder_decoder:
        return None
    inputs, name = one_input(model, tokenizer)
    if type(model).__name__.endswith("ForMultipleChoice"):
        inputs = inputs.unsqueeze(1)
    layers: dict[int, dict[str, Any]] = {}
    for module in linear_attention_modules(model).values():
        mechanism: Any = module.linear_attention
        layers[mechanism.shape.layer] = {"layer": mechanism.shape.layer}
        if isinstance(decay := getattr(mechanism, "decay", None), LearnedDecay):
            layers[mechanism.shape.layer]["half_life"] = [math.log(2) / -rate for rate in decay().tolist()]

    def look(seen: ObservedAttention) -> None:
        errors = _errors(seen)
        if torch.isfinite(errors).all():
            layers[seen.module.linear_attention.shape.layer]["error"] = errors.tolist()

    with contextlib.suppress(NotImplementedError), observe_attention(model, look):
        model(**{model.main_input_name: inputs.to(model.device)})
    found = [layer for _, layer in sorted(layers.items()) if len(layer) > 1]
    return {"inputs": name, "layers": found} if found else None


def _errors(seen: ObservedAttention) -> torch.Tensor:
    """`[H]`: the errors of the heads on inputs without padding, relative to the output of softmax attention."""
    mask = torch.ones(seen.softmax_output.shape[:2], dtype=torch.bool, device=seen.softmax_output.device)
    return relative_head_error(seen, mask).sqrt().mean(0)


def one_input(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> tuple[torch.Tensor, str]:
    """One input without padding, and its name: all built-in sentences together, so that it is longer than a window."""
    samples = samples_of(model, tokenizer)
    if model.main_input_name != "input_ids":
        name = "a random image" if model.main_input_name == "pixel_values" else "random sound"
        return samples[0].to(model.dtype), name
    ids = torch.cat(samples, dim=1)[:, : min(MOST_TOKENS, (max_length_of(model.config) or MOST_TOKENS) * 3 // 4)]
    name = "random tokens" if built_in_text(model.config, tokenizer) is None else "the built-in sentences"
    return ids, f"{name} ({ids.shape[1]} tokens)"
