"""`--restore_projections`: what is put back, in which layers, when it is refused, on one process and in shards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import processes
import pytest
import sharding
import torch
from runs import changed
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_linear_attention import convert
from hf_linear_attention.training.restoration import QueryKeyProjections


RESTORED = {f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk"}


@pytest.fixture
def half(converted: Any, llama_teacher: str) -> Path:
    """Layer 1 has softmax attention."""
    return converted(llama_teacher, mechanism="linear", layers=[0])


@pytest.fixture
def causal(half: Path, files: Path) -> list[Any]:
    data = ["--train_file", files / "train.jsonl", "--validation_file", files / "valid.jsonl", "--max_length", 32]
    steps = ["--max_train_steps", 4, "--learning_rate", "1e-2", "--checkpointing_steps", 2]
    return ["--model_name_or_path", half, "--task", "causal_lm", *data, *steps]


def test_training_alone_and_a_resumed_run_end_alike(finetune, causal: list[Any], half: Path, tmp_path: Path) -> None:
    tuned, restored, resumed, later = (tmp_path / name for name in ("tuned", "restored", "resumed", "later"))
    finetune(*causal, output_dir=tuned)
    events = finetune(*causal, "--restore_projections", half, output_dir=restored)
    assert changed(tuned, restored) == RESTORED
    assert not RESTORED & changed(half, restored)
    assert changed(half, tuned) > RESTORED
    before, after, last = (event for event in events if "eval_recall" in event)
    assert (before["step"], after["step"], last["step"]) == (0, 4, 4)
    assert ("restored" in after, last["restored"]) == (False, 1)
    assert last["eval_nats_per_token"] != after["eval_nats_per_token"]
    report = json.loads((restored / "training_report.json").read_text(encoding="utf-8"))["runs"][-1]
    assert report["metrics"] == {name: value for name, value in last.items() if name.startswith("eval_")}

    shutil.copytree(restored / "checkpoint-2", resumed / "checkpoint-2")
    finetune(*causal, "--restore_projections", half, "--resume_from_checkpoint", "latest", output_dir=resumed)
    assert not changed(restored, resumed)

    alone = ["--model_name_or_path", tuned, "--restore_projections", half, *causal[2:4], *causal[6:10]]
    events = finetune(*alone, output_dir=later)
    assert not changed(restored, later)
    assert [event["eval_recall"] for event in events] == [after["eval_recall"], last["eval_recall"]]
    assert json.loads((later / "training_report.json").read_text(encoding="utf-8"))["runs"][-1]["dataset"] == ""


def test_in_shards(finetune, causal: list[Any], half: Path, tmp_path: Path, dataset_cache: Path) -> None:
    """Tolerance: AdamW turns rounding in tiny gradients into up to lr = 1e-2 a step."""
    words = [*causal, "--restore_projections", half]
    finetune(*words, "--per_device_train_batch_size", 4, output_dir=tmp_path / "one")
    words = [*words, "--per_device_train_batch_size", 2, "--output_dir", tmp_path / "two"]
    group = processes.start(sharding.sharded_finetune, dataset_cache, words, ranks=2, stderr=tmp_path / "stderr")
    assert processes.finish(group) == [0, 0], (tmp_path / "stderr-0").read_text(encoding="utf-8")[-3000:]
    assert not RESTORED & changed(half, tmp_path / "two")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert max((one[name] - two[name]).abs().max() for name in one) < 5e-4


def rows_of_gpt2(weights: torch.Tensor) -> torch.Tensor:
    """Which columns of `c_attn` make queries and keys: [q | k | v]."""
    return torch.arange(weights.shape[-1]) < 2 * weights.shape[-1] // 3


def rows_of_neox(weights: torch.Tensor) -> torch.Tensor:
    """Which rows of `query_key_value` make queries and keys: q, k, v of the first head, of the second one ..."""
    return torch.arange(len(weights)) % 24 < 16


@pytest.mark.parametrize(
    ("stock", "config", "part", "rows_of"),
    [
        (GPT2LMHeadModel, GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50), "c_attn", rows_of_gpt2),
        (
            GPTNeoXForCausalLM,
            GPTNeoXConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=50
            ),
            "query_key_value",
            rows_of_neox,
        ),
    ],
)
def test_matrices_that_queries_and_keys_share_with_values(stock: Any, config: Any, part: str, rows_of: Any) -> None:
    torch.manual_seed(0)
    source = convert(stock(config), mechanism="linear", layers=[0])
    before = {name: value.clone() for name, value in source.state_dict().items()}
    projections = QueryKeyProjections(source, source, "SRC")
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    projections.restore(source)
    shared = {name for name in before if f".1.attn.{part}." in name or f".1.attention.{part}." in name}
    assert len(shared) == 2  # with the biases
    for name, value in source.named_parameters():
        rows = rows_of(value) if name in shared else torch.zeros(value.shape[-1], dtype=torch.bool)
        rows = rows[:, None] if part == "query_key_value" and value.dim() > 1 and name in shared else rows
        expected = torch.where(rows, before[name], before[name] + 1)
        assert torch.equal(value, expected), name


def test_norms_of_queries_and_keys_and_matrices_that_also_make_values() -> None:
    """Qwen3 has norms; the gate of Qwen3-Next stands beside its queries; multi-head latent attention is refused."""
    from architectures import tiny_model

    model = tiny_model("qwen3", "AutoModelForCausalLM")
    names = {name.rpartition("self_attn.")[2] for name in QueryKeyProjections(model, model, "SRC").units}
    assert names == {f"{name}.weight" for name in ("q_proj", "k_proj", "q_norm", "k_norm")}
    layers = ["linear_attention", "full_attention"]
    model = tiny_model("qwen3_next", "AutoModelForCausalLM", layer_types=layers, num_hidden_layers=2)
    units = QueryKeyProjections(model, model, "SRC").units
    assert {name.split(".")[2] for name in units} == {"1"}
    queries, gates = units["model.layers.1.self_attn.q_proj.weight"].view(4, 2, 8).unbind(1)
    assert queries.all()
    assert not gates.any()
    for family, part in (("deepseek_v3", "kv_a_proj_with_mqa"), ("jetmoe", "experts.input_linear"), ("bloom", "own")):
        model = tiny_model(family, "AutoModelForCausalLM")
        with pytest.raises(Exception, match=part):
            QueryKeyProjections(model, model, "SRC")


@pytest.mark.parametrize("case", ["all linear", "adapters", "another model", "no model"])
def test_refusals(
    case: str, finetune, causal: list[Any], converted: Any, llama: str, save: Any, tmp_path: Path, capsys
) -> None:
    linear = converted(llama, mechanism="linear")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    small = save(LlamaForCausalLM, LlamaConfig(vocab_size=300, **sizes))
    words, said = {
        "all linear": (["--model_name_or_path", linear, "--restore_projections", linear], "no layer with softmax"),
        "adapters": (["--restore_projections", llama, "--use_peft"], "--use_peft"),
        "another model": (["--restore_projections", small], "model.layers.1.self_attn.q_proj.weight of the same"),
        "no model": (["--restore_projections", tmp_path / "none"], "none"),
    }[case]
    finetune(*causal, *words, expect=2)
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
