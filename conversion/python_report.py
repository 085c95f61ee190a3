"""conversion_report.json and the model card of a model that was converted in Python, written by `save_pretrained`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_linear_attention._common.model_card import REPORT, write_model_card
from hf_linear_attention.conversion.state_budget import growing_bytes, state_bytes
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


def write_conversion_files(model: Any, save_directory: str | os.PathLike) -> None:
    """Write what `convert_and_heal` left in the model, or else a report and a card, beside the saved weights.

    A card or report that stands in the folder already is kept.
    """
    folder = Path(save_directory)
    files = getattr(model, "conversion_files", None)
    if files is None:
        _write_new(model, folder)
        return
    for name, content in files.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(content)


def _write_new(model: Any, folder: Path) -> None:
    if not (folder / REPORT).exists():
        (folder / REPORT).write_text(json.dumps(report_of(model), indent=2) + "\n", encoding="utf-8")
    if not (folder / "README.md").exists():
        facts = {"base_model": model.converted_from, "settings": model.config.linear_attention, "is_in_python": True}
        write_model_card(folder, facts)


def report_of(model: Any) -> dict[str, Any]:
    """What is known of a model that `convert` made: its settings and sizes; nothing was measured."""
    modules = linear_attention_modules(model)
    tensors = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    sizes = {name: state_bytes(module) for name, module in modules.items()}
    figures = {
        "layers converted": len(modules),
        "weights": sum(tensors.values()),
        "new weights": sum(count for name, count in tensors.items() if ".linear_attention." in name),
        "state bytes per sequence": sum(size or 0 for size in sizes.values()) or None,
        "bytes per token of heads with softmax": sum(map(growing_bytes, modules.values())) or None,
    }
    return {
        "base_model": model.converted_from,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "model_type": model.config.model_type,
        "linear_class": type(model).__name__,
        "settings": model.config.linear_attention,
        "layers": [{"module": name, "state_bytes": size} for name, size in sizes.items()],
        "checks": None,
        "figures": figures,
    }
