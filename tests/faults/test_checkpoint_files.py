"""Files of a checkpoint, damaged or foreign: the commands name the file or the folder, and write nothing."""

from __future__ import annotations

import json
import os
import pickle
import struct

import pytest
import torch
from faults import assert_nothing_written, assert_refused, change_json, convert, copy_of, read_by, train
from safetensors.torch import load_file, save_file


HUGE = 10**12
# Each value is impossible for a Llama whose weights are those of hidden_size 16, 3 layers and 4 heads: another type,
# below the least, beyond every memory, or not what the weights have.
FIELDS = {
    "hidden_size": ["32", 0, 1.5, None, [], True, HUGE, 17, float("nan")],
    "num_hidden_layers": [-1, 2, 4, 10**7],
    "num_attention_heads": [None, 3],
    "num_key_value_heads": [3],
    "vocab_size": [63],
    "intermediate_size": [5],
    "head_dim": [-3, 5],
    "max_position_embeddings": ["many", 0],
    "rope_parameters": [
        3,
        {"rope_type": "unknown", "rope_theta": 1e4},
        {"rope_type": "linear", "factor": "x"},
        {"rope_type": "default", "rope_theta": "10000.0"},
    ],
    "hidden_act": ["nosuch", None],
    "model_type": [None, "nosuch", "../../x"],
    "architectures": ["LlamaForCausalLM", [3], ["NoSuchModel"], ["BertModel"]],
    "dtype": ["float33", "os", 3],
    "rope_theta": ["10000.0", -1],
    "rms_norm_eps": ["x", -1.0],
    "attention_dropout": [2.0],
    "initializer_range": ["x"],
    "pad_token_id": [10**9],
    "tie_word_embeddings": ["maybe"],
    "quantization_config": [3, {"quant_method": "awq"}],
    "auto_map": [3, {"AutoModelForCausalLM": 3}],
    "is_encoder_decoder": [True],
    "sliding_window": ["x"],
    "output_attentions": [3],
}
# Of a converted model.
SETTINGS = [
    3, {}, None, {"mechanism": "nosuch"}, {"mechanism": 3}, {"mechanism": "linear", "foo": 1},
    {"mechanism": "linear", "num_features": 10**15}, {"mechanism": "linear", "format_version": 99},
    {"mechanism": "linear", "layers": [99]}, {"mechanism": "linear", "rotary": {"a": 1}},
    {"mechanism": "linear", "feature_map": "elu1"},
    {"mechanism": "nystrom"},
]  # fmt: skip
# By the name of the file: contents that are no JSON, or another kind of JSON than this file has.
CONTENTS = {
    "config.json": [
        b"", b"[]", b'{"model_type": "lla', b'{"model_type": "\xff\xfe"}', b"[" * 100_000, b"{}", b'{"a": 1}\x00',
    ],
    "tokenizer.json": [b"[]", b'{"version": "1.0", "model": null}', b'{"version": "1.0", "model": {"type": "Nosuch"}}'],
    "tokenizer_config.json": [
        b"[]", b'{"tokenizer_class": 3}', b'{"tokenizer_class": "TokenizersBackend", "model_max_length": "x"}',
        b'{"tokenizer_class": "TokenizersBackend", "pad_token": 3}',
    ],
    "special_tokens_map.json": [b"3"],
    "added_tokens.json": [b"[1]"],
    "generation_config.json": [b"[]", b'{"num_return_sequences": 4, "do_sample": false}'],
    "modules.json": [
        b"{}", b"[]", b"[1]", b'[{"type": "x"}]', b'[{"path": 3, "type": "x"}]', b'[{"path": "/etc", "type": "x"}]',
        b'[{"path": "", "type": "x"}, {"path": "../evil", "type": "y"}]', b'[{"path": "0_Transformer", "type": "x"}]',
        b'[{"path": "a\\u0000", "type": "x"}]',
    ],
}  # fmt: skip


def _cases(table):
    return [(name, value) for name, values in table.items() for value in values]


