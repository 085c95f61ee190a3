"""Linformer inside linear attention: a true average of the values, unlike the formula it is often written down as."""

from __future__ import annotations

import pytest
import torch

from hf_linear_attention import LinearAttentionSettings
from hf_linear_attention.mechanisms.base import LayerShape
from hf_linear_attention.mechanisms.linear import LinearAttention
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
    return mechanism(query, key, value, attention_mask=mask, scaling=0.3, is_causal=False, state=None)[0]


@pytest.mark.parametrize("feature_map", ["elu1", "relu", "squared_relu", "exp", "hedgehog"])
def test_one_slot_a_token_is_linear_attention(feature_map):
    linear = LinearAttention(LinearAttentionSettings({"mechanism": "linear", "feature_map": feature_map}), SHAPE)
    linear.reset_parameters()
    parts = inputs(20)
    expected = run(linear.double(), *parts)
    torch.testing.assert_close(run(build(20, projection_size=20, feature_map=feature_map), *parts), expected)


def test_zeros_of_e_and_f_can_be_learned():
    mechanism = build(20, projection_size=5)
    (run(mechanism, *inputs(20)) * torch.randn(2, 20, 4, 8)).sum().backward()
    for projection in (mechanism.key_projection, mechanism.value_projection):
        assert (projection.detach() == 0).any()
        assert (projection.grad != 0).all()
