"""Random features: their distribution, and the identities that the papers prove."""

from __future__ import annotations

import math

import torch
from matrix import build_mechanism

from hf_linear_attention import reference
from hf_linear_attention.feature_maps import elu_plus_one, orthogonal_random_matrix
from hf_linear_attention.mechanism_performer import PerformerAttention


def test_orthogonal_blocks_are_orthogonal_with_gaussian_norms_and_a_partial_last_block():
    matrix = orthogonal_random_matrix(20, 8, torch.Generator().manual_seed(0)).double()
    for block in (matrix[:8], matrix[8:16], matrix[16:]):
        gram = block @ block.T
        torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-5)
    many = orthogonal_random_matrix(8000, 8, torch.Generator().manual_seed(0))
    assert abs(many.square().sum(1).mean().item() - 8) < 0.2  # E chi^2(8) = 8, standard error 0.045


def test_orthogonal_matrices_are_haar():
    """The first moment of every entry is 0. Plain LAPACK QR gives E[Q_jj] = -0.2 at dimension 16."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.stack([orthogonal_random_matrix(16, 16, generator) for _ in range(2000)])
    unit = blocks / blocks.norm(dim=-1, keepdim=True)
    # standard error of one entry's mean: 0.25 / sqrt(2000) = 0.0056
    assert unit.mean(0).abs().max() < 0.03


def test_favor_estimates_the_softmax_kernel_without_bias():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 1, 6, 8, generator=generator) * 0.35
    key = torch.randn(1, 1, 6, 8, generator=generator) * 0.35
    settings = {"num_features": 16, "seed": 0}
    mechanism = PerformerAttention(settings, build_mechanism("performer").shape)
    estimates = []
    for seed in range(3000):
        mechanism.settings["seed"] = seed
        mechanism.reset_parameters()
        # The feature map leaves out |q|^2 / 2, which cancels in attention; the estimate needs it.
        q = mechanism.feature_map.forward_queries(query, 1.0) - query.square().sum(-1, keepdim=True) / 2
        estimates.append((q.exp() @ mechanism.feature_map.forward_keys(key, 1.0).exp().transpose(-1, -2)) / 16)
    mean = torch.stack(estimates).double().mean(0)
    expected = (query.double() @ key.double().transpose(-1, -2)).exp()
    # relative variance of one feature is exp(|q + k|^2) - 1 (about 6), so 5 standard errors of the mean are 5.6 %
    torch.testing.assert_close(mean, expected, rtol=0.06, atol=0.0)


def test_elu_is_positive_where_the_textbook_form_is_zero():
    x = torch.tensor([-100.0, -20.0, -6.3, 0.0, 3.0])
    assert (elu_plus_one(x) > 0).all()
    assert (torch.nn.functional.elu(x) + 1)[1] == 0
    assert (elu_plus_one(x[1:].bfloat16()) > 0).all()
    torch.testing.assert_close(elu_plus_one(x)[3:], torch.tensor([1.0, 4.0]))


def test_exp_map_with_its_norm_term_is_favor():
    """W at scale 1 and a = 1 are positive random features; the map starts smoother, with queries and keys alike."""
    feature_map = build_mechanism("linear-exp").feature_map
    feature_map.reset_parameters(torch.Generator().manual_seed(0))
    torch.testing.assert_close(feature_map.query_projection[0], feature_map.key_projection[0])
    torch.testing.assert_close(feature_map.query_projection[2], feature_map.key_projection[1])
    with torch.no_grad():
        feature_map.key_norm_weight.fill_(1.0)
    key = torch.randn(1, 2, 3, 8)
    expected = reference.favor(key, feature_map.key_projection[1].T, 0.25)[:, 1] + math.log(24) / 2
    torch.testing.assert_close(feature_map.forward_keys(key, 0.25)[:, 1].double(), expected, rtol=1e-5, atol=1e-5)


def test_hedgehog_starts_as_the_identity_with_two_softmaxes():
    feature_map = build_mechanism("linear-hedgehog").feature_map
    feature_map.reset_parameters(torch.Generator().manual_seed(0))
    query = torch.randn(1, 4, 3, 8)
    expected = torch.cat((query.softmax(-1), (-query).softmax(-1)), dim=-1)
    torch.testing.assert_close(feature_map.forward_queries(query, 1.0).exp(), expected)
