"""`--preset`: conversion, all stages, the healed control and the figures in one command, which goes on after a kill.

`evaluate` measures the same.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
import time
from pathlib import Path
from pydoc_data.topics import topics

import processes
import pytest
import torch
from checkpoints import evaluate, files, run, save_twin
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.conversion import preset_run, quality
from hf_linear_attention.conversion.arguments import parse, parse_tokens
from hf_linear_attention.training.presets import Preset, Stage, fit_to, load_preset


# Shorter than the 48 tokens that the twins read, so that there is something for the linear part to do.
WINDOW = ("--window_size", 4, "--num_exact_keys", 4, "--num_features", 8)
HEALED = ("--controls", "healed")


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """train.txt and valid.txt of Python's documentation."""
    folder = tmp_path_factory.mktemp("texts")
    parts = [topics[name] for name in sorted(topics)]
    (folder / "train.txt").write_text("\n\n".join(parts[:12]), encoding="utf-8")
    (folder / "valid.txt").write_text(parts[12][:3000], encoding="utf-8")
    return folder


@pytest.fixture
def words(llama, texts) -> list[object]:
    """The command, without its output folder."""
    return [
        *("--model_name_or_path", llama, "--preset", "default", "--train_file", texts / "train.txt"),
        *("--validation_file", texts / "valid.txt", "--tokens", "2k", "--checkpointing_steps", 5, *WINDOW),
    ]


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> dict[str, Path]:
    """Filled by the first test that needs it."""
    return {"folder": tmp_path_factory.mktemp("trained") / "out"}


@pytest.fixture
def whole(trained, words) -> Path:
    """The result of the uninterrupted command; tests must not write into it."""
    folder = trained["folder"]
    if not folder.exists():
        code, trained["stdout"], trained["stderr"] = run(*words, *HEALED, "--output_dir", folder)
        assert code == 0, trained["stderr"]
    return folder


def report_of(folder: Path) -> dict:
    return json.loads((folder / "conversion_report.json").read_text())


def test_it_converts_trains_and_measures(whole, trained, llama):
    assert files(whole.parent) == [f"out/{name}" for name in files(whole)]  # nothing unfinished beside it
    assert not [name for name in files(whole) if "checkpoint" in name.split("/")[0] or "stages" in name]
    assert not [name for name in files(whole) if "control" in name]
    for said in ("stage 1 of 2, transfer", "stage 2 of 2, distil", "measuring"):
        assert said in trained["stderr"]
    runs = json.loads((whole / "training_report.json").read_text())["runs"]
    assert [entry["training"]["stage"] for entry in runs] == ["transfer", "distil"]
    assert sum(entry["training"]["tokens"] for entry in runs) == pytest.approx(2000, abs=2 * 2 * 48)  # whole steps
    quality, card = report_of(whole)["quality"], (whole / "README.md").read_text()
    # the same text by the evaluation inside training, which is other code
    assert quality["student"] == pytest.approx(runs[-1]["metrics"]["eval_nats_per_token"], rel=1e-6)
    assert quality["student"] != pytest.approx(runs[0]["metrics"]["eval_nats_per_token"], rel=1e-6)
    assert {"window_alone", "without_far", "agreement", "kl", "gap"} <= quality.keys()
    for text in (f"| nats per token, the original | {quality['teacher']:.4g} |", "| preset | default |"):
        assert text in card
    assert ".unfinished" not in card + trained["stdout"]
    assert re.search(rf"KL\(original, this model\), nats per token +{quality['kl']:.4g}\n", trained["stdout"])
    settings = json.loads((whole / "config.json").read_text())["linear_attention"]
    assert (settings["mechanism"], settings["window_size"], settings["num_sinks"]) == ("hybrid", 4, 4)
    assert settings["decay"] == "learned"
    control = quality["control"]  # the window of the same bytes, trained on as many tokens
    assert control["healed_tokens"] == pytest.approx(2000, abs=2 * 2 * 48)
    assert control["state_bytes"] <= report_of(whole)["state_bytes"]
    assert quality["healed"] != pytest.approx(quality["same_bytes"], abs=1e-6)
    assert f"| {quality['healed']:.4f} |" in card
    assert "the same, healed" in card
    report, page = report_of(whole), (whole / "report.html").read_text(encoding="utf-8")
    assert f"--model_name_or_path {llama.name}" in page  # to repeat it, without the folders of this disk
    assert str(llama.parent) not in page
    before, after = (figures["heads"]["layers"] for figures in (report["checks"], report["quality"]))
    assert [layer["layer"] for layer in before] == [layer["layer"] for layer in after] == [0, 1, 2]
    assert before != after
    assert all(entry["per_second"] > 0 for entry in runs)
    # each stage says what it gained: the second one begins with the figures of the first
    begins = [entry["before"]["eval_nats_per_token"] for entry in runs]
    assert begins[1] == pytest.approx(runs[0]["metrics"]["eval_nats_per_token"], rel=1e-6) != begins[0]
    for begin, entry in zip(begins, runs, strict=True):
        figures = f"eval_nats_per_token {entry['metrics']['eval_nats_per_token']:.4g} ({begin:.4g} before)"
        assert figures in trained["stdout"]


