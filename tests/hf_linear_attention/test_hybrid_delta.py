"""What only `hybrid` with `far` = `gated_delta` has: its start, its rotary positions and its state."""

from __future__ import annotations

import pytest
import torch
from matrix import call_mechanism, hidden_states_of, stock_config

from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.conversion_api import convert_config
from hf_linear_attention.mechanisms.base import LayerShape, MechanismInputs, Rotary
from hf_linear_attention.mechanisms.registry import MECHANISMS


ROTARY = Rotary((1.0, 0.3, 0.09, 0.01))
SIZES = {"window_size": 5, "num_sinks": 2, "trained_length": 20}


def build(mechanism="hybrid", **settings):
    sizes = {"trained_length": 20} if mechanism == "gated_delta" else SIZES
    filled = LinearAttentionSettings({"mechanism": mechanism, **sizes, **settings}, is_causal=True, model_type="test")
    made = MECHANISMS[mechanism](filled, LayerShape(4, 2, 8, 0, rotary=ROTARY, hidden_size=16)).double()
    made.reset_parameters()
    return made


def moved(mechanism):
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return mechanism


def sample(length=40):
    query, key, value = (torch.randn(2, heads, length, 8).double() for heads in (4, 2, 2))
    return query, key, value, torch.stack((torch.arange(length), torch.arange(length) + 7)).int()


def run(mechanism, query, key, value, positions, state=None, gates=None):
    options = {"positions": positions, "gates": gates} if gates is not None else {"positions": positions}
    return call_mechanism(
        mechanism, query, key, value, attention_mask=None, scaling=0.3, is_causal=True, state=state, **options
    )


@torch.no_grad()
def test_it_starts_close_to_what_it_has_without_the_delta_rule():
    query, key, value, positions = sample()
    mechanism = build(far="gated_delta")
    output, _ = run(mechanism, query, key, value, positions, gates=mechanism.gates(torch.randn(2, 40, 16)))
    expected, _ = run(build("window"), query, key, value, positions)
    assert 0 < (output - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("rope", ["before_map", "partial", "none"])
@torch.no_grad()
def test_the_delta_rule_sees_fewer_rotary_frequencies_than_the_window(rope):
    """The window is that of `window`, whose sinks are clamped; the rule gets what the mechanism `gated_delta` gets."""
    frequencies = {"rope": rope, "rope_frequencies": 2} if rope == "partial" else {"rope": rope}
    mechanism = moved(build(far="gated_delta", decay="learned", num_features=6, **frequencies))
    query, key, value, positions = sample()
    gates = mechanism.gates(hidden_states_of(key))
    gated_delta = build("gated_delta", num_features=6, **frequencies)
    gated_delta.rule.load_state_dict(mechanism.rule.state_dict())
    given = MechanismInputs(query, key, value, None, 0.3, True, positions, gates[..., :-4])
    far = gated_delta(gated_delta.prepare(given))[0]
    share = gates[..., -4:].unsqueeze(-1)
    expected = (1 - share) * run(build("window"), query, key, value, positions)[0] + share * far
    for sizes in ([40], [1] * 40, [3, 1, 1, 20, 1, 14]):
        state, outputs = None, []
        tensors = zip(*(x.split(sizes, dim=2) for x in (query, key, value)))
        for (q, k, v), p, g in zip(tensors, positions.split(sizes, dim=1), gates.split(sizes, dim=1)):
            output, state = run(mechanism, q, k, v, p, state, g)
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=1e-6, atol=1e-6)  # angles are float32


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="`far` = `gated_delta` has no bidirectional form"):
        convert_config(stock_config("bert"), mechanism="hybrid", far="gated_delta")
    with pytest.raises(ValueError, match=r"`feature_map`.*no effect.*`far` = `gated_delta`"):
        build(far="gated_delta", feature_map="hedgehog")
    with pytest.raises(ValueError, match="`far` = `gated_delta` is causal and needs `gates`; compute them"):
        run(build(far="gated_delta"), *sample())
    with pytest.raises(ValueError, match="give the layer's `hidden_size`"):
        MECHANISMS["hybrid"](
            LinearAttentionSettings({"mechanism": "hybrid", "far": "gated_delta"}), LayerShape(4, 2, 8, 0)
        )
