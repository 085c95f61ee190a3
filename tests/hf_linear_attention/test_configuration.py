"""Settings are validated together, by name, when the config is built; values by layer, in every way they do not fit."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from matrix import sample_inputs, stock_config, stock_model
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from hf_linear_attention import LinearAttentionSettings, convert, convert_config
from hf_linear_attention.layer_ranges import entries_by_layer, parse_by_layer, parse_layers, ranges_of
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


def test_defaults_are_filled_in_and_survive_json(tmp_path):
    config = convert_config(stock_config("llama"), mechanism="performer")
    assert config.model_type == "linear_llama"
    assert config.linear_attention == {
        "mechanism": "performer",
        **{"features": "exp", "num_features": None, "orthogonal": True, "redraw_interval": 0, "seed": 0},
        **{"geometry": "fixed", "decay": "none"},
        **{"rope": "before_map", "rope_frequencies": None, "trained_length": 64, "rotary": None},
        **{"layers": "all", "drop": [], "cross_attention": False, "format_version": 1},
    }
    config.save_pretrained(tmp_path)
    again = type(config).from_pretrained(tmp_path)
    assert again.linear_attention == config.linear_attention
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()


def test_all_problems_are_named_at_once():
    settings = {"mechanism": "linear", "feature_map": "gelu", "num_feature": 3, "layers": [0, 9]}
    with pytest.raises(ValueError, match="Invalid `linear_attention` settings") as error:
        LinearAttentionSettings(settings, num_layers=4)
    parts = ("`feature_map` = 'gelu'", "`elu1`", "`num_feature` is not an option", "`num_features`", "[9]", "0 to 3")
    assert all(part in str(error.value) for part in parts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"feature_map": "elu1", "num_features": 8}, "has no effect"),
        ({"feature_map": "hedgehog", "num_features": 7}, "must be a multiple of 2"),
        ({"format_version": 2, "new": 1}, r"in format version 2, .* up to 1\. Upgrade hf_linear_attention"),
        ({"format_version": 0}, "`format_version` = 0 in .* must be a whole number of at least 1"),
        ({"mechanism": "nystrom", "cross_attention": True}, "`nystrom` has no cross form"),
        ({"mechanism": "linformer"}, "sets no limit"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        LinearAttentionSettings(settings)


def test_exact_keys_are_bounded_by_what_the_model_reads():
    """In a model of a megabyte, 10^6 of them take half a minute for an input of 40 tokens."""
    for mechanism in ("window", "hybrid"):
        for name in ("window_size", "num_sinks"):
            words = rf"`{name}` = 9000 must be at most 8,192 in a model that reads 64 tokens; choose a smaller number"
            with pytest.raises(ValueError, match=words):
                LinearAttentionSettings({"mechanism": mechanism, name: 9000}, max_length=64)
            assert LinearAttentionSettings({"mechanism": mechanism, name: 9000}, max_length=9000)


LINFORMER = {"mechanism": "linformer", "projection_size": 8}


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("decoding bert", LINFORMER, "`linformer` has no causal form, .*use one of .*`linear`, `performer`"),
        ("bert", {**LINFORMER, "projection_size": 100}, "`projection_size` = 100 is larger than the longest input, 64"),
        ("bert", LINFORMER, None),
        ("llama", {"mechanism": "performer", "features": "trig"}, "`features` = `trig`.* has no causal form"),
        ("bert", {"mechanism": "performer", "features": "trig"}, None),
        ("bert", {"decay": "learned"}, "with `decay` = `learned` has no bidirectional form, which `bert` needs"),
        ("gpt2", {"decay": "learned"}, None),
    ],
)
def test_what_a_mechanism_cannot_do_is_refused_when_the_config_is_built(family, settings, message):
    """Nor what it cannot do with these options."""
    config = stock_config(family.split()[-1], **({"is_decoder": True} if family == "decoding bert" else {}))
    if message is None:
        assert convert_config(config, **settings).linear_attention.items() >= settings.items()
    else:
        with pytest.raises(ValueError, match=message):
            convert_config(config, **settings)


def test_what_an_earlier_version_saved_still_loads(tmp_path):
    """Options that have no effect, or ask for what is done anyway, and settings without a format version."""
    config = convert_config(stock_config("bert"), mechanism="aft")
    config.linear_attention |= {"window_size": 5, "seed": 3}  # which versions before let pass
    config.save_pretrained(tmp_path)
    assert type(config).from_pretrained(tmp_path).linear_attention == config.linear_attention
    with pytest.raises(ValueError, match="`window_size` = `5` has no effect with `variant` = `simple`"):
        convert_config(stock_config("bert"), mechanism="aft", window_size=5)
    assert "uniform_mixing" not in LinearAttentionSettings({"mechanism": "performer", "uniform_mixing": 0.0})
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["linear_attention"].pop("format_version") == 1
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert type(config).from_pretrained(tmp_path).linear_attention == config.linear_attention
    content["linear_attention"]["format_version"] = 7
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="in format version 7"):
        type(config).from_pretrained(tmp_path)


def test_converting_twice_is_refused():
    with pytest.raises(ValueError, match="already converted"):
        convert(convert(stock_model("llama")))


def test_layers_as_text():
    texts = {"all": "all", "none": "none", "0,2,4-7": [0, 2, 4, 5, 6, 7], "3": [3], "1, 0": [0, 1]}
    assert {text: parse_layers(text) for text in texts} == texts
    for text in ("", "a", "1-", "4-2", "-1", "1,,2"):
        with pytest.raises(ValueError, match="layers"):
            parse_layers(text)


def test_a_model_without_a_limit_has_no_trained_length():
    """XLNet's config says -1."""
    config = stock_config("llama")
    config.max_position_embeddings = -1
    assert convert_config(config, mechanism="linear").linear_attention["trained_length"] is None


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
        ({"mechanism": {"3-0": "hybrid", "4-": "linear"}}, ["3-0; this range runs backwards"]),
        ({"mechanism": {0: "hybrid", "1-": "linear"}}, ["the layers 0; give layers as text", "`0-3` or `4-`"]),
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
