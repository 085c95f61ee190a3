"""Many tokens of `hybrid` by Triton against the mechanism in float64: at once, after others, and with padding."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter
from hybrid_calls import EXACT, ROTARY, TOLERANCE, mechanisms, on_cuda, relative, tokens, widened

from hf_linear_attention.kernels import triton_prefill


assert triton_interpreter
CASES = {
    "default": (EXACT | ROTARY | {"trained_length": 4096}, {}, (150,)),
    "beyond the trained length": (EXACT | ROTARY | {"trained_length": 30}, {"is_interleaved": True}, (90,)),
    "after others": (EXACT | ROTARY | {"trained_length": 30}, {"heads": (3, 1)}, (4, 11, 80)),
    "some columns turn": (EXACT | ROTARY | {"trained_length": 12}, {"pairs": 5, "dim": 24}, (70,)),
    "without positions": (EXACT | {"trained_length": None}, {"pairs": 0}, (70, 75)),
    "without exact keys": ({**EXACT, "num_exact_keys": 0} | ROTARY, {}, (70, 140)),
    "without sinks": (EXACT | ROTARY | {"num_sinks": 0, "trained_length": 12}, {"heads": (2, 2)}, (70,)),
    "many keys": (
        {**EXACT, "window_size": 70, "num_exact_keys": 90} | ROTARY | {"trained_length": 100},
        {},
        (200, 230),
    ),
    "80 columns": (EXACT | ROTARY, {"dim": 80}, (70,)),
    "256 columns": (EXACT | ROTARY | {"trained_length": 12}, {"dim": 256}, (70,)),
    "groups": (EXACT | ROTARY | {"trained_length": 4096}, {}, (330,)),
}
PADDED = ("after others", "many keys")
RUNS = [
    (name, dtype, pads)
    for name in CASES
    for dtype in TOLERANCE
    for pads in (False, True)
    if (dtype == torch.float32 and (not pads or name in PADDED)) or (name == "after others" and not pads)
]


def assert_same_state(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        if a is actual[0]:  # sums of exponents, in another order
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize(("name", "dtype", "pads"), RUNS)
def test_tokens_are_those_of_the_mechanism(name, dtype, pads, monkeypatch):
    """Each part after the state of the part before; with padding, the first third of a row in each part."""
    settings, shape, stops = CASES[name]
    monkeypatch.setattr(triton_prefill, "GROUP", 2)
    mechanism, wide = mechanisms(settings, dtype, **shape)
    sizes = {key: shape[key] for key in ("heads", "dim") if key in shape}
    state, start = None, 0
    for stop in stops:
        some = tokens(mechanism, start, stop, dtype, **sizes)
        if pads:
            mask = torch.ones(2, stop - start, dtype=torch.bool)
            mask[0, : (stop - start) // 3] = False
            some = some._replace(attention_mask=mask)
        expected = wide(type(some)(*widened(some)), None if state is None else tuple(widened(state)))[0]
        reference = mechanism(some, state)[1]
        with monkeypatch.context() as patched:
            ran = on_cuda(patched)
            output, state = mechanism(some, state)
        assert ran == ["triton_prefill"]
        error = relative(output, expected)
        assert error < TOLERANCE[dtype]
        assert_same_state(state, reference)
        start = stop
