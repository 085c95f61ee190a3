# SPDX-License-Identifier: Apache-2.0
"""The one entry to the kernels: what a mechanism calls, and where it is decided what computes.

On a CPU that is C where the package was installed with it (csrc/, float32 and bfloat16), on CUDA fla-core's kernels
(extra `gpu`), else torch. All check the same (`kernels_checks`). torch.compile sees one operator (`kernels_operators`);
torch.export, ONNX and torch.func get plain operations.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, S keys, W head dimension of the values,
F features.
"""

from __future__ import annotations

from typing import Any

import torch

from .kernels_causal import CausalAttention
from .kernels_causal import ElementwiseMap
from .kernels_checks import check_attention
from .kernels_torch import EXP
from .kernels_torch import PLAIN
from .kernels_cpu import takes
from .kernels_operators import OPERATORS
from .kernels_operators import in_torch
from .kernels_operators import step_in_c
from .kernels_operators import takes_attention
from .kernels_torch import KernelMap
from .kernels_torch import accumulated
from .kernels_torch import shown
from .kernels_torch import torch_step
from .kernels_torch import with_dtype


def is_tracing() -> bool:
    """Inside a graph (torch.compile, torch.export, ONNX), where nothing may branch on data."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def needs_plain(tensor: torch.Tensor) -> bool:
    """Whether operators of our own would be in the way: in exported graphs, under torch.func, in tensor subclasses."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():
        return True
    if torch.compiler.is_compiling():
        return False
    return type(tensor) is not torch.Tensor or torch._C._functorch.maybe_current_level() is not None


def is_eager(tensor: torch.Tensor) -> bool:
    """Whether this computes at once, on a plain tensor: there, what is fastest eagerly does not make a graph larger."""
    return not torch.compiler.is_compiling() and not needs_plain(tensor)


def makes_features(query, key, value, key_mask, num_features: int) -> bool:
    """Whether `map_attention` makes features inside a kernel, so that making them before would only cost memory."""
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    return is_eager(value) and takes_attention(query, key, value, key_mask, num_features)


def map_attention(
    feature_map: KernelMap,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool,
    key_mask: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    log_decay: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Attention with a feature map that the kernels know, from queries and keys: features never reach memory in C.

    Args: as `kernel_attention`, but `query [B, H, N, D]` and `key [B, Hkv, S, D]` before the feature map.

    Returns:
        The output `[B, N, H, W]` in the dtype of `query`, and in the accumulation dtype its denominator and log scale
        `[B, Hkv, G, N, 1]` (None without exponents; a constant without gradient), and the state.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit each other.
    """
    query_map, key_map = feature_map.query, feature_map.key
    affine = (None,) * 4 if query_map is None or key_map is None else (*key_map, query_map.weight)
    given: Any = (query, key, value, key_mask, log_decay, state, *affine, feature_map.function, is_causal)
    is_plain = needs_plain(value)
    if is_plain or not (torch.compiler.is_compiling() or takes_attention(query, key, value, key_mask, 1)):
        check_attention(*given)
        return _with_output(query, *in_torch(*given, plain=is_plain))
    output, denominator, scale, state = OPERATORS.attention(*given)
    return output, denominator, scale if feature_map.log_features else None, state


def _with_output(query, output, denominator, scale, state):
    return with_dtype(output.flatten(1, 2).transpose(1, 2), query.dtype), denominator, scale, state


def kernel_attention(
    query_features: torch.Tensor,
    key_features: torch.Tensor,
    value: torch.Tensor,
    *,
    log_features: bool,
    is_causal: bool,
    key_mask: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    log_decay: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights phi(q_i)·phi(k_j) / sum_j phi(q_i)·phi(k_j) (Katharopoulos 2020, equations 5, 9 and 18-20).

    Args:
        query_features: `[B, H, N, F]`, non-negative features, or their logarithms when `log_features`.
        key_features: `[B, Hkv, S, F]`, likewise. In the causal form S = N and the state lies before the first token.
        value: `[B, Hkv, S, W]`.
        key_mask: bool `[B, S]`, False where a key takes no part. A query that sees no key at all returns 0. Integers
            number packed sequences from 1 (0 at padding): a query then sees the keys of its own sequence alone. At -n
            is a query of sequence n, whose key takes no part.
        state: the state after the tokens before these, or None at the start.
        log_decay: `[Hkv]`, at most 0: the weight of a key is multiplied by exp(log_decay) for every real token between
            it and the query (ALiBi with slope -log_decay). Causal form only.

    Returns:
        The output `[B, H, N, W]` in the accumulation dtype, and the state after these tokens.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit each other.
    """
    query, key = accumulated(query_features), accumulated(key_features)
    if state is not None and key_mask is None and query.ndim == key.ndim == 4 and query.shape[2] == key.shape[2] == 1:
        return attention_step(query, key, value, state, log_features=log_features, log_decay=log_decay)
    feature_map = KernelMap(EXP if log_features else PLAIN)
    options: dict[str, Any] = {"key_mask": key_mask, "state": state, "log_decay": log_decay}
    output, _, _, state = map_attention(feature_map, query, key, value, is_causal=is_causal, **options)
    return output.transpose(1, 2), state


def kernel_sums(
    query_features: torch.Tensor, key_features: torch.Tensor, value: torch.Tensor, *, log_features: bool, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`kernel_attention` before its division (arguments as there), to share a denominator with other keys.

    Returns:
        `(sums, log_scale, state)`: numerator and denominator `[B, Hkv, G, N, W + 1]`, which stand there divided by
        exp(log_scale) (`[B, Hkv, G, N, 1]`, a constant without gradient; None for plain features).
    """
    query, key = accumulated(query_features), accumulated(key_features)
    feature_map = KernelMap(EXP if log_features else PLAIN)
    output, denominator, scale, state = map_attention(feature_map, query, key, value, **options)
    output = output.transpose(1, 2).unflatten(1, denominator.shape[1:3])
    return torch.cat((output * denominator, denominator), dim=-1), scale, state


def elementwise_attention(
    feature_map: ElementwiseMap,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernel_attention` in its causal form from queries and keys whose features are made block by block, not kept."""
    check_attention(query, key, value, key_mask, None, state, *(None,) * 4, PLAIN, True)
    mask = None if key_mask is None else key_mask[:, None, :, None]
    query = query.unflatten(1, (key.shape[1], -1))
    key, value = shown(key, key_mask), shown(value, key_mask)
    output, _, state = CausalAttention.apply(query, key, value, state, mask, feature_map)
    return output.flatten(1, 2), state


def attention_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    *,
    log_features: bool,
    log_decay: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernel_attention` of one token after others: `query [B, H, 1, F]`, `key [B, Hkv, 1, F]`, `value [B, Hkv, 1, W]`.

    Raises:
        ValueError: if shapes, dtypes or devices do not fit each other.
    """
    if (log_features or log_decay is None) and takes_step(query, key, value, state):
        return step_in_c(query, key, value, state, log_decay, log_features)
    function = EXP if log_features else PLAIN
    check_attention(query, key, value, None, log_decay, state, *(None,) * 4, function, True)
    return torch_step(query, key, value, state, log_features, log_decay)


def takes_step(*tensors: torch.Tensor) -> bool:
    """Whether C computes a step of one token with these, outside a graph and without gradients."""
    if torch.is_grad_enabled() or not is_eager(tensors[0]):
        return False
    return takes(*tensors)
