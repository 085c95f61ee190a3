"""Without gradients, the memory of a layer beyond inputs and output does not grow with the length, in torch too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from matrix import call_mechanism
from torch import Tensor

from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.mechanisms import aft as mechanism_aft
from hf_linear_attention.mechanisms import linear as mechanism_linear
from hf_linear_attention.mechanisms import window as mechanism_window
from hf_linear_attention.mechanisms.base import LayerShape
from hf_linear_attention.mechanisms.registry import MECHANISMS


HEADS, HEAD_DIM = 4, 8
LINEAR: dict[str, Any] = {"mechanism": "linear", "num_features": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "linear, exp": {**LINEAR, "feature_map": "exp"},
    "linear, elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "aft": {"mechanism": "aft", "variant": "simple"},
    "performer": {"mechanism": "performer", "num_features": 8},
    "hybrid": {"mechanism": "hybrid", "num_features": 8, "window_size": 8},
    "hybrid, decay": {"mechanism": "hybrid", "num_features": 8, "window_size": 8, "decay": "learned"},
    "window": {"mechanism": "window", "window_size": 8},
}
# What has to be at least this large for all tokens to be one chunk, in every mechanism.
CHUNKS = (
    (mechanism_linear, "FEATURES_IN_CACHE"),
    (mechanism_aft, "PART_ELEMENTS"),
    (mechanism_window, "QUERIES_AT_ONCE"),
)


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C kernels need no chunks; here are small ones, so that short inputs have many."""
    monkeypatch.setattr(kernels_cpu, "_loaded", lambda: (None, kernels_cpu.KernelBackend("torch", None, "a test")))
    for module, name in CHUNKS:
        monkeypatch.setattr(module, name, 1 << 14)


def call_of(settings: dict[str, Any], tokens: int, is_causal: bool, dtype: torch.dtype) -> Callable[[], Tensor]:
    """A forward pass of one layer, of which the last keys are hidden."""
    complete = LinearAttentionSettings(settings, max_length=tokens)
    mechanism = MECHANISMS[complete["mechanism"]](complete, LayerShape(HEADS, HEADS, HEAD_DIM, 0, tokens))
    mechanism.reset_parameters()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, tokens, HEADS, HEAD_DIM, generator=generator, dtype=dtype) for _ in range(3)]
    mask = torch.arange(tokens)[None] < tokens - 5
    options: dict[str, Any] = {"attention_mask": mask, "is_causal": is_causal, "scaling": HEAD_DIM**-0.5, "state": None}
    return lambda: call_mechanism(mechanism, *(x.transpose(1, 2) for x in inputs), **options)[0]


def most_beyond(call: Callable[[], Tensor]) -> int:
    """The bytes that torch has allocated at most during a call, less those of its output."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        output = call()
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    assert most >= output.nbytes
    return most - output.nbytes


@pytest.mark.parametrize(
    ("name", "is_causal"),
    [
        *((name, False) for name in ("linear, elu1", "aft", "performer", "hybrid, decay", "window")),
        ("linear, exp", True),
    ],
)
def test_memory_is_that_of_a_shorter_input(name: str, is_causal: bool) -> None:
    with torch.no_grad():
        short, long = (
            most_beyond(call_of(SETTINGS[name], tokens, is_causal, torch.float32)) for tokens in (2048, 8192)
        )
    # What remains of the length is the mask of a byte per token, and one number per chunk.
    assert long <= 1.2 * short, (short, long)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", SETTINGS)
def test_chunks_change_nothing(row: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients, without them, and all tokens at once."""
    call = call_of(SETTINGS[row], 2048, False, dtype)
    with_gradients = call()
    with torch.no_grad():
        without = call()
        for module, name in CHUNKS:
            monkeypatch.setattr(module, name, 1 << 30)
        at_once = call()
    assert with_gradients.dtype == without.dtype == dtype
    # `window` and `hybrid` have one chunk for gradients.
    assert torch.equal(with_gradients, at_once if SETTINGS[row]["mechanism"] in ("window", "hybrid") else without)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.allclose(without, at_once, rtol=tolerance, atol=tolerance)
