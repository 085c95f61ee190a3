"""What feature maps promise beyond their oracles: starts, the distribution of random features, their redraws."""

from __future__ import annotations

import itertools
import math

import pytest
import reference
import torch
from matrix import attend, build_mechanism, mechanism_of, move, qkv
from torch.utils.checkpoint import checkpoint

from hf_linear_attention.features.maps import FEATURE_MAPS, elu_plus_one, orthogonal_random_matrix
from hf_linear_attention.features.random_maps import RANDOM_FEATURES, optimal_norm_weight
from hf_linear_attention.mechanisms.base import MechanismInputs
from hf_linear_attention.mechanisms.settings import FEATURE_MAP_TRAITS, RANDOM_FEATURE_TRAITS


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


def performer(layer=1, **settings):
    return mechanism_of({"mechanism": "performer", **settings}, layer=layer)


def test_orthogonal_matrices_are_haar():
    """The first moment of every entry is 0. Plain LAPACK QR gives E[Q_jj] = -0.2 at dimension 16."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.stack([orthogonal_random_matrix(16, 16, generator) for _ in range(2000)])
    unit = blocks / blocks.norm(dim=-1, keepdim=True)
    # standard error of one entry's mean: 0.25 / sqrt(2000) = 0.0056
    assert unit.mean(0).abs().max() < 0.03
    # rows as long as those of independent normal numbers: 512,000 of them
    assert abs(blocks.square().mean() - 1) < 0.01


@pytest.mark.parametrize("features", RANDOM_FEATURES)
def test_all_features_project_on_orthogonal_or_independent_rows(features):
    per_row = RANDOM_FEATURES[features].features_per_row
    for orthogonal in (True, False):
        mechanism = performer(num_features=20 * per_row, features=features, orthogonal=orthogonal)
        projection = mechanism.feature_map.projection
        assert projection.shape == (20, 8)
        overlaps = [(block @ block.T).triu(1).abs().max() for block in projection.split(8)]  # the last block has 4 rows
        # rounding, against the overlap of independent rows of norm 2.8
        assert max(overlaps) < 1e-5 if orthogonal else min(overlaps) > 0.5


@pytest.mark.parametrize(("dim", "f"), [(8, 0.5), (16, 64.0), (128, 4.0)])
def test_the_optimal_norm_weight_minimises_the_variance(dim, f):
    """log E[phi(x)^2 phi(y)^2] as a function of A, from the Gaussian integral, has no smaller value than at ours.

    E exp(4 A |w|^2 + 2 B w·z) = (1 - 8 A)^(-d/2) exp(2 B^2 |z|^2 / (1 - 8 A)) with z = x + y, |z|^2 = f, and
    D^4 = (1 - 4 A)^d, B^2 = 1 - 4 A; the rest does not depend on A.
    """

    def log_second_moment(a):
        return dim * (1 - 4 * a).log() - dim / 2 * (1 - 8 * a).log() + 2 * (1 - 4 * a) * f / (1 - 8 * a)

    ours = optimal_norm_weight(torch.tensor(f, dtype=torch.float64), dim)
    low, high = torch.tensor(-2 * f - 5.0, dtype=torch.float64), torch.tensor(0.12, dtype=torch.float64)
    for _ in range(200):  # golden-section-like search, on a function with one minimum
        third = (high - low) / 3
        if log_second_moment(low + third) < log_second_moment(high - third):
            high = high - third
        else:
            low = low + third
    assert ours == pytest.approx(((low + high) / 2).item(), abs=1e-6)
    assert ours < 0


@pytest.mark.parametrize("geometry", ["fixed", "learned"])
def test_calibration_sees_real_tokens_alone_and_each_head_by_itself(geometry):
    """A learned geometry maps queries and keys first."""
    query, key, _ = qkv(10)
    key[:, 1] *= 2.0
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, 6:] = False
    mechanism = performer(features="favor++", num_features=16, geometry=geometry)
    torch.testing.assert_close(mechanism.feature_map.norm_weight, torch.zeros(2))
    before, _ = attend(mechanism, query, key, key)
    torch.testing.assert_close(before, attend(performer(num_features=16), query, key, key)[0])  # A = 0 is FAVOR+
    move(mechanism)
    seen = mechanism.geometry(query, key) if geometry == "learned" else (query, key)
    given = MechanismInputs(query, key, key, mask, 0.25, is_causal=False)
    mechanism.calibrate(given)
    fitted = mechanism.feature_map.norm_weight.clone()
    for head in range(2):  # f as in the paper: the mean of |q_i + k_j|^2 over all pairs of a head
        real_query = seen[0][:, 2 * head : 2 * head + 2].transpose(1, 2)[mask].reshape(-1, 8).double() * 0.5
        real_key = seen[1][:, head][mask].double() * 0.5
        f = (real_query[:, None] + real_key).square().sum(-1).mean()
        assert fitted[head].item() == pytest.approx(optimal_norm_weight(f, 8).item(), rel=1e-5)
    noisy = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (query, key)]
    mechanism.calibrate(given._replace(query=noisy[0], key=noisy[1]))
    attend(mechanism.train(), *qkv(9, seed=4))  # frozen
    assert torch.equal(mechanism.feature_map.norm_weight, fitted)
    assert not torch.allclose(attend(mechanism, query, key, key)[0], before)


def test_projections_are_redrawn_every_interval_of_training_forwards():
    mechanism = performer(num_features=16, redraw_interval=2).train()
    first = mechanism.feature_map.projection.clone()
    seen = []
    for _ in range(6):
        _, state = attend(mechanism, *qkv(6))
        attend(mechanism, *qkv(6), state=state)  # goes on with a sequence: the projection must stay
        attend(mechanism.eval(), *qkv(6))
        mechanism.train()
        seen.append(mechanism.feature_map.projection.clone())
    assert torch.equal(seen[0], first)
    assert [torch.equal(a, b) for a, b in itertools.pairwise(seen)] == [True, False, True, False, True]
    again = performer(num_features=16, redraw_interval=2).train()
    for expected in seen:
        torch.manual_seed(len(seen))
        attend(again, *qkv(6, seed=9))  # whatever the data, whatever the global seed: all ranks agree
        assert torch.equal(again.feature_map.projection, expected)
    other = performer(num_features=16, redraw_interval=2, seed=1).train()
    for _ in range(3):
        attend(other, *qkv(6))
    assert not torch.equal(other.feature_map.projection, seen[2])


def test_every_layer_and_seed_has_a_projection_of_its_own():
    mechanisms = [performer(layer, seed=seed) for seed in (0, 1) for layer in (0, 1)]
    for first, second in itertools.combinations(mechanisms, 2):
        assert not torch.equal(first.feature_map.projection, second.feature_map.projection)


def test_a_loaded_checkpoint_computes_as_before_and_goes_on_as_without_the_break():
    mechanism = performer(num_features=16, redraw_interval=3).train()
    for _ in range(4):
        attend(mechanism, *qkv(6))
    loaded = performer(num_features=16, redraw_interval=3)
    loaded.load_state_dict(mechanism.state_dict())
    assert torch.equal(attend(loaded.eval(), *qkv(6))[0], attend(mechanism.eval(), *qkv(6))[0])
    loaded.train(), mechanism.train()
    for _ in range(4):
        assert torch.equal(attend(loaded, *qkv(6))[0], attend(mechanism, *qkv(6))[0])


def test_gradient_checkpointing_recomputes_with_the_projection_of_its_forward():
    gradients = []
    for wrap in (False, True):
        mechanism = performer(num_features=16, redraw_interval=1).train()
        for step in range(3):
            inputs = [x.requires_grad_() for x in qkv(5, seed=step)]
            run = lambda *given: attend(mechanism, *given)[0]  # noqa: B023, E731
            output = checkpoint(run, *inputs, use_reentrant=False) if wrap else run(*inputs)
            gradients.append(torch.autograd.grad(output.sum() ** 2, inputs[0])[0])
        assert mechanism.num_forwards == 3
    for plain, recomputed in zip(gradients[:3], gradients[3:]):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("features", RANDOM_FEATURES)
def test_a_learned_geometry_starts_as_the_same_function_bit_for_bit(features):
    for dtype in (torch.float32, torch.bfloat16):
        given = {"num_features": 16, "features": features}
        fixed, learned = (performer(geometry=geometry, **given) for geometry in ("fixed", "learned"))
        inputs, is_causal = qkv(9, dtype=dtype), features != "trig"  # which has no causal form
        output, _ = attend(learned, *inputs, is_causal=is_causal)
        assert output.dtype == dtype
        # Where AMX multiplies, C rounds the features of bfloat16 inputs; those that can learn are float32.
        within = {"rtol": 8e-3, "atol": 8e-3} if dtype == torch.bfloat16 else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(output, attend(fixed, *inputs, is_causal=is_causal)[0], **within)


def test_far_keys_start_with_at_most_their_softmax_weight():
    """E[c phi(q)·phi(k)] = exp(s q·k - (1 - c^2) s |q + k|^2 / 2) over projections, with c the initial scale."""
    query, key, _ = qkv(5, std=0.7)
    mechanism = mechanism_of({"mechanism": "hybrid", "num_features": 24})
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