def _refused(command, source, tmp_path, files, *said, other=None):
    assert_refused(read_by(command, source, other, files, tmp_path / "out"), *said)
    assert_nothing_written(tmp_path, source.name)


@pytest.mark.parametrize(
    ("command", "name", "value"),
    [("convert", name, value) for name, value in _cases(FIELDS)]
    + [("train", "linear_attention", value) for value in SETTINGS]
    + [("train", "rope_parameters", 3)],
    ids=lambda value: str(value)[:24],
)
def test_a_field_of_config_json(llama, linear_llama, files, tmp_path, command, name, value):
    source = copy_of(linear_llama if name == "linear_attention" else llama, tmp_path / "source")
    change_json(source / "config.json", **{name: value})
    _refused(command, source, tmp_path, files, "config.json")


@pytest.mark.parametrize(("name", "content"), _cases(CONTENTS), ids=lambda value: str(value)[:24])
def test_the_content_of_a_file(llama, bert, files, tmp_path, name, content):
    source = copy_of(bert if name == "modules.json" else llama, tmp_path / "source")
    (source / name).write_bytes(content)
    _refused("convert", source, tmp_path, files, "tokeni" if name.startswith("tokenizer") else name)


@pytest.mark.parametrize(
    ("command", "name", "content"),
    [("train", "config.json", b"[]"), ("teacher", "config.json", b"[]"), ("train", "modules.json", b"{}"),
     ("train", "tokenizer.json", b"[]")],
)  # fmt: skip
def test_the_content_of_a_file_in_training(llama, bert, linear_llama, files, tmp_path, command, name, content):
    source = copy_of(bert if name == "modules.json" else llama, tmp_path / "source")
    (source / name).write_bytes(content)
    _refused(command, source, tmp_path, files, "tokeni" if name.startswith("tokenizer") else name, other=linear_llama)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize(("kind", "command"), [("pipe", "convert"), ("device", "convert"), ("loop", "convert"),
                                               ("folder", "train"), ("dangling", "train")])  # fmt: skip
def test_what_is_not_a_file(llama, files, tmp_path, name, kind, command):
    source = copy_of(llama, tmp_path / "source")
    path = source / name
    path.unlink()
    {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "loop": lambda: path.symlink_to(path),
        "dangling": lambda: path.symlink_to("nowhere"),
    }[kind]()
    _refused(command, source, tmp_path, files, name)


def _header(**changes):
    """Writes the file again with these changes in the entry of its first tensor."""

    def damage(path):
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        name = next(key for key in header if key != "__metadata__")
        header[name] |= changes
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return damage


def _tensors(change):
    def damage(path):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return damage


KEY = "model.layers.1.mlp.up_proj.weight"
WEIGHTS = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "text": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"a": 1})),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "huge header": lambda path: path.write_bytes(struct.pack("<Q", 2**62) + b"{}"),
    "header is no JSON": lambda path: path.write_bytes(struct.pack("<Q", 2) + b"{x"),
    "lying shape": _header(shape=[10**9, 10**9]),
    "lying type": _header(dtype="F99"),
    "lying offsets": _header(data_offsets=[0, 10**12]),
    "no tensors": lambda path: save_file({}, path),
    "other names": _tensors(lambda tensors: [tensors.update({f"x.{k}": tensors.pop(k)}) for k in list(tensors)]),
    "one missing": _tensors(lambda tensors: tensors.pop(KEY)),
    "NaN": _tensors(lambda tensors: tensors[KEY][0].fill_(float("nan"))),
    "infinite": _tensors(lambda tensors: tensors[KEY][0].fill_(float("inf"))),
    "another shape": _tensors(lambda tensors: tensors.update({KEY: tensors[KEY][:-1].clone()})),
    "one layer more": _tensors(lambda t: t.update({k.replace("s.1.", "s.3."): t[k].clone() for k in list(t)})),
}


