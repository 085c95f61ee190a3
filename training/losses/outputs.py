"""The outputs of a model for a batch, in the form that objectives and evaluation use."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_linear_attention._common.errors import SetupError
from hf_linear_attention._common.special_tokens import special_token
from hf_linear_attention.attention_observation import ObservedAttention
from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.data.packing import IGNORED
from hf_linear_attention.training.data.pooling import Pooling
from hf_linear_attention.training.losses.divergence import LogitRows
from hf_linear_attention.training.tasks import LogitsOf


@dataclass(frozen=True)
class Outputs:
    """The outputs of one model: logits by row of the flattened batch, and hidden states [B, N, D] by layer.

    In an encoder-decoder, `hidden_states` are those of the encoder, and `decoder_states` [B, T, D] of the decoder.
    """

    logits: LogitRows | None = None
    hidden_states: tuple[Tensor, ...] = ()
    decoder_states: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class StudentOutputs(Outputs):
    """The outputs of the student, whose logits are read while it runs (`output_layer.py`)."""

    attention: tuple[ObservedAttention, ...] = ()


def pooled(hidden: Tensor, attention_mask: Tensor, pooling: Pooling = "mean") -> Tensor:
    """The embeddings [B, D] in float32, made of the hidden states [B, N, D] of right-padded texts.

    Args:
        hidden: the last hidden states.
        attention_mask: which tokens are not padding, [B, N].
        pooling: their mean, the first one (`cls`), their maximum in each dimension, or the last one.
    """
    if pooling == "cls":
        return hidden[:, 0].float()
    mask = attention_mask.bool()
    if pooling == "lasttoken":
        last = mask.sum(1).clamp(min=1) - 1
        return hidden[torch.arange(len(hidden), device=hidden.device), last].float()
    if pooling == "max":
        return hidden.float().masked_fill(~mask.unsqueeze(-1), -torch.inf).amax(1)
    return hidden.float().masked_fill(~mask.unsqueeze(-1), 0.0).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def run_model(model: nn.Module, batch: Batch, layers: str | None) -> Any:
    """The outputs of the model for a batch; hidden states are returned unless `layers` is None."""
    keywords: dict[str, Any] = {"output_hidden_states": True} if layers else {}
    if "pixel_values" in batch:
        return model(pixel_values=batch["pixel_values"], **keywords)
    accepted = inspect.signature(model.forward).parameters
    if "use_cache" in accepted:
        keywords["use_cache"] = False  # a decoder would fill a cache that is not used
    if "token_type_ids" in batch and "token_type_ids" in accepted:
        keywords["token_type_ids"] = batch["token_type_ids"]
    if "decoder_attention_mask" in batch:
        keywords["decoder_input_ids"] = decoder_inputs(model, batch["labels"])
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **keywords)


def decoder_inputs(model: Any, labels: Tensor) -> Tensor:
    """The inputs [B, T] of the decoder for which it predicts `labels` [B, T]: its start token, then the labels before.

    Raises:
        SetupError: if the model names no start token.
    """
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    start = getattr(model.config, "decoder_start_token_id", None)
    if prepare is not None and start is not None:
        return prepare(labels=labels)  # mBART begins with the token of the target's language instead
    start = start if start is not None else getattr(model.generation_config, "decoder_start_token_id", None)
    if start is None:
        raise SetupError(f"{type(model).__name__} has no `decoder_start_token_id`; set it in its config.json")
    shifted = F.pad(labels[:, :-1], (1, 0), value=start)
    return shifted.masked_fill(shifted == IGNORED, special_token(model.config, "pad_token_id"))


def logits_of(outputs: Any) -> Tensor | None:
    """The logits, the last dimension of which is that of a distribution; None if the model has none."""
    return getattr(outputs, "logits", getattr(outputs, "prediction_logits", None))


def scored_logits(batch: Batch, logits: LogitsOf | None) -> Tensor:
    """Whether each row of the logits counts, which padding does not: [B, N], [B, T] or [B].

    In conversations, those may count that predict a token of an answer.
    """
    if logits == "tokens":
        return batch.get("loss_mask", batch["attention_mask"]) > 0
    if logits == "targets":
        return batch["decoder_attention_mask"] > 0
    return torch.ones_like(batch["index"], dtype=torch.bool)


def hidden_states_of(outputs: Any, layers: str | None, part: str = "") -> tuple[Tensor, ...]:
    """The hidden states [B, N, D] after each layer ("all") or after the last one ("last"), without the embeddings.

    Args:
        outputs: the outputs of a model.
        layers: "all", "last", or None for none.
        part: "decoder_" for the decoder of an encoder-decoder; otherwise its encoder.
    """
    if layers is None:
        return ()
    is_divided = getattr(outputs, "encoder_hidden_states", None) is not None
    if part and not is_divided:
        return ()
    states = getattr(outputs, f"{part or 'encoder_'}hidden_states") if is_divided else outputs.hidden_states
    return tuple(states[1:] if layers == "all" else states[-1:])
