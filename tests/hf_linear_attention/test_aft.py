"""The Attention-Free Transformer: what its oracle in the matrix does not show."""

from __future__ import annotations

import pytest
import torch
from matrix import call_mechanism, sample_inputs, stock_config, stock_model
from oracles import aft

from hf_linear_attention import LinearAttentionSettings, convert, convert_config
from hf_linear_attention.mechanisms.aft import AftAttention
from hf_linear_attention.mechanisms.base import LayerShape, MechanismInputs


WINDOW = {"local": {"window_size": 3}, "conv": {"window_size": 3}}


def build(**settings) -> AftAttention:
    settings = LinearAttentionSettings({"mechanism": "aft", **settings}, max_length=40)
    mechanism = AftAttention(settings, LayerShape(2, 2, 4, 0, 40))
    mechanism.reset_parameters()
    return mechanism


def attend(mechanism, query, key, value, is_causal=False, mask=None, state=None):
    return call_mechanism(
        mechanism, query, key, value, attention_mask=mask, scaling=1.0, is_causal=is_causal, state=state
    )


def sample(length=20, key_scale=1.0):
    query, key, value = torch.randn(3, 1, 2, length, 4, generator=torch.Generator().manual_seed(0))
    return query, key * key_scale, value


@pytest.mark.parametrize("variant", ["simple", "local", "conv", "full"])
def test_constant_values_come_out_as_the_gate(variant):
    mechanism = build(variant=variant, **WINDOW.get(variant, {}))
    query, key, value = sample()
    output, _ = attend(mechanism, query, key, torch.ones_like(value))
    torch.testing.assert_close(output.transpose(1, 2), query.sigmoid(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("variant", ["local", "conv"])
def test_a_bias_that_hides_the_near_keys_leaves_the_far_ones_exact(variant, is_causal):
    """Global sums plus a convolution with exp(w) - 1 would cancel here: the dominant key is near, with w = -120.

    Queries that see near keys alone must not be scaled by the far ones: exp(-120) is 0 in float32.
    """
    mechanism = build(variant=variant, **WINDOW.get(variant, {}))
    with torch.no_grad():
        mechanism.position_bias.fill_(-120.0)
    query, key, value = sample()
    key[:, :, 9] = 25.0
    actual, _ = attend(mechanism, query, key, value, is_causal)
    expected = aft(mechanism, query.double(), key.double(), value.double(), None, is_causal, 1.0).transpose(1, 2)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spread", [5.0, 60.0, 500.0])
def test_full_is_exact_for_any_biases_and_large_keys(spread):
    """The product of exp(w) and exp(k) would underflow where both spread far; aft-pytorch overflows instead."""
    mechanism = build(variant="full", position_rank=0)
    with torch.no_grad():
        mechanism.position_bias.copy_(spread * torch.randn(2, 40, 40, generator=torch.Generator().manual_seed(1)))
    mask = torch.ones(1, 20, dtype=torch.bool)
    mask[0, 12:15] = False
    inputs = sample(key_scale=spread)
    actual, _ = attend(mechanism, *inputs, mask=mask)
    expected = aft(mechanism, *[x.double() for x in inputs], mask, False, 1.0).transpose(1, 2)
    # exponents up to 2,000 in float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3 if spread > 100 else 1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("variant", ["simple", "local", "conv"])
def test_large_keys_neither_over_nor_underflow(variant, is_causal):
    mechanism, (query, key, value) = build(variant=variant, **WINDOW.get(variant, {})), sample(40, key_scale=100.0)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.normal_(std=30.0)
    mask = torch.ones(1, 40, dtype=torch.bool)
    mask[0, 12:15] = False
    actual, _ = attend(mechanism, query, key, value, is_causal, mask)
    expected = aft(mechanism, query.double(), key.double(), value.double(), mask, is_causal, 1.0).transpose(1, 2)
    # float32 rounds exponents of 400 to 2e-5
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


def test_more_positions_than_were_learned_are_refused_also_while_decoding():
    mechanism = build(variant="local", window_size=3)
    _, state = attend(mechanism, *sample(39), is_causal=True)
    _, state = attend(mechanism, *sample(1), is_causal=True, state=state)
    refused = r"Got 41 positions.*`max_length` = 40"
    with pytest.raises(ValueError, match=refused):
        attend(mechanism, *sample(1), is_causal=True, state=state)
    with pytest.raises(ValueError, match=refused):
        attend(build(variant="full"), *sample(41))
    attend(build(variant="conv", window_size=3), *sample(90), is_causal=True)


def test_what_is_impossible_is_refused_by_name():
    with pytest.raises(ValueError, match=r"`variant` = `full`.* has no causal form, which `llama` needs"):
        convert_config(stock_config("llama"), mechanism="aft", variant="full")
    with pytest.raises(ValueError, match="`max_length` is required"):
        LinearAttentionSettings({"mechanism": "aft", "variant": "local"})
    model = convert(stock_model("bert"), mechanism="aft")
    with pytest.raises(ValueError, match="no matrix of weights per head"):
        model(**sample_inputs("bert"), output_attentions=True)
    with pytest.raises(NotImplementedError, match="no matrix of weights per head"):
        build().attention_weights(MechanismInputs(*sample(), None, 1.0, is_causal=False))
