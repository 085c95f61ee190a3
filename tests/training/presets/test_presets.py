"""Recipes of several stages: what they run, in which order, and how a killed one goes on."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import finetune as finetune_process
from processes import finish, start
from runs import changed
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, BertConfig, BertModel, LlamaForCausalLM

from hf_linear_attention import convert
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.conversion.plan import with_budget
from hf_linear_attention.training import presets
from hf_linear_attention.training import run as run_module
from hf_linear_attention.training.loop import RunContext
from hf_linear_attention.training.presets import load_preset, preset_names, stage_options
from hf_linear_attention.training.recipe_parser import parse_options


def runs_of(out: Path) -> list[dict[str, Any]]:
    """The options and amounts of each stage, as the report has them."""
    runs = json.loads((out / "training_report.json").read_text(encoding="utf-8"))["runs"]
    return [run["training"] for run in runs]


@pytest.fixture
def models(converted: Any, llama_teacher: str) -> list[str]:
    """A converted model and its original, as options."""
    student = converted(llama_teacher, mechanism="hybrid", window_size=4)
    return ["--model_name_or_path", str(student), "--teacher_name_or_path", llama_teacher, "--task", "causal_lm"]


@pytest.fixture
def data(files: Path) -> list[str]:
    return ["--train_file", f"{files}/train.jsonl", "--max_length", "32", "--max_train_tokens", "800"]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_whole(name: str, any_task: Path, tmp_path: Path) -> None:
    """Settings for every direction, shares that are all of the tokens, and stages that are valid command lines."""
    preset = load_preset(name)
    assert preset.tokens >= 1_000_000
    directions = {"causal" if task == "causal_lm" else "bidirectional" for task in preset.stages}
    assert directions == set(preset.settings) - {"cross_attention", "encoder_decoder"}
    for task, stages in preset.stages.items():
        assert sum(stage.share for stage in stages) == pytest.approx(1)
        words = [f"--preset={name}", f"--task={task}", "--model_name_or_path=m", "--teacher_name_or_path=t"]
        assert parse_options([*words, f"--train_file={any_task}", f"--output_dir={tmp_path / 'o'}"])


@pytest.mark.parametrize("name", [name for name in preset_names() if "causal_lm" in load_preset(name).stages])
def test_every_causal_preset_runs(
    name: str, finetune, converted, llama_teacher: str, data: list[str], tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(llama_teacher)
    settings = with_budget(load_preset(name).settings["causal"], LlamaForCausalLM, config, torch.float32)
    student = converted(llama_teacher, **settings)
    models = ["--model_name_or_path", student, "--teacher_name_or_path", llama_teacher]
    finetune("--preset", name, *models, "--task", "causal_lm", *data)
    stages = load_preset(name).stages["causal_lm"]
    for run, stage in zip(runs_of(tmp_path / "out"), stages, strict=True):
        assert 800 * stage.share <= run["tokens"] < 800 * stage.share + 64
        assert run.get("attention_transfer_weight") == stage.options.get("attention_transfer_weight")


def test_the_stages_of_an_encoder(finetune, masked_teacher: str, files: Path, tmp_path: Path) -> None:
    """The first of two stages trains the parameters of the mechanisms alone, and the second all others too."""
    student = tmp_path / "student"
    settings = load_preset("performer").settings["bidirectional"]
    convert(BertModel.from_pretrained(masked_teacher), **settings).save_pretrained(student)
    AutoTokenizer.from_pretrained(masked_teacher).save_pretrained(student)
    # Several steps, because the first of a schedule has the rate 0.
    data = ["--train_file", files / "train.jsonl", "--max_length", 32, "--max_train_tokens", 4000]
    models = ["--model_name_or_path", student, "--teacher_name_or_path", masked_teacher]
    finetune("--preset", "performer", *models, "--task", "embedding", *data)
    out = tmp_path / "out"
    assert [run.get("attention_transfer_weight") for run in runs_of(out)] == [1.0, None]
    mechanisms = changed(student, out / "stages" / "1-transfer")
    assert mechanisms == {key for key in load_file(student / "model.safetensors") if ".geometry." in key}
    assert changed(out / "stages" / "1-transfer", out) - mechanisms


def test_a_killed_run_goes_on_with_the_stage_it_was_in(
    finetune, models: list[str], data: list[str], files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended between the stages: the first is not repeated, and the result is that of the uninterrupted run.

    The uninterrupted run evaluates the model between its stages once, the other one twice, with the same figures.
    """
    data = [*data, "--validation_file", str(files / "valid.txt"), "--max_eval_tokens", "200"]
    evaluated: list[str] = []
    measure = RunContext._measured
    monkeypatch.setattr(
        RunContext, "_measured", lambda self, *a: evaluated.append(self.recipe.output_dir.name) or measure(self, *a)
    )
    finetune("--preset", "default", *models, *data, output_dir=tmp_path / "whole")
    assert evaluated == ["1-transfer", "1-transfer", "whole"]
    started: list[Path] = []

    def run(recipe, known):
        started.append(recipe.output_dir)
        if len(started) == 2:
            raise KeyboardInterrupt
        return original(recipe, known)

    original = run_module.run
    monkeypatch.setattr(run_module, "run", run)
    options = ["--preset", "default", *models, *data]
    finetune(*options, output_dir=tmp_path / "killed", expect=130)
    finetune(*options, "--resume_from_checkpoint", "latest", output_dir=tmp_path / "killed")
    assert [path.name for path in started] == ["1-transfer", "killed", "killed"]
    assert evaluated[3:] == ["1-transfer", "1-transfer", "killed", "killed"]
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "killed")]
    assert "eval_nats_per_token" in lines[0][0]
    assert lines[0][0] == lines[1][0]
    assert not changed(tmp_path / "whole", tmp_path / "killed")


