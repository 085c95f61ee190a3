"""Whether a model keeps packed documents apart. transformers tells them from `position_ids` that restart, in models
that take them and hand them on to the mask; ours then attends within each document, whatever the mechanism."""

from __future__ import annotations

import inspect

import numpy as np
import torch
from torch import nn

from hf_linear_attention.training.batches import pad
from hf_linear_attention.training.objectives import run_model
from hf_linear_attention.training.packing import PackedBlocks


@torch.no_grad()
def keeps_documents_apart(model: nn.Module) -> bool:
    """Whether the second of two packed documents gets the logits that it gets alone, within float16's rounding."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    first, second = np.arange(1, 7), np.arange(7, 12)
    was_training = model.training
    model.eval()
    logits = []
    for documents in ([first, second], [second]):
        batch = pad([{**PackedBlocks(documents, 16)[0], "index": 0}], 0)
        device = next(value.device for value in model.parameters() if not value.is_meta)  # the others are on disk
        outputs = run_model(model, {name: value.to(device) for name, value in batch.items()}, None)
        logits.append(outputs.logits[0, -len(second) :].float())
    model.train(was_training)
    scale = logits[1].abs().max().clamp(min=1e-6)
    return bool((logits[0] - logits[1]).abs().max() < 1e-3 * scale)
