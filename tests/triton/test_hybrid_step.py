"""One decoding step of `hybrid` by Triton against the mechanism in float64, in place and not."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter
from matrix import hidden_states_of, mechanism_of, move, qkv

from hf_linear_attention.kernels import fla as kernels_fla
from hf_linear_attention.mechanisms.base import MechanismInputs, Rotary


assert triton_interpreter
# The output relative to its norm: float32 sums in another order, and rounding of 16-bit weights and outputs.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
EXACT = {"window_size": 8, "num_sinks": 3, "num_exact_keys": 5, "num_features": 16}
ROTARY = {"rope": "partial", "rope_frequencies": 1}
BLOCKS, ROWS, UNUSED = 5, (3, 1), 77


def on_cuda(monkeypatch):
    """CPU tensors are taken for tensors on CUDA."""
    monkeypatch.setattr(kernels_fla, "is_on_cuda", lambda tensor: True)


def mechanism_for(settings, heads=(4, 2), dim=16, pairs=None, is_interleaved=False):
    pairs = dim // 2 if pairs is None else pairs
    rotary = Rotary(tuple(10.0 ** (-4 * i / max(1, pairs)) for i in range(pairs)), is_interleaved) if pairs else None
    settings = {"mechanism": "hybrid", "decay": "learned", **settings}
    return move(mechanism_of(settings, heads=heads, head_dim=dim, rotary=rotary, is_causal=True, max_length=4096), 0.2)


def tokens(mechanism, start: int, stop: int, dtype, heads, dim, first: int = 0):
    """Some tokens of two sequences, of which the second is three tokens ahead."""
    query, key, value = (x[:, :, start:stop] for x in qkv(stop, heads=heads, dim=dim, dtype=dtype, seed=start))
    inputs = MechanismInputs(query, key, value, None, dim**-0.5, True)
    if mechanism.needs_positions:
        positions = first + torch.arange(start, stop, dtype=torch.int32) + torch.tensor([[0], [3]])
        inputs = inputs._replace(positions=positions.int())
    if mechanism.needs_gates:
        inputs = inputs._replace(gates=mechanism.gates(hidden_states_of(key)))
    return inputs


def widened(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def relative(actual, expected) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


CASES = {
    "default": (EXACT | ROTARY | {"trained_length": 4096}, {}),
    "beyond the trained length": (EXACT | ROTARY | {"trained_length": 12}, {"is_interleaved": True}),
    "some columns turn": (EXACT | ROTARY | {"trained_length": 12}, {"pairs": 5, "dim": 24}),
    "without positions": (EXACT | {"trained_length": None}, {"pairs": 0}),
    "without exact keys": ({**EXACT, "num_exact_keys": 0} | ROTARY, {}),
    "without sinks": (EXACT | ROTARY | {"num_sinks": 0, "trained_length": 12}, {"heads": (2, 2)}),
    "many splits": ({**EXACT, "window_size": 70, "num_exact_keys": 150} | ROTARY | {"trained_length": 100}, {}),
    "80 columns": (EXACT | ROTARY, {"dim": 80}),
    "256 columns": (EXACT | ROTARY | {"trained_length": 12}, {"dim": 256}),
}
HALVES = ("beyond the trained length", "many splits")


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, x) for name in CASES for x in TOLERANCE if x == torch.float32 or name in HALVES]
)
def test_a_step_is_that_of_the_mechanism(name, dtype, monkeypatch):
    """In place by rows, from states with empty places, with sinks in the window, and where keys are displaced."""
    settings, shape = CASES[name]
    shape = {"heads": (2, 1), "dim": 16, **shape}
    mechanism, wide = mechanism_for(settings, **shape).to(dtype), mechanism_for(settings, **shape)
    wide.load_state_dict(mechanism.state_dict())
    wide, sizes = wide.double(), (shape["heads"], shape["dim"])
    for length in (230,) if name == "many splits" else (2, 14):
        state = mechanism(tokens(mechanism, 0, length, dtype, *sizes))[1]
        rows = torch.tensor(ROWS)
        blocks = tuple(torch.full((BLOCKS, *x.shape[1:]), UNUSED, dtype=x.dtype) for x in state)
        for block, x in zip(blocks, state):
            block[rows] = x
        one = tokens(mechanism, length, length + 1, dtype, *sizes)
        expected = wide(type(one)(*map(widened, one)), tuple(map(widened, state)))[0]
        expected_state = mechanism(one, state)[1]
        with monkeypatch.context() as patched:
            on_cuda(patched)
            output = mechanism.step_in_rows(one, blocks, rows)
        assert relative(output, expected) < TOLERANCE[dtype]
        for block, x in zip(blocks, expected_state):
            if x.dtype == torch.float32 and block is blocks[0]:  # sums of exponents, in another order
                torch.testing.assert_close(block[rows], x, rtol=3e-5, atol=1e-5)
            else:
                torch.testing.assert_close(block[rows], x, rtol=0, atol=0)
            assert (block[[0, 2, 4]] == UNUSED).all()


@torch.no_grad()
@pytest.mark.parametrize("name", ["beyond the trained length", "without exact keys"])
def test_without_in_place_the_old_state_stays(name, monkeypatch):
    settings, shape = CASES[name]
    mechanism = mechanism_for(settings, **{"heads": (2, 1), **shape})
    old = mechanism(tokens(mechanism, 0, 14, torch.float32, (2, 1), 16))[1]
    one, before = tokens(mechanism, 14, 15, torch.float32, (2, 1), 16), tuple(x.clone() for x in old)
    expected, expected_state = mechanism(one, old)
    on_cuda(monkeypatch)
    output, state = mechanism(one, old)
    assert all(torch.equal(x, y) for x, y in zip(old, before))
    for actual, x in zip((output, *state), (expected, *expected_state)):
        torch.testing.assert_close(actual, x, rtol=3e-5, atol=1e-5)
