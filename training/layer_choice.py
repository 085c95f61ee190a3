"""Which layers deserve to stay softmax: those whose softmax, given back alone, brings the student nearest the teacher.

By KL of the model's output and never by the error of the layer itself: on RULER the latter chose worse than evenly
spaced layers (KL-guided hybrid distillation, ICLR 2026).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention import softmax_attention
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.losses.outputs import run_model


@dataclass(frozen=True)
class LayerGain:
    """`divergence`: of the student from the teacher with this layer softmax; `gain`: how much less that is."""

    layer: int
    divergence: float
    gain: float


@torch.no_grad()
def rank_layers(student: PreTrainedModel, teacher: PreTrainedModel | None, batches: Iterable[Batch]) -> list[LayerGain]:
    """The converted layers of `student`, the one that gains most first.

    Without a teacher it is the student's own softmax, which it is as long as nothing but the mechanisms was trained.

    The divergence is KL(teacher || student) of the logits per real token; for a model without logits it is the relative
    squared error of the last hidden state. Costs one forward pass a layer and batch.
    """
    layers = [module.linear_attention.shape.layer for module in linear_attention_modules(student).values()]
    sums = dict.fromkeys([None, *layers], 0.0)
    tokens = 0.0
    for batch in batches:
        batch = {name: value.to(student.device) for name, value in batch.items()}
        mask = batch["attention_mask"].bool()
        with softmax_attention(student) if teacher is None else nullcontext():
            target = run_model(student if teacher is None else teacher, batch, None)
        tokens += float(mask.sum())
        for layer in sums:
            with nullcontext() if layer is None else softmax_attention(student, [layer]):
                sums[layer] += float(_divergence(run_model(student, batch, None), target, mask))
    means = {layer: total / max(tokens, 1.0) for layer, total in sums.items()}
    gains = [LayerGain(layer, means[layer], means[None] - means[layer]) for layer in layers]
    return sorted(gains, key=lambda entry: -entry.gain)


def _divergence(mine: Any, yours: Any, mask: Tensor) -> Tensor:
    """Sum over real tokens."""
    if getattr(mine, "logits", None) is None:
        s, t = mine.last_hidden_state.float()[mask], yours.last_hidden_state.float()[mask]
        return ((s - t).square().sum(-1) / t.square().sum(-1).clamp(min=1e-12)).sum()
    if mine.logits.ndim == 2:  # classes of a whole text: as often as it has tokens
        log_q, log_p = (x.logits.float().log_softmax(-1) for x in (mine, yours))
        return (F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1) * mask.sum(-1)).sum()
    log_q, log_p = (x.logits[mask].float().log_softmax(-1) for x in (mine, yours))
    return F.kl_div(log_q, log_p, log_target=True, reduction="sum")


def with_softmax_layers(model: PreTrainedModel, layers: Iterable[int]) -> PreTrainedModel:
    """A copy of a converted model in which `layers` are softmax again, and the others as they were.

    Raises:
        ValueError: if one of them was not converted.
    """
    converted = [module.linear_attention.shape.layer for module in linear_attention_modules(model).values()]
    if wrong := sorted(set(layers) - set(converted)):
        raise ValueError(f"Cannot give softmax back to layers {wrong}; converted are {converted}.")
    config = copy.deepcopy(model.config)
    config.linear_attention = {
        **config.linear_attention,
        "layers": [layer for layer in converted if layer not in set(layers)],
    }
    with torch.random.fork_rng(devices=[]):
        result: Any = type(model)(config)
    result = result.to(dtype=model.dtype)
    missing, _ = result.load_state_dict(model.state_dict(), strict=False)
    if missing:
        raise RuntimeError(f"the copy lacks {missing}")
    if model.can_generate():
        result.generation_config = copy.deepcopy(model.generation_config)
    return result.to(model.device).eval()
