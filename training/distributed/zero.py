"""DeepSpeed's ZeRO-2 and ZeRO-3, which partition gradients, optimizer state and, with ZeRO-3, parameters.

DeepSpeed's engine clips the gradients, makes the steps and stores the optimizer. The loop tells it where a step ends,
and does not rescale the loss; the results are those of one process with a whole model.
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

from hf_linear_attention.attention.transformers_internals import undivided_modules
from hf_linear_attention.training.recipe import Recipe


FOLDER = "deepspeed"  # the folder of its files in a checkpoint


def uses_deepspeed(accelerator: Accelerator) -> bool:
    """Whether the launch file asks for DeepSpeed."""
    return accelerator.state.deepspeed_plugin is not None


def engine_of(accelerator: Accelerator) -> Any:
    """The engine of DeepSpeed, which exists after `prepare`; None if DeepSpeed is not used."""
    wrapped = accelerator.deepspeed_engine_wrapped if uses_deepspeed(accelerator) else None
    return wrapped.engine if wrapped is not None else None


def zero_stage(accelerator: Accelerator) -> int | None:
    """The stage of ZeRO, 2 or 3; None if DeepSpeed is not used."""
    return accelerator.state.deepspeed_plugin.zero_stage if uses_deepspeed(accelerator) else None


def configure(accelerator: Accelerator, recipe: Recipe) -> None:
    """Set what the recipe decides about the optimization, whatever the launch file says."""
    optimization = recipe.optimization
    accelerator.state.deepspeed_plugin.deepspeed_config.update(
        train_micro_batch_size_per_gpu=optimization.per_device_train_batch_size,
        gradient_accumulation_steps=optimization.gradient_accumulation_steps,
        gradient_clipping=optimization.max_grad_norm or 0.0,
    )
    accelerator.gradient_accumulation_steps = optimization.gradient_accumulation_steps
    # accelerate sets this config even without `zero3_init_flag`, and from_pretrained would split the teacher by it.
    unset_hf_deepspeed_config()
    if accelerator.mixed_precision == "bf16":
        # accelerate leaves the precision to DeepSpeed, and would autocast teacher and evaluation to torch's default.
        accelerator.native_amp = True
        torch.set_autocast_dtype(accelerator.device.type, torch.bfloat16)


@contextmanager
def autocast_not_cast(accelerator: Accelerator) -> Iterator[None]:
    """Inside, DeepSpeed makes an engine that autocasts to bf16; by default it would cast the float32 parameters."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    with_bf16 = dict(config)
    if accelerator.mixed_precision == "bf16":
        # Without safe modules, all gradients are summed in float32.
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
    """The engine for `module` and the optimizer, both as accelerate wraps them."""
    if zero_stage(accelerator) == 3:
        gather_by_layer(student)
    with autocast_not_cast(accelerator):
        return accelerator.prepare(module, optimizer)


def gather_by_layer(student: PreTrainedModel) -> None:
    """Have ZeRO-3 gather the parameters of a layer together, as FSDP does, instead of those of each module called.

    Kernels read parameters without calling their modules. With packed documents, a mechanism is called once per
    length, and the number of lengths differs between processes.
    """
    from deepspeed.utils import set_z3_leaf_modules

    names = undivided_modules(student)
    set_z3_leaf_modules(student, list({type(part) for part in student.modules() if type(part).__name__ in names}))


def backward(engine: Any, loss: Tensor, is_last: bool) -> None:
    """Add the gradients of `loss`, not rescaled; `is_last` marks the last backward pass of a step.

    The backward pass of accelerate would step at once.
    """
    engine.set_gradient_accumulation_boundary(is_last)
    engine.backward(loss, scale_wrt_gas=False)


def step(engine: Any) -> Tensor:
    """Clip the gradients and step, and return their norm. If it is not finite, no step is made, and it is infinite."""
    engine.step()
    return torch.tensor(torch.inf if engine.optimizer.overflow else float(engine.get_global_grad_norm()))


def save_states(engine: Any, checkpoint: Path) -> None:
    """Write the part of the optimizer that each process has into `checkpoint`. All processes call this together.

    Raises:
        OSError: if a file cannot be written.
    """
    try:
        engine.save_checkpoint(str(checkpoint / FOLDER), tag="state", save_latest=False)
    except RuntimeError as error:  # the error of torch's writer on a full disk
        raise OSError(f"{checkpoint / FOLDER} could not be written: {str(error).splitlines()[0]}") from error


def load_states(engine: Any, checkpoint: Path) -> None:
    """Load the weights and the optimizer that `save_states` has written with the same number of processes."""
    engine.load_checkpoint(str(checkpoint / FOLDER), tag="state")
