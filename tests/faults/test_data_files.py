"""Files of training, validation and calibration data that are damaged, empty, or not what they seem."""

from __future__ import annotations

import json
import os
import struct
import zlib

import pytest
from faults import assert_nothing_written, assert_refused, convert, train


ROW = json.dumps({"text": "the quick words of a row that is long enough", "label": 1}) + "\n"
BAD = {
    "empty.txt": b"",
    "latin.txt": b"one good line\ncaf\xe9 is not UTF-8\n",
    "utf16.txt": "some text\n".encode("utf-16"),
    "latin.jsonl": ROW.encode() + b'{"text": "caf\xe9"}\n',
    "list.jsonl": b"[1, 2]\n",
    "cut.jsonl": ROW.encode() + b'{"text": "a',
    "numbers.jsonl": b'{"text": 3}\n{"text": 4}\n',
    "other.jsonl": b'{"body": "a b"}\n',
    "mixed.jsonl": ROW.encode() + b'{"text": 3}\n',
    "deep.jsonl": b"[" * 100_000 + b"\n",
    "some blank.jsonl": ROW.encode() + b'{"text": " "}\n',
    "header.csv": b"text,label\n",
    "latin.csv": b"text,label\ngood one,1\ncaf\xe9,0\n",
    "more.csv": b"text,label\ngood row,1\none,two,three\n",
    "fewer.csv": b"text,label\ngood row,1\nlonely\n",
    "other.csv": b"body,label\na b,1\n",
    "quote.csv": b'text,label\n"never closed,1\n',
    "more.tsv": b"text\tlabel\ngood row\t1\none\ttwo\tthree\n",
    "commas.tsv": b"text,label\na,1\n",
    "lying.parquet": b"PAR1" + b"\x00" * 40 + struct.pack("<I", 2**31) + b"PAR1",
}
# What the message names besides the file.
SAID = {
    "latin.txt": "line 2", "latin.jsonl": "line 2", "latin.csv": "line 3", "more.csv": "line 3", "fewer.csv": "line 3",
    "more.tsv": "line 3", "other.csv": "body", "other.jsonl": "body", "commas.tsv": "text,label",
    "mixed.jsonl": "line 2", "cut.jsonl": "line 2", "some blank.jsonl": "line 2",
}  # fmt: skip


@pytest.fixture(autouse=True)
def bad_files(tmp_path):
    (tmp_path / "data").mkdir()


def _result(role, path, files, tmp_path, request):
    """Of the command that reads a file in this role."""
    if role == "calibration_file":
        words = ("--attention", "performer", "--features", "favor++", "--calibration_file", path)
    elif role == "preset":
        words = ("--preset", "default", "--train_file", path, "--validation_file", files / "good.txt")
    elif role == "labels":
        return train(request.getfixturevalue("bert"), path, tmp_path / "out", task="sequence_classification")
    else:
        return train(request.getfixturevalue("linear_llama"), files, tmp_path / "out", **{role: path})
    llama = request.getfixturevalue("llama")
    return convert("--model_name_or_path", llama, "--output_dir", tmp_path / "out", *words)


@pytest.mark.parametrize(
    ("name", "role"),
    [(name, "train_file") for name in BAD]
    + [("other.jsonl", "labels"), ("fewer.csv", "labels"), ("latin.txt", "validation_file")]
    + [("more.csv", "calibration_file"), ("empty.txt", "calibration_file"), ("more.csv", "preset")],
)
def test_bad_data(request, files, tmp_path, name, role):
    path = tmp_path / "data" / name
    path.write_bytes(BAD[name])
    assert_refused(_result(role, path, files, tmp_path, request), str(path), SAID.get(name, ""))
    assert_nothing_written(tmp_path, "data")


@pytest.mark.parametrize("labels", [[0.5, 0.25], [[1], [0]], [None] * 2, ["x", "x"]], ids=str)
def test_labels(request, files, tmp_path, labels):
    path = tmp_path / "data" / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": "some good text", "label": label}) + "\n" for label in labels))
    assert_refused(_result("labels", path, files, tmp_path, request), str(path), "label")
    assert_nothing_written(tmp_path, "data")


@pytest.mark.parametrize(
    ("kind", "role"),
    [(kind, "train_file") for kind in ("folder", "pipe", "device", "loop", "missing", "no type", "upper case")]
    + [("pipe", "calibration_file"), ("pipe", "config"), ("dangling", "validation_file"), ("dangling", "config")],
)
def test_what_is_not_a_data_file(request, files, tmp_path, kind, role):
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
    assert_refused(_result(role, path, files, tmp_path, request), str(path))
    assert_nothing_written(tmp_path, "data")


@pytest.mark.parametrize(
    ("role", "value"),
    [("model_name_or_path", value) for value in ("./nowhere", "nobody/nothing", "two words", "a" * 300, "")]
    + [(role, "/nowhere/model") for role in ("teacher_name_or_path", "tokenizer_name")],
)
def test_models_that_do_not_exist(linear_llama, files, tmp_path, role, value):
    result = train(linear_llama, files, tmp_path / "out", **{role: value})
    assert_refused(result, value[:40])
    assert_nothing_written(tmp_path, "data")


def test_the_files_of_a_folder_are_checked_together(linear_llama, tmp_path):
    (tmp_path / "data" / "train.tsv").write_bytes(BAD["more.tsv"])
    (tmp_path / "data" / "test.tsv").write_bytes(b"body\na b c\n")
    result = train(linear_llama, None, tmp_path / "out", dataset_name=tmp_path / "data")
    assert_refused(result, "2 problems", "train.tsv", "line 3", "test.tsv", "body")
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


CUT = _png(16, 16)[:60]


@pytest.mark.parametrize(
    ("content", "place"),
    [(_png(100_000, 100_000), "rows"), (b"", "rows"), (CUT, "rows"), (CUT, "folder")],
    ids=["bomb", "empty", "cut", "cut in a folder"],
)
def test_pictures(vit, tmp_path, content, place):
    folder = tmp_path / "data"
    for label in ("bright", "dark"):
        (folder / "train" / label).mkdir(parents=True)
        (folder / "train" / label / "1.png").write_bytes(content)
    rows = [{"image": f"train/{label}/1.png", "label": label} for label in ("bright", "dark")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (folder / "rows.jsonl", None) if place == "rows" else (None, folder)
    result = train(vit, data[0], tmp_path / "out", task="image_classification", dataset_name=data[1])
    assert_refused(result, "image")
    assert_nothing_written(tmp_path, "data")
