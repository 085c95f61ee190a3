"""What two gloo processes do with a converted model; started by `processes.start`. A failure ends with exit code 1."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linear_attention import convert
from hf_linear_attention.training.tracking import read_metrics


def shard_and_train(folder: str, results: Path) -> None:
    """One SGD step of a model sharded layer by layer, and of a whole one on all rows; then its state dict and back."""
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sharded = _shard(copy.deepcopy(whole), mesh)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    local = sum(parameter.to_local().numel() for parameter in sharded.parameters())
    rows = torch.randint(5, 300, (4, 48), generator=torch.Generator().manual_seed(0))
    losses = [_step(whole, rows), _step(sharded, rows[2 * rank : 2 * rank + 2])]
    full = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(sharded, options=full)
    restored = _shard(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), mesh)
    set_model_state_dict(restored, dict(state), options=full)  # a copy: it puts the shards into what it is given
    again = get_model_state_dict(restored, options=full)
    same_logits = torch.equal(restored.eval()(rows[:2]).logits, sharded.eval()(rows[:2]).logits)
    if rank == 0:
        found: dict[str, Any] = {
            "losses": losses,
            "whole": whole.state_dict(),
            "sharded": state,
            "restored": again,
            "same_logits": same_logits,
            "local": local,
        }
        torch.save(found, results)
    dist.barrier()
    dist.destroy_process_group()


def _shard(model: Any, mesh: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _step(model: nn.Module, rows: Tensor) -> float:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logits = model(rows, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / 2


def tensor_parallel(folder: str, results: Path) -> None:
    """Logits and the gradient of the first layer's q_proj of a model split over two processes by its own plan."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto")
    rows = torch.randint(5, 300, (2, 48), generator=torch.Generator().manual_seed(0))
    logits = model(rows, use_cache=False).logits
    split = [name for name, value in model.named_parameters() if isinstance(value, DTensor)]
    if dist.get_rank() == 0:
        torch.save({"logits": logits.detach(), "split": split}, results)
    dist.barrier()
    dist.destroy_process_group()


def sharded_finetune(cache: Path, options: list[Any]) -> int:
    """`finetune.py` under accelerate's FSDP2 on two CPU processes.

    accelerate makes DDP of FSDP on a CPU, and nothing of it needs a GPU but that choice, which is made here for it.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    from hf_linear_attention.training import distributed

    def accelerator(**keywords: Any) -> Accelerator:
        made = Accelerator(**keywords)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        if made.mixed_precision != "no":
            plugin.set_mixed_precision(made.mixed_precision)
        made.state.distributed_type, made.state.fsdp_plugin = DistributedType.FSDP, plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        return made

    distributed.Accelerator = accelerator
    return processes.finetune(cache, options)


def distillation(source: Path, teacher: str, files: Path, **settings: Any) -> list[Any]:
    """Options of a short run with evaluation and checkpoints; saves the `teacher` converted as `source`."""
    settings = settings or {"mechanism": "hybrid", "window_size": 8, "num_features": 8}
    convert(teacher, **settings).save_pretrained(source)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(source)
    options = ["--model_name_or_path", source, "--teacher_name_or_path", teacher, "--task", "causal_lm"]
    options += ["--train_file", files / "train.jsonl", "--validation_file", files / "valid.jsonl", "--max_length", 32]
    options += ["--logits_kl_weight", 1, "--hidden_state_weight", 1, "--max_train_steps", 4, "--learning_rate", "1e-3"]
    return [*options, "--logging_steps", 1, "--eval_steps", 2, "--checkpointing_steps", 2]


def assert_same_run(found: Path, expected: Path, rel: float = 1e-4, atol: float = 5e-5) -> dict[str, Tensor]:
    """Losses and weights of the run that wrote `found`, on two processes, are those of `expected`; returns the weights.

    Default tolerances: AdamW turns rounding in tiny gradients into up to lr = 1e-3 a step; a gradient of one process
    alone would be off in the second digit.
    """
    mine, yours = (read_metrics(folder / "metrics.jsonl") for folder in (found, expected))
    assert len(mine) == len(yours) == 7
    for event, other in zip(mine, yours, strict=True):
        assert {**event, "tokens_per_second": 0} == pytest.approx({**other, "tokens_per_second": 0}, rel=rel)
    saved, whole = (load_file(folder / "model.safetensors") for folder in (found, expected))
    assert saved.keys() == whole.keys()
    assert max((saved[name] - whole[name]).abs().max() for name in whole) < atol
    return saved
