"""Input and forget gates of `linear`: values and gradients against the oracle, long inputs, what is refused."""

from __future__ import annotations

import pytest
import torch
from matrix import build_mechanism, call_mechanism, hidden_states_of
from oracles import ORACLES

from hf_linear_attention.mechanisms import linear as mechanism_linear
from hf_linear_attention.mechanisms.token_gates import INITIAL_SLOPE


ROWS = ["linear-gated", "linear-gated-hedgehog", "linear-input-gate"]
SCALING = 8**-0.5


def inputs(length, dtype, batch=2):
    generator = torch.Generator().manual_seed(7)
    heads = (4, 2, 2)
    tensors = [torch.randn(batch, h, length, 8, generator=generator, dtype=torch.float64) for h in heads]
    return [x.to(dtype).requires_grad_() for x in tensors]


def gradients(mechanism, tensors, output):
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    leaves = [*tensors, *mechanism.parameters()]
    return torch.autograd.grad((output * weights.to(output.dtype)).sum(), leaves)


@pytest.mark.parametrize("row", ROWS)
def test_parts_change_nothing(row, monkeypatch):
    mechanism = build_mechanism(row, dtype=torch.float64)
    query, key, value = inputs(53, torch.float64)
    mask = torch.ones(2, 53, dtype=torch.bool)
    mask[0, 4:13] = False
    options = {"attention_mask": mask, "scaling": SCALING, "is_causal": True, "state": None}
    whole, state = call_mechanism(mechanism, query, key, value, **options)
    grads = gradients(mechanism, [query, key, value], whole)
    monkeypatch.setattr(mechanism_linear, "TOKENS_PER_PART", 6)
    parts, other_state = call_mechanism(mechanism, query, key, value, **options)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(other_state, state)
    for grad, other in zip(gradients(mechanism, [query, key, value], parts), grads):
        torch.testing.assert_close(grad, other)


def test_a_strong_decay_keeps_its_digits_in_a_long_input():
    mechanism = build_mechanism("linear-gated")
    with torch.no_grad():
        mechanism.gate.forget.rate.fill_(3.0)  # about 3 nats per token, 30,000 over the input
    query, key, value = (x.detach() for x in inputs(10_000, torch.float32, batch=1))
    output, _ = call_mechanism(
        mechanism, query, key, value, attention_mask=None, scaling=SCALING, is_causal=True, state=None
    )
    last = slice(9_900, None)
    query, key, value = (x[:, :, last] for x in (query, key, value))
    expected = ORACLES["linear"](mechanism.double(), query, key, value, None, True, SCALING).transpose(1, 2)
    # Exponents reach 12,000 within a part of 4,096 tokens, where neighbouring float32 numbers are .001 apart; the
    # first of these 100 queries still see keys that the oracle does not.
    torch.testing.assert_close(output[:, last][:, 50:].double(), expected[:, 50:], atol=5e-3, rtol=0)


def test_gates_start_as_a_constant_decay():
    mechanism = build_mechanism("linear-gated")
    mechanism.gate.reset_parameters(mechanism.generator())
    key = inputs(5, torch.float32)[1]
    gates = mechanism.gates(hidden_states_of(key))
    weight, forget = mechanism.gate.split(gates, None)
    assert weight.abs().max() == 0
    torch.testing.assert_close(forget, torch.full_like(forget, -INITIAL_SLOPE))
