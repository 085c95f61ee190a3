"""From which length on linear attention is faster than softmax: what `benchmarks/speed_break_even.py` measured.

A figure is quoted only for the very settings that were measured, and never where there is a GPU, on which nothing was.
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
# Settings of a mechanism that change no cost: other numbers of the same size.
FREE_SETTINGS = ("seed", "trained_length")
INSTRUCTION_SETS = {"avx512": "AVX-512", "avx2": "AVX2", "base": "any processor"}


@dataclass(frozen=True)
class Backend:
    """What computes attention on a CPU: `name` is `c` or `torch`, `instruction_set` that of the C kernels; `reason`, a
    sentence, says why, and where it is torch what to do to have the others."""

    name: str
    instruction_set: str | None
    reason: str = ""

    @property
    def description(self) -> str:
        if self.name == "torch":
            return "plain torch"
        return f"C kernels for {INSTRUCTION_SETS.get(str(self.instruction_set), self.instruction_set)}"


def current_backend() -> Backend:
    """That of this process."""
    found = hf_linear_attention.kernel_backend()
    return Backend(found.name, found.instruction_set, found.reason)


def cost_settings(mechanism: AttentionMechanism) -> dict[str, Any]:
    """All that decides the cost of a mechanism per head: its options, with the features that a map has by default as a
    number, and `head_dim`."""
    options = {name: mechanism.settings[name] for name in mechanism.options if name not in FREE_SETTINGS}
    if (feature_map := getattr(mechanism, "feature_map", None)) is not None:
        options["num_features"] = feature_map.num_features
    return {"mechanism": mechanism.settings["mechanism"], **options, "head_dim": mechanism.shape.head_dim}


def faster_from(settings: Mapping[str, Any], is_causal: bool | None) -> str | None:
    """Half a sentence: the length, and with what it was measured; None where these settings were not.

    Args:
        settings: `cost_settings` of the converted layers.
        is_causal: None for an encoder and a decoder together.
    """
    measured = _measured()
    row = next((row for row in measured["rows"] if row["settings"] == dict(settings)), None)
    if row is None or _has_gpu():
        return None
    forms = ("bidirectional", "causal") if is_causal is None else ("causal",) if is_causal else ("bidirectional",)
    lengths = [_words(row[form], measured["longest"]) for form in forms if form in row]
    places = (" in the encoder", " in the decoder") if len(lengths) == 2 else ("",)
    found = ", ".join(length + place for length, place in zip(lengths, places))
    machine = f"{Backend(**measured['backend']).description}, {measured['environment']['processor']}"
    return f"{found} (measured: {row['name']}, {measured['conditions']}, {machine})" if found else None


def difference_here() -> str | None:
    """How what computes in this process differs from what was measured, as a sentence or two; None if it does not."""
    measured, here = Backend(**_measured()["backend"]), current_backend()
    if (measured.name, measured.instruction_set) == (here.name, here.instruction_set):
        return None
    if here.name == "torch":
        return f"measured with the {measured.description}; here torch computes, which is slower. {here.reason}"
    if measured.name == "torch":
        return f"measured with plain torch; here the {here.description} compute, which are faster"
    return f"measured with the {measured.description}; here the {here.description} compute, and the length is another"


def _measured() -> dict[str, Any]:
    return json.loads(MEASURED.read_text(encoding="utf-8"))


def _has_gpu() -> bool:
    return torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available()


def _words(tokens: int | None, longest: int) -> str:
    return f"more than {longest:,} tokens" if tokens is None else f"{tokens:,} tokens"
