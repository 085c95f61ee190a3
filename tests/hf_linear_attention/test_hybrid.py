"""The hybrid: exact where it promises to be, and no heavier than softmax in the distance."""

from __future__ import annotations

import reference
import torch
from matrix import mechanism_of, qkv


def build(**settings):
    return mechanism_of({"mechanism": "hybrid", **settings})


def test_far_keys_start_with_at_most_their_softmax_weight():
    """E[c phi(q)·phi(k)] = exp(s q·k - (1 - c^2) s |q + k|^2 / 2) over projections, with c the initial scale."""
    query, key, _ = qkv(5, std=0.7)
    mechanism = build(num_features=24)
    estimates = []
    for seed in range(1000):
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
    # four standard errors of the mean of 24,000 features at the largest |q + k|
    torch.testing.assert_close(mean, expected, rtol=0.1, atol=0.0)
    assert (expected <= softmax.exp()).all()
