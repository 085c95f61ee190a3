"""`evaluate`, `compare`, `doctor` and `serve` on damaged folders, foreign models and impossible places."""

from __future__ import annotations

import pytest
from faults import assert_nothing_written, assert_refused, change_json, command, copy_of


MODEL = "--model_name_or_path"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("conversion_report.json", b'{"base_model": 3}', "conversion_report.json"),
        ("conversion_report.json", b'{"base_model": "/nowhere/x"}', "/nowhere/x"),
        ("config.json", b"[1]", "config.json"),
    ],
)
def test_evaluate_with_a_damaged_file(linear_llama, files, tmp_path, name, content, said):
    model = copy_of(linear_llama, tmp_path / "model")
    (model / name).write_bytes(content)
    result = command("evaluate", "--model_name_or_path", model, "--validation_file", files / "good.txt")
    assert_refused(result, said)


@pytest.mark.parametrize(
    ("model", "teacher", "said"),
    [
        ("linear_llama", "linear_llama", "converted itself"),
        ("linear_llama", "bert", "`bert`"),
        ("linear_llama", "vit", "`vit`"),
        ("llama", "llama", "no converted model"),
    ],
)
def test_evaluate_with_another_model(request, files, model, teacher, said):
    model, teacher = request.getfixturevalue(model), request.getfixturevalue(teacher)
    words = ["--model_name_or_path", model, "--teacher_name_or_path", teacher, "--validation_file", files / "good.txt"]
    assert_refused(command("evaluate", *words), said)


@pytest.mark.parametrize("name", ["LOOP", "b" * 90 + "/" + "c" * 5000])
@pytest.mark.parametrize("words", [("doctor",), ("compare", "--model_name_or_path"), ("convert", "--dry_run", MODEL)])
def test_models_that_no_folder_can_be(tmp_path, words, name):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    result = command(*words, tmp_path / "loop" if name == "LOOP" else name)
    assert_refused(result, "is no usable name")
    assert len(result[2]) < 1000


def test_numbers_in_place_of_texts(llama, tmp_path):
    (tmp_path / "five.jsonl").write_text('{"text": 5}\n{"text": "a b"}\n')
    source = ("--model_name_or_path", llama)
    told = "five.jsonl': `text` is 5, not a text"
    fitted = ("--attention", "performer", "--features", "favor++", "--output_dir", tmp_path / "out")
    assert_refused(command("convert", *source, *fitted, "--calibration_file", tmp_path / "five.jsonl"), told)
    assert_refused(command("compare", *source, "--train_file", tmp_path / "five.jsonl"), told)


def test_positions_beyond_every_memory(bert, tmp_path, monkeypatch):
    tokens = 10**9
    monkeypatch.setattr("hf_linear_attention.conversion.pipeline.memory_of_machine", lambda: 2**30)
    words = ("--model_name_or_path", bert, "--output_dir", tmp_path / "out", "--max_position_embeddings", tokens)
    result = command("convert", *words)
    assert_refused(result, f"--max_position_embeddings {tokens}")
    assert len(result[2]) < 400
    assert_nothing_written(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.json", b"[]"), ("modeling_linear_attention.py", None), ("modeling_linear_attention.py", b"class (")],
)
def test_doctor(linear_llama, tmp_path, monkeypatch, name, content):
    monkeypatch.setattr("hf_linear_attention.conversion.findings.environment_findings", list)
    model = copy_of(linear_llama, tmp_path / "model")
    (model / name).write_bytes(content) if content is not None else (model / name).unlink()
    code, out, err = command("doctor", model)
    assert code == 1, err
    assert "HF_LINEAR_ATTENTION_DEBUG" not in err
    assert name in "".join(line for line in out.splitlines() if line.startswith("broken"))


@pytest.mark.parametrize("value", [["x"], 3, None])
def test_serve_a_damaged_folder(linear_llama, tmp_path, value):
    model = copy_of(linear_llama, tmp_path / "model")
    if value is None:
        (model / "config.json").write_text("[]")
    else:
        change_json(model / "config.json", architectures=value)
    assert_refused(command("serve", model), str(model))


def test_compare_where_nothing_can_be_written(llama, tmp_path):
    source = copy_of(llama, tmp_path / "source")
    result = command("compare", "--model_name_or_path", source, "--output_dir", source / "out")
    assert_refused(result, "--output_dir")
    assert_nothing_written(tmp_path, "source")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mechanisms", ""], "--mechanisms"), (["--mechanisms", ","], "--mechanisms"),
        (["--mechanisms", "nosuch"], "nosuch"), (["--tokens", "1k"], "--train_file"),
        (["--train_file", "/nowhere.txt"], "/nowhere.txt"), (["stray"], "stray"),
    ],
)  # fmt: skip
def test_compare(llama, words, said):
    assert_refused(command("compare", "--model_name_or_path", llama, *words), said)


def test_compare_a_converted_model(linear_llama):
    assert_refused(command("compare", "--model_name_or_path", linear_llama), "converted already")