@pytest.mark.parametrize(
    ("damage", "command"),
    [(name, "convert") for name in WEIGHTS]
    + [(name, command) for name in ("one missing", "NaN") for command in ("train", "teacher")],
)
def test_weights(llama, linear_llama, files, tmp_path, damage, command):
    source = copy_of(llama, tmp_path / "source")
    WEIGHTS[damage](source / "model.safetensors")
    _refused(command, source, tmp_path, files, str(source), other=linear_llama)


def test_what_is_missing_may_be_allowed(llama, files, tmp_path):
    source = copy_of(llama, tmp_path / "source")
    WEIGHTS["one missing"](source / "model.safetensors")
    words = ["--model_name_or_path", source, "--allow_missing"]
    assert convert(*words, "--output_dir", tmp_path / "out", "--num_features", 8)[0] == 0
    code, _, err = train(source, files, tmp_path / "trained", allow_missing=True)
    assert code == 0
    assert "LOAD REPORT" not in err  # one line of our own says it


INDICES = [
    [], {"weight_map": {}},
    *({"weight_map": {KEY: shard}} for shard in (
        "../model.safetensors", "/etc/passwd", ".", "model-1.safetensors", 3, "config.json", "a\0.safetensors",
        "..\\model.safetensors", "m" * 5000 + ".safetensors", "part.safetensors",
    )),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=lambda value: str(value)[-30:])
def test_indices(llama, files, tmp_path, index):
    source = copy_of(llama, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    save_file({KEY: tensors[KEY]}, source / "part.safetensors", metadata={"format": "pt"})
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    _refused("convert", source, tmp_path, files, str(source))


class Evil:
    """A pickle that would create a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("is_of_torch", [True, False])
@pytest.mark.parametrize("command", ["convert", "convert with --allow_pickle", "train"])
def test_pickles(llama, files, tmp_path, is_of_torch, command):
    source, mark = copy_of(llama, tmp_path / "source"), tmp_path / "ran"
    (source / "model.safetensors").unlink()
    path = source / "pytorch_model.bin"
    if is_of_torch:
        torch.save({"a": Evil(mark)}, path)
    else:
        path.write_bytes(pickle.dumps(Evil(mark)))
    if command.endswith("pickle"):
        words = ("--model_name_or_path", source, "--output_dir", tmp_path / "out", "--allow_pickle")
        assert_refused(convert(*words), str(source))
        assert_nothing_written(tmp_path, "source")
    else:
        _refused(command, source, tmp_path, files, str(source))


def test_no_tokenizer(llama, files, tmp_path):
    source = copy_of(llama, tmp_path / "source")
    for path in source.glob("*token*"):
        path.unlink()
    _refused("train", source, tmp_path, files, str(source), "--tokenizer_name")


@pytest.mark.parametrize("place", ["model", "tokenizer"])
def test_a_vocabulary_larger_than_that_of_the_model(llama, files, tmp_path, place):
    source = copy_of(llama, tmp_path / "source")
    content = json.loads((source / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {f"word{number}": 64 + number for number in range(40)}
    (source / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = {"tokenizer_name": source} if place == "tokenizer" else {}
    result = train(llama if tokenizer else source, files, tmp_path / "out", **tokenizer)
    assert_refused(result, str(source), "104", "64")
    assert_nothing_written(tmp_path, "source")


@pytest.mark.parametrize("code", ["configuration.Evil", "nobody/evil--configuration.Config", "../../evil.Config"])
@pytest.mark.parametrize(("command", "is_trusted"), [("convert", False), ("convert", True), ("train", False)])
def test_foreign_code(llama, files, tmp_path, code, command, is_trusted):
    source = copy_of(llama, tmp_path / "source")
    change_json(source / "config.json", model_type="foreign", auto_map={"AutoConfig": code})
    (source / "configuration.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    if is_trusted:
        words = ["--model_name_or_path", source, "--output_dir", tmp_path / "out", "--trust_remote_code"]
        assert_refused(convert(*words), str(source))
        assert not (tmp_path / "out").exists()
    else:
        _refused(command, source, tmp_path, files, str(source))
