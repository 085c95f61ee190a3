"""The minutes and gigabytes of a run before it begins, for `--dry_run`: sizes of the model, and one timed product.

They are those of one process on this machine while nothing else runs, and rough.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_linear_attention._common.devices import computing_device, multiplies_bfloat16
from hf_linear_attention.conversion.plan import Plan
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.data.processors import default_length, mean_exact_tokens
from hf_linear_attention.training.recipe import MECHANISM, TRANSFER, OptimizationArguments


# Bytes of a token in a batch, over the width: in attention transfer, in each layer, in each that is computed again.
TRANSFERRED, KEPT, CHECKPOINT = 68, 88, 4
# Bytes of a token while one layer is differentiated, over heads times tokens that are exact: with rows of 920 and 4,096
# tokens, attention transfer held 4.0 and 5.5 GB of Qwen2.5-Coder-0.5B. LoRA with recomputed activations held, of its
# own, 1.5 and 3.1 GB with rows of 1,024 and 4,096, and 2.7 GB of mapped weights.
EXACT = 60
MOST_LOGITS, IMPORTS = 256e6, 0.6e9
# The time of everything over that of products: of fitting scores to Qwen2.5-Coder-0.5B, products took 51 %.
BESIDES = 2.0
# The same in bfloat16, where the rest is in float32: of 740 CPU seconds, products took 225 by the timed one.
BESIDES_BFLOAT16 = 3.3
# The division of keys takes as long as scores of so many tokens: 109 CPU seconds of Qwen2.5-Coder-0.5B, beside 631.
DIVISION = 10_000
ROWS = 1024  # of the timed product


class Estimate:
    """The cost of the stages of one plan."""

    def __init__(self, plan: Plan):
        model = plan.model
        (self.shape, *_) = (m.linear_attention.shape for m in linear_attention_modules(model).values())
        self.length, self.depth = default_length(plan.config), plan.num_layers
        self.exact = mean_exact_tokens(plan.config)
        self.base = sum(p.numel() for name, p in model.named_parameters() if MECHANISM not in name)
        output = model.get_output_embeddings()
        linear = {
            module: module.weight.numel()
            for name, module in model.named_modules()
            if isinstance(module, (nn.Linear, Conv1D)) and MECHANISM not in name
        }
        self.output, self.vocabulary = (linear.pop(output, 0), len(output.weight)) if output in linear else (0, 0)
        self.layers = sum(linear.values())
        device = computing_device()
        is_half = plan.config.dtype == torch.bfloat16 and multiplies_bfloat16(device)
        self.frozen = torch.bfloat16 if is_half else torch.float32
        self.speeds = {
            x: seconds_per_operation(self.shape.hidden_size, x, device) for x in {torch.float32, self.frozen}
        }

    def scores(self, tokens: int, divides: bool) -> str:
        """The time and the peak memory in which scores of exact keys are fitted, and keys divided between layers if
        they are.
        """
        # Qwen2.5-Coder-0.5B held 3.4 GB in bfloat16 and 6.4 in float32.
        besides = BESIDES if self.frozen == torch.float32 else BESIDES_BFLOAT16
        products, size = self.layers * (tokens + DIVISION * divides), 3 * self.frozen.itemsize * self.base
        return self._cost(products, self.frozen, size, besides)

    def stage(self, options: Mapping[str, Any], tokens: float) -> str:
        """The time and the peak memory of a stage with these options of `finetune.py`."""
        batch = options.get("per_device_train_batch_size", OptimizationArguments.per_device_train_batch_size)
        numbers = self.shape.hidden_size * batch * options.get("max_length", self.length)
        logits = min(MOST_LOGITS, 8 * self.vocabulary * numbers / self.shape.hidden_size)
        exact = EXACT * self.shape.num_heads * self.exact * numbers / self.shape.hidden_size
        if options.get(TRANSFER):
            products, size = self.layers, 4 * self.base + TRANSFERRED * numbers + exact + logits
            dtype = torch.float32
        else:
            has_adapters, again = bool(options.get("use_peft")), bool(options.get("gradient_checkpointing"))
            # the teacher's and the student's forward pass, and gradients of activations, and of weights
            products = (self.layers + self.output) * (3 if has_adapters else 4) + self.layers * again
            dtype = self.frozen if has_adapters else torch.float32
            # With adapters, these are the weights of student and teacher, and what is saved, which is read again.
            size = (3 * dtype.itemsize if has_adapters else 20) * self.base + logits
            size += (CHECKPOINT * self.depth + KEPT) * numbers + exact if again else KEPT * self.depth * numbers
        return self._cost(products * tokens, dtype, size)

    def _cost(self, products: float, dtype: torch.dtype, size: float, besides: float = BESIDES) -> str:
        taken = self._time(products, dtype, besides)
        return f"{taken} and {(size + IMPORTS) / 1e9:.1f} GB in {str(dtype)[len('torch.') :]}"

    def _time(self, products: float, dtype: torch.dtype, besides: float) -> str:
        seconds = 2 * products * besides * self.speeds[dtype]
        for unit, length, least in (("hours", 3600, 10_800), ("minutes", 60, 90)):
            if seconds >= least:
                return f"about {seconds / length:.0f} {unit}"
        return f"about {max(1, seconds):.0f} seconds"


def seconds_per_operation(width: int, dtype: torch.dtype, device: str) -> float:
    """Of one multiplication or addition in a product of matrices of this width."""
    x, weight = (torch.ones(n, width, dtype=dtype, device=device) for n in (ROWS, width))
    taken = []
    for _ in range(7):
        begin = time.perf_counter()
        (x @ weight).sum().item()
        taken.append(time.perf_counter() - begin)
    return min(taken) / (2 * ROWS * width * width)
