"""Weights, indices, tokenizers and modules of a checkpoint, damaged or foreign, for both commands."""

from __future__ import annotations

import json
import pickle
import struct

import pytest
import torch
from faults import assert_nothing_written, assert_refused, change_json, convert, copy_of, finetune, read_by
from safetensors.torch import load_file, save_file


def _header(path, **changes):
    """Write the file again with these changes in the entry of its first tensor."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    name = next(key for key in header if key != "__metadata__")
    header[name] |= changes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


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
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:50]),
    "text": lambda path: path.write_text("these are no weights at all, but a text"),
    "git lfs": lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
    "pickle": lambda path: path.write_bytes(pickle.dumps({"a": 1})),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "huge header": lambda path: path.write_bytes(struct.pack("<Q", 2**62) + b"{}"),
    "header is no JSON": lambda path: path.write_bytes(struct.pack("<Q", 2) + b"{x"),
    "lying shape": lambda path: _header(path, shape=[10**9, 10**9]),
    "lying type": lambda path: _header(path, dtype="F99"),
    "lying offsets": lambda path: _header(path, data_offsets=[0, 10**12]),
    "no tensors": lambda path: save_file({}, path),
    "other names": _tensors(lambda tensors: [tensors.update({f"x.{k}": tensors.pop(k)}) for k in list(tensors)]),
    "one missing": _tensors(lambda tensors: tensors.pop(KEY)),
    "NaN": _tensors(lambda tensors: tensors[KEY][0].fill_(float("nan"))),
    "infinite": _tensors(lambda tensors: tensors[KEY][0].fill_(float("inf"))),
    "another shape": _tensors(lambda tensors: tensors.update({KEY: tensors[KEY][:-1].clone()})),
    "one more dimension": _tensors(lambda tensors: tensors.update({KEY: tensors[KEY][None].clone()})),
    "one layer more": _tensors(lambda t: t.update({k.replace("s.1.", "s.3."): t[k].clone() for k in list(t)})),
}


LOADED = ("cut", "one missing", "NaN", "infinite", "another shape", "one layer more")


@pytest.mark.parametrize(
    ("damage", "command"),
    [(name, "convert") for name in WEIGHTS] + [(n, command) for n in LOADED for command in ("train", "teacher")],
)
def test_weights(llama, linear_llama, files, tmp_path, damage, command):
    source = copy_of(llama, tmp_path / "source")
    WEIGHTS[damage](source / "model.safetensors")
    assert_refused(read_by(command, source, linear_llama, files, tmp_path / "out"), str(source))
    assert_nothing_written(tmp_path, "source")


def test_what_is_missing_may_be_allowed(llama, files, tmp_path):
    source = copy_of(llama, tmp_path / "source")
    WEIGHTS["one missing"](source / "model.safetensors")
    words = ["--model_name_or_path", source, "--allow_missing"]
    assert convert(*words, "--output_dir", tmp_path / "out", "--num_features", 8)[0] == 0
    train = ["--task", "causal_lm", "--train_file", files / "good.jsonl", "--max_train_steps", 1]
    code, _, err = finetune(*words, *train, "--output_dir", tmp_path / "trained")
    assert code == 0
    assert "LOAD REPORT" not in err  # one line of our own says it


INDEX = {
    "outside": {"weight_map": {KEY: "../model.safetensors"}},
    "absolute": {"weight_map": {KEY: "/etc/passwd"}},
    "a folder": {"weight_map": {KEY: "."}},
    "missing": {"weight_map": {KEY: "model-1.safetensors"}},
    "a number": {"weight_map": {KEY: 3}},
    "empty map": {"weight_map": {}},
    "another type": {"weight_map": {KEY: "config.json"}},
    "NUL": {"weight_map": {KEY: "a\0.safetensors"}},
    "backslash": {"weight_map": {KEY: "..\\model.safetensors"}},
    "long": {"weight_map": {KEY: "m" * 5000 + ".safetensors"}},
    "too few": {"weight_map": {KEY: "part.safetensors"}},
    "a list as file": [],
}


@pytest.mark.parametrize(
    ("kind", "command"), [(kind, "convert") for kind in INDEX] + [("outside", "train"), ("too few", "train")]
)
def test_indices(llama, linear_llama, files, tmp_path, kind, command):
    source = copy_of(llama, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    save_file({KEY: tensors[KEY]}, source / "part.safetensors", metadata={"format": "pt"})
    (source / "model.safetensors.index.json").write_text(json.dumps(INDEX[kind]))
    assert_refused(read_by(command, source, linear_llama, files, tmp_path / "out"), str(source))
    assert_nothing_written(tmp_path, "source")


class Evil:
    """A pickle that would create a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("kind", ["torch", "pickle", "text"])
@pytest.mark.parametrize("command", ["convert", "convert with --allow_pickle", "train"])
def test_pickles(llama, linear_llama, files, tmp_path, kind, command):
    source, mark = copy_of(llama, tmp_path / "source"), tmp_path / "ran"
    (source / "model.safetensors").unlink()
    path = source / "pytorch_model.bin"
    {
        "torch": lambda: torch.save({"a": Evil(mark)}, path),
        "pickle": lambda: path.write_bytes(pickle.dumps(Evil(mark))),
        "text": lambda: path.write_text("no pickle"),
    }[kind]()
    if command.endswith("pickle"):
        words = ("--model_name_or_path", source, "--output_dir", tmp_path / "out", "--allow_pickle")
        assert_refused(convert(*words), str(source))
    else:
        assert_refused(read_by(command, source, linear_llama, files, tmp_path / "out"), str(source))
    assert_nothing_written(tmp_path, "source")


