"""config.json and the other JSON files of a checkpoint, damaged: both commands name the file, and write nothing."""

from __future__ import annotations

import os

import pytest
from faults import assert_nothing_written, assert_refused, change_json, convert, copy_of, finetune


HUGE, DEEP = 10**12, "[" * 100_000
NAN = float("nan")
# Each value is impossible for a Llama whose weights are those of hidden_size 16, 3 layers and 4 heads.
FIELDS = {
    "hidden_size": ["32", -16, 0, 1.5, None, [], {}, True, HUGE, 17, NAN],
    "num_hidden_layers": ["3", -1, 2.5, None, [], HUGE, 2, 4, 10**7],
    "num_attention_heads": [0, -4, "four", None, 3, [], HUGE],
    "num_key_value_heads": [3, 0, -1, "two", HUGE],
    "vocab_size": [0, -1, HUGE, "64", None, 63, []],
    "intermediate_size": [0, -8, "x", HUGE, 5],
    "head_dim": [0, -3, "x", 5, HUGE],
    "max_position_embeddings": [-1, 0, "many", [], 1.5],
    "rope_parameters": ["x", 3, [], {"rope_type": "unknown", "rope_theta": 1e4}, {"rope_type": "yarn"},
                        {"rope_type": "default", "rope_theta": "x"}, {"rope_type": "linear", "factor": "x"}],
    "hidden_act": ["nosuch", 3, None, []],
    "model_type": [None, 3, "nosuch", [], "../../x", "", {}],
    "architectures": ["LlamaForCausalLM", [3], ["NoSuchModel"], ["os"], ["AutoModel"], {}, 3, [None], ["BertModel"]],
    "dtype": ["float33", 3, [], "int8", "os"],
    "rms_norm_eps": ["x", None, [], NAN, -1.0],
    "attention_dropout": ["x", 2.0, -1, NAN],
    "initializer_range": ["x", []],
    "pad_token_id": [10**9, "x", -7, []],
    "tie_word_embeddings": ["maybe", 3, []],
    "attention_bias": ["x", [], 3],
    "quantization_config": [3, "x", {"quant_method": "awq"}, {"quant_method": 3}, []],
    "auto_map": [3, [], {"AutoModelForCausalLM": 3}, "evil.py"],
    "use_cache": ["x", []],
    "is_encoder_decoder": [True, "x"],
    "sliding_window": ["x", 1.5, {}],
    "output_attentions": ["yes", 3],
}  # fmt: skip
WHOLE = {
    "empty": b"", "null": b"null", "list": b"[]", "number": b"3", "text": b'"config"', "cut": b'{"model_type": "lla',
    "not UTF-8": b'{"model_type": "\xff\xfe"}', "binary": bytes(range(256)), "deep": DEEP.encode(),
    "empty object": b"{}", "NUL": b'{"a": 1}\x00', "two objects": b"{}{}", "comment": b"// hello\n{}",
}  # fmt: skip


def _id(value):
    return repr(value)[:24]


def _fields():
    return [pytest.param(name, value, id=f"{name}={_id(value)}") for name, values in FIELDS.items() for value in values]


@pytest.mark.parametrize(("name", "value"), _fields())
def test_a_field_of_config_json(llama, tmp_path, name, value):
    source = copy_of(llama, tmp_path / "source")
    change_json(source / "config.json", **{name: value})
    result = convert("--model_name_or_path", source, "--output_dir", tmp_path / "out", "--num_features", 8)
    assert_refused(result, "config.json")
    assert_nothing_written(tmp_path, "source")


@pytest.mark.parametrize(("name", "value"), [(name, values[0]) for name, values in FIELDS.items()])
def test_a_field_of_config_json_in_training(llama, files, tmp_path, name, value):
    source = copy_of(llama, tmp_path / "source")
    change_json(source / "config.json", **{name: value})
    result = finetune(
        "--task", "causal_lm", "--model_name_or_path", source, "--train_file", files / "good.jsonl",
        "--output_dir", tmp_path / "out", "--max_train_steps", 1,
    )  # fmt: skip
    assert_refused(result, "config.json")
    assert_nothing_written(tmp_path, "source")


@pytest.mark.parametrize("content", WHOLE.values(), ids=WHOLE.keys())
@pytest.mark.parametrize("command", ["convert", "train", "teacher"])
def test_the_whole_of_config_json(llama, linear_llama, files, tmp_path, content, command):
    source = copy_of(llama, tmp_path / "source")
    (source / "config.json").write_bytes(content)
    assert_refused(_call(command, source, linear_llama, files, tmp_path), "config.json")
    assert_nothing_written(tmp_path, "source")


def _call(command, source, other, files, tmp_path):
    if command == "convert":
        return convert("--model_name_or_path", source, "--output_dir", tmp_path / "out", "--num_features", 8)
    model = ["--model_name_or_path", other, "--teacher_name_or_path", source]
    return finetune(
        "--task", "causal_lm", *(model if command == "teacher" else [*model[:1], source]),
        "--train_file", files / "good.jsonl", "--output_dir", tmp_path / "out", "--max_train_steps", 1,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "loop", "dangling"])
@pytest.mark.parametrize("command", ["convert", "train"])
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
    assert_refused(_call(command, source, None, files, tmp_path), name)
    assert_nothing_written(tmp_path, "source")


SETTINGS = [
    3, [], {}, "linear", None, [3], {"mechanism": "nosuch"}, {"mechanism": 3}, {"mechanism": "linear", "foo": 1},
    {"mechanism": "linear", "num_features": "x"}, {"mechanism": "linear", "num_features": -1},
    {"mechanism": "linear", "num_features": 10**15}, {"mechanism": "linear", "format_version": 99},
    {"mechanism": "linear", "format_version": "x"}, {"mechanism": "linear", "layers": [99]},
    {"mechanism": "linear", "layers": "x"}, {"mechanism": "linear", "layers": [0.5]},
    {"mechanism": "linear", "rotary": 3}, {"mechanism": "linear", "rotary": {"a": 1}},
    {"mechanism": "linear", "softmax_heads": 3}, {"mechanism": "linear", "softmax_heads": [[99, 99]]},
    {"mechanism": "linear", "drop": 3}, {"mechanism": "linear", "cross_attention": 3},
    {"mechanism": "linear", "feature_map": "elu1"}, {"mechanism": "nystrom"},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=_id)
def test_the_settings_of_a_converted_model(linear_llama, files, tmp_path, settings):
    source = copy_of(linear_llama, tmp_path / "source")
    change_json(source / "config.json", linear_attention=settings)
    assert_refused(_call("train", source, None, files, tmp_path), "config.json")
    assert_nothing_written(tmp_path, "source")
