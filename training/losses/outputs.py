"""The outputs of a model for a batch, in the form that objectives and evaluation use."""

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
    """The outputs of one model: logits by row of the flattened batch, and hidden states [B, N, D] by layer."""

    logits: LogitRows | None = None
    hidden_states: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class StudentOutputs(Outputs):
    """The outputs of the student, with all logits [B, N, V] or [B, C], because their gradient needs as much memory."""

    all_logits: Tensor | None = None
    attention: tuple[ObservedAttention, ...] = ()


def mean_pooled(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """The mean of the hidden states [B, N, D] over the tokens that are not padding: [B, D], in float32."""
    mask = attention_mask.bool().unsqueeze(-1)
    return hidden.float().masked_fill(~mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def embedding_cosine(mine: Tensor, yours: Tensor, attention_mask: Tensor) -> Tensor:
    """The cosine similarity [B] of the mean-pooled hidden states [B, N, D] of two models."""
    return F.cosine_similarity(mean_pooled(mine, attention_mask), mean_pooled(yours, attention_mask), dim=-1)


def run_model(model: nn.Module, batch: Batch, layers: str | None) -> Any:
    """The outputs of the model for a batch; hidden states are returned unless `layers` is None."""
    keywords: dict[str, Any] = {"output_hidden_states": True} if layers else {}
    if "pixel_values" in batch:
        return model(pixel_values=batch["pixel_values"], **keywords)
    accepted = inspect.signature(model.forward).parameters
    if "use_cache" in accepted:
        keywords["use_cache"] = False  # a decoder would fill a cache that is not used
    # transformers recognises packed documents (position_ids that restart) only if there is no attention mask.
    places = "position_ids" if "position_ids" in batch else "attention_mask"
    if "token_type_ids" in batch and "token_type_ids" in accepted:
        keywords["token_type_ids"] = batch["token_type_ids"]
    return model(input_ids=batch["input_ids"], **{places: batch[places]}, **keywords)


def hidden_states_of(outputs: Any, layers: str | None) -> tuple[Tensor, ...]:
    """The hidden states [B, N, D] after each layer ("all") or after the last one ("last"), without the embeddings."""
    if layers is None:
        return ()
    return tuple(outputs.hidden_states[1:] if layers == "all" else outputs.hidden_states[-1:])
