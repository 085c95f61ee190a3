"""What is read off a stock attention module, and what is refused by name."""

from __future__ import annotations

import pytest
import torch
from architectures import tiny_model
from caches import cache_of, past
from matrix import stock_model
from transformers.models.auto import AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_linear_attention import convert
from hf_linear_attention.attention.architectures import attention_modules, is_causal_attention, layer_shape
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.survey import features_of


LINFORMER = {"mechanism": "linformer", "projection_size": 8}


@pytest.fixture
def bart():
    return tiny_model("bart", AutoModelForSeq2SeqLM.__name__)


def test_self_and_cross_attention_and_their_directions(bart):
    names = list(attention_modules(bart))
    assert [name.split(".")[1] for name in names] == ["encoder"] * 3 + ["decoder"] * 3
    assert all(name.endswith("self_attn") for name in names)
    assert [name.rsplit(".", 1)[-1] for name in attention_modules(bart, cross=True)] == ["encoder_attn"] * 3
    assert [is_causal_attention(module, bart) for module in attention_modules(bart).values()] == [False] * 3 + [
        True
    ] * 3


def test_a_mechanism_may_serve_the_encoder_alone(bart):
    with pytest.raises(ValueError, match=r"`linformer` has no causal form, which layer 3 \(BartAttention\) needs"):
        convert(bart, **LINFORMER)
    with pytest.raises(ValueError, match="`cross_attention` = true, but `mechanism` = `linformer` has no cross form"):
        convert(bart, **LINFORMER, layers=[0], cross_attention=True)
    model = convert(bart, **LINFORMER, layers=[0, 1, 2])
    assert list(linear_attention_modules(model)) == [f"model.encoder.layers.{layer}.self_attn" for layer in range(3)]


def test_settings_that_the_model_does_not_fit(bart):
    with pytest.raises(ValueError, match=r"`layers` names \[6\], but the model has self-attention layers 0 to 5"):
        convert(bart, layers=[0, 6])
    with pytest.raises(ValueError, match="`cross_attention` = true, but LinearLlamaForCausalLM has none"):
        convert(stock_model("llama"), mechanism="linear", cross_attention=True)


def test_multi_head_latent_attention_has_the_head_dim_of_its_queries():
    model = tiny_model("deepseek_v3", "AutoModelForCausalLM")
    module = next(iter(attention_modules(model).values()))
    assert module.qk_nope_head_dim == module.qk_rope_head_dim == 8
    assert layer_shape(module, 0, model.config).head_dim == 16  # with the part that is rotated and the one that is not


def test_one_tower_with_a_bias_says_nothing_of_the_other():
    model = tiny_model("clap", "AutoModel")
    features = {name: features_of(module, model) for name, module in attention_modules(model).items()}
    assert all(("position_bias" in found) == name.startswith("audio_model") for name, found in features.items())


@torch.no_grad()
def test_a_decoder_that_leaves_causality_to_the_mask_is_causal():
    (attention, *_) = linear_attention_modules(convert(stock_model("llama"), mechanism="linear")).values()
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    expected, _ = attention.attend(query, key, key, None)
    assert torch.equal(attention.attend(query, key, key, mask, is_causal=False)[0], expected)


@pytest.mark.skipif("iquestcoder" not in CONFIG_MAPPING, reason="newer than this version of transformers")
def test_an_alias_of_another_family_is_refused():
    with pytest.raises(ValueError, match="`iquestcoder` has no model classes of its own and uses those of `llama`"):
        convert(tiny_model("iquestcoder", "AutoModelForCausalLM"))


def test_states_of_the_models_own_are_kept_beside_ours():
    """Falcon-H1 has attention and Mamba in every layer, with one cache layer for both; Mamba runs first."""
    stock = tiny_model("falcon_h1", "AutoModelForCausalLM")
    model, ids = convert(stock, num_features=16), torch.randint(5, 64, (2, 9))
    with torch.no_grad():
        first = model(ids[:, :5], use_cache=True)
        layer = cache_of(first).layers[0]
        assert layer.holds_linear_state
        assert layer.conv_states[0].abs().sum() > 0
        second = model(ids[:, 5:6], **past(cache_of(first))).logits
        whole = model(ids[:, :6], use_cache=False).logits[:, 5:]
    # float32 sums in another order, through three layers of weights with a standard deviation of 0.3
    torch.testing.assert_close(second, whole, rtol=1e-4, atol=1e-4 * whole.abs().max().item())
    layer.record_past = True
    with pytest.raises(RuntimeError, match="recurrent states of the stock model"):
        layer.crop(-1)
    layer.reorder_cache(torch.tensor([1, 0]))
    layer.reset()
    assert layer.conv_states[0].abs().sum() == 0
