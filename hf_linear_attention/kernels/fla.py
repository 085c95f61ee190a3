# SPDX-License-Identifier: Apache-2.0
"""Causal kernel attention and the gated delta rule on CUDA by fla-core (extra `gpu`), if that is installed.

A column of ones beside the values makes fla's float32 state equal to ours, S | Z. The scale is 1 and the division is
done here, because fla's functions differ in the defaults of both, and fla sums its own normaliser in the dtype of the
keys. Its kernels of the delta rule always erase; without erasing, torch computes.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N tokens, F features, D head dimension of the values.
fla puts the tokens before the heads and needs as many key heads as query heads.
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
from packaging.version import Version
from torch import Tensor

from ..torch_kernels.blocks import is_on_cuda
from .cpu import requested_backend


logger = logging.getLogger(__name__)

# Up to this many tokens the recurrent kernel runs, in float32; beyond it, the kernel of blocks of matrix products.
LONGEST_RECURRENT = 64
# fla's documentation says that 16-bit kernels miscompile odd widths, and tensor cores load rows of 32 bytes.
COLUMNS = 16


def gpu_kernel(value: Tensor, length: int) -> Callable[..., Any] | None:
    """`causal_attention` if it supports N tokens with these values on CUDA, else None."""
    if not is_on_cuda(value) or requested_backend() == "torch" or not takes(value, length):
        return None
    return causal_attention


def takes(value: Tensor, length: int) -> bool:
    """Whether the kernels are installed, and as exact for these values as torch's own sums.

    Kernels for blocks multiply float32 as TF32, which keeps all digits of float16 but not of float32; float32 is
    therefore accepted only if torch itself may use TF32.
    """
    if value.dtype == torch.float64 or _kernels(True) is None:
        return False
    return length <= LONGEST_RECURRENT or value.dtype != torch.float32 or is_tf32_allowed()


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor | None, gate: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`CausalAttention.apply` on CUDA: `query [B, Hkv, G, N, F]`, `key [B, Hkv, N, F]`, `value [B, Hkv, N, D]`.

    Each token first multiplies the sums before it by exp(`gate [B, Hkv, N, F]`), if that is given. The results are the
    normalised output `[B, Hkv, G, N, D]`, its denominator `[B, Hkv, G, N, 1]` and the state `[B, Hkv, F, D + 1]`, all
    in float32.
    """
    kernels = _kernels(gate is not None)
    if kernels is None:
        raise ImportError("fla-core or triton is missing; call `takes` first.")
    groups, length, features, width = *query.shape[2:], value.shape[-1]
    is_short = length <= LONGEST_RECURRENT
    # Unnormalised sums overflow float16, and the kernels use one dtype for the sums and their terms.
    dtype = torch.bfloat16 if value.dtype == torch.bfloat16 and not is_short else torch.float32
    values = F.pad(value.to(dtype), (0, 1), value=1.0)
    gates = {} if gate is None else {"gk" if is_short else "g": laid_out(repeated(gate.float(), groups))}
    sums, new_state = kernels[0 if is_short else 1](
        laid_out(query.flatten(1, 2).to(dtype)),
        laid_out(repeated(key.to(dtype), groups)),
        laid_out(repeated(values, groups)),
        scale=1.0,
        initial_state=None if state is None else repeated(widened(widened(state.float(), -1), -2), groups),
        output_final_state=True,
        **gates,
    )
    sums = sums.float().transpose(1, 2).unflatten(1, (-1, groups))
    denominator = sums[..., width : width + 1]
    output = sums[..., :width] / denominator.masked_fill(denominator == 0, 1.0)
    if sums.requires_grad:
        sums.register_hook(refuse_second_derivatives)
    return output, denominator, new_state[:, ::groups, :features, : width + 1]


def refuse_second_derivatives(grad: Tensor) -> None:
    """Autograd treats fla's backward pass as a constant, so a second derivative would be silently wrong."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "fla's CUDA kernels have no second derivatives (`create_graph=True`, torch.func). To compute them, set the "
            "environment variable HF_LINEAR_ATTENTION_BACKEND to torch."
        )


def laid_out(x: Tensor) -> Tensor:
    """`[B, H, N, X]` -> `[B, N, H, X]`, with X padded by zeros."""
    return widened(x, -1).transpose(1, 2)


def widened(x: Tensor, axis: int) -> Tensor:
    """Pad this axis by zeros to a multiple of COLUMNS."""
    missing = -x.shape[axis] % COLUMNS
    return x if not missing else F.pad(x, (0, 0) * (-1 - axis) + (0, missing))


def repeated(x: Tensor, groups: int) -> Tensor:
    """Repeat each key/value head for its query heads: `[B, Hkv, ...]` -> `[B, Hkv G, ...]`."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def is_tf32_allowed() -> bool:
    """Whether torch may multiply float32 as TF32."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # since torch 2.9, where reading the old flag may raise
    return matmul.allow_tf32 if precision is None else precision == "tf32"


@functools.cache
def _kernels(gated: bool) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The recurrent and the chunked kernel of fla, without gates or with one for every token and feature.

    None if fla-core or triton is missing or too old to have them. A gate per head alone would be faster, but fla
    refuses its gradients where `refuses_decay_per_head`.
    """
    with without_models():
        try:
            if gated:
                from fla.ops.gla import chunk_gla as chunked
                from fla.ops.gla import fused_recurrent_gla as recurrent
            else:
                from fla.ops.simple_gla import chunk_simple_gla as chunked
                from fla.ops.simple_gla import fused_recurrent_simple_gla as recurrent
        except ImportError as error:
            logger.info("Linear attention on CUDA is computed by torch, not by fla-core's kernels: %s", error)
            return None
    return recurrent, chunked


@contextlib.contextmanager
def without_models() -> Iterator[None]:
    """`import fla` also imports its models, if they are installed, and these replace transformers' own Mamba."""
    hidden = [name for name in ("fla.layers", "fla.models") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes the import fail
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


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
    if not key.numel() or key.shape[3] > MOST_FEATURES or _delta_kernels(log_decay.ndim == 4) is None:
        return False
    return _is_recurrent(query, key, value, log_decay, beta, state) or value.dtype != torch.float32 or is_tf32_allowed()


def _is_recurrent(query: Tensor, *others: Tensor | None) -> bool:
    return query.shape[2] <= LONGEST_RECURRENT and not _needs_gradient(query, *others)


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


@functools.cache
def refuses_decay_per_head() -> bool:
    """Whether fla refuses gradients of the delta rule with a decay per head: on Hopper, by Triton 3.4 to 3.7.0."""
    from triton import __version__ as version

    is_miscompiled = Version("3.4") <= Version(version) < Version("3.7.1")
    return is_miscompiled and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def delta_on_gpu(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`torch_kernels.delta.plain_delta` with `erases` on CUDA in float32; blocks of bfloat16 values are bfloat16."""
    given = query, key, value, log_decay, beta, state
    if log_decay.ndim == 3 and _needs_gradient(*given) and refuses_decay_per_head():
        log_decay = log_decay.unsqueeze(-1).expand_as(key)
    kernels = _delta_kernels(log_decay.ndim == 4)
    if kernels is None:
        raise ImportError("fla-core or triton is missing; call `takes_on_gpu` first.")
    groups, (features, width) = query.shape[1] // key.shape[1], (key.shape[3], value.shape[3])
    is_recurrent = _is_recurrent(*given)
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
def _delta_kernels(by_feature: bool) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
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
