"""Attention transfer by layer: blocks of layers, layers that stop by themselves, and models that stay on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_linear_attention import convert


TRANSFER = ["--attention_transfer_weight", 1, "--trainable", "mechanism", "--logging_steps", 1, "--max_grad_norm", 0]


@pytest.fixture
def converted(llama_teacher: str, tmp_path: Path) -> Path:
    model = convert(LlamaForCausalLM.from_pretrained(llama_teacher), mechanism="linear", feature_map="exp")
    model.save_pretrained(tmp_path / "converted")
    AutoTokenizer.from_pretrained(llama_teacher).save_pretrained(tmp_path / "converted")
    return tmp_path / "converted"


@pytest.fixture
def options(converted: Path, files: Path) -> list[Any]:
    data = ["--train_file", files / "train.jsonl", "--max_length", 32, "--mechanism_learning_rate", "1e-2"]
    return ["--model_name_or_path", converted, "--task", "causal_lm", *data]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for part in sorted(folder.glob("*.safetensors")) for name, value in load_file(part).items()}


def changed(folder: Path, source: Path) -> set[str]:
    """`layers.<number>` of everything that differs."""
    before = weights(source)
    names = [name for name, value in weights(folder).items() if not torch.equal(value, before[name])]
    assert all(".linear_attention." in name for name in names)
    return {".".join(name.split(".")[1:3]) for name in names}


def test_only_the_chosen_layer_learns_and_those_behind_are_not_computed(
    finetune, options: list[Any], converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda *a: calls.append(1) or forward(*a))
    options = [*options, *TRANSFER, "--join_documents", "--max_train_steps", 3]
    steps = finetune(*options, "--transfer_layers", "0")
    assert changed(tmp_path / "out", converted) == {"layers.0"}
    assert not calls  # the first attention comes before the first MLP
    assert {name for name in steps[0] if "layer_" in name} == {"attention_transfer.layer_0"}
    finetune(*options, "--transfer_layers", "1", output_dir=tmp_path / "other")
    assert changed(tmp_path / "other", converted) == {"layers.1"}
    assert len(calls) == 2 + 1 + 1  # the last MLP is computed once, to see that no attention follows it


def test_block_by_block_is_all_at_once(finetune, options: list[Any], llama_teacher: str, tmp_path: Path) -> None:
    """Adam's steps do not depend on the loss' scale, which is twice as large for one of two layers, but for its epsilon
    of 1e-8 beside gradients of about 1e-4: 1e-4 of steps of 1e-2."""
    stages = ["--preset", "default", "--teacher_name_or_path", llama_teacher, "--max_train_tokens", 800]
    options = [*options, *stages, "--max_grad_norm", 0]
    finetune(*options, output_dir=tmp_path / "joint")
    finetune(*options, "--layers_per_block", 1, output_dir=tmp_path / "blocks")
    names = sorted(path.name for path in (tmp_path / "blocks" / "stages").iterdir())
    assert names == ["1-transfer-0-0", "2-transfer-1-1"]
    joint, blocks = (weights(tmp_path / name) for name in ("joint/stages/1-transfer", f"blocks/stages/{names[-1]}"))
    for name, value in joint.items():
        torch.testing.assert_close(blocks[name], value, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("extra", "expect", "message"),
    [
        (["--transfer_layers", "all"], 2, "such as 0,2,4-7"),
        (["--transfer_layers", "0,5"], 2, "layers 5 are not converted; choose from 0, 1"),
        (["--layers_per_block", 2], 2, "needs `--preset`"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    extra: list[Any], expect: int, message: str, finetune, options: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    finetune(*options, *TRANSFER, "--max_train_steps", 1, *extra, expect=expect)
    assert message in capsys.readouterr().err
