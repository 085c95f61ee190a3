"""A run that an earlier version left unfinished goes on with this one."""

from __future__ import annotations

import json
import shutil

import datasets
import pytest
from accelerate.state import AcceleratorState, GradientState
from checkpoints import run
from earlier import FIRST, unfinished_run

from hf_linear_attention.training import presets as preset


@pytest.fixture(autouse=True)
def fresh_accelerate(tmp_path_factory, monkeypatch):
    """accelerate keeps one state a process; the data sets' cache is not the user's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


def command(folder):
    return [
        *("--model_name_or_path", folder / "source", "--output_dir", folder / "out", "--preset", "default"),
        *("--train_file", folder / "train.txt", "--validation_file", folder / "valid.txt", "--tokens", "3k"),
        *("--checkpointing_steps", 5, "--window_size", 4, "--num_features", 8),
    ]


@pytest.fixture
def earlier_preset(tmp_path_factory, monkeypatch):
    """The preset of that time: another version of it would be another request."""
    folder = tmp_path_factory.mktemp("presets")
    shutil.copy(FIRST / "default.yaml", folder)
    monkeypatch.setattr(preset, "FOLDER", folder)


def test_an_unfinished_preset_goes_on_to_its_end(tmp_path, earlier_preset):
    out = unfinished_run(tmp_path)
    expected = json.loads((tmp_path / "expected_quality.json").read_text())
    code, _, err = run(*command(tmp_path))
    assert code == 2  # its checkpoint is in another form
    assert "checkpoint-5 was written by an earlier version" in err.splitlines()[-1]
    shutil.rmtree(tmp_path / "out.unfinished" / "trained" / "checkpoint-5")
    AcceleratorState._reset_state(reset_partial_state=True)
    code, _, err = run(*command(tmp_path))
    assert code == 0, err
    assert "resuming the run in" in err
    assert "stage 1" not in err
    assert not out.with_name("out.unfinished").exists()
    quality = json.loads((out / "conversion_report.json").read_text())["quality"]
    assert quality["teacher"] == pytest.approx(expected["teacher"], rel=1e-5)
    # 11 steps of AdamW after the checkpoint: it moves every weight by its learning rate whatever the size of the
    # gradient, so that rounding errors of gradients near 0 show; the whole training gained 0.015 nats.
    assert quality["student"] == pytest.approx(expected["student"], abs=5e-4)
    assert quality["kl"] == pytest.approx(expected["kl"], rel=2e-3)
    config = json.loads((out / "config.json").read_text())
    assert config["linear_attention"]["format_version"] == 1


def test_another_request_is_refused_by_what_differs(tmp_path):
    unfinished_run(tmp_path)
    code, _, err = run(*command(tmp_path), "--num_sinks", 2)
    assert code == 2
    assert "'num_sinks': 2" in err
