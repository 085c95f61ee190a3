"""What each feature map of `linear` promises beyond its oracle."""

from __future__ import annotations

import math

import reference
import torch
from matrix import build_mechanism

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


def test_the_options_know_what_each_map_does():
    """They need no torch, so that they cannot ask the classes."""
    for maps, traits in ((FEATURE_MAPS, FEATURE_MAP_TRAITS), (RANDOM_FEATURES, RANDOM_FEATURE_TRAITS)):
        assert list(maps) == list(traits)
        for name, kind in maps.items():
            assert traits[name][:2] == (kind.log_features, kind.has_num_features), name
    for name, kind in RANDOM_FEATURES.items():
        assert RANDOM_FEATURE_TRAITS[name].multiple == kind.features_per_row, name
