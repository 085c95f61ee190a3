"""What each feature map of `linear` promises beyond its oracle."""

from __future__ import annotations

import math

import reference
import torch
from matrix import attend, build_mechanism

from hf_linear_attention.features.maps import FEATURE_MAPS, elu_plus_one
from hf_linear_attention.features.random_maps import RANDOM_FEATURES
from hf_linear_attention.mechanisms.options import FEATURE_MAP_TRAITS, RANDOM_FEATURE_TRAITS


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
    expected = reference.favor(key * 0.5, feature_map.key_projection[1].T)[:, 1] + math.log(24) / 2
    torch.testing.assert_close(feature_map.forward_keys(key, 0.25)[:, 1].double(), expected, rtol=1e-5, atol=1e-5)


def test_taylor_features_have_the_kernel_of_the_series_at_half_the_papers_count():
    feature_map = build_mechanism("linear-taylor").feature_map
    assert feature_map.num_features == 1 + 8 + 36
    query, key = torch.randn(2, 1, 2, 6, 8, dtype=torch.float64)
    weights = feature_map.forward_queries(query, 0.25) @ feature_map.forward_keys(key, 0.25).transpose(-1, -2)
    assert weights.shape[-2:] == (6, 6)
    torch.testing.assert_close(weights, reference.taylor_weights(query, key, 0.25))
    assert (weights >= 0.5).all()
    near = 0.1 * query
    expected = (0.25 * near @ key.transpose(-1, -2)).exp()
    series = feature_map.forward_queries(near, 0.25) @ feature_map.forward_keys(key, 0.25).transpose(-1, -2)
    # the third term of the series at |s| < 0.4
    torch.testing.assert_close(series, expected, rtol=0, atol=0.4**3 / 6 * 1.2)


def test_t2r_gives_zero_to_a_query_without_features_and_constants_to_the_others():
    mechanism = build_mechanism("linear-t2r")
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    with torch.no_grad():
        mechanism.feature_map.bias[0] = -1e3  # the first key/value head, of query heads 0 and 1
    output, _ = attend(mechanism, query, key, torch.ones_like(key), is_causal=False)
    assert torch.equal(output[:, :, :2], torch.zeros(1, 5, 2, 8))
    torch.testing.assert_close(output[:, :, 2:], torch.ones(1, 5, 2, 8))


def test_the_options_know_what_each_map_does():
    """They need no torch, so that they cannot ask the classes."""
    for maps, traits in ((FEATURE_MAPS, FEATURE_MAP_TRAITS), (RANDOM_FEATURES, RANDOM_FEATURE_TRAITS)):
        assert list(maps) == list(traits)
        for name, kind in maps.items():
            assert traits[name][:2] == (kind.log_features, kind.has_num_features), name
    for name, kind in RANDOM_FEATURES.items():
        assert RANDOM_FEATURE_TRAITS[name].multiple == kind.features_per_row, name
