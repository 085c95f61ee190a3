"""Attention transfer by layer: which parameters learn, and what need not be computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM


def changed(folder: Path, source: Path) -> set[str]:
    """`layers.<number>` of everything that differs."""
    before, after = (load_file(path / "model.safetensors") for path in (source, folder))
    names = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert all(".linear_attention." in name for name in names)
    return {".".join(name.split(".")[1:3]) for name in names}


def test_every_mechanism_learns_and_the_output_layer_is_not_computed(
    finetune, converted, llama_teacher: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "forward", None)  # the model without its output layer is enough
    student = converted(llama_teacher, mechanism="linear", feature_map="exp")
    options = ["--model_name_or_path", student, "--task", "causal_lm", "--train_file", files / "train.jsonl"]
    options += ["--attention_transfer_weight", 1, "--trainable", "mechanism", "--max_length", 32, "--join_documents"]
    steps = finetune(*options, "--max_train_steps", 3, "--logging_steps", 1)
    assert changed(tmp_path / "out", student) == {"layers.0", "layers.1"}
    assert {name for name in steps[0] if "layer_" in name} == {f"attention_transfer.layer_{layer}" for layer in (0, 1)}
