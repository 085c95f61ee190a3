"""Two processes: training in shards, the default preset, and transformers' tensor parallel plan."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import processes
import pytest
import sharding
import torch
from runs import changed
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hf_linear_attention import convert
from hf_linear_attention._common.reading import read_json
from hf_linear_attention.training.tracking import read_metrics


@pytest.mark.long
@pytest.mark.parametrize(
    ("mechanism", "options"), [("linear", {"feature_map": "elu1"}), ("performer", {}), ("hybrid", {"num_features": 8})]
)
def test_tensor_parallel_by_the_plan_of_the_base_model(mechanism, options, tmp_path):
    """Works where the mechanism has no parameters per head, and is refused by name where it has.

    Tolerance: float32 sums over heads in two parts, through two layers.
    """
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    stock = LlamaForCausalLM(LlamaConfig(vocab_size=300, num_key_value_heads=2, initializer_range=0.2, **sizes))
    model = convert(stock, mechanism=mechanism, **options).eval()
    model.save_pretrained(tmp_path / "model")
    arguments = (str(tmp_path / "model"), tmp_path / "results.pt")
    group = processes.start(sharding.tensor_parallel, *arguments, ranks=2, stderr=tmp_path / "stderr")
    codes, said = processes.finish(group, timeout=60), (tmp_path / "stderr-0").read_text(encoding="utf-8")
    if mechanism == "hybrid":
        assert "HybridAttention has parameters for 4 heads and got 2 heads" in said
        return
    assert codes == [0, 0], said
    found = torch.load(tmp_path / "results.pt", weights_only=True)
    assert any("self_attn.q_proj" in name for name in found["split"])
    rows = torch.randint(5, 300, (2, 48), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(found["logits"], model(rows, use_cache=False).logits, rtol=1e-5, atol=2e-5)


def on_two(target: Any, words: list[Any], tmp_path: Path, dataset_cache: Any) -> None:
    """Run finetune.py on two processes, started as by torchrun."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (target, store.port, dataset_cache, words)
    group = processes.start(processes.launched, *arguments, ranks=2, stderr=tmp_path / "stderr")
    assert processes.finish(group) == [0, 0], (tmp_path / "stderr-0").read_text(encoding="utf-8")[-3000:]


KINDS = pytest.mark.parametrize("kind", [processes.finetune, sharding.sharded_finetune], ids=["ddp", "fsdp2"])


