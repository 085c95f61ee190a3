"""The control that a student has to beat: an exact window of the same bytes, with the weights of the teacher.

An untrained window forgets what leaves it and costs nothing to make; a state that does no better with as many bytes is
not worth its training (arXiv 2608.28444).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_linear_attention.conversion.state_budget import growing_bytes, state_bytes
from hf_linear_attention.conversion_api import convert_config
from hf_linear_attention.modeling_linear_attention import linear_attention_modules, linear_model_class
from hf_linear_attention.training.evaluation.retention import Settings, window_settings


# A window without sinks is the better one beyond the trained length, one with sinks where sinks carry weight.
SINKS = (0, 4)
# Shorter texts would lie in the window for the most part, and it would be softmax attention there.
WINDOWS_OF_TEXT = 8


@dataclass(frozen=True)
class SameBytes:
    """A `window` as `convert` takes its `settings`, and the bytes of its state in all layers."""

    window_size: int
    num_sinks: int
    state_bytes: int
    settings: Settings

    @property
    def name(self) -> str:
        """Of its own among all windows of one teacher, whichever layers they are in."""
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:6]
        return f"window-{self.window_size}-{self.num_sinks}-{digest}"


def model_state_bytes(model: PreTrainedModel, length: int = 0) -> int:
    """Bytes of the decoding state of all converted layers, per sequence; 0 where they have none.

    Heads with softmax attention (`softmax_heads`) add the keys and values of `length` tokens.
    """
    modules = linear_attention_modules(model).values()
    return sum((state_bytes(module) or 0) + length * growing_bytes(module) for module in modules)


def windows_of_same_bytes(teacher: PreTrainedModel, student: PreTrainedModel, trained_length: int) -> list[SameBytes]:
    """Per number of sinks the largest window, in the layers that the student converts, whose state takes no more bytes
    than the student's at the trained length; none where the student has no state, or no window fits."""
    budget, settings = model_state_bytes(student, trained_length), student.config.linear_attention
    found = []
    for sinks in SINKS if budget else ():
        sizes = [_window(teacher, settings, size, sinks, trained_length).state_bytes for size in (1, 2)]
        largest = 1 + (budget - sizes[0]) // (sizes[1] - sizes[0])
        if largest >= 1:
            found.append(_window(teacher, settings, largest, sinks, trained_length))
    return found


def _window(
    teacher: PreTrainedModel, settings: Settings, window_size: int, num_sinks: int, trained_length: int
) -> SameBytes:
    sizes = {"window_size": window_size, "num_sinks": num_sinks, "trained_length": trained_length}
    own = window_settings(settings, **sizes, softmax_heads=[])
    with torch.device("meta"):
        model: Any = linear_model_class(type(teacher))(convert_config(teacher.config, own))
    return SameBytes(window_size, num_sinks, model_state_bytes(model), own)
