"""Errors of heads, computed again from stock models."""

from __future__ import annotations

import math

import pytest
import torch
from architectures import tiny_model
from checkpoints import tiny_tokenizer
from matrix import stock_model

from hf_linear_attention import convert
from hf_linear_attention.conversion.verification import head_figures, one_input
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


def test_the_error_is_0_for_what_is_exact_and_large_for_what_is_not():
    stock = stock_model("llama")
    exact = head_figures(convert(stock, mechanism="window", window_size=64), None)
    rough = head_figures(convert(stock, mechanism="linear", feature_map="elu1"), None)
    assert exact["inputs"] == rough["inputs"] == "random tokens (48 tokens)"
    assert [layer["layer"] for layer in exact["layers"]] == list(range(stock.config.num_hidden_layers))
    for layer in exact["layers"]:
        assert layer["error"] == pytest.approx([0] * stock.config.num_attention_heads, abs=1e-5)
    assert min(error for layer in rough["layers"] for error in layer["error"]) > 0.01


def test_the_error_of_a_head_is_that_of_its_definition():
    model = convert(stock_model("bert"), mechanism="linear", feature_map="elu1")
    found = head_figures(model, tiny_tokenizer())
    assert found["inputs"].startswith("the built-in sentences (")
    module = linear_attention_modules(model)[next(iter(linear_attention_modules(model)))]
    seen = {}

    def keep(_, inputs, output):
        seen.update(inputs[0]._asdict())
        seen["mine"] = output[0]

    ids, _ = one_input(model, tiny_tokenizer())
    with torch.no_grad(), module.linear_attention.register_forward_hook(keep):
        model.base_model(input_ids=ids)
    query, key, value, mine = (seen[name].double() for name in ("query", "key", "value", "mine"))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    softmax = (scores.softmax(-1) @ value).transpose(1, 2)
    expected = ((mine - softmax).square().sum((1, 3)) / softmax.square().sum((1, 3))).sqrt()[0]
    # The first layer sees the same queries, keys and values with either attention.
    assert found["layers"][0]["error"] == pytest.approx(expected.tolist(), rel=1e-4)


def test_families_that_cannot_be_observed_or_have_two_stacks():
    bloom = head_figures(convert(tiny_model("bloom", "AutoModelForCausalLM"), mechanism="linear"), None)
    assert bloom is None  # ALiBi
    assert head_figures(convert(tiny_model("bart", "AutoModelForSeq2SeqLM"), mechanism="linear"), None) is None
    assert "a random image" in head_figures(convert(stock_model("vit"), mechanism="linear"), None)["inputs"]
