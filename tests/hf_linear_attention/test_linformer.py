"""Linformer: the paper's formula at full length, means of what is there at any other."""

from __future__ import annotations

import pytest
import torch
from matrix import build_mechanism, stock_model

from hf_linear_attention import convert
from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.mechanisms.linformer import LinformerAttention, mean_pool_matrix


def test_mean_pool_matrix_averages():
    pool = mean_pool_matrix(5, 13)
    torch.testing.assert_close(pool.sum(1), torch.ones(5))
    assert ((pool > 0).sum(0) == 1).all()


@pytest.mark.parametrize(("sharing", "count"), [("none", 288), ("headwise", 24), ("key-value", 12), ("layerwise", 1)])
def test_sharing_has_the_papers_number_of_matrices(sharing, count, tmp_path):
    """Linformer 2020, section 4: for 12 layers of 12 heads, 288, 24, 12 or 1 distinct projection matrices."""
    stock = stock_model("bert", num_hidden_layers=12, num_attention_heads=12, hidden_size=24, intermediate_size=24)
    model = convert(stock, mechanism="linformer", projection_size=4, projection_sharing=sharing)
    names = [name for name in model.state_dict() if "_projection" in name]
    assert sum(model.state_dict()[name].shape[0] for name in names) == count
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    ids = torch.randint(3, 60, (2, 9))
    assert torch.equal(again(ids).logits, model(ids).logits)


def tokens(length: int, batch: int = 1):
    torch.manual_seed(length)
    return [torch.randn(batch, heads, length, 8) for heads in (4, 2, 2)]


def run(mechanism, query, key, value, mask=None):
    return mechanism(query, key, value, attention_mask=mask, scaling=0.3, is_causal=False, state=None)[0]


def test_every_projection_but_the_random_one_starts_as_the_means():
    query, key, value = tokens(96)
    outputs = []
    for kind in ("learned", "stretched", "mean-pool", "conv"):
        settings = {"mechanism": "linformer", "projection": kind, "projection_size": 8}
        shape = build_mechanism("linformer-none", max_length=96).shape
        mechanism = LinformerAttention(LinearAttentionSettings(settings, max_length=96), shape)
        mechanism.reset_parameters()
        outputs.append(run(mechanism, query, key, value))
    for other in outputs[1:]:
        torch.testing.assert_close(outputs[0], other)


def test_random_projections_are_gaussian_of_variance_1_over_k_and_stored():
    mechanism = build_mechanism("linformer-random", max_length=4000)
    state = mechanism.state_dict()
    assert sorted(state) == ["key_projection", "value_projection"]
    assert not list(mechanism.parameters())
    for matrix in state.values():
        assert abs(matrix.var().item() * 9 - 1) < 0.03  # 36,000 draws: the variance is known to 0.75 %
    assert abs((state["key_projection"] * state["value_projection"]).mean().item()) * 9 < 0.03


def test_each_layer_may_have_its_own_size():
    model = convert(stock_model("bert"), mechanism="linformer", projection_size=[7, 5, 3])
    sizes = [value.shape[1] for name, value in model.state_dict().items() if name.endswith("key_projection")]
    assert sizes == [7, 5, 3]
    some = convert(stock_model("bert"), mechanism="linformer", projection_size=[7, 5, 3], layers=[0, 2])
    assert [v.shape[1] for n, v in some.state_dict().items() if n.endswith("key_projection")] == [7, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"projection": "mean-pool", "projection_sharing": "none"}, "`projection_sharing` = `none` has no effect"),
        ({"projection": "mean-pool", "max_length": 64}, "`max_length` = `64` has no effect"),
        ({"projection": "mean-pool", "seed": 1}, "`seed` = `1` has no effect with `projection` = `mean-pool`"),
        ({"projection": "stretched", "seed": 1}, "`seed` = `1` has no effect with `projection` = `stretched`"),
        ({"projection": "stretched", "projection_size": 65}, "larger than the longest input, 64"),
        ({"projection": "conv", "seed": 1}, "`seed` = `1` has no effect with `projection` = `conv`"),
        ({"projection": "max-pool"}, "must be one of `learned`, `mean-pool`"),
        ({"projection_size": [7, 5]}, "has 2 values, but the model has 3 layers"),
        ({"projection_size": [7, 0, 5]}, r"at least 1 \(layer 1\)"),
        ({"projection_size": [7, "5", 5]}, r"type int \(layer 1\)"),
        ({"projection_size": [7, 65, 5]}, "larger than the longest input, 64"),
        ({"projection_size": [7, 5, 5], "projection_sharing": "layerwise"}, "must be one number"),
        ({"projection_sharing": ["none"]}, "must be of type str"),
    ],
)
def test_impossible_options_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        LinearAttentionSettings({"mechanism": "linformer", **settings}, num_layers=3, max_length=64)


def test_an_input_that_is_too_long_says_what_to_do():
    mechanism = build_mechanism("linformer-headwise", max_length=8)
    x = torch.randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match=r"Got 9 positions.*`max_length` = 8.*--max_length"):
        mechanism(torch.randn(1, 4, 9, 8), x, x, attention_mask=None, scaling=1.0, is_causal=False, state=None)
