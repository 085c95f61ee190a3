"""Files of training, validation and calibration data that are damaged, empty, or not what they seem."""

from __future__ import annotations

import json
import os
import struct
import zlib

import pytest
from faults import assert_nothing_written, assert_refused, convert, finetune


ROW = json.dumps({"text": "the quick words of a row that is long enough", "label": 1}) + "\n"
BAD = {
    "empty.txt": b"",
    "latin.txt": b"one good line\ncaf\xe9 is not UTF-8\n",
    "utf16.txt": "some text\n".encode("utf-16"),
    "nul.txt": b"a\x00b\x00c\x00" * 99,
    "empty.jsonl": b"",
    "latin.jsonl": ROW.encode() + b'{"text": "caf\xe9"}\n',
    "list.jsonl": b"[1, 2]\n",
    "cut.jsonl": ROW.encode() + b'{"text": "a',
    "numbers.jsonl": b'{"text": 3}\n{"text": 4}\n',
    "nested.jsonl": b'{"text": {"a": "b"}}\n',
    "other.jsonl": b'{"body": "a b"}\n',
    "mixed.jsonl": ROW.encode() + b'{"text": 3}\n',
    "deep.jsonl": b"[" * 100_000 + b"\n",
    "some blank.jsonl": ROW.encode() + b'{"text": " "}\n',
    "header.csv": b"text,label\n",
    "latin.csv": b"text,label\ngood one,1\ncaf\xe9,0\n",
    "more.csv": b"text,label\ngood row,1\none,two,three\n",
    "all more.csv": b"text,label\na,b,c\nd,e,f\n",
    "fewer.csv": b"text,label\ngood row,1\nlonely\n",
    "other.csv": b"body,label\na b,1\n",
    "quote.csv": b'text,label\n"never closed,1\n',
    "more.tsv": b"text\tlabel\ngood row\t1\none\ttwo\tthree\n",
    "fewer.tsv": b"text\tlabel\ngood row\t1\nlonely\n",
    "commas.tsv": b"text,label\na,1\n",
    "text.parquet": b"this is no parquet file",
    "lying.parquet": b"PAR1" + b"\x00" * 40 + struct.pack("<I", 2**31) + b"PAR1",
}
# What the message names besides the file.
SAID = {
    "latin.txt": "line 2", "latin.jsonl": "line 2", "latin.csv": "line 3", "more.csv": "line 3", "fewer.csv": "line 3",
    "more.tsv": "line 3", "fewer.tsv": "line 3", "other.csv": "body", "other.jsonl": "body", "commas.tsv": "text,label",
    "mixed.jsonl": "line 2", "cut.jsonl": "line 2", "some blank.jsonl": "line 2", "all more.csv": "line 2",
}  # fmt: skip


@pytest.fixture(autouse=True)
def bad_files(tmp_path):
    (tmp_path / "data").mkdir()


def _words(model, tmp_path, **options):
    words = {"task": "causal_lm", "model_name_or_path": model, "output_dir": tmp_path / "out", "max_train_steps": 1}
    return [word for name, value in (words | options).items() if value is not None for word in (f"--{name}", value)]


VALIDATED = ["latin.jsonl", "empty.txt", "other.csv"]


@pytest.mark.parametrize(
    ("name", "role"),
    [(name, "train_file") for name in BAD] + [(name, "validation_file") for name in VALIDATED],
)
def test_bad_data(linear_llama, files, tmp_path, name, role):
    path = tmp_path / "data" / name
    path.write_bytes(BAD[name])
    words = _words(linear_llama, tmp_path, **({"train_file": files / "good.jsonl"} | {role: path}))
    assert_refused(finetune(*words), str(path), SAID.get(name, ""))
    assert_nothing_written(tmp_path, "data")


@pytest.mark.parametrize("name", ["more.csv", "fewer.tsv", "other.jsonl"])
def test_bad_labelled_data(bert, files, tmp_path, name):
    path = tmp_path / "data" / name
    path.write_bytes(BAD[name])
    words = _words(bert, tmp_path, task="sequence_classification", train_file=path)
    assert_refused(finetune(*words), str(path), SAID.get(name, ""))
    assert_nothing_written(tmp_path, "data")


LABELS = {
    "fraction": [0.5, 0.25],
    "list": [[1], [0]],
    "all null": [None] * 2,
    "one class": ["x", "x"],
}


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS.keys())
def test_labels(bert, tmp_path, labels):
    path = tmp_path / "data" / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": "some good text", "label": label}) + "\n" for label in labels))
    result = finetune(*_words(bert, tmp_path, task="sequence_classification", train_file=path))
    assert_refused(result, str(path), "label")
    assert_nothing_written(tmp_path, "data")