@pytest.mark.long
@KINDS
def test_adapters_on_two_processes(kind, finetune, llama_teacher, files, tmp_path, dataset_cache):
    """Accumulation, evaluation of 21 texts on 2 processes, a checkpoint and what goes on from it.

    Tolerance: AdamW turns rounding in tiny gradients into up to lr = 1e-3 a step; a gradient of one process alone would
    be off in the second digit.
    """
    source, one, two, again, alone = (tmp_path / name for name in ("source", "one", "two", "again", "alone"))
    mechanisms = {"0": "hybrid", "1": "performer"}  # parameters and buffers
    convert(llama_teacher, mechanism=mechanisms, window_size=8, num_features=8).save_pretrained(source)
    AutoTokenizer.from_pretrained(llama_teacher).save_pretrained(source)
    options = [f"--model_name_or_path={source}", f"--teacher_name_or_path={llama_teacher}", "--task=causal_lm"]
    options += [f"--train_file={files}/train.jsonl", "--max_length=32"]
    options += [f"--validation_file={files}/valid.jsonl", "--eval_steps=2", "--logging_steps=1"]
    options += ["--logits_kl_weight=1", "--hidden_state_weight=1", "--max_train_steps=4", "--learning_rate=1e-3"]
    options += ["--checkpointing_steps=2", "--use_peft=true", "--lora_target_modules=attention"]
    options += ["--gradient_checkpointing=true"]  # as the default preset, where tokens are few
    finetune(*options, "--per_device_train_batch_size", 4, output_dir=one)
    split = [*options, "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 2]
    on_two(kind, [*split, "--output_dir", two], tmp_path, dataset_cache)
    mine, yours = (read_metrics(folder / "metrics.jsonl") for folder in (two, one))
    assert len(mine) == len(yours) == 7
    for event, other in zip(mine, yours, strict=True):
        assert {**event, "tokens_per_second": 0} == pytest.approx({**other, "tokens_per_second": 0}, rel=1e-4)
    loaded = AutoModelForCausalLM.from_pretrained(two, trust_remote_code=True)
    assert type(loaded).__name__ == "LinearLlamaForCausalLM"
    assert sorted(path.name for path in two.glob("*.py")) == sorted(path.name for path in one.glob("*.py"))

    shutil.copytree(two / "checkpoint-2", alone / "checkpoint-2")
    finetune(*options, "--per_device_train_batch_size", 4, "--resume_from_checkpoint", "latest", output_dir=alone)
    whole = load_file(one / "model.safetensors")
    for folder in (two, alone):  # the last on one process, without shards
        saved = load_file(folder / "model.safetensors")
        assert saved.keys() == whole.keys()
        assert max((saved[name] - whole[name]).abs().max() for name in whole) < 5e-5

    shutil.copytree(two / "checkpoint-2", again / "checkpoint-2")
    on_two(kind, [*split, "--output_dir", again, "--resume_from_checkpoint", "latest"], tmp_path, dataset_cache)
    assert not changed(two, again)


@pytest.mark.long
@KINDS
def test_both_stages_of_the_default_preset(kind, finetune, llama_teacher, files, tmp_path, dataset_cache):
    """Started as by torchrun, and in shards resumed within attention transfer: the figures and weights of one process.

    Tolerance: as above, with the rates .1 and 5e-3 of the mechanism. Recall is a difference of sums near each other.
    """
    source, one, two, again = (tmp_path / name for name in ("source", "one", "two", "again"))
    sizes = {"window_size": 4, "num_sinks": 1, "num_exact_keys": 4, "num_features": 8}
    student = convert(llama_teacher, mechanism="hybrid", decay="learned", rope="partial", **sizes)
    student.save_pretrained(source)
    AutoTokenizer.from_pretrained(llama_teacher).save_pretrained(source)
    options = [f"--model_name_or_path={source}", f"--teacher_name_or_path={llama_teacher}", "--task=causal_lm"]
    options += ["--preset=default", f"--train_file={files}/train.jsonl", f"--validation_file={files}/valid.jsonl"]
    options += ["--max_length=32", "--max_train_tokens=1000", "--logging_steps=1", "--checkpointing_steps=2"]
    finetune(*options, "--per_device_train_batch_size", 4, output_dir=one)
    split = [*options, "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 2]
    on_two(kind, [*split, "--output_dir", two], tmp_path, dataset_cache)
    transfer = "stages/1-transfer"
    for stage in (transfer, "."):
        mine, yours = (read_metrics(folder / stage / "metrics.jsonl") for folder in (two, one))
        assert len(mine) == len(yours) == 6
        for event, other in zip(mine, yours, strict=True):
            expected = pytest.approx({**other, "tokens_per_second": 0}, rel=1e-5, abs=1e-5)
            assert {**event, "tokens_per_second": 0} == expected
        saved, whole = (load_file(folder / stage / "model.safetensors") for folder in (two, one))
        assert saved.keys() == whole.keys()
        assert max((saved[name] - whole[name]).abs().max() for name in whole) < 5e-5
    learned = {name for name in whole if ".linear_attention." in name and "score_" not in name}
    assert changed(source, two / transfer) == learned
    assert changed(two / transfer, two) - learned
    runs = read_json(two / "training_report.json")["runs"]
    assert [run["training"]["processes"] for run in runs] == [2, 2]

    if kind is sharding.sharded_finetune:
        place = f"{transfer}/checkpoint-2"
        shutil.copytree(two / place, again / place)
        # With this, nothing but attention transfer itself puts its parameters into shards again.
        kept = functools.partial(kind, reshard=False)
        on_two(kept, [*split, "--output_dir", again, "--resume_from_checkpoint", "latest"], tmp_path, dataset_cache)
        assert not changed(two, again)
