"""Tasks beyond plain text: what is learned from the original, and what is measured and refused.

Every shipped recipe also trains a converted model on two processes, on real text.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.nn.functional as F
import yaml
from runs import changed
from task_twins import TWINS
from transformers import AutoModel, AutoTokenizer, BartConfig, BartForConditionalGeneration

from hf_linear_attention import convert
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.data.processors import load_processor
from hf_linear_attention.training.data.splits import load_data
from hf_linear_attention.training.models import auto_class_of
from hf_linear_attention.training.recipe_parser import parse_options
from hf_linear_attention.training.tasks import TASKS
from hf_linear_attention.training.tracking import read_metrics


DROPPED: dict[str, Any] = {"seq2seq_lm": {"drop": ["position_bias"]}}


@pytest.fixture
def student(twin, converted):
    """Options that distil a converted twin from its original."""

    def options(task: str) -> list[Any]:
        folder = twin(task)
        model = converted(folder / "original", mechanism="linear", feature_map="exp", **DROPPED.get(task, {}))
        models = ["--model_name_or_path", model, "--teacher_name_or_path", folder / "original"]
        return ["--task", task, *models, "--train_file", folder / "train.jsonl", "--logging_steps", 1]

    return options


def data_of(task: str, folder: Path) -> Any:
    model = folder / "original"
    words = ["--task", task, "--model_name_or_path", model, "--output_dir", "o", "--train_file", folder / "train.jsonl"]
    words += ["--teacher_name_or_path", model] if TASKS[task].logits is None else []
    recipe = parse_options([str(word) for word in words])
    return load_data(recipe, load_processor(recipe)).train


def test_losses_are_the_formulas(student, twin, finetune):
    """Of one pair at a time, without padding. A source weighs what its tokens and those of its target do."""
    options = [*student("seq2seq_lm"), "--max_train_steps", 6, "--per_device_train_batch_size", 24]
    options += ["--learning_rate", 5e-4, "--task_loss_weight", 0.25, "--logits_kl_weight", 7]
    options += ["--hidden_state_weight", 1]
    event, *_, last = (event for event in finetune(*options) if "loss" in event)
    assert last["loss"] < 0.9 * event["loss"]
    models = [auto_class_of("seq2seq_lm").from_pretrained(str(options[place])).eval() for place in (3, 5)]
    states = ("encoder_hidden_states", "decoder_hidden_states")
    found = data_of("seq2seq_lm", twin("seq2seq_lm"))
    sums = dict.fromkeys(("task_loss", "logits_kl", "hidden_state"), 0.0)
    targets = units = 0
    for number in range(len(found)):
        example = found[number]
        ids, labels = (torch.as_tensor(example[name])[None] for name in ("input_ids", "targets"))
        with torch.no_grad():
            mine, yours = (model(input_ids=ids, labels=labels, output_hidden_states=True) for model in models)
        a, b = (outputs.logits[0].log_softmax(-1) for outputs in (mine, yours))
        count, weight = labels.numel(), len(example["input_ids"]) + labels.numel()
        sums["task_loss"] += mine.loss.item() * count
        sums["logits_kl"] += F.kl_div(a, b, log_target=True, reduction="sum").item()
        last = [(getattr(mine, name)[-1], getattr(yours, name)[-1]) for name in states]
        errors = [((a - b).square().sum(-1) / b.square().sum(-1)).mean().item() for a, b in last]
        sums["hidden_state"] += sum(errors) / len(errors) * weight
        targets, units = targets + count, units + weight
    assert event["task_loss"] == pytest.approx(sums["task_loss"] / targets, rel=1e-4)
    assert event["logits_kl"] == pytest.approx(sums["logits_kl"] / targets, rel=1e-4)
    assert event["hidden_state"] == pytest.approx(sums["hidden_state"] / units, rel=1e-4)
    weighted = 0.25 * event["task_loss"] + 7 * event["logits_kl"] + event["hidden_state"]
    assert event["loss"] == pytest.approx(weighted, rel=1e-5)
    assert event["tokens"] == units


def test_attention_transfer_reaches_encoder_decoder_and_cross_attention(twin, finetune, tmp_path):
    """Every converted layer is trained, by a loss that does not depend on the padding of either side."""
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    more = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0, "init_std": 0.3}
    ids = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    original = BartForConditionalGeneration(BartConfig(**sizes, **more, **ids))
    model = convert(original, mechanism="linear", feature_map="exp", cross_attention=True)
    model.save_pretrained(tmp_path / "student")
    AutoTokenizer.from_pretrained(twin("seq2seq_lm") / "original").save_pretrained(tmp_path / "student")
    options = ["--task", "seq2seq_lm", "--model_name_or_path", tmp_path / "student", "--trainable", "mechanism"]
    options += ["--attention_transfer_weight", 1, "--train_file", twin("seq2seq_lm") / "train.jsonl"]
    options += ["--max_train_steps", 2, "--logging_steps", 1, "--learning_rate", 1e-2]
    events = [
        event
        for size in (24, 1)  # one step of all pairs, with and without padding
        for event in finetune(
            *options, "--per_device_train_batch_size", size, "--gradient_accumulation_steps", 24 // size,
            output_dir=tmp_path / f"out{size}",
        )
        if event["step"] == 1
    ]  # fmt: skip
    assert events[0]["loss"] == pytest.approx(events[1]["loss"], rel=1e-4)
    names = changed(tmp_path / "student", tmp_path / "out24")
    modules = linear_attention_modules(model)
    assert all(any(name.startswith(f"{module}.linear_attention") for name in names) for module in modules)
    assert all(".linear_attention." in name for name in names)
    assert "decoder.layers.0.encoder_attn" in " ".join(modules)


def test_a_vision_model_without_a_head_learns_the_mean_of_its_states(student, twin, finetune, tmp_path):
    """The preset shares its epochs among the stages; the first losses of the last stage are the formulas."""
    options = student("image_embedding")
    batch = ["--per_device_train_batch_size", 24, "--validation_file", twin("image_embedding") / "valid.jsonl"]
    events = finetune("--preset", "default", *options, *batch, "--num_train_epochs", 4)
    runs = json.loads((tmp_path / "out" / "training_report.json").read_text())["runs"]
    assert [run["training"]["num_train_epochs"] for run in runs] == [2, 2]
    assert [run["training"]["images"] for run in runs] == [48, 48]
    first, last = (event["eval_cosine"] for event in events if "eval_cosine" in event)
    assert first < last <= 1
    found = data_of("image_embedding", twin("image_embedding"))
    pixels = torch.stack([found[number]["pixel_values"] for number in range(24)])
    folders = (tmp_path / "out" / "stages" / "1-transfer", options[5])
    with torch.no_grad():
        models = [AutoModel.from_pretrained(str(folder)) for folder in folders]
        mine, yours = (model(pixels, output_hidden_states=True).hidden_states[-1] for model in models)
    cosine = F.cosine_similarity(mine.mean(1), yours.mean(1), dim=-1).mean().item()
    event = next(event for event in events if "embedding" in event)
    assert event["embedding"] == pytest.approx(1 - cosine, rel=1e-3, abs=1e-6)


RECIPES = sorted((Path(__file__).resolve().parents[2] / "training" / "configs").glob("*.yaml"))


# The fixtures of an original and of the folder of its data, and the suffix of the files; `TWINS` has the others.
ORIGINALS = {
    "causal_lm": ("llama_teacher", "files", "jsonl"),
    "masked_lm": ("masked_teacher", "files", "jsonl"),
    "embedding": ("bert_teacher", "files", "jsonl"),
    "sequence_classification": ("named_classifier", "files", "tsv"),
    "image_classification": ("vision_teacher", "pictures", "jsonl"),
}


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_trains_on_two_processes(recipe, request, twin, converted, tmp_path, dataset_cache):
    task = yaml.safe_load(recipe.read_text(encoding="utf-8"))["task"]
    if task in TWINS:
        original, files, suffix = twin(task) / "original", twin(task), "jsonl"
    else:
        original, files = (request.getfixturevalue(name) for name in ORIGINALS[task][:2])
        suffix = ORIGINALS[task][2]
    student = converted(original, mechanism="linear", feature_map="exp", **DROPPED.get(task, {}))
    out = tmp_path / "out"
    options: list[Any] = ["--config", recipe, "--model_name_or_path", student, "--teacher_name_or_path", original]
    options += ["--train_file", files / f"train.{suffix}", "--validation_file", files / f"valid.{suffix}"]
    options += ["--output_dir", out, "--max_train_steps", 2, "--logging_steps", 1]
    options += ["--per_device_train_batch_size", 4, *(["--max_length", 64] if TASKS[task].inputs == "text" else [])]
    run = processes.start(processes.finetune, dataset_cache, options, ranks=2, stderr=tmp_path / "stderr")
    assert processes.finish(run) == [0, 0], (tmp_path / "stderr-0").read_text(encoding="utf-8")[-2000:]
    events = read_metrics(out / "metrics.jsonl")
    losses = [event["loss"] for event in events if "loss" in event]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    figures = {f"eval_{TASKS[task].figure}"} | ({"eval_agreement"} if task == "seq2seq_lm" else set())
    assert [event["step"] for event in events if figures <= event.keys()] == [0, 2]
    assert {".linear_attention." in name for name in changed(student, out)} == {True, False}
