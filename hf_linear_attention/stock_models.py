# SPDX-License-Identifier: Apache-2.0
"""Our kernels for the gated delta rule in stock models of transformers: Qwen3-Next, Olmo-Hybrid, Kimi Linear.

Without fla-core, and on a CPU always, these models compute their linear layers in plain torch. Their modules look the
rule up by its name in their file, in every call, so models that exist already are accelerated too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .torch_kernels.delta import gated_delta


# Model types whose file has the functions below; the tests compare each that the installed transformers knows.
STOCK_MODELS = (
    "bailing_hybrid",
    "glm5_next",
    "kimi_linear",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen4_exp",
)
# A decay per head, and a decay per feature; both for whole inputs, and for one token after a state.
STOCK_FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)


def accelerate_stock_models() -> contextlib.ExitStack:
    """Let stock models of transformers compute the gated delta rule with our kernels on a CPU, from now on.

    These are Qwen3-Next, Qwen3.5, Olmo-Hybrid, Kimi Linear and the other `STOCK_MODELS` that the installed transformers
    has. Values and gradients are those of transformers' torch code up to rounding; the ratios of time are in
    `benchmarks/results/speed.md`. Tensors on other devices, packed sequences (`cu_seqlens`) and torch.export go on to
    the function that transformers has chosen.

    Returns:
        What undoes it: as a context manager at the end of `with`, or by its method `close`. Undo in the reverse order
        if it is called more than once.
    """
    undo = contextlib.ExitStack()
    for model_type in STOCK_MODELS:
        name = f"transformers.models.{model_type}.modeling_{model_type}"
        if importlib.util.find_spec(name.rpartition(".")[0]) is None:
            continue
        module = importlib.import_module(name)
        for function in STOCK_FUNCTIONS:
            stock = getattr(module, function, None)
            if stock is not None:
                undo.callback(setattr, module, function, stock)
                setattr(module, function, _accelerated(stock))
    return undo


def _accelerated(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def delta_rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        is_packed = kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None
        if args or is_packed or not value.is_cpu or torch.compiler.is_exporting():
            return stock(query, key, value, g, beta, *args, **kwargs)
        state, normalizes = kwargs.get("initial_state"), kwargs.get("use_qk_l2norm_in_kernel", False)
        output, state = _delta_rule(query, key, value, g, beta, state, normalizes)
        return output, state if kwargs.get("output_final_state", False) else None

    return delta_rule


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, normalizes: bool
) -> tuple[Tensor, Tensor]:
    """The rule as transformers defines it: tokens before heads, float32, queries scaled by 1 / sqrt(features)."""
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]
    query, key, value, g, beta = (x.float() for x in (query, key, value, g, beta))
    if normalizes:
        query, key = (x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6) for x in (query, key))
    if groups > 1:  # in Qwen3-Next each query/key head has several heads of values, and a state for each
        query, key = (x.repeat_interleave(groups, dim=2) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    query, key, value, g, beta = (x.transpose(1, 2) for x in (query, key, value, g, beta))
    output, state = gated_delta(query, key, value, g, beta, state=None if state is None else state.float())
    return output.transpose(1, 2).to(dtype), state
