"""Values by layer: what they stand for, and every way in which they do not fit the layers."""

from __future__ import annotations

import pytest
import torch
from matrix import sample_inputs, stock_config, stock_model
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from hf_linear_attention import convert
from hf_linear_attention.conversion_api import convert_config
from hf_linear_attention.layer_numbers import parse_by_layer, ranges_of
from hf_linear_attention.layer_ranges import entries_by_layer
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


TWO = {"mechanism": {"0-3": "hybrid", "4-": "linear"}}


def entries(settings, converted=range(8), num_layers=8):
    return entries_by_layer(settings, list(converted), num_layers)


def test_ranges_become_one_entry_per_group_of_equal_layers():
    hybrid, linear = {"mechanism": "hybrid"}, {"mechanism": "linear"}
    assert entries(TWO) == [{**hybrid, "layers": [0, 1, 2, 3]}, {**linear, "layers": [4, 5, 6, 7]}]
    ends = {"mechanism": {"0": "hybrid", "1-6": "linear", "7-7": "hybrid"}}
    assert entries(ends) == [{**hybrid, "layers": [0, 7]}, {**linear, "layers": [1, 2, 3, 4, 5, 6]}]
    assert entries({"mechanism": {" 4 - ": "linear", "0 -3": "hybrid"}}) == entries(TWO)
    some = entries(TWO, converted=[0, 5, 6])
    assert some == [{**hybrid, "layers": [0]}, {**linear, "layers": [5, 6]}]
    with pytest.raises(ValueError, match="the layers 4-, none of which is converted"):
        entries(TWO, converted=[0, 1])


def test_an_option_is_for_the_layers_whose_mechanism_has_it():
    found = entries({**TWO, "window_size": 16, "num_features": {"0-1": 8, "2-": 4}, "decay": "learned", "drop": []})
    shared = {"decay": "learned", "drop": []}
    assert found == [
        {"mechanism": "hybrid", **shared, "window_size": 16, "num_features": 8, "layers": [0, 1]},
        {"mechanism": "hybrid", **shared, "window_size": 16, "num_features": 4, "layers": [2, 3]},
        {"mechanism": "linear", **shared, "num_features": 4, "layers": [4, 5, 6, 7]},
    ]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mechanism": {"0-4": "hybrid", "4-": "linear"}}, ["`mechanism` names layer 4 more than once"]),
        ({"mechanism": {"0-3": "hybrid"}}, ["`mechanism` has no value for layers 4-7", "`layers`"]),
        ({"mechanism": {"0-3": "hybrid", "4-8": "linear"}}, ["names the layers 4-8", "layers 0 to 7"]),
        ({"mechanism": {"0-": "linear", "9-": "linear"}}, ["names the layers 9-", "layers 0 to 7"]),
        ({"mechanism": {"3-0": "hybrid", "4-": "linear"}}, ["3-0; this range runs backwards"]),
        ({"mechanism": {0: "hybrid", "1-": "linear"}}, ["the layers 0; give layers as text", "`0-3` or `4-`"]),
        ({"mechanism": {"-3": "hybrid", "4-": "linear"}}, ["the layers '-3'"]),
        ({"mechanism": {"0-": "hybird"}}, ["`mechanism` = 'hybird'; it must be one of"]),
        ({**TWO, "features": "exp"}, ["`features` is not an option of `hybrid`, `linear`"]),
        ({**TWO, "window_size": {"0-5": 4}}, ["`window_size` has a value for layers 4-5", "no", "`linear`"]),
        ({**TWO, "window_size": {"0-2": 4}}, ["`window_size` has no value for layer 3"]),
        ({**TWO, "drop": {"0-": []}}, ["`drop` cannot differ by layer"]),
        ({**TWO, "cross_attention": True}, ["`cross_attention` = true"]),
        ({**TWO, "features": "exp", "window_size": {"0-2": 4}}, ["`features`", "`window_size`"]),
    ],
)
def test_what_does_not_fit_the_layers_is_refused_at_once(settings, said):
    with pytest.raises(ValueError, match="Invalid settings by layer") as caught:
        entries(settings)
    assert all(text in str(caught.value) for text in said), caught.value


def test_the_text_of_the_command_line():
    assert parse_by_layer("0-3:hybrid, 4-:linear") == TWO["mechanism"]
    for text in ("0-3:hybrid,4-", "0-3:hybrid,:linear", "0-3:", "hybrid", ""):
        with pytest.raises(ValueError, match="is not of the form LAYERS:VALUE"):
            parse_by_layer(text)
    with pytest.raises(ValueError, match="the layers 0 are given twice"):
        parse_by_layer("0:4,0:8")
    assert ranges_of([0, 2, 4, 5, 6]) == "0, 2, 4-6"


def test_a_converted_model_has_them(tmp_path):
    short = {"mechanism": {"0": "hybrid", "1-": "linear"}, "window_size": 4, "num_features": {"0-1": 8, "2": 4}}
    long = [
        {"mechanism": "hybrid", "window_size": 4, "num_features": 8, "layers": [0]},
        {"mechanism": "linear", "num_features": 8, "layers": [1]},
        {"mechanism": "linear", "num_features": 4, "layers": [2]},
    ]
    stock = stock_model("llama")
    model, other = convert(stock, **short), convert(stock, settings=long)
    assert model.config.linear_attention == other.config.linear_attention
    stock.save_pretrained(tmp_path)
    assert convert(tmp_path, settings=short).config.linear_attention == other.config.linear_attention
    found = {m.linear_attention.shape.layer: m.linear_attention for m in linear_attention_modules(model).values()}
    assert [found[layer].settings["mechanism"] for layer in range(3)] == ["hybrid", "linear", "linear"]
    with torch.no_grad():
        other.load_state_dict(model.state_dict())
        assert torch.equal(model(**sample_inputs("llama")).logits, other(**sample_inputs("llama")).logits)


def test_the_layers_of_an_encoder_decoder_are_counted():
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_decoder_layers=1, num_heads=2)
    short = {"mechanism": {"0-1": "nystrom", "2-": "linear"}, "drop": ["position_bias"]}
    model = convert(T5ForConditionalGeneration(config), **short)
    names = [m.linear_attention.settings["mechanism"] for m in linear_attention_modules(model).values()]
    assert names == ["nystrom", "nystrom", "linear"]
    with pytest.raises(ValueError, match="`linear_attention` settings") as caught:
        convert_config(stock_config("llama"), mechanism={"0": "nystrom", "1-": "linear"}, num_features={"1-": 0})
    for said in ("`nystrom` has no causal form", "(in the settings of layers [0])", "`num_features` = 0", "[1, 2]"):
        assert said in str(caught.value)


@pytest.mark.parametrize("layers", [[0, 1], [1]])
def test_partial_rotary_positions_of_some_layers_are_saved_and_loaded(layers, tmp_path):
    """The frequencies are given per layer of the model, also if its last layers are not converted."""
    model = convert(stock_model("llama"), mechanism="linear", rope="partial", trained_length=16, layers=layers)
    kept = model.config.linear_attention["rope_frequencies"]
    assert len(kept) == 3
    assert [layer for layer in range(3) if kept[layer]] == layers
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(model(**sample_inputs("llama")).logits, loaded(**sample_inputs("llama")).logits)
