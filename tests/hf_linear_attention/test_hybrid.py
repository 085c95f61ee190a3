"""The hybrid: exact where it promises to be, and no heavier than softmax in the distance."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from matrix import build_mechanism, call_mechanism

from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.mechanisms.hybrid import HybridAttention


def build(**settings) -> HybridAttention:
    filled = LinearAttentionSettings({"mechanism": "hybrid", **settings})
    mechanism = HybridAttention(filled, build_mechanism("hybrid").shape)
    mechanism.reset_parameters()
    return mechanism


def sample(length: int, std: float = 2.0):
    return (
        torch.randn(2, 4, length, 8) * std,
        torch.randn(2, 2, length, 8) * std,
        torch.randn(2, 2, length, 8),
    )


def run(mechanism, query, key, value, mask=None, state=None, is_causal=True):
    return call_mechanism(
        mechanism, query, key, value, attention_mask=mask, scaling=0.3, is_causal=is_causal, state=state
    )


def test_sinks_are_the_first_real_tokens():
    """With a window of 1 and values that name their token, only sinks, the window and the far part can show."""
    mechanism = build(window_size=1, num_sinks=2)
    mechanism.uses_far = False
    query, key, value = torch.zeros(1, 4, 9, 8), torch.zeros(1, 2, 9, 8), torch.zeros(1, 2, 9, 9)
    value[..., range(9), range(9)] = 1.0
    mask = torch.tensor([[0, 0, 1, 0, 1, 1, 1, 1, 1]], dtype=torch.bool)
    output, _ = run(mechanism, query, key, value, mask=mask)
    expected = torch.zeros(9)
    expected[[2, 4, 8]] = 1 / 3
    torch.testing.assert_close(output[0, 8, 0], expected)
    torch.testing.assert_close(output[0, 2, 0], torch.eye(9)[2])


def test_far_keys_start_with_at_most_their_softmax_weight():
    """E[c phi(q)·phi(k)] = exp(s q·k - (1 - c^2) s |q + k|^2 / 2) over projections, with c the initial scale."""
    query, key, _ = sample(5, std=0.7)
    mechanism = build(num_features=24)
    estimates = []
    for seed in range(1500):
        generator = torch.Generator().manual_seed(seed)
        mechanism.feature_map.reset_parameters(generator)
        torch.nn.init.ones_(mechanism.feature_map.key_norm_weight)
        q = mechanism.feature_map.forward_queries(query, 0.3) - query.square().sum(-1, keepdim=True) * 0.15
        k = reference.repeat_heads(mechanism.feature_map.forward_keys(key, 0.3), 4)
        estimates.append((q.exp() @ k.exp().transpose(-1, -2)) * mechanism.mix.far_log_scale.exp()[:, None, None])
    mean = torch.stack(estimates).double().mean(0).detach()
    both = (query.unsqueeze(-2) + reference.repeat_heads(key, 4).unsqueeze(-3)).double().square().sum(-1)
    softmax = 0.3 * query.double() @ reference.repeat_heads(key.double(), 4).transpose(-1, -2)
    scale = mechanism.feature_map.initial_scale
    expected = (softmax - (1 - scale**2) * 0.15 * both).exp()
    # five standard errors of the mean of 36,000 features at the largest |q + k|
    torch.testing.assert_close(mean, expected, rtol=0.1, atol=0.0)
    assert (expected <= softmax.exp()).all()


def test_the_far_part_is_used_and_counts_every_key_once():
    """With W = 0 every far key weighs exp(far_log_scale) F = 1 and every exact one 1: the output is the plain mean."""
    mechanism = build(window_size=4, num_sinks=2, num_features=24)
    with torch.no_grad():
        for parameter in mechanism.feature_map.parameters():
            parameter.zero_()
        mechanism.mix.query_norm_weight.zero_()
    assert mechanism.mix.far_log_scale[0].item() == pytest.approx(-math.log(24))
    value = torch.randn(1, 2, 50, 8)
    zeros = torch.zeros(1, 4, 50, 8), torch.zeros(1, 2, 50, 8)
    output, _ = run(mechanism, *zeros, value)
    mean = value.cumsum(2) / torch.arange(1, 51)[:, None]
    torch.testing.assert_close(output.transpose(1, 2), mean.repeat_interleave(2, 1), rtol=1e-5, atol=1e-5)


def test_global_tokens_of_an_encoder_see_and_are_seen_exactly():
    """With the far part switched off: rows of global tokens are full softmax, others see window and globals."""
    mechanism = build(window_size=3, num_sinks=2)
    mechanism.uses_far = False
    query, key, _ = sample(20)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :5] = False  # its global tokens are 5 and 6
    value = torch.eye(20).expand(2, 2, 20, 20)
    weights = run(mechanism, query, key, value, mask=mask, is_causal=False)[0].transpose(1, 2)
    logits = 0.3 * query.double() @ reference.repeat_heads(key.double(), 4).transpose(-1, -2)
    place = torch.arange(20)
    for row, first in ((0, 5), (1, 0)):
        is_global = (place >= first) & (place < first + 2)
        visible = ((place[:, None] - place).abs() < 3) | is_global | is_global[:, None]
        visible = visible & (place >= first)
        expected = logits[row].masked_fill(~visible, -math.inf).softmax(dim=-1)
        torch.testing.assert_close(weights[row, :, first:].double(), expected[:, first:], rtol=1e-5, atol=1e-5)
