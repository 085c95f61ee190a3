"""`window` by the Triton kernels of `hybrid` against the mechanism in float64: values and gradients."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter
from hybrid_calls import OF_GRADIENTS, TOLERANCE, gradients, on_cuda, relative, tokens, widened
from matrix import mechanism_of

from hf_linear_attention.mechanisms.base import Rotary


assert triton_interpreter
ROTARY = Rotary((1.0, 0.1, 0.01))
CASES = {
    "beyond the trained length": (12, ROTARY, 3),
    "without positions": (None, None, 3),
    "without sinks": (12, None, 0),
}


def window(name):
    trained_length, rotary, sinks = CASES[name]
    settings = {"mechanism": "window", "window_size": 8, "num_sinks": sinks, "trained_length": trained_length}
    shape = {"heads": (4, 2), "head_dim": 16, "rotary": rotary, "is_causal": True, "max_length": 4096}
    return mechanism_of(settings, **shape)


@pytest.mark.parametrize(("name", "pads"), [*((name, True) for name in CASES), ("beyond the trained length", False)])
def test_values_and_gradients_are_those_of_the_mechanism(name, pads, monkeypatch):
    mechanism = window(name)
    inputs = tokens(mechanism, 0, 90, torch.float32, heads=(4, 2))
    if pads:
        mask = torch.ones(2, 90, dtype=torch.bool)
        mask[0, :30] = False
        inputs = inputs._replace(attention_mask=mask)

    def attend(mechanism, inputs):
        return mechanism(inputs)[0]

    direction = torch.randn(2, 90, 4, 16)
    expected = gradients(attend, mechanism, type(inputs)(*widened(inputs)), direction)
    ran = on_cuda(monkeypatch)
    actual = gradients(attend, mechanism, inputs, direction)
    assert ran == ["triton_prefill", "triton_backward"]
    for part, x in expected.items():
        assert relative(actual[part], x) < OF_GRADIENTS[torch.float32], part


@torch.no_grad()
def test_tokens_follow_others(monkeypatch):
    mechanism, outputs, state = window("beyond the trained length"), [], None
    given = tokens(mechanism, 0, 40, torch.float32, heads=(4, 2))
    expected = mechanism(type(given)(*widened(given)))[0]
    ran = on_cuda(monkeypatch)
    for ends in ((0, 4), (4, 5), (5, 40)):
        output, state = mechanism(tokens(mechanism, *ends, torch.float32, heads=(4, 2)), state)
        outputs.append(output)
    assert ran == ["triton_prefill"] * 3
    assert relative(torch.cat(outputs, dim=1), expected) < TOLERANCE[torch.float32]
