"""What fits into no table: places and names, other processes and users, signals, a disk or a memory that is full."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from faults import (
    assert_nothing_written,
    assert_refused,
    command,
    convert,
    copy_of,
    finetune,
    train,
    without_privileges,
    words_of,
)
from safetensors.torch import load_file, save_file

from hf_linear_attention._common.folders import only_writer
from hf_linear_attention.conversion import pipeline
from hf_linear_attention.training import checkpoints


SCRIPTS = [Path(pipeline.__file__).with_name("convert_checkpoint.py"),
           Path(checkpoints.__file__).parents[1] / "finetune.py"]  # fmt: skip
NOBODY, MODEL = 65534, "--model_name_or_path"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="capabilities are those of Linux")


@pytest.mark.parametrize(
    ("place", "command"),
    [(place, "convert") for place in ("source", "source/../source/x", ".", "link/out")]
    + [("source/out", "train"), (".", "train")],
)
def test_one_folder_inside_of_the_other(llama, files, tmp_path, place, command):
    source = copy_of(llama, tmp_path / "source")
    (tmp_path / "link").symlink_to(source)
    out = tmp_path / place
    words = ["--model_name_or_path", source, "--output_dir", out, "--overwrite"]
    result = convert(*words) if command == "convert" else train(source, files, out)
    assert_refused(result, "--output_dir")
    assert sorted(path.name for path in source.iterdir()) == sorted(path.name for path in llama.iterdir())


PLACES = ["file", "full", "under a file", "long", "longer", "NUL", "empty", "null device", "no UTF-8", "loop", "user"]


@pytest.mark.parametrize(
    ("kind", "command"), [(kind, "convert") for kind in PLACES] + [(kind, "train") for kind in ("full", "long", "NUL")]
)
def test_places_that_cannot_be_written(llama, linear_llama, files, tmp_path, kind, command):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    out = {
        "file": tmp_path / "file",
        "full": tmp_path / "full",
        "under a file": tmp_path / "file" / "out",
        "long": tmp_path / ("a" * 300),
        "longer": "a/" * 2500,
        "NUL": f"{tmp_path}/a\0b",
        "no UTF-8": os.fsdecode(os.fsencode(tmp_path) + b"/\xff"),
        "loop": tmp_path / "loop" / "out",
        "user": "~nosuchuser/x",
        "empty": "",
        "null device": "/dev/null",
    }[kind]
    model = llama if command == "convert" else linear_llama
    words = ("--model_name_or_path", model, "--output_dir", out, "--overwrite")
    result = convert(*words) if command == "convert" else train(model, files, out)
    assert_refused(result, "--output_dir")
    assert len(result[2]) < 1000
    assert_nothing_written(tmp_path, "file", "full", "loop")
    assert (tmp_path / "full" / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["LOOP", "b" * 90 + "/" + "c" * 5000])
@pytest.mark.parametrize("words", [("doctor",), ("compare", MODEL), ("convert", "--dry_run", MODEL)])
def test_models_that_no_folder_can_be(tmp_path, words, name):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    result = command(*words, tmp_path / "loop" if name == "LOOP" else name)
    assert_refused(result, "is no usable name")
    assert len(result[2]) < 1000


# Several kinds in one name: what globs, shells, formats, templates and Markdown take for their own.
NAMES = ["-with space a[1] b* c? d{x} %s {{ name }} $ `ls` <b>", "quo'te dou\"ble back\\slash ünï日本\nline\ttab",
         "x" * 200]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names(llama, linear_llama, files, tmp_path, name):
    """Unusual names of the source, the data and the result work, and the card has them as plain text."""
    source = copy_of(linear_llama, tmp_path / f"{name}-model")
    data = tmp_path / f"{name}.jsonl"
    shutil.copy(files / "good.jsonl", data)
    out = tmp_path / f"{name}-out"
    words = {"model_name_or_path": source, "train_file": data, "output_dir": out, "max_train_steps": 1}
    code, _, err = finetune("--task=causal_lm", *(f"--{option}={value}" for option, value in words.items()))
    assert code == 0, err[-900:]
    card = (out / "README.md").read_text()
    assert "<b>" not in re.sub(r"(?s)```.*?```", "", card)  # in code it is text
    assert card.count("---\n") >= 2
    assert (out / "model.safetensors").is_file()


def test_what_a_dead_process_left_is_removed_and_nothing_else(tmp_path):
    kept = [f"out.old-{'a' * 16}", "out.tmp-mine", f"outer.tmp-{'a' * 16}"]
    for name in (*kept, f"out.tmp-{'a' * 16}"):
        (tmp_path / name).mkdir()
    with only_writer(tmp_path / "out"):
        assert_nothing_written(tmp_path, *kept, ".out.lock")
    assert_nothing_written(tmp_path, *kept)


@pytest.mark.long
@pytest.mark.parametrize("command", ["convert", "train"])
def test_the_second_of_two_processes_is_refused_at_once_and_told_who_writes(
    llama, linear_llama, files, tmp_path, command, monkeypatch
):
    out = tmp_path / "deep" / "out"
    code = "import sys, time; from pathlib import Path; from hf_linear_attention._common.folders import only_writer"
    code += "\nwith only_writer(Path(sys.argv[1])): print('locked', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, out], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "locked\n"
            words = ("--model_name_or_path", llama, "--output_dir", out, "--num_features", 8)
            with monkeypatch.context() as patch:
                patch.setattr(pipeline, "load_converted", lambda *_: pytest.fail("it began"))
                result = convert(*words) if command == "convert" else train(linear_llama, files, out)
            assert_refused(result, str(out), f"process {other.pid} on ", " since 2")
            assert_nothing_written(out.parent, ".out.lock")
        finally:
            other.kill()
    assert (convert(*words) if command == "convert" else train(linear_llama, files, out))[0] == 0
    assert_nothing_written(out.parent, "out")  # what the killed process left is used again, and removed


@pytest.mark.long
def test_two_conversions_to_one_folder(llama, tmp_path, monkeypatch):
    started, load = threading.Event(), pipeline.load_converted

    def slow(*arguments):
        model = load(*arguments)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("theirs")
        started.set()
        return model

    monkeypatch.setattr(pipeline, "load_converted", slow)
    result = convert("--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--num_features", 8)
    assert_refused(result, "another process", code=1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs"]


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("part", "error"),
    [("write_model_card", KeyError("x")), ("copy_sidecars", FULL), ("training_history", KeyError("x"))],
)
def test_what_accompanies_the_model_never_costs_it(linear_llama, files, tmp_path, monkeypatch, part, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(checkpoints, part, fail)
    code, _, _ = train(linear_llama, files, tmp_path / "out")
    assert code == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "out" / "training_report.json").read_text())["runs"]


def test_a_conversion_survives_its_card(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "write_model_card", lambda *arguments, **options: {}["x"])
    code, _, err = convert("--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--num_features", 8)
    assert code == 0
    assert "the model card could not be written" in err
    assert (tmp_path / "out" / "conversion_report.json").is_file()


@pytest.mark.parametrize("option", ["train_file", "dataset_name"])
def test_other_content_of_the_same_size_is_another_run(linear_llama, files, tmp_path, option):
    (tmp_path / "data").mkdir()
    data = tmp_path / "data" / "train.jsonl"
    shutil.copy(files / "good.jsonl", data)
    words = {"task": "causal_lm", "model_name_or_path": linear_llama, "output_dir": tmp_path / "out"}
    words |= {option: data if option == "train_file" else data.parent, "checkpointing_steps": 1}
    assert finetune(*words_of(**words, max_train_steps=1))[0] == 0
    data.write_text(data.read_text().replace("quick", "quack"))
    result = finetune(*words_of(**words, max_train_steps=2, resume_from_checkpoint="latest"))
    assert_refused(result, "train_content")


def test_a_folder_with_a_test_split_is_evaluated_on_it(linear_llama, files, tmp_path):
    for split in ("train", "test"):
        (tmp_path / "data").mkdir(exist_ok=True)
        shutil.copy(files / "good.jsonl", tmp_path / "data" / f"{split}.jsonl")
    code, _, err = train(linear_llama, None, tmp_path / "out", dataset_name=tmp_path / "data")
    assert code == 0, err
    assert json.loads((tmp_path / "out" / "training_report.json").read_text())["runs"][0]["metrics"]


def test_the_files_of_a_folder_are_checked_together(linear_llama, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.tsv").write_bytes(b"text\tlabel\ngood row\t1\none\ttwo\tthree\n")
    (tmp_path / "data" / "test.tsv").write_bytes(b"body\na b c\n")
    result = train(linear_llama, None, tmp_path / "out", dataset_name=tmp_path / "data")
    assert_refused(result, "2 problems", "train.tsv", "line 3", "test.tsv", "body")
    assert_nothing_written(tmp_path, "data")


def test_what_is_missing_may_be_allowed(llama, files, tmp_path):
    source = copy_of(llama, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    code, _, err = train(source, files, tmp_path / "trained", allow_missing=True)
    assert code == 0
    assert "LOAD REPORT" not in err  # one line of our own says it


@pytest.mark.long
@pytest.mark.parametrize(("script", "number"), [(SCRIPTS[0], 2), (SCRIPTS[1], 15)], ids=["convert", "train"])
def test_a_signal_during_the_imports_is_one_line(script, number, linear_llama, files, tmp_path):
    words = ["--model_name_or_path", linear_llama, "--output_dir", tmp_path / "out"]
    words += ["--task", "causal_lm", "--train_file", files / "good.txt"] if script is SCRIPTS[1] else []
    process = subprocess.Popen([sys.executable, script, *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and "libtorch" not in maps.read_text():
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert err.decode().count("\n") == 1, err
    assert err.decode().startswith(script.name)


def test_a_closed_pipe_is_no_traceback():
    command = f"{sys.executable} {SCRIPTS[0]} --help | true"
    process = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=100)
    assert process.stderr == ""


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


@on_linux
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


@on_linux
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
