"""The gradients of `hybrid` by Triton against the mechanism in float64."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter
from hybrid_calls import (
    EXACT,
    OF_DECAY,
    OF_GRADIENTS,
    ROTARY,
    gradients,
    mechanisms,
    on_cuda,
    relative,
    tokens,
    widened,
)

from hf_linear_attention.kernels import triton_backward, triton_prefill


assert triton_interpreter
CASES = {
    "default": (EXACT | ROTARY | {"trained_length": 4096}, {}, 150),
    "beyond the trained length": (EXACT | ROTARY | {"trained_length": 30}, {"is_interleaved": True}, 90),
    "grouped heads": (EXACT | ROTARY | {"trained_length": 30}, {"heads": (3, 1)}, 80),
    "some columns turn": (EXACT | ROTARY | {"trained_length": 12}, {"pairs": 5, "dim": 24, "heads": (4, 2)}, 70),
    "without positions": (EXACT | {"trained_length": None}, {"pairs": 0}, 75),
    "without exact keys": ({**EXACT, "num_exact_keys": 0} | ROTARY, {}, 140),
    "without sinks and decay": (EXACT | ROTARY | {"num_sinks": 0, "decay": "none"}, {"heads": (2, 2)}, 70),
    "many keys": ({**EXACT, "window_size": 70, "num_exact_keys": 90} | ROTARY | {"trained_length": 100}, {}, 230),
    "fewer tokens than the window": ({**EXACT, "window_size": 70} | ROTARY, {}, 40),
    # With two or three heads, gradients of numbers per head nearly cancel: their terms are up to 21 times their sum.
    **{f"{dim} columns": (EXACT | ROTARY, {"dim": dim, "heads": (6, 2)}, 70) for dim in (64, 80, 96, 128)},
    "groups": (EXACT | ROTARY | {"trained_length": 4096}, {}, 330),
    # Chunks of 32 tokens.
    "256 columns": (EXACT | ROTARY | {"trained_length": 12}, {"dim": 256}, 70),
    "128 features": ({**EXACT, "num_features": 128} | ROTARY, {"dim": 32, "heads": (6, 2)}, 100),
}
RUNS = [
    *((name, torch.float32, False) for name in CASES),
    *(("grouped heads", torch.bfloat16, False), ("many keys", torch.float32, True)),
    *(("256 columns", torch.bfloat16, False), ("128 features", torch.float32, True)),
    *(("64 columns", torch.bfloat16, False), ("64 columns", torch.float16, True)),
    *(("without exact keys", torch.float32, True), ("groups", torch.float32, True)),
]


def attend(mechanism, inputs):
    """The output, 0 at padding."""
    output, mask = mechanism(inputs)[0], inputs.attention_mask
    return output if mask is None else output * mask[:, :, None, None]


@pytest.mark.parametrize(("name", "dtype", "pads"), RUNS)
def test_gradients_are_those_of_the_mechanism(name, dtype, pads, monkeypatch):
    settings, shape, length = CASES[name]
    for module in (triton_prefill, triton_backward):
        monkeypatch.setattr(module, "GROUP", 2)
    mechanism, wide = mechanisms(settings, dtype, **shape)
    sizes = {key: shape[key] for key in ("heads", "dim") if key in shape}
    inputs = tokens(mechanism, 0, length, dtype, **sizes)
    if pads:
        mask = torch.ones(2, length, dtype=torch.bool)
        mask[0, : length // 3] = False
        inputs = inputs._replace(attention_mask=mask)
    inputs = inputs._replace(gates=None if inputs.gates is None else inputs.gates.detach())
    direction = torch.randn(2, length, *inputs.query.shape[1::2])
    expected = gradients(attend, wide, type(inputs)(*widened(inputs)), direction)
    ran = on_cuda(monkeypatch)
    actual = gradients(attend, mechanism, inputs, direction)
    assert ran == ["triton_prefill", "triton_backward"]
    errors = {part: relative(actual[part], x) for part, x in expected.items()}
    assert errors.pop("decay.rate", 0.0) < OF_DECAY[dtype]
    assert max(errors.values()) < OF_GRADIENTS[dtype], errors


@pytest.mark.parametrize(("shared", "expected"), [(101_376, False), (232_448, True)])
def test_rows_are_loaded_ahead_where_there_is_room(shared, expected, monkeypatch):
    """`test_compiled.py` has what fits into the shared memory of an RTX 4090."""
    mechanism, _ = mechanisms(EXACT | ROTARY, torch.float32)
    inputs, found, run = tokens(mechanism, 0, 20, torch.float32), [], triton_backward.run
    on_cuda(monkeypatch, shared)
    monkeypatch.setattr(triton_backward, "run", lambda *given: found.append(given[-1]) or run(*given))
    gradients(
        attend, mechanism, inputs._replace(gates=inputs.gates.detach()), torch.randn(2, 20, *inputs.query.shape[1::2])
    )
    assert found == [expected]


def test_under_autocast_products_have_the_dtype_of_values(monkeypatch):
    """Rotary positions make queries and keys float32 there, whereas values and the output's gradient are rounded."""
    settings, shape, length = CASES["grouped heads"]
    mechanism, wide = mechanisms(settings, torch.float32, **shape)
    inputs = tokens(mechanism, 0, length, torch.float32, heads=shape["heads"])
    inputs = inputs._replace(value=inputs.value.bfloat16(), gates=inputs.gates.detach())
    direction = torch.randn(2, length, *inputs.query.shape[1::2])
    expected = gradients(attend, wide, type(inputs)(*widened(inputs)), direction)
    on_cuda(monkeypatch)
    actual = gradients(attend, mechanism, inputs, direction)
    assert actual["query"].dtype == torch.float32
    assert actual["value"].dtype == torch.bfloat16
    errors = {part: relative(actual[part], x) for part, x in expected.items()}
    assert max(errors.values()) < OF_GRADIENTS[torch.bfloat16], errors


def test_gradients_of_a_state_and_second_derivatives_are_those_of_torch(monkeypatch):
    """Both go through plain operations; a second part after a state has gradients without the kernels."""
    settings, shape, length = CASES["some columns turn"]
    sizes = {"heads": shape["heads"], "dim": shape["dim"]}
    mechanism, wide = mechanisms(settings, torch.float32, **shape)
    parts = [tokens(mechanism, *ends, torch.float32, **sizes) for ends in ((0, length), (length, length + 5))]
    parts = [x._replace(gates=x.gates.detach()) for x in parts]

    def found(mechanism, parts):
        leaves = [x.clone().requires_grad_() for x in parts[0][:3]]
        output, state = mechanism(type(parts[0])(*leaves, *parts[0][3:]))
        last, _ = mechanism(parts[1], state)
        grads = torch.autograd.grad(output.square().sum() + last.square().sum(), leaves, retain_graph=True)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), [*leaves, *mechanism.mix.parameters()])
        return [*grads, *second]

    expected = found(wide, [type(x)(*widened(x)) for x in parts])
    ran = on_cuda(monkeypatch)
    actual = found(mechanism, parts)
    # In the last call, the gradient of `output` that comes from its square has none itself.
    assert ran == ["triton_prefill", "triton_backward"]
    for a, b in zip(actual, expected, strict=True):
        assert relative(a, b) < 1e-5  # squares of squares
