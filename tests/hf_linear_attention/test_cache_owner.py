"""A cache belongs to its rows, its mechanism and its kind of attention: others are refused, and change nothing."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from matrix import MECHANISM_ROWS, stock_model
from transformers import DynamicCache

from hf_linear_attention import convert, softmax_attention
from hf_linear_attention.attention.cache import LinearAttentionStateLayer, state_layer


IDS = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(3))
CASES = {
    "linear": {"mechanism": "linear", "num_features": 16},
    "linear-elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "performer": {"mechanism": "performer", "num_features": 16},
    "hybrid": {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 16},
    "softmax-first": {"mechanism": "linear", "num_features": 16, "layers": [1, 2]},
    "softmax-last": {"mechanism": "hybrid", "window_size": 4, "num_features": 16, "layers": [0, 1]},
}


def build(name, family="llama", **changes):
    model = convert(stock_model(family, **changes), **CASES[name])
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


@torch.no_grad()
def read(model, ids, cache=None):
    return model(ids, past_key_values=cache, use_cache=True)


def tensors(cache):
    """All that a cache holds, and how many tokens it says these are."""
    held = []
    for layer in cache.layers:
        parts = [getattr(layer, name, None) or () for name in ("state", "state_at_crop", "pending")]
        held.append(([t for part in parts for t in part if t is not None], int(layer.get_seq_length())))
        if not isinstance(layer, LinearAttentionStateLayer):
            held.append(([layer.keys, layer.values], layer.keys.shape[2]))
    return held


def assert_unchanged(cache, before):
    for (now, count), (then, count_then) in zip(tensors(cache), before, strict=True):
        assert count == count_then
        assert len(now) == len(then)
        assert all(torch.equal(*pair) for pair in zip(now, then))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rows", "new"), [((1, 3), 1), ((3, 2), 4)], ids=str)
def test_other_rows_are_refused_before_anything_changes(name, rows, new):
    model, (cached, given) = build(name), rows
    cache = read(model, IDS[:cached, :5]).past_key_values
    before = copy.deepcopy(tensors(cache))
    repeat = r".*cache.batch_repeat_interleave\(3\)" if cached == 1 else ""
    with pytest.raises(ValueError, match=rf"a cache of {cached} rows? and an input of {given}\.{repeat}"):
        read(model, IDS[:given, 5 : 5 + new], cache)
    assert_unchanged(cache, before)
    # and it still goes on as if nothing had been
    expected = read(model, IDS[:cached]).logits[:, 5:]
    torch.testing.assert_close(read(model, IDS[:cached, 5:], cache).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["linear", "softmax-first"])
def test_tokens_that_stayed_after_a_rollback(name):
    model = build(name)
    cache = DynamicCache(config=model.config)
    for module in model.modules():
        if hasattr(module, "linear_attention"):
            state_layer(cache, module.layer_idx)
    cache.activate_past_recording()
    read(model, IDS[:1, :5], cache)
    cache.crop(-2)
    before = copy.deepcopy(tensors(cache))
    with pytest.raises(ValueError, match="a cache of 1 row and an input of 3"):
        read(model, IDS[:, 3:5], cache)
    assert_unchanged(cache, before)
    expected = read(model, IDS[:1]).logits[:, 3:]
    torch.testing.assert_close(read(model, IDS[:1, 3:], cache).logits, expected, atol=1e-4, rtol=1e-4)


def test_an_emptied_cache_takes_any_rows():
    model = build("hybrid")
    cache = DynamicCache(config=model.config)
    for layer in range(3):
        state_layer(cache, layer)
    cache.activate_past_recording()
    read(model, IDS[:1, :5], cache)
    cache.crop(-5)
    torch.testing.assert_close(read(model, IDS, cache).logits, read(model, IDS).logits)
    cache.reset()
    torch.testing.assert_close(read(model, IDS[:2], cache).logits, read(model, IDS[:2]).logits)


def build_bart(**settings):
    config = transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        max_position_embeddings=64,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, init_std=0.3, forced_eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return convert(transformers.BartForConditionalGeneration(config).eval(), num_features=16, **settings)


@pytest.mark.parametrize("cross", [True, False])
def test_an_encoder_decoder(cross):
    model = build_bart(cross_attention=cross)
    with torch.no_grad():
        encoded = model.get_encoder()(IDS)
        one = type(encoded)(last_hidden_state=encoded.last_hidden_state[:1])
        cache = model(encoder_outputs=one, decoder_input_ids=IDS[:1, :4], use_cache=True).past_key_values
        before = copy.deepcopy(tensors(cache.self_attention_cache))
        with pytest.raises(ValueError, match="a cache of 1 row and an input of 3"):
            model(encoder_outputs=encoded, decoder_input_ids=IDS[:, 4:6], past_key_values=cache)
        assert_unchanged(cache.self_attention_cache, before)
        if cross:  # the decoder's own state repeated, the encoder's forgotten
            cache.self_attention_cache.batch_repeat_interleave(3)
            with pytest.raises(ValueError, match="a cache of 1 row and an input of 3"):
                model(encoder_outputs=encoded, decoder_input_ids=IDS[:, 4:6], past_key_values=cache)


@pytest.mark.parametrize(
    "other",
    [
        {"mechanism": "hybrid", "window_size": 4, "num_features": 16},
        {"mechanism": "performer", "num_features": 16},
        {"mechanism": "performer", "num_features": 16, "seed": 1},
        {"mechanism": "linear", "num_features": 24},
        {"mechanism": "linear", "feature_map": "elu1"},
        {"mechanism": "aft", "variant": "simple"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["linear", "performer", "hybrid"])
def test_the_state_of_another_mechanism_is_refused(name, other):
    if CASES[name] == other:
        return
    model, stranger = build(name), convert(stock_model("llama"), **other)
    cache = read(stranger, IDS[:, :5]).past_key_values
    before = copy.deepcopy(tensors(cache))
    with pytest.raises(ValueError, match=r"with the state of \w+Attention\(.*\) in a layer of \w+Attention\(.*\)\."):
        read(model, IDS[:, 5:], cache)
    assert_unchanged(cache, before)


@pytest.mark.parametrize("change", [{"num_key_value_heads": 1}, {"hidden_size": 64}], ids=str)
def test_the_state_of_other_heads_or_another_dtype_is_refused(change):
    model = build("hybrid")
    for stranger in (build("hybrid", **change), build("hybrid").to(torch.bfloat16)):
        cache = read(stranger, IDS[:, :5]).past_key_values
        before = copy.deepcopy(tensors(cache))
        with pytest.raises(ValueError, match=r"made of keys and values with \d heads of .*, and new ones with 2 heads"):
            read(model, IDS[:, 5:], cache)
        assert_unchanged(cache, before)


def test_softmax_attention_refuses_a_linear_cache():
    model = build("linear")
    cache = read(model, IDS[:, :5]).past_key_values
    before = copy.deepcopy(tensors(cache))
    with softmax_attention(model), pytest.raises(ValueError, match="a cache of linear attention in a layer that comp"):
        read(model, IDS[:, 5:], cache)
    with pytest.raises(ValueError, match="a cache of linear attention in a layer that computes softmax"):
        read(stock_model("llama"), IDS[:, 5:], cache)
    assert_unchanged(cache, before)
    expected = read(model, IDS).logits[:, 5:]
    torch.testing.assert_close(read(model, IDS[:, 5:], cache).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_softmax_cache_is_refused():
    model = build("linear")
    cache = read(stock_model("llama"), IDS[:, :5]).past_key_values
    with pytest.raises(ValueError, match="already holds 5 tokens of softmax keys and values"):
        read(model, IDS[:, 5:], cache)
    with softmax_attention(model):
        cache = read(model, IDS[:, :5]).past_key_values
    with pytest.raises(ValueError, match="already holds 5 tokens of softmax keys and values"):
        read(model, IDS[:, 5:], cache)


@pytest.mark.parametrize("row", ["aft-conv", "linear-exp", "hybrid", "gated_delta"])
@torch.no_grad()
def test_no_tokens_change_nothing(row):
    """Stock layers cannot reshape them, but those that come from elsewhere may reach the attention function."""
    model = convert(stock_model("llama"), **MECHANISM_ROWS[row])
    attention = model.model.layers[0].self_attn
    sizes = [(2, 4, 0, 8), (2, 2, 0, 8), (2, 2, 0, 8)]
    assert attention.attend(*map(torch.zeros, sizes), None)[0].shape == (2, 0, 4, 8)
    assert attention.attend(*(torch.zeros(0, heads, 5, 8) for heads in (4, 2, 2)), None)[0].shape == (0, 5, 4, 8)
    cache = read(model, IDS[:2]).past_key_values
    before = copy.deepcopy(tensors(cache))
    if "state" in vars(cache.layers[0]):
        output, _ = attention.attend(*map(torch.zeros, sizes), None, state_layer=cache.layers[0])
        assert output.shape == (2, 0, 4, 8)
        assert_unchanged(cache, before)


def test_a_refused_mask_does_not_count_its_tokens():
    model = build("linear")
    cache = read(model, IDS[:, :5]).past_key_values
    hole = torch.ones(9, 9, dtype=torch.bool).tril()[None, None, 5:].expand(3, -1, -1, -1).clone()
    hole[..., 2, 6] = False
    with torch.no_grad(), pytest.raises(ValueError, match="see more than causality"):
        model(IDS[:, 5:], attention_mask=hole, past_key_values=cache)
    assert cache.get_seq_length() == 5
