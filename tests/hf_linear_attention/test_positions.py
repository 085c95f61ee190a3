"""Positions that are no part of queries and keys: ALiBi, and rotary embeddings taken back (`rope` = `none`)."""

from __future__ import annotations

import inspect

import pytest
import torch
from matrix import FAMILY_ROWS, sample_inputs, stock_config, stock_model
from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM

from hf_linear_attention import convert, softmax_attention
from hf_linear_attention.attention.layer import LinearizedAttention
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


# 3 heads: not a power of two, for which ALiBi's slopes have a formula of their own
ALIBI = {
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(vocab_size=64, hidden_size=24, n_layer=2, n_head=3, initializer_range=0.3)
    ),
    "mpt": lambda: MptForCausalLM(
        MptConfig(vocab_size=64, d_model=24, n_layers=2, n_heads=3, max_seq_len=64, initializer_range=0.3)
    ),
}
ROTARY = [name for name in FAMILY_ROWS if "rope_parameters" in inspect.signature(type(stock_config(name))).parameters]


def alibi_model(family: str):
    torch.manual_seed(0)
    return ALIBI[family]().eval()


@pytest.mark.parametrize("layers", ["all", [1]])
@pytest.mark.parametrize("family", ALIBI)
def test_alibi_is_exact(family, layers):
    """A window over everything is the stock model, whose bias grows with the distance; half of it far away is not."""
    stock = alibi_model(family)
    ids, mask = torch.randint(3, 64, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    expected = stock(ids, attention_mask=mask).logits
    model = convert(stock, mechanism="hybrid", window_size=64, layers=layers)
    torch.testing.assert_close(
        model(ids, attention_mask=mask).logits[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=2e-5
    )
    with softmax_attention(model):
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)
    for module in linear_attention_modules(model).values():
        module.linear_attention.alibi.log_decay.zero_()
    assert (model(ids, attention_mask=mask).logits - expected)[mask.bool()].abs().max() > 0.1


@pytest.mark.parametrize("settings", [{"mechanism": "linear"}, {"mechanism": "hybrid", "window_size": 4}])
@pytest.mark.parametrize("family", ALIBI)
def test_alibi_decodes_as_in_one_forward(family, settings):
    model = convert(alibi_model(family), **settings)
    ids = torch.randint(3, 64, (2, 20))
    whole, cache, outputs = model(ids).logits, None, []
    for part in ids.split([7, 1, 1, 11], dim=1):
        output = model(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        outputs.append(output.logits)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=1e-4, atol=2e-5)


def test_alibi_is_refused_by_name_where_it_cannot_be_honoured():
    with pytest.raises(ValueError, match=r"BloomAttention has ALiBi positions.*`hybrid`, `linear`, `performer`"):
        convert(alibi_model("bloom"), mechanism="aft")


@pytest.mark.parametrize("family", ROTARY)
def test_without_rope_the_map_sees_unrotated_queries_and_keys(family, monkeypatch):
    """What `apply_rotary_pos_emb` undoes is what the projections gave, in every family's way of pairing channels."""
    model = convert(stock_model(family), mechanism="linear", feature_map="elu1", rope="none")
    seen = []
    first = next(iter(linear_attention_modules(model).values()))
    monkeypatch.setattr(
        first.linear_attention,
        "forward",
        lambda given, state: (seen.append((given.query, given.key)), (given.query.transpose(1, 2), None))[1],
    )
    model(**sample_inputs(family), use_cache=False)
    inputs = sample_inputs(family)
    nowhere = torch.zeros_like(inputs["input_ids"], dtype=torch.int32)
    monkeypatch.setattr(LinearizedAttention, "_positions", lambda *given: nowhere)
    (rotary,) = [module for name, module in model.named_modules() if name.endswith("rotary_emb")]
    rotary.register_forward_hook(lambda module, args, output: (torch.ones_like(output[0]), torch.zeros_like(output[1])))
    model(**inputs, use_cache=False)
    for actual, expected in zip(seen[0], seen[1]):
        # float32 rotates there and back
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ROTARY)
def test_a_hybrid_without_rope_keeps_it_in_window_and_sinks(family):
    stock = stock_model(family)
    model, inputs = convert(stock, mechanism="hybrid", window_size=64, rope="none"), sample_inputs(family)
    torch.testing.assert_close(model(**inputs).logits, stock(**inputs).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"mechanism": "performer"}, {"mechanism": "hybrid", "window_size": 3}])
@pytest.mark.parametrize("family", ROTARY)
def test_without_rope_decoding_equals_one_forward(family, settings):
    """And what is far away does not depend on where it stood: `rope` changes the output."""
    model = convert(stock_model(family), **settings, rope="none")
    ids = sample_inputs(family)["input_ids"]
    whole, cache, outputs = model(ids).logits, None, []
    for part in ids.split([5, 1, 7], dim=1):
        output = model(part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        outputs.append(output.logits)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=1e-4, atol=5e-5)
    assert (convert(stock_model(family), **settings)(ids).logits - whole).abs().max() > 1e-3


def test_a_decoder_without_rope_is_generated_from_alike():
    model = convert(stock_model("llama"), mechanism="hybrid", window_size=3, rope="none")
    ids = sample_inputs("llama")["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_rope_is_refused_where_there_is_none(family):
    with pytest.raises(ValueError, match=r"`rope` = `none`, but \w+ has no rotary positions"):
        convert(stock_model(family), rope="none")
