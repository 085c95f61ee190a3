"""Two processes that share one model: torch's `fully_shard`, layer by layer, and transformers' tensor parallel plan."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import processes
import pytest
import sharding
import torch
from runs import changed
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_linear_attention import convert


Converted = Callable[..., str]


@pytest.fixture
def converted(tmp_path: Path) -> Converted:
    def saved(mechanism: str, **options: Any) -> str:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        stock = LlamaForCausalLM(LlamaConfig(vocab_size=300, num_key_value_heads=2, initializer_range=0.2, **sizes))
        model = convert(stock, mechanism=mechanism, **options)
        model.save_pretrained(tmp_path / mechanism)
        return str(tmp_path / mechanism)

    return saved


def run(target: Callable[..., None], folder: str, tmp_path: Path) -> dict[str, Any] | str:
    """What it saved, or the last line of its error."""
    group = processes.start(target, folder, tmp_path / "results.pt", ranks=2, stderr=tmp_path / "stderr")
    if processes.finish(group, timeout=60) == [0, 0]:
        return torch.load(tmp_path / "results.pt", weights_only=True)
    return (tmp_path / "stderr-0").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [("hybrid", {"window_size": 8, "num_features": 8}), ("performer", {"num_features": 16, "redraw_interval": 1})],
)
def test_a_sharded_step_is_a_whole_one(mechanism: str, options: Any, converted: Converted, tmp_path: Path) -> None:
    """Tolerance: gradients summed over 2 x 2 rows and over 4 differ in rounding, 1e-7 of sums of some 200 terms; the
    step is 0.1 of them. A gradient of one process alone would be off by about as much as the step itself, 1e-2."""
    found = run(sharding.shard_and_train, converted(mechanism, **options), tmp_path)
    assert isinstance(found, dict), found
    whole, sharded = found["whole"], found["sharded"]
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-6)
    names = {name for name in whole if not name.endswith("lm_head.weight")}
    assert names <= sharded.keys()
    buffers = {name for name in names if ".linear_attention." in name}
    assert buffers  # the mechanisms' parameters and, for performer, its projection and its count
    before = AutoModelForCausalLM.from_pretrained(tmp_path / mechanism).state_dict()
    assert max((whole[name] - before[name]).abs().max() for name in names if whole[name].is_floating_point()) > 1e-3
    for name in names:
        torch.testing.assert_close(
            sharded[name], whole[name], rtol=0, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
        assert torch.equal(found["restored"][name], sharded[name]), name
    assert found["same_logits"]
    total = sum(value.numel() for value in AutoModelForCausalLM.from_pretrained(tmp_path / mechanism).parameters())
    assert found["local"] <= 0.51 * total


@pytest.mark.parametrize(
    ("mechanism", "options"), [("linear", {"feature_map": "elu1"}), ("hybrid", {"num_features": 8})]
)
def test_tensor_parallel_by_the_plan_of_the_base_model(
    mechanism: str, options: Any, converted: Converted, tmp_path: Path
) -> None:
    """Works where the mechanism has no parameters per head, and is refused by name where it has.

    Tolerance: float32 sums over heads in two parts, through two layers.
    """
    folder = converted(mechanism, **options)
    found = run(sharding.tensor_parallel, folder, tmp_path)
    if mechanism == "hybrid":
        assert isinstance(found, str)
        assert "HybridAttention has parameters for 4 heads and got 2 heads" in found
        return
    assert isinstance(found, dict), found
    assert any("self_attn.q_proj" in name for name in found["split"])
    rows = torch.randint(5, 300, (2, 48), generator=torch.Generator().manual_seed(0))
    expected = AutoModelForCausalLM.from_pretrained(folder)(rows, use_cache=False).logits
    torch.testing.assert_close(found["logits"], expected, rtol=1e-5, atol=2e-5)


def test_finetune_in_shards(finetune, llama_teacher: str, files: Path, tmp_path: Path, dataset_cache: Path) -> None:
    """Accumulation, evaluation of 21 texts on 2 processes, a checkpoint and what goes on from it."""
    options = [*sharding.distillation(tmp_path / "source", llama_teacher, files)]
    one, two, again, alone = (tmp_path / name for name in ("one", "two", "again", "alone"))
    finetune(*options, "--per_device_train_batch_size", 4, output_dir=one)
    split = [*options, "--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 2]

    def sharded(*more: Any) -> None:
        words = [*split, *more]
        group = processes.start(sharding.sharded_finetune, dataset_cache, words, ranks=2, stderr=tmp_path / "stderr")
        assert processes.finish(group) == [0, 0], (tmp_path / "stderr-0").read_text(encoding="utf-8")[-3000:]

    sharded("--output_dir", two)
    sharding.assert_same_run(two, one)
    whole = load_file(one / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(two, trust_remote_code=True)
    assert type(loaded).__name__ == "LinearLlamaForCausalLM"
    assert sorted(path.name for path in two.glob("*.py")) == sorted(path.name for path in one.glob("*.py"))

    shutil.copytree(two / "checkpoint-2", alone / "checkpoint-2")
    finetune(*options, "--per_device_train_batch_size", 4, "--resume_from_checkpoint", "latest", output_dir=alone)
    resumed = load_file(alone / "model.safetensors")  # on one process, without shards
    assert max((resumed[name] - whole[name]).abs().max() for name in whole) < 5e-5

    shutil.copytree(two / "checkpoint-2", again / "checkpoint-2")
    sharded("--output_dir", again, "--resume_from_checkpoint", "latest")
    assert not changed(two, again)
