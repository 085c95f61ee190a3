"""Latent bottleneck: convex combinations of the values, cross-attention, and a start that suits pretrained keys."""

from __future__ import annotations

import pytest
import reference
import torch
from matrix import build_mechanism, stock_config, stock_model

from hf_linear_attention import convert, convert_config
from hf_linear_attention.mechanisms.base import MechanismInputs


def run(mechanism, query, key, value, mask=None):
    return mechanism.attend(query, key, value, attention_mask=mask, scaling=0.3, is_causal=False, state=None)[0]


@pytest.mark.parametrize("std", [0.5, 8.0])
def test_outputs_are_convex_combinations_of_the_values(std):
    mechanism, mask = build_mechanism("latent"), torch.ones(2, 30, dtype=torch.bool)
    mask[0, 5:17] = False
    query, key = torch.randn(2, 4, 30, 8) * std, torch.randn(2, 2, 30, 8) * std
    weights = mechanism.attention_weights(MechanismInputs(query, key, key, mask, 0.3, is_causal=False))
    assert (weights >= 0).all()
    assert (weights[0, :, :, ~mask[0]] == 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 30), rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", [1, 5, 40])
def test_queries_may_come_from_another_sequence(length):
    mechanism, query = build_mechanism("latent", dtype=torch.float64), torch.randn(2, 4, length, 8).double()
    key, value = torch.randn(2, 2, 23, 8).double(), torch.randn(2, 2, 23, 8).double()
    mask = torch.rand(2, 23) > 0.3
    expected = reference.latent(query, key, value, mechanism.latents, 0.3, mask).transpose(1, 2)
    torch.testing.assert_close(run(mechanism, query, key, value, mask), expected)


def test_an_empty_row_has_finite_gradients():
    mechanism = build_mechanism("latent")
    leaves = [torch.randn(2, heads, 20, 8).requires_grad_() for heads in (4, 2, 2)]
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0] = False
    run(mechanism, *leaves, mask=mask).sum().backward()
    assert all(x.grad.isfinite().all() and (x.grad[0] == 0).all() for x in [*leaves])
    assert mechanism.latents.grad.isfinite().all()


def test_layers_and_seeds_start_from_different_latents():
    model = convert(stock_model("bert"), mechanism="latent", num_latents=5)
    latents = [value for name, value in model.state_dict().items() if name.endswith(".latents")]
    assert len(latents) == 3
    assert not torch.equal(latents[0], latents[1])
    other = convert(stock_model("bert"), mechanism="latent", num_latents=5, seed=1).state_dict()
    assert not torch.equal(next(v for n, v in other.items() if n.endswith(".latents")), latents[0])


def test_causal_models_are_refused():
    with pytest.raises(ValueError, match="`latent` has no causal form, which `llama` needs"):
        convert_config(stock_config("llama"), mechanism="latent")
