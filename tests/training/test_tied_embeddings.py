"""Embeddings that are one matrix, trained apart and made one again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertForMaskedLM, LlamaForCausalLM

from hf_linear_attention.training.models import retie, untie


INPUTS = {"input_ids": torch.arange(5, 25)[None]}
EMBEDDINGS = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize(("model_class", "fixture"), [(LlamaForCausalLM, "llama"), (BertForMaskedLM, "masked")])
@torch.no_grad()
def test_apart_they_are_free_and_together_they_are_the_mean(
    model_class: Any, fixture: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = model_class.from_pretrained(request.getfixturevalue(fixture)).eval()
    before, count = model(**INPUTS).logits, model.num_parameters()
    untie(model)
    assert torch.equal(model(**INPUTS).logits, before)
    output, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    start = embedding.clone()
    output += 1
    assert torch.equal(embedding, start)
    model.save_pretrained(tmp_path / "apart")
    again = model_class.from_pretrained(tmp_path / "apart").eval()
    assert torch.equal(again(**INPUTS).logits, model(**INPUTS).logits)
    retie(again)
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    torch.testing.assert_close(again.get_input_embeddings().weight, start + 0.5)
    again.save_pretrained(tmp_path / "together")
    assert model_class.from_pretrained(tmp_path / "together").num_parameters() == count


@pytest.fixture
def options(llama: str, llama_teacher: str, files: Path) -> list[Any]:
    data = ["--train_file", files / "train.jsonl", "--validation_file", files / "valid.txt", "--max_length", 32]
    models = ["--model_name_or_path", llama, "--teacher_name_or_path", llama_teacher, "--task", "causal_lm"]
    return [*models, *data, "--max_train_steps", 4, "--learning_rate", "1e-2", "--checkpointing_steps", 2]


def test_kept_apart(finetune, options: list[Any], tmp_path: Path) -> None:
    finetune(*options, "--untie_embeddings", "keep")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    first, second = (weights[name] for name in EMBEDDINGS)
    assert not torch.equal(first, second)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("extra", [[], ["--ema_decay", 0.5]], ids=["last", "average"])
def test_made_one_again_with_figures_of_its_own_and_resumed(
    extra: list[Any], finetune, options: list[Any], tmp_path: Path
) -> None:
    options = [*options, "--untie_embeddings", "retie", *extra]
    events = finetune(*options)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert EMBEDDINGS[1] not in weights
    assert [event["step"] for event in events if "eval_nats_per_token" in event] == [0, 4, 4]
    figures = json.loads((tmp_path / "out" / "training_report.json").read_text())["runs"][-1]["metrics"]
    assert figures["eval_nats_per_token"] == events[-1]["eval_nats_per_token"] != events[-2]["eval_nats_per_token"]
    model = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    shutil.copytree(tmp_path / "out", tmp_path / "resumed")
    checkpoint = tmp_path / "resumed" / "checkpoint-2"
    finetune(*options, "--resume_from_checkpoint", checkpoint, output_dir=tmp_path / "resumed")
    again = load_file(tmp_path / "resumed" / "model.safetensors")
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_what_has_nothing_to_untie_is_refused(finetune, options: list[Any], tmp_path: Path, capsys) -> None:
    finetune(*options, "--untie_embeddings", "keep")
    apart = ["--model_name_or_path", tmp_path / "out", *options[2:], "--untie_embeddings", "keep"]
    finetune(*apart, output_dir=tmp_path / "again", expect=2)
    assert "has no tied embeddings" in capsys.readouterr().err
    finetune(*options, "--untie_embeddings", "keep", "--use_peft", output_dir=tmp_path / "peft", expect=2)
    assert "drop one" in capsys.readouterr().err
