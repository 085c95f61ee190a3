"""The hybrid: exact where it promises to be, no heavier than softmax in the distance, and its two ways to be far."""

from __future__ import annotations

import pytest
import reference
import torch
from matrix import attend, hidden_states_of, mechanism_of, move, qkv, stock_config

from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.conversion_api import convert_config
from hf_linear_attention.mechanisms.base import LayerShape, MechanismInputs, Rotary
from hf_linear_attention.mechanisms.registry import MECHANISMS


def build(**settings):
    return mechanism_of({"mechanism": "hybrid", **settings})


def test_sinks_are_the_first_real_tokens():
    """With a window of 1 and values that name their token, only sinks, the window and the far part can show."""
    mechanism = build(window_size=1, num_sinks=2)
    mechanism.uses_far = False
    query, key, value = torch.zeros(1, 4, 9, 8), torch.zeros(1, 2, 9, 8), torch.zeros(1, 2, 9, 9)
    value[..., range(9), range(9)] = 1.0
    mask = torch.tensor([[0, 0, 1, 0, 1, 1, 1, 1, 1]], dtype=torch.bool)
    output, _ = attend(mechanism, query, key, value, mask)
    expected = torch.zeros(9)
    expected[[2, 4, 8]] = 1 / 3
    torch.testing.assert_close(output[0, 8, 0], expected)
    torch.testing.assert_close(output[0, 2, 0], torch.eye(9)[2])


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


# Of `far` = `gated_delta`.
SIZES = {"window_size": 5, "num_sinks": 2, "trained_length": 20}


def with_rotary(mechanism="hybrid", **settings):
    sizes = {"trained_length": 20} if mechanism == "gated_delta" else SIZES
    rotary = Rotary((1.0, 0.3, 0.09, 0.01))
    return mechanism_of({"mechanism": mechanism, **sizes, **settings}, rotary=rotary, is_causal=True).double()


def sample():
    positions = torch.stack((torch.arange(40), torch.arange(40) + 7)).int()
    return (*qkv(40, dtype=torch.float64), positions)


def run(mechanism, query, key, value, positions, state=None, gates=None):
    return attend(mechanism, query, key, value, None, state, positions=positions, gates=gates)


@torch.no_grad()
def test_it_starts_close_to_what_it_has_without_the_delta_rule():
    mechanism, without = with_rotary(far="gated_delta"), with_rotary("window")
    output, _ = run(mechanism, *sample(), gates=mechanism.gates(torch.randn(2, 40, 16)))
    expected, _ = run(without, *sample())
    assert 0 < (output - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("rope", ["before_map", "partial", "none"])
@torch.no_grad()
def test_the_delta_rule_sees_fewer_rotary_frequencies_than_the_window(rope):
    """The window is that of `window`, whose sinks are clamped; the rule gets what the mechanism `gated_delta` gets."""
    frequencies = {"rope": rope, "rope_frequencies": 2} if rope == "partial" else {"rope": rope}
    mechanism = move(with_rotary(far="gated_delta", decay="learned", num_features=6, **frequencies))
    query, key, value, positions = sample()
    gates = mechanism.gates(hidden_states_of(key))
    gated_delta = with_rotary("gated_delta", num_features=6, **frequencies)
    gated_delta.rule.load_state_dict(mechanism.rule.state_dict())
    given = MechanismInputs(query, key, value, None, 8**-0.5, True, positions, gates[..., :-4])
    far = gated_delta(gated_delta.prepare(given))[0]
    share = gates[..., -4:].unsqueeze(-1)
    expected = (1 - share) * run(with_rotary("window"), query, key, value, positions)[0] + share * far
    for sizes in ([40], [1] * 40, [3, 1, 1, 20, 1, 14]):
        state, outputs = None, []
        tensors = zip(*(x.split(sizes, dim=2) for x in (query, key, value)))
        for (q, k, v), p, g in zip(tensors, positions.split(sizes, dim=1), gates.split(sizes, dim=1)):
            output, state = run(mechanism, q, k, v, p, state, g)
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=1e-6, atol=1e-6)  # angles are float32


def test_what_the_delta_rule_cannot_do_is_refused():
    with pytest.raises(ValueError, match="`far` = `gated_delta` has no bidirectional form"):
        convert_config(stock_config("bert"), mechanism="hybrid", far="gated_delta")
    with pytest.raises(ValueError, match=r"`feature_map`.*no effect.*`far` = `gated_delta`"):
        build(far="gated_delta", feature_map="hedgehog")
    with pytest.raises(ValueError, match="`far` = `gated_delta` is causal and needs `gates`; compute them"):
        run(with_rotary(far="gated_delta"), *sample())
    for settings in ({"mechanism": "hybrid", "far": "gated_delta"}, {"mechanism": "gated_delta"}):
        with pytest.raises(ValueError, match="give the layer's `hidden_size`"):
            MECHANISMS[settings["mechanism"]](LinearAttentionSettings(settings), LayerShape(4, 2, 8, 0))