@pytest.mark.parametrize(
    ("kind", "role"),
    [(kind, "train_file") for kind in ("folder", "pipe", "device", "loop", "missing", "no type", "upper case")]
    + [("pipe", role) for role in ("validation_file", "calibration_file", "config")]
    + [("dangling", role) for role in ("validation_file", "calibration_file", "config")],
)
def test_what_is_not_a_data_file(llama, linear_llama, files, tmp_path, kind, role):
    path = tmp_path / "data" / {"no type": "file", "upper case": "file.TXTX"}.get(kind, "x.jsonl")
    {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "loop": lambda: path.symlink_to(path),
        "dangling": lambda: path.symlink_to("nowhere"),
        "missing": lambda: None,
        "no type": lambda: path.write_text("text"),
        "upper case": lambda: path.write_text("text"),
    }[kind]()
    if role == "calibration_file":
        words = ["--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--attention", "performer"]
        result = convert(*words, "--features", "favor++", "--calibration_file", path)
    else:
        result = finetune(*_words(linear_llama, tmp_path, **({"train_file": files / "good.txt"} | {role: path})))
    assert_refused(result, str(path))
    assert_nothing_written(tmp_path, "data")


@pytest.mark.parametrize("name", ["latin.txt", "empty.jsonl", "more.csv", "text.parquet"])
def test_bad_calibration_data(llama, tmp_path, name):
    path = tmp_path / "data" / name
    path.write_bytes(BAD[name])
    words = ["--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--attention", "performer"]
    result = convert(*words, "--features", "favor++", "--calibration_file", path)
    assert_refused(result, str(path), SAID.get(name, ""))
    assert_nothing_written(tmp_path, "data")


@pytest.mark.parametrize(("name", "role"), [("more.csv", "train_file"), ("latin.jsonl", "validation_file")])
def test_bad_data_of_a_preset(llama, files, tmp_path, name, role):
    path = tmp_path / "data" / name
    path.write_bytes(BAD[name])
    words = {"train_file": files / "good.jsonl", "validation_file": files / "good.txt"} | {role: path}
    options = [word for option, value in words.items() for word in (f"--{option}", value)]
    result = convert("--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--preset", "default", *options)
    assert_refused(result, str(path), SAID.get(name, ""))
    assert_nothing_written(tmp_path, "data")


def test_the_columns_of_all_files_are_in_one_message(linear_llama, tmp_path):
    train, valid = tmp_path / "data" / "other.csv", tmp_path / "data" / "other.jsonl"
    train.write_bytes(BAD["other.csv"])
    valid.write_bytes(BAD["other.jsonl"])
    result = finetune(*_words(linear_llama, tmp_path, train_file=train, validation_file=valid))
    assert_refused(result, "2 problems", str(train), str(valid), "`--text_column_name text`")


@pytest.mark.parametrize(
    ("role", "value"),
    [("model_name_or_path", value) for value in ("./nowhere", "nobody/nothing", "two words", "a" * 300, "", "x[1]*")]
    + [(role, "/nowhere/model") for role in ("teacher_name_or_path", "tokenizer_name")],
)
def test_models_that_do_not_exist(linear_llama, files, tmp_path, role, value):
    result = finetune(*_words(linear_llama, tmp_path, **({"train_file": files / "good.txt"} | {role: value})))
    assert_refused(result, value[:40])
    assert_nothing_written(tmp_path, "data")


def test_the_files_of_a_folder_are_checked_together(linear_llama, tmp_path):
    (tmp_path / "data" / "train.tsv").write_bytes(BAD["more.tsv"])
    (tmp_path / "data" / "test.tsv").write_bytes(b"body\na b c\n")
    result = finetune(*_words(linear_llama, tmp_path, dataset_name=tmp_path / "data"))
    assert_refused(result, "2 problems", "train.tsv", "line 3", "test.tsv", "body")
    assert_nothing_written(tmp_path, "data")


def test_causal_lm_on_a_bidirectional_model(bert, files, tmp_path):
    result = finetune(*_words(bert, tmp_path, train_file=files / "good.txt"))
    assert_refused(result, "bert", "causal_lm", "masked_lm")
    assert_nothing_written(tmp_path, "data")


def _png(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


PICTURES = {
    "bomb": _png(100_000, 100_000),
    "empty": b"",
    "text": b"no picture",
    "cut": _png(16, 16)[:60],
}


@pytest.mark.parametrize(
    ("content", "place"), [(content, "rows") for content in PICTURES.values()] + [(PICTURES["cut"], "folder")]
)
def test_pictures(vit, tmp_path, content, place):
    folder = tmp_path / "data"
    for label in ("bright", "dark"):
        (folder / "train" / label).mkdir(parents=True)
        (folder / "train" / label / "1.png").write_bytes(content)
    rows = [{"image": f"train/{label}/1.png", "label": label} for label in ("bright", "dark")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train_file": folder / "rows.jsonl"} if place == "rows" else {"dataset_name": folder}
    result = finetune(*_words(vit, tmp_path, task="image_classification", **data))
    assert_refused(result, "image")
    assert_nothing_written(tmp_path, "data")