def launched(store: int, cache: Path, options: list[Any]) -> int:
    """`finetune.py` in a process of torchrun, whose store stays when the connection through it is closed."""
    os.environ.update(MASTER_PORT=str(store), TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1")
    return finetune_process(cache, options)


def test_two_processes_go_through_all_stages(
    models: list[str], data: list[str], tmp_path: Path, dataset_cache: Path
) -> None:
    """One output, and every stage starts from the one before it."""
    out = tmp_path / "out"
    options = ["--preset", "default", *models, *data, "--output_dir", out]
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert finish(start(launched, store.port, dataset_cache, options, ranks=2), timeout=100) == [0, 0]
    first, second = runs_of(out)
    assert (first["processes"], second["processes"]) == (2, 2)
    assert second["model_name_or_path"] == str(out / "stages" / "1-transfer")
    assert [path.parent.name for path in sorted(out.rglob("model.safetensors"))] == ["out", "1-transfer"]
    projection, middle = "model.layers.0.self_attn.q_proj.weight", out / "stages" / "1-transfer"
    assert projection not in changed(models[1], middle)
    assert projection in changed(middle, out)


def test_an_older_run_is_not_taken_for_this_one(tmp_path: Path, data: list[str], models: list[str]) -> None:
    """Started anew in a used folder and killed in the first stage: resuming begins with the first stage."""
    out = tmp_path / "out"
    for folder in (out, out / "stages" / "1-transfer"):
        folder.mkdir(parents=True)
        (folder / "training_report.json").write_text('{"runs": [{"metrics": {}}]}')
    words = ["--preset=default", *models, *data, f"--output_dir={out}"]
    preset, given = parse_options([*words, "--overwrite_output_dir=true"])

    def killed(recipe, known):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_module.run_stages(preset, given, killed)
    started = []
    resumed = {**given, "resume_from_checkpoint": "latest"}
    del resumed["overwrite_output_dir"]
    run_module.run_stages(preset, resumed, lambda recipe, known: started.append(recipe) or {"figure": 1.0})
    assert len(started) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--preset", "best"], "--preset best.*default"),
        (["--preset", "default", "--learning_rate", "-1"], "--learning_rate -1.0.*above 0"),
        (["--preset", "default", "--output_dir", "."], "is not empty"),
    ],
)
def test_refusals(options: list[str], said: str, models, data, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        parse_options([*models, *data, "--output_dir", str(tmp_path / "o"), *options])


def test_the_command_line_wins_over_the_stages() -> None:
    (transfer, distil) = load_preset("default").stages["causal_lm"]
    given = {"task": "causal_lm", "teacher_name_or_path": "t", "learning_rate": 3.0, "logging_steps": 7}
    assert stage_options(distil, given, 100)["learning_rate"] == 3
    assert not {"learning_rate", "teacher_name_or_path"} & stage_options(transfer, given, 100).keys()
    assert stage_options(transfer, given, 100)["logging_steps"] == 7


def test_what_learns_nothing_from_transfer_goes_without(
    finetune, converted, llama_teacher: str, data: list[str], tmp_path
) -> None:
    student = converted(llama_teacher, mechanism="performer", num_features=16)
    models = ["--model_name_or_path", student, "--teacher_name_or_path", llama_teacher]
    finetune("--preset", "default", *models, "--task", "causal_lm", *data)
    (run,) = runs_of(tmp_path / "out")
    assert run["logits_kl_weight"] == 1
    assert run["tokens"] >= 800


def test_what_no_stage_takes_is_refused(data: list[str], models: list[str], tmp_path: Path, monkeypatch) -> None:
    """The stages of attention transfer do not train what has the other learning rate."""
    whole = load_preset("default")
    stages = {task: [stage for stage in stages if stage.name == "transfer"] for task, stages in whole.stages.items()}
    monkeypatch.setattr(
        "hf_linear_attention.training.recipe_parser.load_preset", lambda name: dataclasses.replace(whole, stages=stages)
    )
    words = ["--preset=default", *map(str, [*models, *data]), f"--output_dir={tmp_path / 'out'}"]
    with pytest.raises(UsageError, match=r"`--learning_rate` has no effect in any stage of `--preset default`"):
        parse_options([*words, "--learning_rate=1"])
    assert isinstance(parse_options(words), tuple)


def test_embeddings_of_a_window_are_trained_at_a_rate_of_their_own() -> None:
    """They begin near their original, from which larger steps lead away."""
    stock = BertModel(
        BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    )
    whole = load_preset("default")
    for mechanism, rate in (("window", presets.WINDOW_RATE), ("hybrid", 5e-5)):
        stages = presets.fit_to(whole, convert(stock, mechanism=mechanism)).stages
        assert float(stages["embedding"][-1].options["learning_rate"]) == rate
        assert float(stages["causal_lm"][-1].options["learning_rate"]) == 5e-5  # a window is healed as a control
