"""Recipes of several stages: what they run, in which order, and how a killed one goes on."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import changed
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from hf_linear_attention import convert
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.training import presets
from hf_linear_attention.training import run as run_module
from hf_linear_attention.training.loop import RunContext
from hf_linear_attention.training.losses.objectives import StudentWithObjectives
from hf_linear_attention.training.models import add_adapters, share_frozen_weights
from hf_linear_attention.training.presets import load_preset, preset_names, stage_options
from hf_linear_attention.training.recipe import ModelArguments
from hf_linear_attention.training.recipe_parser import parse_options


def runs_of(out: Path) -> list[dict[str, Any]]:
    """The options and amounts of each stage, as the report has them."""
    runs = json.loads((out / "training_report.json").read_text(encoding="utf-8"))["runs"]
    return [run["training"] for run in runs]


@pytest.fixture
def models(converted, llama_teacher):
    """A converted model and its original, as options."""
    student = converted(llama_teacher, mechanism="hybrid", window_size=4)
    return ["--model_name_or_path", str(student), "--teacher_name_or_path", llama_teacher, "--task", "causal_lm"]


@pytest.fixture
def data(files):
    return ["--train_file", f"{files}/train.jsonl", "--max_length", "32", "--max_train_tokens", "800"]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_whole(name, any_task, tmp_path):
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
def test_every_causal_preset_runs(name, finetune, converted, llama_teacher, data, tmp_path):
    convert(llama_teacher, **load_preset(name).settings["causal"]).bfloat16().save_pretrained(tmp_path / "student")
    AutoTokenizer.from_pretrained(llama_teacher).save_pretrained(tmp_path / "student")
    models = ["--model_name_or_path", tmp_path / "student", "--teacher_name_or_path", llama_teacher]
    finetune("--preset", name, *models, "--task", "causal_lm", *data)
    stages = load_preset(name).stages["causal_lm"]
    for folder in {path.parent for path in (tmp_path / "out").rglob("model.safetensors")}:
        expected = torch.bfloat16 if folder.name == "out" else torch.float32  # what no stage has rounded is trained
        assert {value.dtype for value in load_file(folder / "model.safetensors").values()} == {expected}
    for run, stage in zip(runs_of(tmp_path / "out"), stages, strict=True):
        assert 800 * stage.share <= run["tokens"] < 800 * stage.share + 64
        assert run.get("attention_transfer_weight") == stage.options.get("attention_transfer_weight")


def test_the_stages_of_an_encoder(finetune, masked_teacher, files, tmp_path):
    """The first of two stages trains all parameters of the mechanisms and no others, the second all others too."""
    student = tmp_path / "student"
    settings = {"mechanism": {"0": "performer", "1": "linformer"}, "geometry": "learned", "projection": "stretched"}
    settings["projection_size"] = 4  # rows are longer
    convert(BertModel.from_pretrained(masked_teacher), **settings).save_pretrained(student)
    AutoTokenizer.from_pretrained(masked_teacher).save_pretrained(student)
    # Several steps, because the first of a schedule has the rate 0.
    data = ["--train_file", files / "train.jsonl", "--max_length", 32, "--max_train_tokens", 4000]
    models = ["--model_name_or_path", student, "--teacher_name_or_path", masked_teacher]
    finetune("--preset", "performer", *models, "--task", "embedding", *data)
    out = tmp_path / "out"
    assert [run.get("attention_transfer_weight") for run in runs_of(out)] == [1.0, None]
    mechanisms = changed(student, out / "stages" / "1-transfer")
    learned = (".geometry.", "key_projection", "value_projection")
    assert mechanisms == {
        key for key in load_file(student / "model.safetensors") if any(name in key for name in learned)
    }
    assert changed(out / "stages" / "1-transfer", out) - mechanisms


@pytest.mark.long
def test_a_killed_run_goes_on_with_the_stage_it_was_in(finetune, models, data, files, tmp_path, monkeypatch):
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


def test_a_stage_with_shorter_rows_does_not_evaluate_for_the_next_one(finetune, models, data, files, monkeypatch):
    """Its last figures are those of its rows; the next stage measures the same weights in its own again."""
    evaluated, forward, measure = [], StudentWithObjectives.forward, RunContext._measured

    def in_little(self, batch, *args):
        if self.observes_attention and batch["input_ids"].numel() > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, batch, *args)

    def measured(self, *args):
        evaluated.append((self.recipe.output_dir.name, self.recipe.data.max_length))
        return measure(self, *args)

    monkeypatch.setattr(StudentWithObjectives, "forward", in_little)
    monkeypatch.setattr(RunContext, "_measured", measured)
    monkeypatch.setattr("hf_linear_attention.training.loop.SHORTEST_ROW", 8)
    data = [*data, "--validation_file", str(files / "valid.txt"), "--max_eval_tokens", "200"]
    finetune("--preset", "default", *models, *data)
    assert evaluated[-4:] == [("1-transfer", 16), ("1-transfer", 16), ("out", 32), ("out", 32)]


def test_an_older_run_is_not_taken_for_this_one(tmp_path, data, models):
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
def test_refusals(options, said, models, data, tmp_path):
    with pytest.raises(UsageError, match=said):
        parse_options([*models, *data, "--output_dir", str(tmp_path / "o"), *options])


def test_the_command_line_wins_over_the_stages():
    (transfer, distil) = load_preset("default").stages["causal_lm"]
    given = {"task": "causal_lm", "teacher_name_or_path": "t", "learning_rate": 3.0, "logging_steps": 7}
    assert stage_options(distil, given, 100)["learning_rate"] == 3
    assert not {"learning_rate", "teacher_name_or_path"} & stage_options(transfer, given, 100).keys()
    assert stage_options(transfer, given, 100)["logging_steps"] == 7


def test_what_no_stage_takes_is_refused(data, models, tmp_path, monkeypatch):
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


def test_few_tokens_train_adapters():
    """Fewer than one for 100 parameters of the base."""
    stock = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    few, whole = sum(parameter.numel() for parameter in stock.parameters()) // 100, load_preset("default")
    for settings in ({"mechanism": "hybrid", "window_size": 4}, {"mechanism": "linear"}):
        student = convert(stock, **settings)
        for tokens, is_adapted in ((few - 1, True), (few + 1, False)):
            *transfer, distil = presets.fit_to(whole, student, tokens).stages["causal_lm"]
            assert (distil.options.get("use_peft"), distil.options["logits_kl_weight"]) == (is_adapted or None, 1.0)
            # A hybrid begins near its original, and so few tokens lead its far keys away from it.
            is_left_out = is_adapted and settings["mechanism"] == "hybrid"
            assert (len(transfer), distil.share) == ((0, 1.0) if is_left_out else (1, 0.5))
            assert all(x.options["per_device_train_batch_size"] == (1 if is_adapted else 2) for x in transfer)


def test_a_teacher_has_no_copy_of_what_is_frozen():
    stock = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2))
    teacher, inputs = copy.deepcopy(stock), {"input_ids": torch.arange(12)[None]}
    before = teacher(**inputs).logits
    student = convert(stock, mechanism="hybrid", window_size=4)
    student.model.layers[1].mlp.up_proj.weight.data[0] += 1  # the teacher's are other ones
    arguments = ModelArguments(model_name_or_path="", task="causal_lm", use_peft=True, lora_target_modules="attention")
    add_adapters(student, arguments)
    share_frozen_weights(student, teacher)
    mine = {x.data_ptr() for x in student.parameters()}
    own = {name for name, x in teacher.named_parameters() if x.data_ptr() not in mine}
    assert own == {"model.layers.1.mlp.up_proj.weight"}
    assert torch.equal(teacher(**inputs).logits, before)


def test_a_preset_fits_the_model():
    """Embeddings of a window begin near their original, from which larger steps lead away; and where no mechanism
    compares near and far keys, they have no shares."""
    stock = BertModel(BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    whole = load_preset("default")
    for mechanism, rate in (("window", presets.WINDOW_RATE), ("hybrid", 5e-5), ("linear", 5e-5)):
        stages = presets.fit_to(whole, convert(stock, mechanism=mechanism)).stages
        assert float(stages["embedding"][-1].options["learning_rate"]) == rate
        assert float(stages["causal_lm"][-1].options["learning_rate"]) == 5e-5  # a window is healed as a control
        assert ("far_share_weight" in stages["causal_lm"][0].options) == (mechanism == "hybrid")
