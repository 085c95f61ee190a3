"""LoRA: what is trained, what is saved, and how a run with adapters goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import changed
from transformers import AutoModelForCausalLM

from hf_linear_attention.training.models import add_adapters, merged_state_dict
from hf_linear_attention.training.recipe import ModelArguments


pytest.importorskip("peft")

INPUTS = {"input_ids": torch.arange(5, 25)[None]}


@pytest.fixture
def student(converted: Any, llama_teacher: str) -> Path:
    return converted(llama_teacher, mechanism="linear")


@pytest.fixture
def causal(student: Path, files: Path) -> list[Any]:
    data = ["--train_file", files / "train.jsonl", "--validation_file", files / "valid.txt", "--max_eval_tokens", 60]
    sizes = ["--max_length", 32, "--learning_rate", "1e-2", "--use_peft", "--lora_target_modules", "attention"]
    return ["--model_name_or_path", student, "--task", "causal_lm", *data, *sizes]


def test_merging_keeps_the_function_and_leaves_the_model_alone(student: Path) -> None:
    model, merged = (AutoModelForCausalLM.from_pretrained(student).eval() for _ in range(2))
    add_adapters(model, ModelArguments("m", "causal_lm", lora_target_modules="attention"))
    before = model(**INPUTS).logits
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # starts as 0
            parameter.data.normal_(std=0.05)
    expected = model(**INPUTS).logits
    assert (expected - before).abs().max() > 1e-3
    merged.load_state_dict(merged_state_dict(model))
    torch.testing.assert_close(merged(**INPUTS).logits, expected, rtol=1e-4, atol=1e-4)  # W x + B A x in another order
    assert torch.equal(model(**INPUTS).logits, expected)


def test_adapters_alone_change_the_projections_and_nothing_else(
    finetune, causal: list[Any], student: Path, tmp_path: Path
) -> None:
    events = finetune(*causal, "--trainable", "adapter", "--max_train_steps", 8)
    names = changed(student, tmp_path / "out")
    projections = {f"model.layers.{n}.self_attn.{p}_proj.weight" for n in (0, 1) for p in "qkvo"}
    assert names == projections
    values = [event["eval_nats_per_token"] for event in events if "eval_nats_per_token" in event]
    assert values[-1] < values[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(loaded).__name__ == "LinearLlamaForCausalLM"


def test_a_resumed_run_is_the_same_bit_by_bit_and_saves_the_best_adapters(
    finetune, causal: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures are replaced, the weights are the runs' own: step 2 of 4 is best, and its checkpoint is merged."""
    figures = iter([9.0, 1.0, 2.0, 2.0])  # before training, which does not count, and of steps 2, 4 and again 4
    compute = lambda *_, **__: {"nats_per_token": next(figures)}  # noqa: E731 (one line of bookkeeping)
    monkeypatch.setattr("hf_linear_attention.training.evaluation.scores.TokenLoss._compute", compute)
    options = [*causal, "--max_train_steps", 4, "--checkpointing_steps", 2, "--eval_steps", 2]
    options += ["--load_best_model_at_end"]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    finetune(*options, output_dir=whole)
    shutil.copytree(whole / "checkpoint-2", parted / "checkpoint-2")
    finetune(*options, "--resume_from_checkpoint", "latest", output_dir=parted)
    assert not changed(whole / "checkpoint-4", parted / "checkpoint-4")
    for out in (whole, parted):
        assert not changed(out / "checkpoint-2", out)
        assert changed(out / "checkpoint-4", out)
        report = json.loads((out / "training_report.json").read_text(encoding="utf-8"))
        assert report["runs"][-1]["metrics"]["eval_nats_per_token"] == 1.0
