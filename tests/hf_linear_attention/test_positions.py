"""Positions that are no part of queries and keys: ALiBi, and rotary embeddings taken back (`rope` = `none`)."""

from __future__ import annotations

import inspect

import pytest
import torch
from matrix import FAMILY_ROWS, sample_inputs, stock_config, stock_model
from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM

from hf_linear_attention import convert, softmax_attention
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


# 3 heads: not a power of two, for which ALiBi's slopes have a formula of their own
_WIDE = {"vocab_size": 64, "initializer_range": 0.3}
ALIBI = {
    "bloom": (BloomForCausalLM, BloomConfig(hidden_size=24, n_layer=2, n_head=3, **_WIDE)),
    "mpt": (MptForCausalLM, MptConfig(d_model=24, n_layers=2, n_heads=3, max_seq_len=64, **_WIDE)),
}
ROTARY = [name for name in FAMILY_ROWS if "rope_parameters" in inspect.signature(type(stock_config(name))).parameters]


def alibi_model(family: str):
    torch.manual_seed(0)
    model_class, config = ALIBI[family]
    return model_class(config).eval()


@torch.no_grad()
def assert_decoding_is_one_forward(model, ids):
    whole, cache, outputs = model(ids).logits, None, []
    for part in ids.split([5, 1, 1, ids.shape[1] - 7], dim=1):
        output = model(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        outputs.append(output.logits)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("layers", ["all", [1]])
@pytest.mark.parametrize("family", ALIBI)
@torch.no_grad()
def test_alibi_is_exact(family, layers):
    """A window over everything is the stock model, whose bias grows with the distance; half of it far away is not."""
    stock = alibi_model(family)
    ids, mask = torch.randint(3, 64, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    expected = stock(ids, attention_mask=mask).logits
    model = convert(stock, mechanism="hybrid", window_size=64, layers=layers)
    actual = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=2e-5)
    with softmax_attention(model):
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)
    for module in linear_attention_modules(model).values():
        module.linear_attention.alibi.log_decay.zero_()
    assert (model(ids, attention_mask=mask).logits - expected)[mask.bool()].abs().max() > 0.1


@pytest.mark.parametrize("settings", [{"mechanism": "linear"}, {"mechanism": "hybrid", "window_size": 4}])
def test_alibi_decodes_as_in_one_forward(settings):
    for family in ALIBI:
        assert_decoding_is_one_forward(convert(alibi_model(family), **settings), torch.randint(3, 64, (2, 20)))
    with pytest.raises(ValueError, match=r"BloomAttention has ALiBi positions.*`hybrid`, `linear`, `performer`"):
        convert(alibi_model("bloom"), mechanism="aft")


@pytest.mark.parametrize("family", ROTARY)
@torch.no_grad()
def test_without_rope_only_what_is_far_is_not_rotated(family):
    """A window over everything is the stock model; what is far away does not depend on where it stood."""
    stock, inputs = stock_model(family), sample_inputs(family)
    wide = convert(stock, mechanism="hybrid", window_size=64, rope="none")
    torch.testing.assert_close(wide(**inputs).logits, stock(**inputs).logits, rtol=1e-4, atol=1e-4)
    for settings in ({"mechanism": "performer"}, {"mechanism": "hybrid", "window_size": 3}):
        model, rotating = convert(stock, **settings, rope="none"), convert(stock, **settings)
        assert_decoding_is_one_forward(model, inputs["input_ids"])
        assert (rotating(**inputs).logits - model(**inputs).logits).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_rope_is_refused_where_there_is_none(family):
    with pytest.raises(ValueError, match=r"`rope` = `none`, but \w+ has no rotary positions"):
        convert(stock_model(family), rope="none")