@pytest.mark.long
def test_two_processes_train_and_the_first_does_the_rest(words, tmp_path):
    """Started as by torchrun. What they train is compared in tests/training/distributed/test_sharding.py."""
    out, store = tmp_path / "out", torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [*words, *HEALED, "--output_dir", out]
    arguments = (processes.convert, store.port, tmp_path / "cache", command)
    group = processes.start(processes.launched, *arguments, ranks=2, stderr=tmp_path / "stderr")
    assert processes.finish(group) == [0, 0], (tmp_path / "stderr-0").read_text()[-3000:]
    assert not (tmp_path / "out.unfinished").exists()
    said = [(tmp_path / f"stderr-{rank}").read_text() for rank in (0, 1)]
    assert ["stage 2 of 2, distil" in text for text in said] == [True, False]
    runs = json.loads((out / "training_report.json").read_text())["runs"]
    found = [(entry["training"]["stage"], entry["training"]["processes"]) for entry in runs]
    assert found == [("transfer", 2), ("distil", 2)]
    assert report_of(out)["quality"]["healed"] > 0


def kill_at(place: str, command: list[str], tmp_path: Path) -> None:
    """Run the command in another process until there is a checkpoint in this folder of its work."""
    (process,) = processes.start(processes.convert, tmp_path / "cache", command, stderr=tmp_path / "stderr")
    while process.is_alive() and not list((tmp_path / "out.unfinished" / place).glob("checkpoint-*")):
        time.sleep(0.02)
    process.kill()
    assert processes.finish([process]) == [-signal.SIGKILL], (tmp_path / "stderr-0").read_text()
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_run_that_is_killed_while_scores_are_fitted_has_the_same_result(llama, texts, tmp_path):
    """The fit starts again, and nothing is left of the first one."""
    words = ["--model_name_or_path", llama, "--calibration_file", texts / "train.txt", "--no_verify"]
    command = [str(word) for word in [*words, "--output_dir", tmp_path / "out"]]
    (process,) = processes.start(processes.convert, tmp_path / "cache", command, stderr=tmp_path / "stderr")
    said = tmp_path / "stderr-0"
    while process.is_alive() and not (said.exists() and "calibrating on" in said.read_text()):
        time.sleep(0.02)
    process.kill()
    assert processes.finish([process]) == [-signal.SIGKILL], said.read_text()
    assert not (tmp_path / "out").exists()
    found = []
    for folder in (tmp_path / "out", tmp_path / "other"):
        code, _, err = run(*words, "--output_dir", folder)
        assert code == 0, err
        found.append((folder / "model.safetensors").read_bytes())
    assert found[0] == found[1]
    assert {path.name for path in tmp_path.iterdir()} - {"cache"} == {"out", "other", "stderr-0"}


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_result(whole, words, tmp_path, monkeypatch):
    out, made = tmp_path / "out", []
    command = [str(word) for word in [*words, *HEALED, "--output_dir", out]]
    kill_at("trained", command, tmp_path)  # in the second stage
    kill_at("control/trained", command, tmp_path)
    said = (tmp_path / "stderr-0").read_text()
    assert "resuming the run in" in said
    assert "loading" not in said  # converted already
    assert "stage 1 of 2" not in said
    assert "resuming from" in said
    assert (tmp_path / "out.unfinished" / "trained" / "model.safetensors").is_file()
    save = quality.save_window
    monkeypatch.setattr(quality, "save_window", lambda *arguments: made.append(arguments) or save(*arguments))
    code, _, err = run(*command)
    assert code == 0, err
    assert not made
    assert "stage 2 of 2" not in err  # the student is finished
    assert "stage 1 of 1, distil" in err
    assert "resuming from" in err
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    mine, theirs = (report_of(folder)["quality"] for folder in (out, whole))
    assert mine.keys() == theirs.keys()
    assert all(mine[name] == theirs[name] for name in mine if name != "speed")  # what was timed is never equal
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out"]


