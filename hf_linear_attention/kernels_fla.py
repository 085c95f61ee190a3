# SPDX-License-Identifier: Apache-2.0
"""Causal kernel attention on CUDA by fla-core (extra `gpu`), in place of `CausalAttention` where it is installed.

A column of ones beside the values makes fla's float32 state ours, S | Z; scale is 1 and the division is our own: the
defaults of fla's functions differ in both, and its own normaliser is summed in the dtype of the keys.

Axes: B batch, Hkv key/value heads, G query heads per key/value head, N tokens, F features, D head dimension of the
values. fla has the tokens before the heads, and as many key heads as query heads.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from .kernels_cpu import requested_backend


logger = logging.getLogger(__name__)

# Up to this length one token after the other, in float32; beyond, blocks of matrix products.
LONGEST_RECURRENT = 64
# 16-bit kernels miscompile odd widths (fla says so), and rows of 32 bytes are what tensor cores load.
COLUMNS = 16


def gpu_kernel(value: torch.Tensor, length: int) -> Callable[..., Any] | None:
    """`causal_attention` for N tokens on CUDA with these values, or None."""
    if not _is_on_cuda(value) or requested_backend() == "torch" or not takes(value, length):
        return None
    return causal_attention


def _is_on_cuda(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and type(tensor) is torch.Tensor  # of no kind that has no memory


def takes(value: torch.Tensor, length: int) -> bool:
    """Whether the kernels are there, and as exact as torch's own sums would be.

    Blocks multiply float32 as TF32, which has all the digits of float16 but not of float32: those only if torch may.
    """
    if value.dtype == torch.float64 or _kernels() is None:
        return False
    return length <= LONGEST_RECURRENT or value.dtype != torch.float32 or _is_tf32_allowed()


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor | None,
    log_decay: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `CausalAttention.apply`: `query [B, Hkv, G, N, F]`, `key [B, Hkv, N, F]`, `value [B, Hkv, N, D]`.

    Args:
        log_decay: `[B, Hkv, N]`, by how much each token makes all before it fade; None for not at all.

    Returns:
        The normalised output `[B, Hkv, G, N, D]`, its denominator `[B, Hkv, G, N, 1]` and the state
        `[B, Hkv, F, D + 1]`, all in float32.
    """
    kernels = _kernels()
    if kernels is None:
        raise ImportError("fla-core and triton are missing; ask `takes` first")
    groups, length, features, width = *query.shape[2:], value.shape[-1]
    is_short = length <= LONGEST_RECURRENT
    # Unnormalised sums overflow float16, and have one dtype with what they are sums of.
    dtype = torch.bfloat16 if value.dtype == torch.bfloat16 and not is_short else torch.float32
    values = F.pad(value.to(dtype), (0, 1), value=1.0)
    sums, new_state = kernels[0 if is_short else 1](
        _laid_out(query.flatten(1, 2).to(dtype)),
        _laid_out(_repeated(key.to(dtype), groups)),
        _laid_out(_repeated(values, groups)),
        g=None if log_decay is None else _repeated(log_decay.float(), groups).transpose(1, 2),
        scale=1.0,
        initial_state=None if state is None else _repeated(_widened(_widened(state.float(), -1), -2), groups),
        output_final_state=True,
    )
    sums = sums.float().transpose(1, 2).unflatten(1, (-1, groups))
    denominator = sums[..., width : width + 1]
    output = sums[..., :width] / denominator.masked_fill(denominator == 0, 1.0)
    if sums.requires_grad:
        sums.register_hook(_refuse_second_derivatives)
    return output, denominator, new_state[:, ::groups, :features, : width + 1]


def _refuse_second_derivatives(grad: torch.Tensor) -> None:
    """fla's backward pass is a constant to autograd: differentiating it again would be wrong in silence."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "fla's CUDA kernels have no second derivatives (`create_graph=True`, torch.func); set the environment "
            "variable HF_LINEAR_ATTENTION_BACKEND to torch for them."
        )


def _laid_out(x: torch.Tensor) -> torch.Tensor:
    """`[B, H, N, X]` -> `[B, N, H, X]`, X filled up with zeros."""
    return _widened(x, -1).transpose(1, 2)


def _widened(x: torch.Tensor, axis: int) -> torch.Tensor:
    missing = -x.shape[axis] % COLUMNS
    return x if not missing else F.pad(x, (0, 0) * (-1 - axis) + (0, missing))


def _repeated(x: torch.Tensor, groups: int) -> torch.Tensor:
    """`[B, Hkv, ...]` -> `[B, Hkv G, ...]`."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _is_tf32_allowed() -> bool:
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # from torch 2.9 on, where reading the old flag may raise
    return matmul.allow_tf32 if precision is None else precision == "tf32"


@functools.cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Its recurrent and its chunked kernel, or None where fla-core or triton is missing or too old to have them."""
    with _without_models():
        try:
            from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla
        except ImportError as error:
            logger.info("No CUDA kernels of fla-core, torch computes instead: %s", error)
            return None
    return fused_recurrent_simple_gla, chunk_simple_gla


@contextlib.contextmanager
def _without_models() -> Iterator[None]:
    """`import fla` imports its models where they are installed, which replace transformers' own mamba."""
    hidden = [name for name in ("fla.layers", "fla.models") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: there is no such module
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
