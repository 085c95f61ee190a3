"""`--controls healed`: the window of the same bytes is trained as the student is, and goes on after a kill."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from pydoc_data.topics import topics

import processes
import pytest
from checkpoints import files, run

from hf_linear_attention.conversion import quality
from hf_linear_attention.training.presets import Preset, Stage, fit_to, load_preset


@pytest.fixture(scope="session")
def words(llama, tmp_path_factory) -> list[object]:
    """The command, without its output folder."""
    folder, parts = tmp_path_factory.mktemp("texts"), [topics[name] for name in sorted(topics)]
    (folder / "train.txt").write_text("\n\n".join(parts[:12]), encoding="utf-8")
    (folder / "valid.txt").write_text(parts[12][:3000], encoding="utf-8")
    return [
        *("--model_name_or_path", llama, "--preset", "default", "--train_file", folder / "train.txt"),
        *("--validation_file", folder / "valid.txt", "--tokens", "2k", "--checkpointing_steps", 5),
        *("--window_size", 4, "--num_features", 8, "--controls", "healed"),
    ]


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("trained") / "out"


@pytest.fixture
def whole(trained, words) -> Path:
    """The result of the uninterrupted command; tests must not write into it."""
    if not trained.exists():
        code, _, err = run(*words, "--output_dir", trained)
        assert code == 0, err
    return trained


def quality_of(folder: Path) -> dict:
    """The figures of the report that do not depend on the clock."""
    quality = json.loads((folder / "conversion_report.json").read_text())["quality"]
    del quality["speed"]
    return quality


def test_it_has_the_tokens_of_all_stages_and_a_column(whole):
    quality, card = quality_of(whole), (whole / "README.md").read_text()
    control = quality["control"]
    trained_tokens = sum(
        entry["training"]["tokens"] for entry in json.loads((whole / "training_report.json").read_text())["runs"]
    )
    assert control["healed_tokens"] == pytest.approx(trained_tokens, abs=2 * 2 * 48)  # whole steps
    assert control["state_bytes"] <= json.loads((whole / "conversion_report.json").read_text())["state_bytes"]
    assert quality["healed"] != pytest.approx(quality["same_bytes"], abs=1e-6)
    assert f"| {quality['healed']:.4f} |" in card
    assert "the same, healed" in card
    assert not [name for name in files(whole) if "control" in name]
    assert files(whole.parent) == [f"out/{name}" for name in files(whole)]


def test_killed_in_the_training_of_the_control_it_goes_on_there(whole, words, tmp_path):
    out, work = tmp_path / "out", tmp_path / "out.unfinished"
    command = [str(word) for word in [*words, "--output_dir", out]]
    (process,) = processes.start(processes.convert, tmp_path / "cache", command, stderr=tmp_path / "stderr")
    while process.is_alive() and not list((work / "control" / "trained").glob("checkpoint-*")):
        time.sleep(0.002)
    process.kill()
    assert processes.finish([process]) == [-signal.SIGKILL], (tmp_path / "stderr-0").read_text()
    before = (work / "control" / "converted" / "model.safetensors").stat().st_mtime_ns
    assert (work / "trained" / "model.safetensors").is_file()
    made = []
    save = quality.save_window
    quality.save_window = lambda *arguments: made.append(arguments) or save(*arguments)
    try:
        code, _, err = run(*command)
    finally:
        quality.save_window = save
    assert code == 0, err
    assert not made, before
    assert "stage 1 of 2" not in err  # the student is finished
    assert "stage 2 of 2" not in err
    assert "stage 1 of 1, distil" in err
    assert "resuming from" in err
    assert quality_of(out) == quality_of(whole)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_text_too_short_for_a_control_heals_none(words, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("only a few words are here for a control to be measured on", encoding="utf-8")
    command = [short if isinstance(word, Path) and word.name == "valid.txt" else word for word in words]
    code, _, err = run(*command, "--output_dir", tmp_path / "out")
    assert code == 0, err
    assert "no window of the same bytes is healed: a window of the same bytes has" in err
    quality = quality_of(tmp_path / "out")
    assert "left_out" in quality["control"]
    assert "healed" not in quality


def test_the_dry_run_says_so_and_held_out_text_is_needed(words, tmp_path):
    code, text, err = run(*words, "--output_dir", tmp_path / "out", "--dry_run")
    assert code == 0, err
    assert "control     a window of the same bytes, trained on 2,000 tokens too" in text
    at = words.index("--validation_file")
    code, _, err = run(*words[:at], *words[at + 2 :], "--output_dir", tmp_path / "out")
    assert code == 2
    assert "`--controls healed` needs `--validation_file`" in err


def test_stages_that_can_train_nothing_give_their_tokens_to_the_others(llama):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama)  # no mechanism at all
    stages = [
        Stage("transfer", 0.5, {"attention_transfer_weight": 1.0, "trainable": "mechanism"}),
        Stage("gates", 0.3, {"logits_kl_weight": 1.0, "trainable": "mechanism"}),
        Stage("distil", 0.1, {"logits_kl_weight": 1.0}),
        Stage("finetune", 0.1, {"task_loss_weight": 1.0}),
    ]
    preset = Preset("p", 1, "", 1, {}, {"causal_lm": stages})
    left = fit_to(preset, model).stages["causal_lm"]
    assert [(stage.name, stage.share) for stage in left] == [("distil", 0.5), ("finetune", 0.5)]
    for name in ("default", "linear", "gated_delta", "performer"):
        assert sum(stage.share for stage in fit_to(load_preset(name), model).stages["causal_lm"]) == pytest.approx(1)