@pytest.mark.long
def test_an_interruption_keeps_what_was_done_for_this_request_alone(words, tmp_path, monkeypatch):
    out, work = tmp_path / "out", tmp_path / "out.unfinished"

    def interrupt(conversion, training):
        raise KeyboardInterrupt

    monkeypatch.setattr(preset_run, "_train", interrupt)
    for said in ("loading", "resuming the run in"):  # what is converted is not converted again
        code, _, err = run(*words, "--output_dir", out)
        assert code == 130
        assert said in err
        assert "the same command resumes the run" in err
        assert (work / "converted" / "config.json").is_file()
    before = (work / "converted" / "model.safetensors").stat().st_mtime_ns
    code, _, err = run(*words, "--output_dir", out, "--tokens", "7k", "--num_features", 16)
    assert code == 2
    for said in ("tokens: 2000 -> 7000", "'num_features': 16", "`--overwrite` to start over"):
        assert said in err
    assert (work / "converted" / "model.safetensors").stat().st_mtime_ns == before
    assert run(*words, "--output_dir", out, "--tokens", "7k", "--overwrite")[0] == 130
    assert json.loads((work / "request.json").read_text())["tokens"] == 7000
    assert (work / "converted" / "model.safetensors").stat().st_mtime_ns != before


def test_a_folder_of_the_same_name_is_not_touched(words, tmp_path):
    precious = tmp_path / "out.unfinished" / "symphony.txt"
    precious.parent.mkdir()
    precious.write_text("8")
    code, _, err = run(*words, "--output_dir", tmp_path / "out", "--overwrite")
    assert code == 2
    assert "exists and is not from an unfinished run" in err
    assert files(tmp_path) == ["out.unfinished/symphony.txt"]


def test_the_dtype_is_kept_and_without_held_out_text_there_are_no_figures(texts, tmp_path):
    save_twin(tmp_path / "llama", "llama", dtype=torch.bfloat16)
    code, text, err = run(
        *("--model_name_or_path", tmp_path / "llama", "--output_dir", tmp_path / "out", "--preset", "default"),
        *("--train_file", texts / "train.txt", "--tokens", 400, *WINDOW),
    )
    assert code == 0, err
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert not torch.equal(
        weights["lm_head.weight"], load_file(tmp_path / "llama" / "model.safetensors")["lm_head.weight"]
    )
    assert "There are no figures after training; give a `--validation_file`" in text
    assert report_of(tmp_path / "out")["quality"] is None


