"""The window of the same bytes: its size against the bytes of its state, its figures, and where there is none."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import evaluate, run, save_twin
from matrix import stock_model
from transformers import AutoConfig, AutoTokenizer

from hf_linear_attention import convert
from hf_linear_attention._common import logs
from hf_linear_attention._common.model_card import HISTORY
from hf_linear_attention.conversion import quality
from hf_linear_attention.conversion.calibration_data import data_recipe
from hf_linear_attention.conversion.figures import figures_of
from hf_linear_attention.conversion.preset_plan import CONTROL, CONVERTED, TRAINED, Training
from hf_linear_attention.conversion.quality import (
    Controls,
    HeldOutText,
    better_window,
    finite,
    language_figures,
    model_state_bytes,
    possible_controls,
    read_text,
    windows_of_same_bytes,
)
from hf_linear_attention.training import run as training_run
from hf_linear_attention.training.data.packing import StreamWindows
from hf_linear_attention.training.evaluation.recall import RecallProbe
from hf_linear_attention.training.evaluation.retention import nats_of
from hf_linear_attention.training.presets import load_preset


HYBRID = {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 8}
TOKENS = np.random.default_rng(0).integers(5, 12, 700)


def held_out(length: int = 400) -> HeldOutText:
    return HeldOutText(StreamWindows(TOKENS, 64, 1), 64, 1, 0, length)


@pytest.fixture
def teacher():
    torch.manual_seed(0)
    return stock_model("llama", "AutoModelForCausalLM")


@pytest.mark.parametrize(
    ("changes", "dtype"), [({"layers": [0]}, torch.float32), ({"window_size": 9, "num_sinks": 0}, torch.bfloat16)]
)
def test_one_more_token_would_be_more_bytes(teacher, changes, dtype) -> None:
    student = convert(teacher, **{**HYBRID, **changes})
    budget = model_state_bytes(student, dtype)
    found = windows_of_same_bytes(teacher, student, 64, dtype)
    assert [window.num_sinks for window in found] == [0, 4]
    for window in found:
        assert model_state_bytes(convert(teacher, settings=window.settings), dtype) == window.state_bytes <= budget
        larger = {**window.settings, "window_size": window.window_size + 1}
        assert model_state_bytes(convert(teacher, settings=larger), dtype) > budget
        assert window.settings["layers"] == student.config.linear_attention["layers"]
        assert window.settings["trained_length"] == 64


def test_layers_with_settings_of_their_own(teacher) -> None:
    """One window for all of them, of the bytes of all together."""
    settings = [
        {**HYBRID, "layers": [0]},
        {"mechanism": "linear", "num_features": 24, "feature_map": "exp", "layers": [1]},
    ]
    student = convert(teacher, settings=settings)
    for window in windows_of_same_bytes(teacher, student, 64):
        assert [entry["layers"] for entry in window.settings] == [[0], [1]]
        assert {entry["window_size"] for entry in window.settings} == {window.window_size}
        assert window.state_bytes <= model_state_bytes(student)


def test_the_figures_of_the_control_are_those_of_the_converted_teacher(teacher) -> None:
    student, text = convert(teacher, **HYBRID), held_out()
    controls = possible_controls(teacher, student, text)
    figures = language_figures(teacher, student, text, controls)
    by_size = {
        (w.window_size, w.num_sinks): nats_of(convert(teacher, settings=w.settings), text.batches())
        for w in controls.windows
    }
    best = min(by_size, key=lambda size: by_size[size].mean())
    control = figures["control"]
    assert (control["window_size"], control["num_sinks"]) == best
    assert figures["same_bytes"] == pytest.approx(by_size[best].mean().item())
    closed = (figures["same_bytes"] - figures["student"]) / (figures["same_bytes"] - figures["teacher"])
    assert figures["closed"] is None or figures["closed"] == pytest.approx(closed)
    difference = figures["student_minus_same_bytes"]
    assert difference["mean"] == pytest.approx(figures["student"] - figures["same_bytes"])
    assert figures["targets"] == len(TOKENS)
    assert control["nats"] == figures["same_bytes"] <= control["others"][0]["nats"]
    positions = figures["positions"]
    assert (positions["length"], positions["ended_by"], positions["windows"]) == (400, "`--max_eval_length`", 1)
    assert [bucket["to"] for bucket in positions["buckets"]] == [8, 16, 32, 64, 128, 256, 400]
    # inside its window a query sees all that the teacher sees
    assert positions["buckets"][0]["same_bytes"] == pytest.approx(positions["buckets"][0]["teacher"], abs=1e-5)
    assert positions["buckets"][0]["student_minus_window_alone"]["standard_error"] >= 0
    probe = RecallProbe(text.examples, 64, 64, 1)
    for name, model in (("recall_teacher", teacher), ("recall", student)):
        assert figures[name] == pytest.approx(probe(model, nullcontext)["eval_recall"])


@pytest.mark.parametrize(("ran", "expected"), [([{}, {}], None), ([{"max_length": 16}, {}], 16)])
def test_the_window_is_healed_on_rows_of_the_students_length(ran, expected, tmp_path, monkeypatch):
    """Which are shorter than asked for where there was no memory for them."""
    training = Training(load_preset("default"), {"task": "causal_lm"}, tmp_path / "out")
    (training.work / TRAINED).mkdir(parents=True)
    (training.work / TRAINED / HISTORY).write_text(json.dumps({"runs": [{"training": options} for options in ran]}))
    (training.work / CONTROL / CONVERTED).mkdir(parents=True)
    found = []
    monkeypatch.setattr(quality, "run_stages", lambda preset, given, run: found.append(given.get("max_length")))
    quality.heal_control(None, training, None, None)
    assert found == [expected]


def test_the_healed_column_is_that_of_the_model_given(teacher) -> None:
    student, text = convert(teacher, **HYBRID), held_out()
    controls = possible_controls(teacher, student, text)
    window, _ = better_window(teacher, controls.windows, text.batches())
    healed = convert(teacher, settings=window.settings)
    with torch.no_grad():
        healed.lm_head.weight *= 1.5
    figures = language_figures(teacher, student, text, replace(controls, healed=healed))
    assert figures["healed"] == pytest.approx(nats_of(healed, text.batches()).mean().item())
    assert figures["healed"] != pytest.approx(figures["same_bytes"], abs=1e-3)
    assert all({"healed", "student_minus_healed"} <= bucket.keys() for bucket in figures["positions"]["buckets"])
    table = figures_of({"validation_file": "a.txt", "max_tokens": 1, **finite(figures)}).by_position
    row, last = table.rows[-1], figures["positions"]["buckets"][-1]
    difference = last["student_minus_same_bytes"]
    gain = row[table.header.index("less than the same bytes")]
    assert row[:3:2] == ["positions 256 to 399", f"{last['teacher']:.4f}"]
    assert gain == f"{-difference['mean']:.3f} ± {difference['standard_error']:.3f}"


def test_a_text_of_less_than_four_windows_has_no_control(teacher) -> None:
    text = held_out()
    student = convert(teacher, **{**HYBRID, "window_size": 120})
    controls = possible_controls(teacher, student, text)
    assert controls.windows == []
    assert "the text is read 400 tokens at a time: less than 4 windows" in controls.left_out


def test_a_window_as_long_as_the_texts_inside_is_only_compared_beyond(teacher) -> None:
    """Inside it would be the teacher itself."""
    student = convert(teacher, **{**HYBRID, "window_size": 16})
    for window in possible_controls(teacher, student, held_out()).windows:
        length = window.window_size + window.num_sinks  # of a window with sinks these count, too
        text = replace(held_out(), examples=StreamWindows(TOKENS, length, 1), max_length=length)
        figures = language_figures(teacher, student, text, Controls(windows=[window]))
        assert "same_bytes" not in figures
        assert "same_bytes" in figures["positions"]["buckets"][-1]


def test_a_model_without_a_converted_layer_has_no_control(teacher) -> None:
    student = convert(teacher, mechanism="linear", layers="none")
    controls = possible_controls(teacher, student, held_out())
    assert "no state" in controls.left_out


@pytest.fixture
def converted(llama, linear_llama, tmp_path):
    shutil.copytree(linear_llama, tmp_path / "out")
    (tmp_path / "valid.txt").write_text("a word and another " * 80)
    return ["--model_name_or_path", llama, "--output_dir", tmp_path / "out", "--validation_file"]


def test_evaluate_without_controls(converted, tmp_path, monkeypatch) -> None:
    bars = set()
    monkeypatch.setattr(logs, "tqdm", lambda parts, desc, **_: bars.add(desc) or parts)
    code, _, err = evaluate(*converted, tmp_path / "valid.txt", "--controls", "none", "--max_eval_length", 90)
    assert code == 0, err
    quality = json.loads((tmp_path / "out" / "conversion_report.json").read_text())["quality"]
    assert quality["control"] == {"left_out": "`--controls none` was given"}
    assert quality["positions"]["length"] == 90
    assert bars == {"measuring", "timing"}
    assert "`--controls none` was given" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--controls", "healed"], "this command trains nothing"),
        (["--max_eval_length", 3], "it must be 16 or more"),
        (["--train_file", "a.txt"], "`--train_file` is not an option any more; leave it out"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(converted, tmp_path, more, said) -> None:
    code, _, err = evaluate(*converted, tmp_path / "valid.txt", *more)
    assert code == 2
    assert said in err


def test_controls_of_other_models_are_refused(bert, tmp_path) -> None:
    save_twin(tmp_path / "bert", "bert", "AutoModel")
    (tmp_path / "valid.txt").write_text("a word and another " * 80)
    where = ("--model_name_or_path", tmp_path / "bert", "--output_dir", tmp_path / "out")
    assert run(*where, "--layers", "none")[0] == 0
    code, _, err = evaluate(*where, "--validation_file", tmp_path / "valid.txt", "--controls", "none")
    assert code == 2
    assert "`--controls` is only for causal_lm, but the task of this model is" in err


@pytest.mark.parametrize("has_bos", [True, False])
def test_windows_of_figures_begin_as_the_tokenizer_begins_texts(llama, tmp_path, has_bos, monkeypatch):
    """A BOS token that it has, but puts nowhere, is no beginning."""
    folder, text = tmp_path / "llama", tmp_path / "text.txt"
    shutil.copytree(llama, folder)
    if not has_bos:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        (folder / "tokenizer.json").write_text(json.dumps({**content, "post_processor": None}), encoding="utf-8")
    text.write_text("Some words of a text. " * 40, encoding="utf-8")
    recipe = data_recipe(str(folder), "causal_lm", validation_file=str(text), max_eval_tokens=200)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.bos_token_id == 1
    found = read_text(recipe, 64)
    assert found.bos_token_id == (1 if has_bos else None)
    asked = []
    monkeypatch.setattr(training_run, "RecallProbe", lambda *given: asked.append(given))
    training_run.recall_probe(recipe, tokenizer, AutoConfig.from_pretrained(folder), found.examples)
    assert asked[0][3] == found.bos_token_id
