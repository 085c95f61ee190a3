"""Settings are validated together, by name, when the config is built."""

from __future__ import annotations

import json
import pickle

import pytest
from matrix import stock_config, stock_model

from hf_linear_attention import LinearAttentionSettings, convert, convert_config
from hf_linear_attention.layer_numbers import parse_layers


def test_defaults_are_filled_in_and_survive_json(tmp_path):
    config = convert_config(stock_config("llama"), mechanism="performer")
    assert config.model_type == "linear_llama"
    assert config.linear_attention == {
        "mechanism": "performer",
        **{"features": "exp", "num_features": None, "orthogonal": True, "redraw_interval": 0, "seed": 0},
        **{"geometry": "fixed", "decay": "none"},
        **{"rope": "before_map", "rope_frequencies": None, "trained_length": 64, "rotary": None},
        **{"layers": "all", "softmax_heads": [], "drop": [], "cross_attention": False, "format_version": 1},
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
        ({"mechanism": "flash"}, "must be one of .*`linear`"),
        ({"feature_map": "elu1", "num_features": 8}, "has no effect"),
        ({"feature_map": "hedgehog", "num_features": 7}, "must be a multiple of 2"),
        ({"mechanism": "performer", "num_features": 0}, "at least 1"),
        ({"mechanism": "performer", "num_features": 2.5}, "type int"),
        ({"mechanism": "performer", "num_features": True}, "type int"),
        ({"mechanism": "performer", "features": "cosh", "num_features": 7}, "must be a multiple of 2"),
        ({"mechanism": "performer", "num_features": 10**6}, r"= 1000000 must be at most 131,072; choose a smaller"),
        ({"mechanism": "performer", "uniform_mixing": 0.1}, r"`uniform_mixing` = 0\.1 is not possible any more"),
        ({"mechanism": "nystrom", "pinv_iterations": 8}, "= 8 is not possible any more; leave it out"),
        ({"mechanism": "hybrid", "window_size": 10**6}, "must be at most 131,072; choose a smaller number"),
        ({"format_version": 2, "new": 1}, r"in format version 2, .* up to 1\. Upgrade hf_linear_attention"),
        ({"format_version": 0}, "`format_version` = 0 in .* must be a whole number of at least 1"),
        ({"format_version": True}, "`format_version` = True"),
        ({"format_version": "1"}, "`format_version` = '1'"),
        ({"layers": "some"}, "`all`, `full_attention`, `none` or a list"),
        ({"drop": ["dropout"]}, "must be a list with any of `attention_sinks`, `position_bias`"),
        ({"drop": "softcap"}, "must be a list with any of"),
        ({"mechanism": "nystrom", "cross_attention": True}, "`nystrom` has no cross form"),
        ({"cross_attention": 1}, "must be true or false"),
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
        ("gpt2", LINFORMER, "`linformer` has no causal form, which `gpt2` needs; use one of .*`linear`, `performer`"),
        ("decoding bert", LINFORMER, "no causal form"),
        ("bert", {**LINFORMER, "projection_size": 100}, "`projection_size` = 100 is larger than the longest input, 64"),
        ("bert", LINFORMER, None),
        (
            "llama",
            {"mechanism": "performer", "features": "trig"},
            "`features` = `trig`.* has no causal form",
        ),
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


def test_converting_twice_or_the_unknown_is_refused():
    model = convert(stock_model("llama"))
    with pytest.raises(ValueError, match="already converted"):
        convert(model)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("all", "all"), ("none", "none"), ("0,2,4-7", [0, 2, 4, 5, 6, 7]), ("3", [3]), ("1, 0", [0, 1])],
)
def test_parse_layers(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "1-", "4-2", "-1", "1,,2"])
def test_parse_layers_refuses(text):
    with pytest.raises(ValueError, match="layers"):
        parse_layers(text)


def test_a_model_without_a_limit_has_no_trained_length():
    """XLNet's config says -1."""
    config = stock_config("llama")
    config.max_position_embeddings = -1
    assert convert_config(config, mechanism="linear").linear_attention["trained_length"] is None
