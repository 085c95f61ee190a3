"""The gradients of `hybrid` by Triton against the mechanism in float64."""

from __future__ import annotations

import pytest
import torch
import triton_interpreter
from hybrid_calls import EXACT, ROTARY, mechanisms, on_cuda, relative, tokens, widened

from hf_linear_attention.kernels import triton_backward, triton_prefill


assert triton_interpreter
# Relative to the norm of a gradient: float32 in another order, and numbers that are rounded to bfloat16 (4e-3) before
# and after each product. That of a decay is one number of which nearly all cancels; C has an error of 1e-5, too.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
OF_DECAY = {torch.float32: 5e-5, torch.bfloat16: 2e-2}
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
    "80 columns": (EXACT | ROTARY, {"dim": 80}, 70),
    "groups": (EXACT | ROTARY | {"trained_length": 4096}, {}, 330),
}
RUNS = [
    *((name, torch.float32, False) for name in CASES),
    *(("grouped heads", torch.bfloat16, False), ("many keys", torch.float32, True)),
    *(("without exact keys", torch.float32, True), ("groups", torch.float32, True)),
]


def gradients(mechanism, inputs, direction):
    """The output, and the gradients of queries, keys, values and parameters by name."""
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    parameters = {name: x for name, x in mechanism.named_parameters() if x.requires_grad}
    output = mechanism(type(inputs)(*leaves, *inputs[3:]))[0]
    if inputs.attention_mask is not None:
        output = output * inputs.attention_mask[:, :, None, None]
    grads = torch.autograd.grad((output * direction.to(output.dtype)).sum(), [*leaves, *parameters.values()])
    return dict(zip(("output", "query", "key", "value", *parameters), (output.detach(), *grads), strict=True))


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
    expected = gradients(wide, type(inputs)(*widened(inputs)), direction)
    ran = on_cuda(monkeypatch)
    actual = gradients(mechanism, inputs, direction)
    assert ran == ["triton_prefill", "triton_backward"]
    errors = {part: relative(actual[part], x) for part, x in expected.items()}
    assert errors.pop("decay.rate", 0.0) < OF_DECAY[dtype]
    assert max(errors.values()) < TOLERANCE[dtype], errors
