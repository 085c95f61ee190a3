# SPDX-License-Identifier: Apache-2.0
"""What the kernels take: every shape, dtype and device is compared here, once, before anything is computed.

The same checks serve C and torch, so that a mistake is the same ValueError on every machine. Axes: B batch, H query
heads, Hkv key/value heads, N queries, S keys, D head_dim, W head dimension of the values, F features.
"""

from __future__ import annotations

import torch

from .kernels_torch import EXP
from .kernels_torch import HEDGEHOG
from .kernels_torch import PLAIN
from .kernels_torch import accumulation_dtype


Shape = tuple["int | None", ...]


def check_shape(name: str, tensor: torch.Tensor | None, *shapes: Shape, like: torch.Tensor) -> None:
    """Refuse a tensor that has none of these shapes (None: any length), or is not where `like`, the queries, are.

    Raises:
        ValueError: naming both.
    """
    if tensor is None or (tensor.shape in shapes and tensor.device == like.device):
        return
    if tensor.device != like.device:
        raise ValueError(f"`{name}` is on {tensor.device} and the queries on {like.device}; move one of them.")
    got = tensor.shape
    for shape in shapes:
        if len(got) == len(shape) and all(n is None or n == m for n, m in zip(shape, got)):
            return
    allowed = " or ".join(f"[{', '.join('any' if n is None else str(n) for n in shape)}]" for shape in shapes)
    raise ValueError(
        f"`{name}` has the shape {list(got)}, and with queries of shape {list(like.shape)} it must have {allowed}. A "
        "cache of another batch size has to be repeated first (`cache.batch_repeat_interleave(n)`)."
        if name == "state"
        else f"`{name}` has the shape {list(got)}, and with queries of shape {list(like.shape)} it must have {allowed}."
    )


def check_axes(x: torch.Tensor) -> None:
    """The argument of the operator `elu_plus_one`.

    Raises:
        ValueError: if it has not four axes.
    """
    if x.ndim != 4:
        raise ValueError(f"`x` has {x.ndim} axes; it must be [batch, heads, length, head_dim].")


