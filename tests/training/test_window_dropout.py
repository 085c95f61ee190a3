"""Windows that are left out while training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

from hf_linear_attention import convert
from hf_linear_attention._common.errors import TrainingError
from hf_linear_attention.training.models import WindowDropout
from hf_linear_attention.training.recipe import parse_rates


AFT = {"mechanism": "aft", "variant": "local", "window_size": 4}
INPUTS = {"input_ids": torch.arange(5, 25)[None]}


@pytest.fixture
def teacher(llama_teacher: str) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(llama_teacher).eval()


@pytest.mark.parametrize("text", ["1.5", "0.5,-0.1", "half"])
def test_what_is_no_probability_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"0 and 1|half"):
        parse_rates(text)


def test_the_rates_hold_for_equal_parts_of_the_run(teacher) -> None:
    dropout = WindowDropout(convert(teacher, mechanism="hybrid"), parse_rates("0.9,0.75,0.5"), 7)
    assert [dropout.rate(step) for step in range(7)] == [0.9, 0.9, 0.9, 0.75, 0.75, 0.5, 0.5]


@torch.no_grad()
def test_without_the_window_only_the_token_itself_is_exact(teacher) -> None:
    model = convert(teacher, mechanism="hybrid", window_size=8, num_features=8).eval()
    alone = convert(teacher, mechanism="hybrid", window_size=1, num_features=8).eval()
    alone.load_state_dict(model.state_dict())
    before = model(**INPUTS).logits
    with WindowDropout(model, (1.0,), 1).drawn(0):
        assert torch.equal(model(**INPUTS).logits, alone(**INPUTS).logits)
    assert torch.equal(model(**INPUTS).logits, before)
    assert (alone(**INPUTS).logits - before).abs().max() > 1e-3
    with WindowDropout(model, (), 1).drawn(0):
        assert torch.equal(model(**INPUTS).logits, before)


def test_it_is_drawn_as_often_as_the_rate_says(teacher) -> None:
    model = convert(teacher, mechanism="hybrid", window_size=8)
    dropout, sizes = WindowDropout(model, (0.75,), 1), []
    torch.manual_seed(0)
    for _ in range(1000):
        with dropout.drawn(0):
            sizes.append(model.model.layers[1].self_attn.linear_attention.window_size)
    assert set(sizes) == {1, 8}
    assert abs(sizes.count(1) - 750) < 4 * (1000 * 0.75 * 0.25) ** 0.5  # four standard deviations


@pytest.mark.parametrize("settings", [{"mechanism": "linear"}, {"mechanism": "window"}, AFT], ids=str)
def test_a_model_without_hybrid_layers_is_refused(teacher, settings) -> None:
    model = convert(teacher, **settings)
    with pytest.raises(TrainingError, match=f"those of the model are {settings['mechanism']}"):
        WindowDropout(model, (0.5,), 1)


def test_a_run_with_it_resumes_bit_exactly(finetune, llama_teacher: str, teacher, files: Path, tmp_path: Path) -> None:
    source = tmp_path / "converted"
    convert(teacher, mechanism="hybrid", window_size=4, num_features=8).save_pretrained(source)
    AutoTokenizer.from_pretrained(llama_teacher).save_pretrained(source)
    options: list[Any] = [
        *("--model_name_or_path", source, "--task", "causal_lm", "--train_file", files / "train.jsonl"),
        *("--attention_transfer_weight", 1, "--trainable", "mechanism", "--mechanism_learning_rate", "1e-2"),
        *("--max_length", 32, "--max_train_steps", 6, "--checkpointing_steps", 3),
    ]
    results = {}
    for name, rates in {"without": [], "with": ["--window_dropout", "0.9,0.5"]}.items():
        finetune(*options, *rates, output_dir=tmp_path / name)
        results[name] = load_file(tmp_path / name / "model.safetensors")
    parted = tmp_path / "parted"
    parted.mkdir()
    (tmp_path / "with" / "checkpoint-3").rename(parted / "checkpoint-3")
    finetune(
        *(*options, "--window_dropout", "0.9,0.5", "--resume_from_checkpoint", "latest"),
        output_dir=parted,
    )
    again = load_file(parted / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in results["with"].items())
    assert not all(torch.equal(results["without"][name], value) for name, value in results["with"].items())
