# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule on CUDA by fla-core (extra `gpu`), if that is installed.

fla puts the tokens before the heads, and needs as many key/value heads as query heads. Its scale is set to 1, because
the caller scales the queries. Its kernels always erase; without erasing, torch computes.

Axes: B batch, H query heads, Hkv key/value heads, N tokens, F features, D head dimension of the values.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .cpu import requested_backend
from .fla import (
    LONGEST_RECURRENT,
    is_on_cuda,
    is_tf32_allowed,
    laid_out,
    refuse_second_derivatives,
    repeated,
    widened,
    without_models,
)


logger = logging.getLogger(__name__)

# The widest keys that fla's kernels for blocks of tokens support.
MOST_FEATURES = 256


def takes_on_gpu(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, erases: bool
) -> bool:
    """Whether fla's kernels are installed, fit, and are as exact for these tensors as torch's own products.

    Kernels for blocks of tokens multiply float32 as TF32, so they get float32 only if torch itself may use TF32. The
    recurrent kernel is exact, but has no gradients.
    """
    if not erases or not is_on_cuda(value) or requested_backend() == "torch" or value.dtype == torch.float64:
        return False
    if not key.numel() or key.shape[3] > MOST_FEATURES or _kernels(log_decay.ndim == 4) is None:
        return False
    return _is_recurrent(query, key, value, log_decay, beta, state) or value.dtype != torch.float32 or is_tf32_allowed()


def _is_recurrent(query: Tensor, *others: Tensor | None) -> bool:
    is_short = query.shape[2] <= LONGEST_RECURRENT
    needs_gradient = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, *others))
    return is_short and not needs_gradient


def delta_on_gpu(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`torch_kernels.delta.plain_delta` with `erases` on CUDA, in float32; the blocks of bfloat16 values are bfloat16.

    Raises:
        ImportError: if fla-core or triton is missing.
    """
    kernels = _kernels(log_decay.ndim == 4)
    if kernels is None:
        raise ImportError("fla-core or triton is missing; call `takes_on_gpu` first.")
    groups, (features, width) = query.shape[1] // key.shape[1], (key.shape[3], value.shape[3])
    is_recurrent = _is_recurrent(query, key, value, log_decay, beta, state)
    # float16 would overflow where the state grows.
    dtype = torch.bfloat16 if value.dtype == torch.bfloat16 and not is_recurrent else torch.float32
    log_decay, beta = repeated(log_decay.float(), groups), repeated(beta.float(), groups)
    output, new_state = kernels[0 if is_recurrent else 1](
        laid_out(query.to(dtype)),
        *(laid_out(repeated(x.to(dtype), groups)) for x in (key, value)),
        g=laid_out(log_decay) if log_decay.ndim == 4 else log_decay.transpose(1, 2),
        beta=beta.transpose(1, 2),
        scale=1.0,
        initial_state=None if state is None else repeated(widened(widened(state.float(), -1), -2), groups),
        output_final_state=True,
    )
    for result in (output, new_state):
        if result.requires_grad:
            result.register_hook(refuse_second_derivatives)
    output = output[..., :width].float().transpose(1, 2)
    return output, new_state[:, ::groups, :features, :width].float()


@functools.cache
def _kernels(by_feature: bool) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """fla's recurrent and its chunked kernel for a decay per head, or per feature; None if they are missing."""
    with without_models():
        try:
            if by_feature:
                from fla.ops.kda import chunk_kda as chunked
                from fla.ops.kda import fused_recurrent_kda as recurrent
            else:
                from fla.ops.gated_delta_rule import chunk_gated_delta_rule as chunked
                from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule as recurrent
        except ImportError as error:
            logger.info("The gated delta rule on CUDA is computed by torch, not by fla-core's kernels: %s", error)
            return None
    return recurrent, chunked
