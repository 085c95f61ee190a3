"""`evaluate`, `compare`, `doctor` and `serve` on damaged folders, foreign models and impossible places."""

from __future__ import annotations

import pytest
from faults import assert_nothing_written, assert_refused, change_json, command, copy_of


MODEL = "--model_name_or_path"
REPORTS = {
    "empty": b"", "deep": b"[" * 100_000, "number": b'{"base_model": 3}', "gone": b'{"base_model": "/nowhere/x"}',
}  # fmt: skip


@pytest.mark.parametrize("content", REPORTS.values(), ids=REPORTS.keys())
def test_evaluate_with_a_damaged_report(linear_llama, files, tmp_path, content):
    model = copy_of(linear_llama, tmp_path / "model")
    (model / "conversion_report.json").write_bytes(content)
    result = command("evaluate", "--model_name_or_path", model, "--validation_file", files / "good.txt")
    assert_refused(result, "/nowhere/x" if b"nowhere" in content else "conversion_report.json")


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


@pytest.mark.parametrize("name", ["~nosuchuser/x", "LOOP", "b" * 90 + "/" + "c" * 5000])
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


@pytest.mark.parametrize("tokens", [10**9, 10**20])
def test_positions_beyond_every_memory(bert, tmp_path, tokens, monkeypatch):
    monkeypatch.setattr("hf_linear_attention.conversion.pipeline.memory_of_machine", lambda: 2**30)
    words = ("--model_name_or_path", bert, "--output_dir", tmp_path / "out", "--max_position_embeddings", tokens)
    result = command("convert", *words)
    assert_refused(result, f"--max_position_embeddings {tokens}")
    assert len(result[2]) < 400
    assert_nothing_written(tmp_path)


DAMAGE = {
    ("config.json", b"[]"), ("config.json", b"[" * 100_000), ("config.json", b"x"), ("model.safetensors", b"x"),
    ("model.safetensors", b""), ("model.safetensors", None), ("modeling_linear_attention.py", None),
    ("modeling_linear_attention.py", b""), ("modeling_linear_attention.py", b"class ("), ("tokenizer.json", b"x"),
    ("conversion_report.json", b""), ("conversion_report.json", b"[]"),
    ("conversion_report.json", b'{"quality": {"positions": 3}}'),
    ("conversion_report.json", b'{"quality": {"positions": {"length": "x"}}}'),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content"), sorted(DAMAGE, key=str), ids=lambda value: str(value)[:20])
def test_doctor(linear_llama, tmp_path, monkeypatch, name, content):
    monkeypatch.setattr("hf_linear_attention.conversion.findings.environment_findings", list)
    model = copy_of(linear_llama, tmp_path / "model")
    (model / name).write_bytes(content) if content is not None else (model / name).unlink()
    code, out, err = command("doctor", model)
    assert code == 1, err
    assert "HF_LINEAR_ATTENTION_DEBUG" not in err
    assert name in "".join(line for line in out.splitlines() if line.startswith("broken")) or name.startswith("model.")


@pytest.mark.parametrize("value", [["x"], ["os"], 3, None])
def test_serve_a_damaged_folder(linear_llama, tmp_path, value):
    model = copy_of(linear_llama, tmp_path / "model")
    if value is None:
        (model / "config.json").write_text("[]")
    else:
        change_json(model / "config.json", architectures=value)
    assert_refused(command("serve", model), str(model))


PLACES = {"a file": "file", "below a file": "file/x", "too long": "x" * 300, "NUL": "a\0b", "source": "source/out"}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_compare_where_nothing_can_be_written(llama, tmp_path, place):
    source = copy_of(llama, tmp_path / "source")
    (tmp_path / "file").write_text("mine")
    result = command("compare", "--model_name_or_path", source, "--output_dir", f"{tmp_path}/{place}")
    assert_refused(result, "--output_dir")
    assert_nothing_written(tmp_path, "file", "source")


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