TOKENIZER = {
    "empty": ("tokenizer.json", b""),
    "list": ("tokenizer.json", b"[]"),
    "no model": ("tokenizer.json", b'{"version": "1.0", "model": null}'),
    "unknown model": ("tokenizer.json", b'{"version": "1.0", "model": {"type": "Nosuch"}}'),
    "not UTF-8": ("tokenizer.json", b'{"a": "\xff"}'),
    "config list": ("tokenizer_config.json", b"[]"),
    "config class": ("tokenizer_config.json", b'{"tokenizer_class": 3}'),
    "config length": ("tokenizer_config.json", b'{"tokenizer_class": "TokenizersBackend", "model_max_length": "x"}'),
    "config token": ("tokenizer_config.json", b'{"tokenizer_class": "TokenizersBackend", "pad_token": 3}'),
    "special": ("special_tokens_map.json", b"3"),
    "added": ("added_tokens.json", b"[1]"),
    "generation list": ("generation_config.json", b"[]"),
}


@pytest.mark.parametrize(("name", "content"), TOKENIZER.values(), ids=TOKENIZER.keys())
@pytest.mark.parametrize("command", ["convert", "train"])
def test_tokenizers(llama, linear_llama, files, tmp_path, name, content, command):
    source = copy_of(llama, tmp_path / "source")
    (source / name).write_bytes(content)
    assert_refused(
        read_by(command, source, linear_llama, files, tmp_path / "out"), "tokeni" if "token" in name else name
    )
    assert_nothing_written(tmp_path, "source")


def test_no_tokenizer(llama, linear_llama, files, tmp_path):
    source = copy_of(llama, tmp_path / "source")
    for path in source.glob("*token*"):
        path.unlink()
    assert_refused(read_by("train", source, linear_llama, files, tmp_path / "out"), str(source), "--tokenizer_name")
    assert_nothing_written(tmp_path, "source")


@pytest.mark.parametrize("command", ["train", "tokenizer"])
def test_a_vocabulary_larger_than_that_of_the_model(llama, files, tmp_path, command):
    source = copy_of(llama, tmp_path / "source")
    content = json.loads((source / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {f"word{number}": 64 + number for number in range(40)}
    (source / "tokenizer.json").write_text(json.dumps(content))
    words = [source] if command == "train" else [llama, "--tokenizer_name", source]
    result = finetune(
        "--task", "causal_lm", "--model_name_or_path", *words, "--train_file", files / "good.jsonl",
        "--output_dir", tmp_path / "out", "--max_train_steps", 1,
    )  # fmt: skip
    assert_refused(result, str(source), "104", "64")
    assert_nothing_written(tmp_path, "source")


MODULES = {
    "empty": b"", "object": b"{}", "empty list": b"[]", "numbers": b"[1]", "no path": b'[{"type": "x"}]',
    "path is a number": b'[{"path": 3, "type": "x"}]', "absolute": b'[{"path": "/etc", "type": "x"}]',
    "second outside": b'[{"path": "", "type": "x"}, {"path": "../evil", "type": "y"}]',
    "missing folder": b'[{"path": "0_Transformer", "type": "x"}]', "NUL": b'[{"path": "a\\u0000", "type": "x"}]',
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "command"), [(kind, "convert") for kind in MODULES] + [("empty", "train"), ("second outside", "train")]
)
def test_modules_json(bert, linear_llama, files, tmp_path, kind, command):
    source = copy_of(bert, tmp_path / "source")
    (source / "modules.json").write_bytes(MODULES[kind])
    assert_refused(read_by(command, source, linear_llama, files, tmp_path / "out"), "modules.json")
    assert_nothing_written(tmp_path, "source")


FOREIGN = {
    "unknown class": {"AutoConfig": "configuration.Evil"},
    "another repository": {"AutoConfig": "nobody/evil--configuration.Config"},
    "outside": {"AutoConfig": "../../evil.Config"},
}


@pytest.mark.parametrize("code", FOREIGN.values(), ids=FOREIGN.keys())
@pytest.mark.parametrize("command", ["convert", "train"])
@pytest.mark.parametrize("trusted", [False, True])
def test_foreign_code(llama, linear_llama, files, tmp_path, code, command, trusted):
    source = copy_of(llama, tmp_path / "source")
    change_json(source / "config.json", model_type="foreign", auto_map=code)
    (source / "configuration.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    words = ["--model_name_or_path", source, "--output_dir", tmp_path / "out", *(["--trust_remote_code"] * trusted)]
    train = ["--task", "causal_lm", "--train_file", files / "good.jsonl", "--max_train_steps", 1]
    result = convert(*words) if command == "convert" else finetune(*words, *train)
    assert_refused(result, str(source))
    if not trusted:
        assert_nothing_written(tmp_path, "source")
    assert not (tmp_path / "out").exists()
