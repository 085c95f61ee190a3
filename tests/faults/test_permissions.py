"""Folders and files of other users, and those that may only be read, for processes without the privileges of root."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from faults import assert_nothing_written, assert_refused, convert, copy_of, finetune, train, without_privileges


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="capabilities are those of Linux")
NOBODY = 65534


def _train(model, data, out, **options):
    return train(model, data, out, lambda *words: without_privileges(finetune, *words), **options)


def _convert(model, out, *words):
    given = ("--model_name_or_path", model, "--output_dir", out, "--num_features", 8)
    return without_privileges(convert, *given, *words)


def _forbid(path, kind):
    """Let nobody write to a folder, or give it to another user."""
    if kind == "read-only":
        path.chmod(0o555)
    elif os.getuid() == 0:
        os.chown(path, NOBODY, NOBODY)
        path.chmod(0o700)
    else:
        pytest.skip("only root gives folders away")


@pytest.mark.parametrize(("kind", "command"), [("read-only", "convert"), ("other user", "train")])
def test_a_place_where_nothing_may_be_written(llama, linear_llama, files, tmp_path, kind, command):
    place = tmp_path / "place"
    place.mkdir()
    _forbid(place, kind)
    out = place / "out"
    result = _convert(llama, out) if command == "convert" else _train(linear_llama, files / "good.jsonl", out)
    assert_refused(result, str(place), code=1)
    place.chmod(0o700)
    assert_nothing_written(place)


@pytest.mark.parametrize(("kind", "part"), [("read-only", "."), ("other user", "deep")])
def test_a_result_of_somebody_else_is_not_replaced(llama, tmp_path, kind, part):
    out = copy_of(llama, tmp_path / "out")
    (out / "deep").mkdir()
    (out / "deep" / "theirs").write_text("theirs")
    _forbid(out / part, kind)
    assert_refused(_convert(llama, out, "--overwrite"), "--output_dir", "cannot be replaced")
    (out / part).chmod(0o700)
    assert_nothing_written(tmp_path, "out")
    assert (out / "deep" / "theirs").read_text() == "theirs"


@pytest.mark.parametrize(
    ("part", "command"),
    [(".", "convert"), ("config.json", "train"), ("model.safetensors", "convert")],
)
def test_a_source_that_may_not_be_read(llama, linear_llama, files, tmp_path, part, command):
    source = copy_of(llama if command == "convert" else linear_llama, tmp_path / "source")
    (source / part).chmod(0)
    out = tmp_path / "out"
    result = _convert(source, out) if command == "convert" else _train(source, files / "good.jsonl", out)
    source.chmod(0o700)
    assert_refused(result, str(source / part))
    assert_nothing_written(tmp_path, "source")


@pytest.mark.parametrize(("option", "is_folder"), [("train_file", False), ("validation_file", True), ("config", False)])
def test_a_file_that_may_not_be_read(linear_llama, files, tmp_path, option, is_folder):
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / ("options.yaml" if option == "config" else "rows.jsonl")
    shutil.copy(files / "good.jsonl", path)
    (folder if is_folder else path).chmod(0)
    result = _train(linear_llama, files / "good.jsonl", tmp_path / "out", **{option: path})
    folder.chmod(0o700)
    assert_refused(result, str(path))
    assert_nothing_written(tmp_path, "data")
