"""Folders and names: where the result goes, what is left of a killed run, and what other people wrote into a name."""

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
from faults import assert_nothing_written, assert_refused, convert, copy_of, finetune, train, words_of

from hf_linear_attention._common import folders
from hf_linear_attention._common.folders import staging
from hf_linear_attention.conversion import pipeline
from hf_linear_attention.training import checkpoints


SCRIPTS = [Path(pipeline.__file__).with_name("convert_checkpoint.py"),
           Path(checkpoints.__file__).parents[1] / "finetune.py"]  # fmt: skip


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
    result = convert("--model_name_or_path", model, "--output_dir", out) if command == "convert" else train(
        model, files, out)  # fmt: skip
    assert_refused(result, "--output_dir")
    assert len(result[2]) < 1000
    assert_nothing_written(tmp_path, "file", "full", "loop")
    assert (tmp_path / "full" / "mine").read_text() == "mine"


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


def test_what_a_dead_process_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path):
    dead, alive = (tmp_path / f"out.tmp-{letter * 16}" for letter in "ab")
    other = tmp_path / "out.tmp-mine"
    for folder in (dead, alive, other):
        folder.mkdir()
    with folders._held(alive):
        for folder in (dead, alive, other):
            os.utime(folder, (0, 0))
        with staging(tmp_path / "out") as folder:
            (folder / "x").write_text("x")
    assert_nothing_written(tmp_path, "out", alive.name, other.name)


@pytest.mark.parametrize("command", ["convert", "train"])
def test_the_second_of_two_processes_is_refused_at_once_and_told_who_writes(
    llama, linear_llama, files, tmp_path, command, monkeypatch
):
    out = tmp_path / "deep" / "out"
    code = "import sys, time; from pathlib import Path; from hf_linear_attention._common.output_lock import only_writer"
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


@pytest.mark.parametrize(
    ("name", "content"),
    [("training_report.json", b"[]"), ("training_report.json", b'{"runs": [{}]}'),
     ("conversion_report.json", b'{"base_model": "x", "figures": []}')],
)  # fmt: skip
def test_a_bad_report_is_refused_before_the_first_step(linear_llama, files, tmp_path, name, content):
    source = copy_of(linear_llama, tmp_path / "source")
    (source / name).write_bytes(content)
    assert_refused(train(source, files, tmp_path / "out"), name)
    assert_nothing_written(tmp_path, "source")


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
    command = f"{sys.executable} {SCRIPTS[0]} --list_architectures | true"
    process = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=100)
    assert process.stderr == ""


@pytest.mark.parametrize("content", ["[]", None])
def test_a_damaged_request_of_an_unfinished_run(llama, files, tmp_path, content):
    work = tmp_path / "out.unfinished"
    work.mkdir()
    if content is not None:
        (work / "request.json").write_text(content)
    words = ["--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--preset", "default"]
    assert_refused(convert(*words, "--train_file", files / "good.jsonl"), str(work))
    assert_nothing_written(tmp_path, "out.unfinished")


def test_what_does_not_fit_into_memory_is_said(linear_llama, files, tmp_path, monkeypatch):
    def load(*arguments):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr("hf_linear_attention.training.run.load_student", load)
    assert_refused(train(linear_llama, files, tmp_path / "out"), "not enough memory", code=1)
    assert_nothing_written(tmp_path)
