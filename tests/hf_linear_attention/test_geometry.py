"""The learned geometry of `performer`: its start, what the mapped features estimate, and what redraws leave alone."""

from __future__ import annotations

import pytest
import reference
import torch
from matrix import call_mechanism, sample_inputs, stock_model
from oracles import ORACLES

from hf_linear_attention import convert
from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.features.random_maps import RANDOM_FEATURES, GeneralizedRandomFeatureMap
from hf_linear_attention.mechanisms.base import LayerShape, MechanismInputs, Rotary
from hf_linear_attention.mechanisms.performer import PerformerAttention


UNBIASED = [
    name
    for name, features in RANDOM_FEATURES.items()
    if name not in ("regularized", "trig") and not issubclass(features, GeneralizedRandomFeatureMap)
]
# `trig` has no causal form.
FORMS = [(name, name != "trig") for name in RANDOM_FEATURES]


def performer(**settings) -> PerformerAttention:
    filled = LinearAttentionSettings({"mechanism": "performer", "num_features": 16, **settings})
    mechanism = PerformerAttention(filled, LayerShape(4, 2, 8, 1))
    mechanism.reset_parameters()
    return mechanism


def sample(length: int = 9, std: float = 1.0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [std * torch.randn(2, heads, length, 8, generator=generator).to(dtype) for heads in (4, 2, 2)]


def attend(mechanism, inputs, is_causal=True, mask=None, state=None):
    return call_mechanism(mechanism, *inputs, attention_mask=mask, scaling=0.25, is_causal=is_causal, state=state)


def move(mechanism: PerformerAttention, scale: float = 0.3) -> PerformerAttention:
    """Move every parameter away from where it starts."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return mechanism


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("features", "is_causal"), FORMS)
def test_the_start_is_the_same_function_bit_for_bit(features, is_causal, dtype):
    inputs = sample(dtype=dtype)
    expected, _ = attend(performer(features=features), inputs, is_causal)
    actual, _ = attend(performer(features=features, geometry="learned"), inputs, is_causal)
    assert actual.dtype == dtype
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("orthogonal", [True])
@pytest.mark.parametrize("features", UNBIASED)
def test_the_mapped_features_estimate_the_kernel_of_the_mapped_vectors_without_bias(features, orthogonal):
    """The mean of phi(q')·phi(k') over 60,000 rows of W, with the factor of q' that cancels in attention."""
    per_row = RANDOM_FEATURES[features].features_per_row
    mechanism = move(
        performer(features=features, num_features=60_000 * per_row, orthogonal=orthogonal, geometry="learned"), 0.2
    ).double()
    if features == "favor++":
        mechanism.feature_map.norm_weight.fill_(-0.3)
    query, key, _ = sample(5, 0.35, torch.float64)
    maps = mechanism.geometry
    mapped = [reference.head_maps(x, m.weight, m.log_scale, m.bias) for x, m in ((query, maps.query), (key, maps.key))]
    keys = reference.repeat_heads(mapped[1], 4)
    expected = (mapped[0] @ keys.transpose(-1, -2) * 0.25).exp()
    phi_query = mechanism.feature_map.forward_queries(maps(query, key)[0], 0.25)
    phi_key = reference.repeat_heads(mechanism.feature_map.forward_keys(maps(query, key)[1], 0.25), 4)
    half = mapped[0].square().sum(-1, keepdim=True) / 8
    estimate = (phi_query - half).exp() @ phi_key.exp().transpose(-1, -2) / mechanism.feature_map.num_features
    # variance of one feature: at most exp(|q' + k'|^2 / 4) - 1, about 5 relative here; 5 standard errors are 5 %
    torch.testing.assert_close(estimate, expected, rtol=0.05, atol=0.0)
    unmapped = (query @ reference.repeat_heads(key, 4).transpose(-1, -2) * 0.25).exp()
    assert ((estimate - unmapped) / unmapped).abs().max() > 0.1


def test_calibration_sees_mapped_queries_and_keys():
    mechanism = move(performer(features="favor++", geometry="learned"))
    query, key, _ = sample(30)
    mapped = [x.detach() for x in mechanism.geometry(query, key)]
    plain = performer(features="favor++")
    given = MechanismInputs(query, key, key, None, 0.25, is_causal=False)
    plain.calibrate(given._replace(query=mapped[0], key=mapped[1]))
    mechanism.calibrate(given)
    assert torch.equal(mechanism.feature_map.norm_weight, plain.feature_map.norm_weight)
    plain.calibrate(given)
    assert not torch.allclose(mechanism.feature_map.norm_weight, plain.feature_map.norm_weight, rtol=1e-2)


@pytest.mark.parametrize(("family", "more"), [("llama", {"decay": "learned", "rope": "partial"}), ("bert", {})])
def test_a_saved_model_is_the_same_function(family, more, tmp_path):
    model = convert(stock_model(family), mechanism="performer", num_features=12, geometry="learned", **more)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".geometry." in name or ".decay." in name:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(tmp_path)
    assert "class LearnedGeometry(" in (tmp_path / "modeling_linear_attention.py").read_text(encoding="utf-8")
    loaded = type(model).from_pretrained(tmp_path).eval()
    inputs = sample_inputs(family)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, model.eval()(**inputs).logits)


def rotated(x: torch.Tensor, positions: torch.Tensor, frequencies: list[float]) -> torch.Tensor:
    """`x` `[B, heads, N, 8]` in float64 with the channel pairs (i, i + 4) turned by position times frequency."""
    angle = positions[:, None, :, None] * torch.tensor(frequencies, dtype=torch.float64)
    a, b = x.double().chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), dim=-1)


@pytest.mark.parametrize("sizes", [[23], [9, 1, 1, 12]])
def test_partial_rotary_with_geometry_and_decay_equals_the_oracle(sizes):
    """The maps see the fast frequencies alone, with left padding, as one forward pass and as prefill and decoding."""
    frequencies = [1.0, 0.3, 0.02, 0.001]
    settings = {"num_features": 16, "geometry": "learned", "decay": "learned", "rope": "partial", "rope_frequencies": 2}
    filled = LinearAttentionSettings({"mechanism": "performer", "trained_length": 32, **settings})
    mechanism = PerformerAttention(filled, LayerShape(4, 2, 8, 1, rotary=Rotary(tuple(frequencies))))
    mechanism.reset_parameters()
    move(mechanism)
    query, key, value = sample(23)
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[0, :5] = False
    positions = (mask.cumsum(1) - 1).clamp(min=0).int()
    whole = [rotated(x, positions, frequencies).float() for x in (query, key)]
    seen = [rotated(x, positions, [*frequencies[:2], 0.0, 0.0]) for x in (query, key)]
    expected = ORACLES["performer"](mechanism, *seen, value.double(), mask, True, 0.25).transpose(1, 2)
    state, outputs = None, []
    parts = [x.split(sizes, dim=2) for x in (*whole, value)] + [x.split(sizes, dim=1) for x in (mask, positions)]
    for q, k, v, m, p in zip(*parts):
        q, k, *_ = mechanism.prepare(MechanismInputs(q, k, v, m, 0.25, True, p))
        output, state = attend(mechanism, (q, k, v), mask=m, state=state)
        outputs.append(output)
    # float32 rotates back and forth: 1e-7 of the queries, times exponents of about 10
    torch.testing.assert_close(torch.cat(outputs, dim=1).double(), expected, rtol=1e-4, atol=1e-5)