def test_evaluate_gives_the_same_figures(whole, llama, texts, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    weights = (out / "model.safetensors").read_bytes()
    report = report_of(out)
    (out / "README.md").unlink()
    command = ("--model_name_or_path", llama, "--output_dir", out, "--validation_file", texts / "valid.txt")
    code, text, err = evaluate(*command)
    assert code == 0, err
    again, card = report_of(out), (out / "README.md").read_text()
    equal = {"teacher", "student", "same_bytes", "kl", "recall", "heads"}
    assert all(again["quality"][name] == report["quality"][name] for name in equal)
    assert again["quality"]["speed"]["model"].keys() == {"reading", "writing"}
    assert {**again, "quality": None} == {**report, "quality": None}
    for said in (text, card):
        assert re.search(rf"nats per token, the original[ |]+{report['quality']['teacher']:.4g}", said)
        assert "window of the same bytes" in said
    assert (out / "model.safetensors").read_bytes() == weights
    assert evaluate(*command, "--max_eval_tokens", 60)[0] == 0
    assert report_of(out)["quality"]["teacher"] != report["quality"]["teacher"]


@pytest.fixture
def pairs(tmp_path) -> Path:
    """Scored as the numbers of common words, which embeddings of random weights have something to do with."""
    rows = [("a cat sat there", "a cat sat here", 3), ("a cat sat there", "nobody knows", 0), ("one", "one", 5)]
    lines = [json.dumps(dict(zip(("sentence1", "sentence2", "score"), row))) for row in rows]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    return tmp_path / "pairs.jsonl"


def test_evaluate_correlates_with_the_scores_of_pairs(texts, pairs, tmp_path):
    save_twin(tmp_path / "bert", "bert", "AutoModel")
    where = ("--model_name_or_path", tmp_path / "bert", "--output_dir", tmp_path / "out")
    assert run(*where, "--layers", "none")[0] == 0
    command = [*where, "--validation_file", texts / "valid.txt", "--pairs_file", pairs]
    code, text, err = evaluate(*command)
    assert code == 0, err
    quality = report_of(tmp_path / "out")["quality"]
    assert quality["spearman"] == quality["spearman_teacher"] == pytest.approx(1)
    assert quality["cosine"] == pytest.approx(1, abs=1e-5)  # float32 rounding of a norm
    card, page = ((tmp_path / "out" / name).read_text() for name in ("README.md", "report.html"))
    assert all("correlation with the pairs" in said for said in (text, card, page))
    code, _, err = evaluate(*command, "--retrieval_file", pairs)
    assert (code, err.count("\n")) == (2, 1)
    assert "`--retrieval_file` is not an option any more; sentence-transformers evaluates" in err


def test_pairs_that_cannot_be_used_are_refused_before_training(words, llama, bert, texts, pairs, tmp_path):
    code, _, err = run(*words, "--output_dir", tmp_path / "out", "--pairs_file", pairs)
    assert code == 2
    assert "`--pairs_file` is only for embedding, but the task" in err
    save_twin(tmp_path / "bert", "bert", "AutoModel")
    (tmp_path / "other.jsonl").write_text('{"text": "a"}')
    command = ["--model_name_or_path", tmp_path / "bert", *words[2:-4], "--output_dir", tmp_path / "out"]
    code, _, err = run(*command, "--pairs_file", tmp_path / "other.jsonl")
    assert code == 2
    assert "`sentence1` is not a column of" in err
    assert not (tmp_path / "out.unfinished").exists()


def test_a_dry_run_prints_the_stages(words, tmp_path):
    code, text, err = run(*words, *HEALED, "--output_dir", tmp_path / "out", "--dry_run")
    assert code == 0, err
    cost = r"about \d+ (seconds|minutes)"
    size = "0.6 GB in float32"
    assert re.search(rf"stage 1 of 2  transfer: 1,000 tokens, {cost} and {size}; attention_transfer_weight=1.0", text)
    assert re.search(rf"stage 2 of 2  distil: 1,000 tokens, {cost} and {size}; logits_kl_weight=1.0", text)
    assert "control     a window of the same bytes, trained on 2,000 tokens too" in text
    assert not list(tmp_path.iterdir())
    assert run(*words, "--dry_run")[0] == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--preset", "best"], ["`--preset best`", "default"]),
        (["--tokens", "many"], ["`--tokens many`", "2000000, 500k or 2M"]),
        (["--train_file", "absent.txt"], ["`--train_file absent.txt`", "no such file"]),
        (["--validation_file", "absent.pdf"], ["`--validation_file absent.pdf`", "*.txt"]),
        (["--layers", "none"], ["but `--layers` selects none"]),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_loaded(words, tmp_path, more, said):
    code, out, err = run(*words, "--output_dir", tmp_path / "out", *more)
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    assert all(part in err for part in said), err
    assert not list(tmp_path.iterdir())


def test_what_is_missing_or_unused_is_said(llama, linear_llama, texts, tmp_path):
    source, out, valid = ("--model_name_or_path", llama), ("--output_dir", tmp_path / "o"), texts / "valid.txt"
    for command, said in (
        ((*source, *out, "--preset", "default"), "give a `--train_file`"),
        ((*source, "--preset", "default", "--train_file", valid), "name the folder to write, or give `--dry_run`"),
        ((*source, *out, "--tokens", "2M"), "`--tokens 2M` needs `--preset`"),
        ((*source, *out, *HEALED), "`--controls healed` needs `--validation_file`"),
        ((*source, *out, "--validation_file", valid), f"`--validation_file {valid}` needs `--preset`"),
    ):
        code, _, err = run(*command)
        assert code == 2
        assert said in err


def test_a_head_without_stages_is_refused_by_name(bert, texts, tmp_path, monkeypatch):
    save_twin(tmp_path / "sentences", "bert", "AutoModelForNextSentencePrediction")
    more = ("--output_dir", tmp_path / "out", "--preset", "default", "--train_file", texts / "train.txt")
    code, _, err = run("--model_name_or_path", tmp_path / "sentences", *more)
    assert code == 2
    assert "but not for BertForNextSentencePrediction (there is no recipe to train it)" in err
    causal = {"causal_lm": load_preset("default").stages["causal_lm"]}
    only_causal = dataclasses.replace(load_preset("default"), stages=causal)
    monkeypatch.setattr("hf_linear_attention.conversion.preset_plan.load_preset", lambda name: only_causal)
    code, _, err = run("--model_name_or_path", bert, *more)
    assert code == 2
    assert "but not for BertForMaskedLM (its task is masked_lm)" in err


def test_the_command_line_wins_over_the_settings_of_the_preset():
    preset = {"mechanism": "hybrid", "window_size": 64, "num_sinks": 4}
    words = ["--model_name_or_path", "x"]
    assert parse(words).settings_over(preset) == {**preset, "layers": "all"}
    given = parse([*words, "--window_size", "16", "--layers", "0,1"]).settings_over(preset)
    assert given == {**preset, "window_size": 16, "layers": [0, 1]}
    given = parse([*words, "--attention", "hybrid", "--num_sinks", "0"]).settings_over(preset)
    assert given == {**preset, "num_sinks": 0, "layers": "all"}
    assert parse([*words, "--attention", "linear"]).settings_over(preset) == {"mechanism": "linear", "layers": "all"}


def test_stages_that_can_train_nothing_give_their_tokens_to_the_others(llama):
    model = AutoModelForCausalLM.from_pretrained(llama)  # no mechanism at all
    stages = [
        Stage("transfer", 0.5, {"attention_transfer_weight": 1.0, "trainable": "mechanism"}),
        Stage("gates", 0.3, {"logits_kl_weight": 1.0, "trainable": "mechanism"}),
        Stage("distil", 0.1, {"logits_kl_weight": 1.0}),
        Stage("finetune", 0.1, {"task_loss_weight": 1.0}),
    ]
    preset = Preset("p", "", 1, {}, {"causal_lm": stages})
    left = fit_to(preset, model).stages["causal_lm"]
    assert [(stage.name, stage.share) for stage in left] == [("distil", 0.5), ("finetune", 0.5)]
    for name in ("default", "linear", "gated_delta", "performer"):
        assert sum(stage.share for stage in fit_to(load_preset(name), model).stages["causal_lm"]) == pytest.approx(1)


def test_tokens_take_units():
    assert [parse_tokens(text) for text in ("2000000", "500k", "2M", "1.5m", "1b")] == [
        2_000_000, 500_000, 2_000_000, 1_500_000, 1_000_000_000,
    ]  # fmt: skip
    for text in ("", "k", "0", "-1", "2 million", "nan", "infM", "2.5"):
        with pytest.raises(UsageError, match="`--tokens"):
            parse_tokens(text)
