"""A model's outputs for a batch, as objectives and evaluation take them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hf_linear_attention.attention_observation import ObservedAttention
from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.losses.divergence import LogitRows


@dataclass(frozen=True)
class Outputs:
    """What one model says about a batch: logits by row of the flattened batch, hidden states [B, N, D] by layer."""

    logits: LogitRows | None = None
    hidden_states: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class StudentOutputs(Outputs):
    """The student's logits [B, N, V] or [B, C] exist as a whole: their gradient does, too."""

    all_logits: Tensor | None = None
    attention: tuple[ObservedAttention, ...] = ()


def mean_pooled(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Mean of the hidden states [B, N, D] over the real tokens: [B, D], in float32."""
    mask = attention_mask.bool().unsqueeze(-1)
    return hidden.float().masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def embedding_cosine(mine: Tensor, yours: Tensor, attention_mask: Tensor) -> Tensor:
    """Cosine [B] of the mean-pooled hidden states [B, N, D] of two models."""
    return F.cosine_similarity(mean_pooled(mine, attention_mask), mean_pooled(yours, attention_mask), dim=-1)


def run_model(model: nn.Module, batch: Batch, layers: str | None) -> Any:
    """The model's outputs, with the hidden states that `layers` ("last", "all" or None) asks for."""
    keywords: dict[str, Any] = {"output_hidden_states": True} if layers else {}
    if "pixel_values" in batch:
        return model(pixel_values=batch["pixel_values"], **keywords)
    accepted = inspect.signature(model.forward).parameters
    if "use_cache" in accepted:
        keywords["use_cache"] = False  # a decoder would fill a cache that nobody reads
    # transformers looks for packed documents (position_ids that restart) only where there is no mask
    places = "position_ids" if "position_ids" in batch else "attention_mask"
    if "token_type_ids" in batch and "token_type_ids" in accepted:
        keywords["token_type_ids"] = batch["token_type_ids"]
    return model(input_ids=batch["input_ids"], **{places: batch[places]}, **keywords)


def hidden_states_of(outputs: Any, layers: str | None) -> tuple[Tensor, ...]:
    """Hidden states [B, N, D] after each layer, or after the last one; without the embeddings."""
    if layers is None:
        return ()
    return tuple(outputs.hidden_states[1:] if layers == "all" else outputs.hidden_states[-1:])
