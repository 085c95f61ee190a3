"""Linformer inside linear attention: a true average of the values, unlike the formula it is often written down as."""

from __future__ import annotations

import pytest
import reference
import torch
from matrix import build_mechanism, stock_config

from hf_linear_attention import LinearAttentionSettings, convert_config
from hf_linear_attention.features.maps import elu_plus_one
from hf_linear_attention.mechanisms.base import LayerShape, MechanismInputs
from hf_linear_attention.mechanisms.linear import LinearAttention
from hf_linear_attention.mechanisms.linformer import mean_pool_matrix
from hf_linear_attention.mechanisms.linformer_linear import LinformerLinearAttention


SHAPE = LayerShape(4, 2, 8, 0)


def build(max_length: int, **options):
    settings = LinearAttentionSettings({"mechanism": "linformer_linear", **options}, max_length=max_length)
    mechanism = LinformerLinearAttention(settings, LayerShape(4, 2, 8, 0, max_length))
    mechanism.reset_parameters()
    return mechanism.double()


def inputs(length: int, std: float = 2.0):
    torch.manual_seed(length)
    return [torch.randn(2, heads, length, 8, dtype=torch.float64) * std for heads in (4, 2, 2)]


def run(mechanism, query, key, value, mask=None):
    return mechanism.attend(query, key, value, attention_mask=mask, scaling=0.3, is_causal=False, state=None)[0]


@pytest.mark.parametrize("feature_map", ["elu1", "relu", "squared_relu", "exp", "hedgehog"])
def test_one_slot_a_token_is_linear_attention(feature_map):
    linear = LinearAttention(LinearAttentionSettings({"mechanism": "linear", "feature_map": feature_map}), SHAPE)
    linear.reset_parameters()
    parts = inputs(20)
    expected = run(linear.double(), *parts)
    torch.testing.assert_close(run(build(20, projection_size=20, feature_map=feature_map), *parts), expected)


@pytest.mark.parametrize("std", [0.5, 8.0])
def test_weights_are_non_negative_and_sum_to_1(std):
    mechanism = build_mechanism("linformer_linear-exp", max_length=30)
    with torch.no_grad():
        for parameter in mechanism.parameters():  # whatever training makes of them
            parameter.normal_()
    query, key, _ = (x.float() for x in inputs(30, std))
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, 4:11] = False
    weights = mechanism.attention_weights(MechanismInputs(query, key, key, mask, 0.3, is_causal=False))
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 30), rtol=0, atol=1e-6)


def test_the_slides_formula_is_no_average():
    """Its weights sum to k / n for segment means, and are negative about half of the time for Gaussian E and F."""
    query, key, _ = (elu_plus_one(reference.repeat_heads(x, 4)) for x in inputs(64))
    identity, pool = torch.eye(64).expand(2, 4, -1, -1), mean_pool_matrix(16, 64)
    weights = reference.linformer_linear_slides(query, key, identity, pool, pool)
    torch.testing.assert_close(weights.sum(-1), torch.full((2, 4, 64), 16 / 64, dtype=torch.float64))
    gaussian = reference.linformer_linear_slides(query, key, identity, *(torch.randn(2, 16, 64) / 4))
    assert 0.2 < (gaussian < 0).double().mean() < 0.8


def test_a_partly_filled_slot_counts_for_its_tokens():
    """Started as means, each token of a short row has the weight of its segment's mean key."""
    query, key, value = inputs(10)
    mechanism = build(24, projection_size=6, feature_map="elu1")  # segments of 4 tokens: 4, 4 and 2 of them filled
    segments = [elu_plus_one(key[:, :, start : min(start + 4, 10)]) for start in (0, 4, 8)]
    means = torch.cat([part.mean(2, keepdim=True).expand_as(part) for part in segments], dim=2)
    expected = reference.kernel_attention(elu_plus_one(query), means, value_means(value), log_features=False)
    torch.testing.assert_close(run(mechanism, query, key, value), expected.transpose(1, 2))


def value_means(value):
    parts = [value[:, :, start : min(start + 4, 10)] for start in (0, 4, 8)]
    return torch.cat([part.mean(2, keepdim=True).expand_as(part) for part in parts], dim=2)


def test_zeros_of_e_and_f_can_be_learned():
    mechanism = build(20, projection_size=5)
    (run(mechanism, *inputs(20)) * torch.randn(2, 20, 4, 8)).sum().backward()
    for projection in (mechanism.key_projection, mechanism.value_projection):
        assert (projection.detach() == 0).any()
        assert (projection.grad != 0).all()


def test_an_empty_row_has_finite_gradients():
    mechanism, leaves = build(20, projection_size=5), [x.requires_grad_() for x in inputs(20)]
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0] = False
    run(mechanism, *leaves, mask=mask).sum().backward()
    assert all(x.grad.isfinite().all() and (x.grad[0] == 0).all() for x in leaves)
    assert all(parameter.grad.isfinite().all() for parameter in mechanism.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"feature_map": "elu1", "num_features": 8}, "`num_features` = 8 has no effect"),
        ({"projection": "conv"}, "`projection` is not an option"),
        ({"projection_size": 65}, "larger than the longest input, 64"),
    ],
)
def test_impossible_options_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        LinearAttentionSettings({"mechanism": "linformer_linear", **settings}, max_length=64)


def test_causal_models_are_refused():
    with pytest.raises(ValueError, match="`linformer_linear` has no causal form, which `gpt2` needs"):
        convert_config(stock_config("gpt2"), mechanism="linformer_linear", projection_size=8)
