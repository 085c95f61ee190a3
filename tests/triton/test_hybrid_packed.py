"""Packed sequences of `hybrid` as they stand in a row, by Triton against the mechanism in float64, one by one."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter
from hybrid_calls import (
    EXACT,
    OF_DECAY,
    OF_GRADIENTS,
    ROTARY,
    TOLERANCE,
    gradients,
    mechanisms,
    on_cuda,
    relative,
    tokens,
    widened,
)

from hf_linear_attention.attention.masks import attend_packed
from hf_linear_attention.kernels import triton_backward, triton_prefill


assert triton_interpreter
# Lengths of sequences and, below 0, of padding: of less than a window, of several chunks, and ending with a chunk.
ROWS = ((5, 1, 100, 22, 64, -8), (-70, 40, -3, 87))
SHORT = ((30, 34, 6), (70,))
CASES = {
    "default": (EXACT | ROTARY | {"trained_length": 4096}, {}, ROWS),
    "beyond the trained length": (EXACT | ROTARY | {"trained_length": 12}, {"is_interleaved": True}, ROWS),
    "some columns turn": (EXACT | ROTARY | {"trained_length": 30}, {"pairs": 5, "dim": 24, "heads": (4, 2)}, SHORT),
    "without positions": (EXACT | {"trained_length": None}, {"pairs": 0, "heads": (3, 1)}, SHORT),
    "without exact keys": ({**EXACT, "num_exact_keys": 0} | ROTARY | {"trained_length": 30}, {}, ROWS),
    "without sinks and decay": (EXACT | ROTARY | {"num_sinks": 0, "decay": "none"}, {"heads": (2, 2)}, ROWS),
    "many keys": (
        {**EXACT, "window_size": 20, "num_exact_keys": 40} | ROTARY | {"trained_length": 100},
        {},
        ((150, 20, 30), (-1, 1, 198)),
    ),
}
HALF = "some columns turn"


def packed(name, dtype):
    """A mechanism, the same in float64, and inputs whose mask numbers the sequences."""
    settings, shape, rows = CASES[name]
    mechanism, wide = mechanisms(settings, dtype, **shape)
    sizes = {key: shape[key] for key in ("heads", "dim") if key in shape}
    inputs = tokens(mechanism, 0, sum(map(abs, rows[0])), dtype, **sizes)
    numbers = [torch.cat([torch.full((abs(n),), i * (n > 0)) for i, n in enumerate(row, 1)]) for row in rows]
    inputs = inputs._replace(attention_mask=torch.stack(numbers))
    if inputs.positions is not None:
        places = [torch.cat([torch.arange(abs(n)) for n in row]) for row in rows]
        inputs = inputs._replace(positions=torch.stack(places))
    return mechanism, wide, inputs._replace(gates=None if inputs.gates is None else inputs.gates.detach())


def one_by_one(mechanism, inputs):
    return attend_packed(lambda part: mechanism(part)[0], inputs)


@torch.no_grad()
@pytest.mark.parametrize(("name", "dtype"), [("default", torch.float32), *((HALF, x) for x in TOLERANCE)])
def test_outputs_are_those_of_each_sequence_alone(name, dtype, monkeypatch):
    monkeypatch.setattr(triton_prefill, "GROUP", 2)
    mechanism, wide, inputs = packed(name, dtype)
    expected = one_by_one(wide, type(inputs)(*widened(inputs)))
    ran = on_cuda(monkeypatch)
    output = mechanism.attend_packed(inputs)
    assert ran == ["triton_prefill"]
    assert output.dtype == dtype
    assert relative(output, expected) < TOLERANCE[dtype]
    assert not output[inputs.attention_mask == 0].any()


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in [*CASES][1:]), (HALF, torch.bfloat16)])
def test_gradients_are_those_of_each_sequence_alone(name, dtype, monkeypatch):
    for module in (triton_prefill, triton_backward):
        monkeypatch.setattr(module, "GROUP", 2)
    mechanism, wide, inputs = packed(name, dtype)
    direction = torch.randn(*inputs.attention_mask.shape, *inputs.query.shape[1::2])
    expected = gradients(one_by_one, wide, type(inputs)(*widened(inputs)), direction)
    ran = on_cuda(monkeypatch)
    actual = gradients(type(mechanism).attend_packed, mechanism, inputs, direction)
    assert ran == ["triton_prefill", "triton_backward"]
    errors = {part: relative(actual[part], x) for part, x in expected.items()}
    assert errors.pop("decay.rate", 0.0) < OF_DECAY[dtype]
    assert max(errors.values()) < OF_GRADIENTS[dtype], errors


def test_second_derivatives_are_those_of_torch(monkeypatch):
    mechanism, wide, inputs = packed("some columns turn", torch.float32)

    def found(attend, mechanism, inputs):
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        output = attend(mechanism, type(inputs)(*leaves, *inputs[3:]))
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), [*leaves, *mechanism.mix.parameters()])

    expected = found(one_by_one, wide, type(inputs)(*widened(inputs)))
    on_cuda(monkeypatch)
    for a, b in zip(found(type(mechanism).attend_packed, mechanism, inputs), expected, strict=True):
        assert relative(a, b) < 1e-5  # squares of squares
