"""DeepSpeed's ZeRO-2 and ZeRO-3: optimizer state and gradients, with ZeRO-3 also parameters, in parts on all processes.

Its engine clips, steps and stores the optimizer. The loop tells it where a step ends and leaves the loss as it is; the
numbers are those of one process with a whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import unset_hf_deepspeed_config

from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.transformers_internals import undivided_modules


FOLDER = "deepspeed"  # in a checkpoint


def uses_deepspeed(accelerator: Accelerator) -> bool:
    return accelerator.state.deepspeed_plugin is not None


def engine_of(accelerator: Accelerator) -> Any:
    """DeepSpeed's engine, after `prepare`; None where it is not used."""
    wrapped = accelerator.deepspeed_engine_wrapped if uses_deepspeed(accelerator) else None
    return wrapped.engine if wrapped is not None else None


def zero_stage(accelerator: Accelerator) -> int | None:
    return accelerator.state.deepspeed_plugin.zero_stage if uses_deepspeed(accelerator) else None


def configure(accelerator: Accelerator, recipe: Recipe) -> None:
    """What the launch file leaves open or says about the optimization is what the recipe says."""
    optimization = recipe.optimization
    accelerator.state.deepspeed_plugin.deepspeed_config.update(
        train_micro_batch_size_per_gpu=optimization.per_device_train_batch_size,
        gradient_accumulation_steps=optimization.gradient_accumulation_steps,
        gradient_clipping=optimization.max_grad_norm or 0.0,
    )
    accelerator.gradient_accumulation_steps = optimization.gradient_accumulation_steps
    # which accelerate sets whatever `zero3_init_flag` says, and by which from_pretrained would split the teacher, too
    unset_hf_deepspeed_config()
    if accelerator.mixed_precision == "bf16":
        # accelerate leaves precision to DeepSpeed, and would autocast teacher and evaluation to torch's default
        accelerator.native_amp = True
        torch.set_autocast_dtype(accelerator.device.type, torch.bfloat16)


@contextmanager
def autocast_not_cast(accelerator: Accelerator) -> Iterator[None]:
    """Inside, an engine is made that keeps parameters in float32 with bf16; DeepSpeed's own way is to cast them."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    with_bf16 = dict(config)
    if accelerator.mixed_precision == "bf16":
        # no safe modules: gradients are summed in float32
        autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        config.update(bf16={"enabled": False}, torch_autocast=autocast)
    try:
        yield
    finally:
        config.clear()
        config.update(with_bf16)


def prepare(
    accelerator: Accelerator, student: PreTrainedModel, module: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Any, Any]:
    """Engine and optimizer as accelerate wraps them; parameters in parts stay in their modules."""
    if zero_stage(accelerator) == 3:
        gather_by_layer(student)
    with autocast_not_cast(accelerator):
        return accelerator.prepare(module, optimizer)


def gather_by_layer(student: PreTrainedModel) -> None:
    """Have ZeRO-3 gather a layer's parameters together, as FSDP does, and not where the module that has them is called.

    Kernels take them past their modules, and packed documents call a mechanism as often as there are lengths, which
    differ between processes.
    """
    from deepspeed.utils import set_z3_leaf_modules

    names = undivided_modules(student)
    set_z3_leaf_modules(student, list({type(part) for part in student.modules() if type(part).__name__ in names}))


def backward(engine: Any, loss: Tensor, is_last: bool) -> None:
    """Add the gradients of `loss`, undivided; `is_last` of the step. (accelerate's would step at once.)"""
    engine.set_gradient_accumulation_boundary(is_last)
    engine.backward(loss, scale_wrt_gas=False)


def step(engine: Any) -> Tensor:
    """Clip and step, but leave everything as it is where a gradient is not finite; the norm, infinite then."""
    engine.step()
    return torch.tensor(torch.inf if engine.optimizer.overflow else float(engine.get_global_grad_norm()))


def save_states(engine: Any, checkpoint: Path) -> None:
    """Write what each process has of the optimizer into `checkpoint`. Called by all processes.

    Raises:
        OSError: if a file cannot be written.
    """
    try:
        engine.save_checkpoint(str(checkpoint / FOLDER), tag="state", save_latest=False)
    except RuntimeError as error:  # torch's writer, on a full disk
        raise OSError(f"{checkpoint / FOLDER} could not be written: {str(error).splitlines()[0]}") from error


def load_states(engine: Any, checkpoint: Path) -> None:
    """Weights and optimizer as `save_states` found them, on as many processes."""
    engine.load_checkpoint(str(checkpoint / FOLDER), tag="state")
