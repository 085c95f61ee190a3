"""Without gradients, the memory of a layer beyond inputs and output does not grow with the length, in torch too."""

from __future__ import annotations

import pytest
import torch
from matrix import attend, mechanism_of

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.mechanisms import aft as mechanism_aft
from hf_linear_attention.mechanisms import bidirectional_window
from hf_linear_attention.mechanisms import linear as mechanism_linear


SMALL_CHUNKS = (
    (mechanism_linear, "FEATURES_IN_CACHE"),
    (mechanism_aft, "PART_ELEMENTS"),
    (bidirectional_window, "QUERIES_AT_ONCE"),
)


def most_beyond(settings, tokens: int, is_causal: bool) -> int:
    """The bytes that torch has allocated at most during a call, less those of its output; the last keys are hidden."""
    mechanism = mechanism_of(settings, heads=(4, 4), max_length=tokens)
    inputs = [torch.randn(1, tokens, 4, 8).transpose(1, 2) for _ in range(3)]
    mask = torch.arange(tokens)[None] < tokens - 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        output, _ = attend(mechanism, *inputs, mask, is_causal=is_causal)
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    assert most >= output.nbytes
    return most - output.nbytes


@pytest.mark.parametrize(
    ("settings", "is_causal"),
    [
        ({"mechanism": "linear", "feature_map": "elu1"}, False),
        ({"mechanism": "linear", "feature_map": "exp", "num_features": 8}, True),
        ({"mechanism": "aft", "variant": "simple"}, False),
        ({"mechanism": "performer", "num_features": 8}, False),
        ({"mechanism": "hybrid", "num_features": 8, "window_size": 8, "decay": "learned"}, False),
        ({"mechanism": "window", "window_size": 8}, False),
    ],
    ids=str,
)
@torch.no_grad()
def test_memory_is_that_of_a_shorter_input(settings, is_causal, monkeypatch):
    # The C kernels need no chunks; here are small ones, so that short inputs have many.
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    for module, name in SMALL_CHUNKS:
        monkeypatch.setattr(module, name, 1 << 14)
    short, long = (most_beyond(settings, tokens, is_causal) for tokens in (2048, 8192))
    # What remains of the length is the mask of a byte per token, and one number per chunk.
    assert long <= 1.2 * short, (short, long)
