"""conversion_report.json: a conversion writes its plan and its checks; an evaluation adds `quality` (figures.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_linear_attention._common.model_card import REPORT, write_model_card
from hf_linear_attention._common.options import option_text
from hf_linear_attention.configuration_linear_attention import max_length_of
from hf_linear_attention.conversion.plan import Plan
from hf_linear_attention.conversion.source import Source
from hf_linear_attention.kernels.cpu import kernel_backend
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.state_size import state_bytes


VERSIONS = {"torch": torch.__version__, "transformers": transformers.__version__}


def build_report(source: Source, plan: Plan, checks: Mapping[str, Any] | None, **details: Any) -> dict[str, Any]:
    """The content of conversion_report.json. `figures` is the part that the model card shows."""
    counts = {kind: len(getattr(plan, kind)) for kind in ("mapped", "new", "dropped", "tied")}
    outputs = (checks or {}).get("student_against_teacher") or {}
    calibrated = None  # if there is nothing to calibrate
    if (facts := details.get("calibration")) is not None:
        calibrated = f"{facts['tokens']:,} tokens ({facts['inputs']})" if facts["tokens"] else "nothing"
    figures = {**plan.figures, "calibrated on": calibrated}
    figures |= {name.replace("_", " "): value for name, value in outputs.items() if name != "beyond"}
    if (beyond := outputs.get("beyond")) is not None:
        where = f"tokens {beyond['first']:,} to {beyond['last']:,}"
        measured = {name: value for name, value in beyond.items() if name not in ("first", "last")}
        figures |= {f"{name.replace('_', ' ')}, {where}": value for name, value in measured.items()}
    return {
        "base_model": source.name,
        "versions": VERSIONS,
        **details,
        **plan.to_dict(),
        "tensor_counts": counts,
        "checks": dict(checks) if checks else None,
        "figures": figures,
        "max_length": max_length_of(plan.config),
        "backend": kernel_backend()._asdict(),
    }


def published_words(options: Mapping[str, Any]) -> list[str]:
    """The options as one types them, for the report: of an absolute path only the name, as they may be published."""
    words = []
    for name, value in options.items():
        text = option_text(value)
        shown = Path(text).name if Path(text).expanduser().is_absolute() else text
        words += [f"--{name}"] if value is True else [f"--{name}", shown]
    return words


def settings_of(config: Mapping[str, Any], report: Mapping[str, Any]) -> Any:
    """The settings of linear attention of a converted model; a stock architecture has them in its report alone."""
    return config.get("linear_attention", report.get("settings"))


def write_conversion_files(model: Any, save_directory: str | os.PathLike) -> None:
    """Write what `convert_and_heal` left in the model, or else a report and a card, beside the saved weights.

    A card or report that stands in the folder already is kept.
    """
    folder = Path(save_directory)
    if (files := getattr(model, "conversion_files", None)) is not None:
        for name, content in files.items():
            if not (folder / name).exists():
                (folder / name).write_bytes(content)
        return
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
    }
    return {
        "base_model": model.converted_from,
        "versions": VERSIONS,
        "model_type": model.config.model_type,
        "linear_class": type(model).__name__,
        "settings": model.config.linear_attention,
        "layers": [{"module": name, "state_bytes": size} for name, size in sizes.items()],
        "checks": None,
        "figures": figures,
    }
