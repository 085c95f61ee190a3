"""`--softmax_layers`: listed, or chosen on the untrained student or before the last stage of a preset."""

from __future__ import annotations

import json
import re

import pytest
import torch
from checkpoints import run
from transformers import AutoModelForCausalLM

from hf_linear_attention.conversion.softmax_choice import rank_layers


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The river had risen in the night, and the lower field was a lake. " * 60, encoding="utf-8")
    return path


def report_of(folder):
    return json.loads((folder / "conversion_report.json").read_text())


def converted_layers(folder):
    return json.loads((folder / "config.json").read_text())["linear_attention"]["layers"]


def test_listed_layers_stay_softmax(llama, tmp_path):
    out = tmp_path / "out"
    assert run("--model_name_or_path", llama, "--output_dir", out, "--softmax_layers", "1")[0] == 0
    assert converted_layers(out) == [0, 2]
    assert report_of(out)["figures"]["layers converted"] == "2 of 3"


def test_the_untrained_student_is_ranked(llama, text, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    words = ("--model_name_or_path", llama, "--attention", "linear", "--feature_map", "elu1")
    code, stdout, _ = run(*words, "--output_dir", out, "--softmax_layers", "auto:1", "--calibration_file", text)
    assert code == 0
    assert run(*words, "--output_dir", whole)[0] == 0
    choice = report_of(out)["softmax_layers"]
    first, *others = choice["ranking"]
    assert choice["layers"] == [first["layer"]]
    assert all(first["gain"] > other["gain"] for other in others)
    assert converted_layers(out) == sorted(other["layer"] for other in others)
    assert re.search(rf"layer {first['layer']} .*{first['gain']:.4g}  stays softmax\n", stdout)
    assert "2 of 3" in stdout
    # independently: with a second model as teacher
    student = AutoModelForCausalLM.from_pretrained(whole)
    teacher = AutoModelForCausalLM.from_pretrained(llama)
    ids = torch.randint(5, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    for mine, other in zip(rank_layers(student, None, batches), rank_layers(student, teacher, batches), strict=True):
        assert mine.layer == other.layer
        assert mine.divergence == pytest.approx(other.divergence, rel=1e-4)  # float32


def test_with_a_preset_the_layers_are_chosen_before_the_last_stage(llama, text, tmp_path):
    out = tmp_path / "out"
    code, stdout, stderr = run(
        *("--model_name_or_path", llama, "--output_dir", out, "--preset", "default", "--train_file", text),
        *("--tokens", "2k", "--window_size", 4, "--num_features", 8, "--softmax_layers", "auto:1"),
    )
    assert code == 0, stderr
    assert stderr.index("stage 2 of 2") < stderr.index("ranking the layers")
    left = sorted({0, 1, 2} - set(report_of(out)["softmax_layers"]["layers"]))
    assert converted_layers(out) == left
    assert report_of(out)["figures"]["layers converted"] == "2 of 3"
    assert "stays softmax" in stdout
    assert "2 of 3" in stdout
    names = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert {name.split(".")[2] for name in names if "linear_attention" in name} == {str(layer) for layer in left}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["auto:1"], ["`--calibration_file`"]),
        (["auto:3", "--calibration_file", "TEXT"], ["auto:3", "K must be from 1 to 2"]),
        (["auto:x", "--calibration_file", "TEXT"], ["auto:x", "K must be from 1 to 2"]),
        (["0,7"], ["[7]", "[0, 1, 2]"]),
        (["all"], ["`--softmax_layers all`", "auto:K"]),
        (["last"], ["`--softmax_layers last`", "auto:K"]),
    ],
)
def test_refusals(llama, text, tmp_path, options, words):
    options = [text if word == "TEXT" else word for word in options]
    code, _, stderr = run("--model_name_or_path", llama, "--output_dir", tmp_path / "o", "--softmax_layers", *options)
    assert code == 2
    for word in words:
        assert word in stderr
