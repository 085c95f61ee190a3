"""config.json of a checkpoint, damaged: the commands name the file, and write nothing."""

from __future__ import annotations

import os

import pytest
from faults import assert_nothing_written, assert_refused, change_json, convert, copy_of, read_by


HUGE = 10**12
# Each value is impossible for a Llama whose weights are those of hidden_size 16, 3 layers and 4 heads: another type,
# below the least, beyond every memory, or not what the weights have.
FIELDS = {
    "hidden_size": ["32", 0, 1.5, None, [], True, HUGE, 17, float("nan")],
    "num_hidden_layers": [-1, 2, 4, 10**7],
    "num_attention_heads": [0, None, 3, HUGE],
    "num_key_value_heads": [3, 0],
    "vocab_size": [HUGE, 63, []],
    "intermediate_size": ["x", 5],
    "head_dim": [-3, 5],
    "max_position_embeddings": ["many", 0],
    "rope_parameters": [3, {"rope_type": "unknown", "rope_theta": 1e4}, {"rope_type": "linear", "factor": "x"}],
    "hidden_act": ["nosuch", None],
    "model_type": [None, "nosuch", "../../x"],
    "architectures": ["LlamaForCausalLM", [3], ["NoSuchModel"], ["BertModel"]],
    "dtype": ["float33", "os"],
    "rms_norm_eps": ["x", -1.0],
    "attention_dropout": [2.0],
    "initializer_range": ["x"],
    "pad_token_id": [10**9],
    "tie_word_embeddings": ["maybe"],
    "attention_bias": ["x"],
    "quantization_config": [3, {"quant_method": "awq"}],
    "auto_map": [3, {"AutoModelForCausalLM": 3}],
    "use_cache": ["x"],
    "is_encoder_decoder": [True],
    "sliding_window": ["x"],
    "output_attentions": [3],
}  # fmt: skip
WHOLE = {
    "empty": b"", "list": b"[]", "cut": b'{"model_type": "lla', "not UTF-8": b'{"model_type": "\xff\xfe"}',
    "deep": b"[" * 100_000, "empty object": b"{}", "NUL": b'{"a": 1}\x00',
}  # fmt: skip


def _id(value):
    return repr(value)[:24]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in FIELDS.items() for value in values])
def test_a_field_of_config_json(llama, tmp_path, name, value):
    source = copy_of(llama, tmp_path / "source")
    change_json(source / "config.json", **{name: value})
    result = convert("--model_name_or_path", source, "--output_dir", tmp_path / "out", "--num_features", 8)
    assert_refused(result, "config.json")
    assert_nothing_written(tmp_path, "source")


@pytest.mark.parametrize("name", ["hidden_size", "rope_parameters", "architectures", "quantization_config"])
def test_a_field_of_config_json_in_training(llama, files, tmp_path, name):
    source = copy_of(llama, tmp_path / "source")
    change_json(source / "config.json", **{name: FIELDS[name][0]})
    assert_refused(read_by("train", source, None, files, tmp_path / "out"), "config.json")
    assert_nothing_written(tmp_path, "source")


@pytest.mark.parametrize(
    ("kind", "command"), [(kind, "convert") for kind in WHOLE] + [("cut", "train"), ("list", "teacher")]
)
def test_the_whole_of_config_json(llama, linear_llama, files, tmp_path, kind, command):
    source = copy_of(llama, tmp_path / "source")
    (source / "config.json").write_bytes(WHOLE[kind])
    assert_refused(read_by(command, source, linear_llama, files, tmp_path / "out"), "config.json")
    assert_nothing_written(tmp_path, "source")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"])
@pytest.mark.parametrize(("kind", "command"), [("pipe", "convert"), ("device", "convert"), ("loop", "convert"),
                                               ("folder", "train"), ("dangling", "train")])  # fmt: skip
def test_what_is_not_a_file(llama, files, tmp_path, name, kind, command):
    source = copy_of(llama, tmp_path / "source")
    path = source / name
    path.unlink(missing_ok=True)
    {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "loop": lambda: path.symlink_to(path),
        "dangling": lambda: path.symlink_to("nowhere"),
    }[kind]()
    assert_refused(read_by(command, source, None, files, tmp_path / "out"), name)
    assert_nothing_written(tmp_path, "source")


SETTINGS = [
    3, {}, "linear", None, {"mechanism": "nosuch"}, {"mechanism": 3}, {"mechanism": "linear", "foo": 1},
    {"mechanism": "linear", "num_features": "x"}, {"mechanism": "linear", "num_features": 10**15},
    {"mechanism": "linear", "format_version": 99}, {"mechanism": "linear", "layers": [99]},
    {"mechanism": "linear", "rotary": {"a": 1}}, {"mechanism": "linear", "softmax_heads": [[99, 99]]},
    {"mechanism": "linear", "drop": 3}, {"mechanism": "linear", "feature_map": "elu1"}, {"mechanism": "nystrom"},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=_id)
def test_the_settings_of_a_converted_model(linear_llama, files, tmp_path, settings):
    source = copy_of(linear_llama, tmp_path / "source")
    change_json(source / "config.json", linear_attention=settings)
    assert_refused(read_by("train", source, None, files, tmp_path / "out"), "config.json")
    assert_nothing_written(tmp_path, "source")