def check_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int, int]:
    """`query [B, H, N, D]`, `key [B, Hkv, S, any]`, `value [B, Hkv, S, W]` with H a multiple of Hkv -> B, H, Hkv.

    Raises:
        ValueError: naming the shapes that do not fit.
    """
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(
            f"Queries, keys and values have {query.ndim}, {key.ndim} and {value.ndim} axes; each must be "
            "[batch, heads, length, head_dim]."
        )
    batch, heads = query.shape[:2]
    kv_heads, length = key.shape[1:3]
    check_shape("key", key, (batch, None, None, None), like=query)
    check_shape("value", value, (batch, kv_heads, length, None), like=query)
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"Got {heads} query heads and {kv_heads} key/value heads; the first must be a multiple.")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` is {tensor.dtype}; it must be a floating-point tensor.")
    return batch, heads, kv_heads


def check_mask(mask: torch.Tensor | None, key: torch.Tensor, query: torch.Tensor) -> None:
    """`[B, S]`, bool, or integers that number packed sequences.

    Raises:
        ValueError: for another shape or dtype.
    """
    if mask is None:
        return
    check_shape("key_mask", mask, (key.shape[0], key.shape[2]), like=query)
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(
            f"`key_mask` is {mask.dtype}; it must be bool (True where a key takes part), or integers that number "
            "packed sequences from 1."
        )


def check_attention(
    query, key, value, key_mask, log_decay, state, key_weight, key_bias, key_norm, query_weight, function, is_causal
) -> int:
    """The arguments of the operator `attention` (see kernels_operators) fit each other -> F, its features.

    Raises:
        ValueError: for the first that does not, with the size that was got and the one that is needed.
    """
    batch, heads, kv_heads = check_heads(query, key, value)
    check_mask(key_mask, key, query)
    if is_causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"Got {query.shape[2]} queries and {key.shape[2]} keys; causal attention needs as many keys as queries, "
            "older ones are in the state."
        )
    check_shape("query", query, (batch, heads, None, key.shape[3]), like=query)
    if function not in range(4):
        raise ValueError(f"`function` = {function} is not one of 0 (none), 1 (elu + 1), 2 (exp) and 3 (Hedgehog).")
    if (key_weight is None) != (query_weight is None):
        raise ValueError("`key_weight` and `query_weight` go together; give both or none.")
    if (key_bias is not None or key_norm is not None) and (key_weight is None or function == HEDGEHOG):
        raise ValueError(
            f"Got `key_bias` or `key_norm` with `function` = {function} and "
            f"{'no' if key_weight is None else 'a'} `key_weight`; they need one, and Hedgehog (3) has neither."
        )
    if key_weight is None:
        columns = key.shape[3]
    else:
        columns = key_weight.shape[-1] if key_weight.ndim else 0
        check_shape("key_weight", key_weight, *((n, key.shape[3], None) for n in (kv_heads, 1)), like=query)
        check_shape("query_weight", query_weight, *((n, query.shape[3], columns) for n in (heads, 1)), like=query)
        check_shape("key_bias", key_bias, *((n, 1, columns) for n in (kv_heads, 1)), like=query)
        check_shape("key_norm", key_norm, *((n, 1, 1) for n in (kv_heads, 1)), like=query)
    features = columns * (1 + (function == HEDGEHOG))
    check_shape("log_decay", log_decay, (kv_heads,), like=query)
    if log_decay is not None and not is_causal:
        raise ValueError("`log_decay` is for causal attention; leave it out where queries look both ways.")
    if state is not None:
        check_state("state", state, (batch, kv_heads, features, value.shape[3] + 1 + (function >= EXP)), query, value)
    return features


def check_step(query, key, value, state, log_decay, log_features: bool) -> None:
    """`check_attention` of one token after others, quickly where all is well.

    Raises:
        ValueError: for the first argument that does not fit.
    """
    device = query.device
    if query.ndim == key.ndim == value.ndim == 4 and log_decay is None:
        (batch, heads, length, features), kv_heads, width = query.shape, key.shape[1], value.shape[-1]
        is_usual = (
            length == 1
            and key.shape == (batch, kv_heads, 1, features)
            and value.shape == (batch, kv_heads, 1, width)
            and state.shape == (batch, kv_heads, features, width + 1 + log_features)
            and kv_heads
            and heads % kv_heads == 0
            and state.dtype == torch.float32
            and value.dtype != torch.float64
            and key.device == value.device == state.device == device
        )
        if is_usual and query.is_floating_point() and key.is_floating_point() and value.is_floating_point():
            return
    check_attention(query, key, value, None, log_decay, state, *(None,) * 4, EXP if log_features else PLAIN, True)


def check_state(name: str, state: torch.Tensor, shape: Shape, query: torch.Tensor, value: torch.Tensor) -> None:
    """A state of this shape, in the accumulation dtype of the values.

    Raises:
        ValueError: for another shape or dtype.
    """
    check_shape(name, state, shape, like=query)
    if state.dtype != accumulation_dtype(value):
        raise ValueError(
            f"`{name}` is {state.dtype}; with values of {value.dtype} it must be {accumulation_dtype(value)}, whose "
            "sums keep growing."
        )


def check_results(query: torch.Tensor, **results: tuple[torch.Tensor | None, Shape, torch.dtype]) -> None:
    """Results of a forward pass, or gradients of them: tensors with their shape and dtype.

    Raises:
        ValueError: for the first that has others.
    """
    for name, (tensor, shape, dtype) in results.items():
        check_shape(name, tensor, shape, like=query)
        if tensor is not None and tensor.dtype != dtype:
            raise ValueError(f"`{name}` is {tensor.dtype}; it must be {dtype}, as in the forward pass.")


def check_attention_results(
    query, key, value, features, function, grad_output, grad_denominator, grad_state, output, denominator, needed
) -> None:
    """What the operator `attention_backward` takes besides the arguments of `attention`.

    Raises:
        ValueError: for the first that does not fit.
    """
    (batch, heads, length, _), kv_heads, width = query.shape, key.shape[1], value.shape[3]
    by_head, per_query = (batch, length, heads, width), (batch, kv_heads, heads // kv_heads, length, 1)
    dtype = accumulation_dtype(value)
    check_results(
        query,
        grad_output=(grad_output, by_head, query.dtype),
        grad_denominator=(grad_denominator, per_query, dtype),
        grad_state=(grad_state, (batch, kv_heads, features, width + 1 + (function >= EXP)), dtype),
        output=(output, by_head, query.dtype),
        denominator=(denominator, per_query, dtype),
    )
    if len(needed) != 10:
        raise ValueError(f"`needed` has {len(needed)} entries; it must have one for each of the 10 tensors.")
