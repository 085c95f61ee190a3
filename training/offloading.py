"""A student larger than memory (`--offload_folder`): its weights lie on disk and are read when their layer runs, by the
hooks of accelerate; only the mechanisms, which are what is trained, stay. Attention transfer needs no gradient through
the layers, so nothing else of them has to."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


SHARD_SIZE = "2GB"  # of what is saved: each is gathered in memory


def device_map(empty: PreTrainedModel, device: torch.device, mechanism: str) -> dict[str, Any]:
    """`disk`, or the device for the modules with `mechanism` in their name, for each module with weights of its own.

    Args:
        empty: the model without its weights.
    """
    place: Any = "cpu" if device.type == "cpu" else device.index or 0
    return {
        name: place if mechanism in f"{name}." else "disk"
        for name, module in empty.named_modules()
        if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    }


def is_offloaded(model: PreTrainedModel) -> bool:
    return "disk" in (getattr(model, "hf_device_map", None) or {}).values()
