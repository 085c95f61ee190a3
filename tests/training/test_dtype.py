"""The weights that training writes have the dtype of the checkpoint that it began with, and are float32 until then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_linear_attention import convert


def dtypes(folder: Path) -> set[torch.dtype]:
    (weights,) = folder.glob("*.safetensors")
    return {value.dtype for value in load_file(weights).values()}


@pytest.fixture(scope="module")
def half(llama_teacher: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half")
    convert(llama_teacher, mechanism="linear", feature_map="hedgehog").bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(llama_teacher).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("asked", [None, "float32"])
def test_one_run(asked: str | None, half: Path, finetune, files: Path, tmp_path: Path) -> None:
    words = [f"--train_file={files / 'train.txt'}", "--max_length=16", "--max_train_steps=2", "--checkpointing_steps=1"]
    words += ["--task=causal_lm", f"--model_name_or_path={half}"]
    finetune(*words, *([] if asked is None else [f"--dtype={asked}"]))
    out = tmp_path / "out"
    expected = getattr(torch, asked or "bfloat16")
    assert dtypes(out) == {expected} == {AutoConfig.from_pretrained(out).dtype}
    assert dtypes(out / "checkpoint-2") == {torch.float32}
    trained = AutoModelForCausalLM.from_pretrained(out / "checkpoint-2").to(expected).state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in load_file(out / "model.safetensors").items())


def test_stages_train_what_no_stage_has_rounded(half: Path, llama_teacher: str, finetune, files, tmp_path) -> None:
    words = [
        "--preset=linear",
        "--task=causal_lm",
        f"--model_name_or_path={half}",
        f"--train_file={files / 'train.txt'}",
    ]
    finetune(*words, f"--teacher_name_or_path={llama_teacher}", "--max_length=16", "--max_train_tokens=800")
    stages = sorted((tmp_path / "out" / "stages").iterdir())
    assert stages
    assert all(dtypes(folder) == {torch.float32} for folder in stages)
    assert dtypes(tmp_path / "out") == {torch.bfloat16}
