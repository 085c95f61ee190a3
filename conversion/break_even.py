"""The input length from which linear attention is faster than softmax, as `benchmarks/speed_break_even.py` measured it.

A figure is quoted only for exactly the settings that were measured, and never on a machine with a GPU, because speed on
GPUs was not measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hf_linear_attention
from hf_linear_attention.mechanism import AttentionMechanism


MEASURED = Path(__file__).with_name("break_even.json")
# Settings of a mechanism that do not change its cost.
FREE_SETTINGS = ("seed", "trained_length")
INSTRUCTION_SETS = {"avx512": "AVX-512", "avx2": "AVX2", "base": "any processor"}


@dataclass(frozen=True)
class Backend:
    """What computes attention on a CPU.

    Args:
        name: `c` or `torch`.
        instruction_set: that of the C kernels; None with torch.
        reason: a sentence that says why this backend is used and, for torch, how to get the C kernels.
    """

    name: str
    instruction_set: str | None
    reason: str = ""

    @property
    def description(self) -> str:
        """The backend in a few words."""
        if self.name == "torch":
            return "plain torch"
        return f"C kernels for {INSTRUCTION_SETS.get(str(self.instruction_set), self.instruction_set)}"


def current_backend() -> Backend:
    """The backend of this process."""
    found = hf_linear_attention.kernel_backend()
    return Backend(found.name, found.instruction_set, found.reason)


def cost_settings(mechanism: AttentionMechanism) -> dict[str, Any]:
    """All settings that decide the cost of a mechanism per head: its options and `head_dim`.

    `num_features` is a number even if it is left to the feature map.
    """
    options = {name: mechanism.settings[name] for name in mechanism.options if name not in FREE_SETTINGS}
    if (feature_map := getattr(mechanism, "feature_map", None)) is not None:
        options["num_features"] = feature_map.num_features
    return {"mechanism": mechanism.settings["mechanism"], **options, "head_dim": mechanism.shape.head_dim}


def faster_from(settings: Mapping[str, Any], is_causal: bool | None) -> str | None:
    """The length and how it was measured, as part of a sentence; None if these settings were not measured.

    Args:
        settings: the `cost_settings` of the converted layers.
        is_causal: None for an encoder-decoder.
    """
    speed = measured_speed(settings, is_causal)
    if speed is None:
        return None
    lengths = [_words(length, speed["longest"]) for length in speed["lengths"].values()]
    places = (" in the encoder", " in the decoder") if len(lengths) == 2 else ("",)
    found = ", ".join(length + place for length, place in zip(lengths, places))
    return f"{found} (measured: {speed['measured']})"


def measured_speed(settings: Mapping[str, Any], is_causal: bool | None) -> dict[str, Any] | None:
    """The `lengths` (None beyond the `longest`) by the direction of attention, and what was `measured`, for the report.

    The arguments are those of `faster_from`.
    """
    measured = _measured()
    row = next((row for row in measured["rows"] if row["settings"] == dict(settings)), None)
    if row is None or _has_gpu():
        return None
    forms = ("bidirectional", "causal") if is_causal is None else ("causal",) if is_causal else ("bidirectional",)
    lengths = {form: row[form] for form in forms if form in row}
    machine = f"{Backend(**measured['backend']).description}, {measured['environment']['processor']}"
    conditions = f"{row['name']}, {measured['conditions']}, {machine}"
    return {"lengths": lengths, "longest": measured["longest"], "measured": conditions} if lengths else None


def why_unknown(settings: Mapping[str, Any]) -> str:
    """Why `faster_from` has no length for these settings."""
    if _has_gpu():
        return "not measured on GPUs"
    heads = sorted({row["settings"]["head_dim"] for row in _measured()["rows"]})
    if settings and settings["head_dim"] not in heads:
        return f"not measured for heads of {settings['head_dim']} (only of {', '.join(map(str, heads))})"
    return "not measured for these settings"


def difference_here() -> str | None:
    """How the backend of this process differs from the measured one, in a sentence or two; None if it does not."""
    measured, here = Backend(**_measured()["backend"]), current_backend()
    if (measured.name, measured.instruction_set) == (here.name, here.instruction_set):
        return None
    if here.name == "torch":
        return f"measured with the {measured.description}; this process uses torch, which is slower. {here.reason}"
    if measured.name == "torch":
        return f"measured with plain torch; this process uses the {here.description}, which are faster"
    return f"measured with the {measured.description}; this process uses the {here.description}, so the length differs"


def _measured() -> dict[str, Any]:
    return json.loads(MEASURED.read_text(encoding="utf-8"))


def _has_gpu() -> bool:
    return torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available()


def _words(tokens: int | None, longest: int) -> str:
    return f"more than {longest:,} tokens" if tokens is None else f"{tokens:,} tokens"
