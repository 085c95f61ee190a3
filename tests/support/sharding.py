"""What two gloo processes do with a converted model; started by `processes.start`. A failure ends with exit code 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM


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


def sharded_finetune(cache: Path, options: list[Any], reshard: bool = True) -> int:
    """`finetune.py` under accelerate's FSDP2 on two CPU processes.

    accelerate makes DDP of FSDP on a CPU, and nothing of it needs a GPU but that choice, which is made here for it.
    """
    import accelerate
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    def accelerator(**keywords: Any) -> Accelerator:
        made = Accelerator(**keywords)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
            reshard_after_forward=reshard,
        )
        if made.mixed_precision != "no":
            plugin.set_mixed_precision(made.mixed_precision)
        made.state.distributed_type, made.state.fsdp_plugin = DistributedType.FSDP, plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        prepare = made.prepare

        def prepared(*given: Any, **options: Any) -> Any:
            found = prepare(*given, **options)
            assert all(isinstance(parameter, DTensor) for parameter in found[0].parameters())
            return found

        made.prepare = prepared
        return made

    accelerate.Accelerator = accelerator
    return processes.finetune(cache, options)
