# SPDX-License-Identifier: Apache-2.0
"""The checks of the kernels' arguments: shapes, dtypes and devices are compared here before anything is computed.

C and torch share these checks, so a mistake raises the same ValueError on every machine. Axes: B batch, H query heads,
Hkv key/value heads, N queries, S keys, D head_dim, W head dimension of the values, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..torch_kernels.blocks import EXP, HEDGEHOG, accumulation_dtype


def check_shape(name: str, tensor: Tensor | None, *shapes: tuple[int, ...], like: Tensor) -> None:
    """Raise ValueError unless a tensor has one of these shapes and is on the device of `like`, the queries."""
    if tensor is None or (tensor.shape in shapes and tensor.device == like.device):
        return
    if tensor.device != like.device:
        raise ValueError(f"`{name}` is on {tensor.device} and the queries are on {like.device}; move one of them.")
    allowed = " or ".join(str(list(shape)) for shape in shapes)
    advice = " A cache of another batch size has to be repeated first (`cache.batch_repeat_interleave(n)`)."
    raise ValueError(
        f"`{name}` has the shape {list(tensor.shape)}, and with queries of shape {list(like.shape)} it must have "
        f"{allowed}.{advice if name == 'state' else ''}"
    )


def check_axes(x: Tensor) -> None:
    """Raise ValueError unless the argument of the operator `elu_plus_one` has four axes."""
    if x.ndim != 4:
        raise ValueError(f"`x` has {x.ndim} axes; it must be [batch, heads, length, head_dim].")


def check_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int, int]:
    """Check `query [B, H, N, D]`, `key [B, Hkv, S, any]` and `value [B, Hkv, S, W]`, and return B, H and Hkv.

    ValueError if the shapes do not match, H is not a multiple of Hkv, or a tensor is not floating-point.
    """
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(
            f"Queries, keys and values have {query.ndim}, {key.ndim} and {value.ndim} axes; each must be "
            "[batch, heads, length, head_dim]."
        )
    batch, heads, kv_heads = query.shape[0], query.shape[1], key.shape[1]
    check_shape("key", key, (batch, *key.shape[1:]), like=query)
    check_shape("value", value, (*key.shape[:3], value.shape[3]), like=query)
    if not kv_heads or heads % kv_heads:
        raise ValueError(
            f"Got {heads} query heads and {kv_heads} key/value heads; the first must be a multiple of the second."
        )
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.is_floating_point():
            raise ValueError(f"`{name}` is {tensor.dtype}; it must be a floating-point tensor.")
    return batch, heads, kv_heads


def check_mask(mask: Tensor | None, key: Tensor, query: Tensor) -> None:
    """Raise ValueError unless this is a key mask `[B, S]`: bool, or integers that number packed sequences."""
    if mask is None:
        return
    check_shape("key_mask", mask, (key.shape[0], key.shape[2]), like=query)
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(
            f"`key_mask` is {mask.dtype}; it must be bool (True where a key takes part), or integers that number "
            "packed sequences from 1."
        )


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor | None,
    key_weight: Tensor | None,
    key_bias: Tensor | None,
    key_norm: Tensor | None,
    query_weight: Tensor | None,
    function: int,
    is_causal: bool,
    rows: Tensor | None = None,
) -> int:
    """Check the arguments of the operator `attention` (see kernels.operators) and return F, the number of features.

    With `rows`, they are those of `attention_step_`. ValueError for the first invalid argument, with both sizes.
    """
    _, heads, kv_heads = check_heads(query, key, value)
    check_mask(key_mask, key, query)
    if is_causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"Got {query.shape[2]} queries and {key.shape[2]} keys; causal attention needs as many keys as queries, "
            "because the state holds the older keys."
        )
    check_shape("query", query, (*query.shape[:3], key.shape[3]), like=query)
    if function not in range(4):
        raise ValueError(f"`function` = {function} is not one of 0 (none), 1 (elu + 1), 2 (exp) and 3 (Hedgehog).")
    if (key_weight is None) != (query_weight is None):
        raise ValueError("`key_weight` and `query_weight` belong together; pass both or neither.")
    if (key_bias is not None or key_norm is not None) and (key_weight is None or function == HEDGEHOG):
        raise ValueError(
            f"Got `key_bias` or `key_norm` with `function` = {function} and "
            f"{'no' if key_weight is None else 'a'} `key_weight`; they need a `key_weight`, and Hedgehog (3) takes "
            "neither of them."
        )
    if key_weight is None:
        columns = key.shape[3]
    else:
        columns = key_weight.shape[-1] if key_weight.ndim else 0
        check_shape("key_weight", key_weight, *((n, key.shape[3], columns) for n in (kv_heads, 1)), like=query)
        check_shape("query_weight", query_weight, *((n, query.shape[3], columns) for n in (heads, 1)), like=query)
        check_shape("key_bias", key_bias, *((n, 1, columns) for n in (kv_heads, 1)), like=query)
        check_shape("key_norm", key_norm, *((n, 1, 1) for n in (kv_heads, 1)), like=query)
    features = columns * (1 + (function == HEDGEHOG))
    if not features:
        raise ValueError("Queries and keys have 0 features; kernel attention needs at least one.")
    check_shape("log_decay", log_decay, (kv_heads,), like=query)
    if log_decay is not None and not is_causal:
        raise ValueError("`log_decay` is for causal attention only; leave it out for bidirectional attention.")
    if state is not None:
        blocks = check_rows(rows, state, query)
        check_state("state", state, (blocks, kv_heads, features, value.shape[3] + 1 + (function >= EXP)), query, value)
    return features


def check_window(
    window: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    seen: Tensor,
    sink_query: Tensor | None,
) -> int:
    """Check the arguments of the operator `window_attention` and return the number of keys that a query sees.

    With a `window` above 0, there is a key for every query, which sees window - 1 places on either side of its own.
    With 0, query t sees the keys from t on, as `torch_kernels.window.NearKeys` has them.

    Raises:
        ValueError: for the first invalid argument.
    """
    batch, _, kv_heads = check_heads(query, key, value)
    length, places = query.shape[2], key.shape[2]
    if window < 0 or (window and places != length):
        raise ValueError(
            f"Got a window of {window} for {length} queries and {places} keys; with one above 0, there is "
            "a key for every query, and 0 stands for keys that are padded."
        )
    if places < max(length, 1):
        raise ValueError(f"Got {places} keys for {length} queries; every query needs at least one key of its own.")
    check_shape("query", query, (*query.shape[:3], key.shape[3]), like=query)
    check_shape("visible", visible, (batch, places), like=query)
    sinks = sink_key.shape[2] if sink_key.ndim == 4 else 0
    check_shape("sink_key", sink_key, (batch, kv_heads, sinks, key.shape[3]), like=query)
    check_shape("sink_value", sink_value, (batch, kv_heads, sinks, value.shape[3]), like=query)
    check_shape("seen", seen, (batch, length, sinks), like=query)
    check_shape("sink_query", sink_query, tuple(query.shape), like=query)
    if visible.dtype != torch.bool or seen.dtype != torch.bool:
        raise ValueError(f"`visible` and `seen` are {visible.dtype} and {seen.dtype}; both must be bool.")
    return 2 * window - 1 if window else places - length + 1


def check_state(name: str, state: Tensor, shape: tuple[int, ...], query: Tensor, value: Tensor) -> None:
    """Raise ValueError unless a state has this shape and the accumulation dtype of the values."""
    check_shape(name, state, shape, like=query)
    if state.dtype != accumulation_dtype(value):
        raise ValueError(
            f"`{name}` is {state.dtype}; with values of {value.dtype} it must be {accumulation_dtype(value)}, because "
            "sums in a narrower dtype stop growing."
        )


def check_rows(rows: Tensor | None, state: Tensor, query: Tensor) -> int:
    """How many blocks the state must have: B without `rows`, which are int64 `[B]` (else ValueError).

    That each of them is a block, the kernel sees itself.
    """
    if rows is None:
        return query.shape[0]
    check_shape("rows", rows, (query.shape[0],), like=query)
    if rows.dtype != torch.int64:
        raise ValueError(f"`rows` is {rows.dtype}; it must be int64.")
    return state.shape[0] if state.ndim else 0


def check_blocks(*state: Tensor) -> None:
    """Refuse (ValueError) a state that cannot be changed in place: blocks must be dense, with none over another."""
    for x in state:
        if not x.is_contiguous() and not (x[:1].is_contiguous() and x.stride(0) >= x[:1].numel()):
            raise ValueError(
                f"`state` has a tensor with strides {tuple(x.stride())}; every block of it must be dense, with none "
                "over another."
            )


def check_results(query: Tensor, made: Sequence[Tensor], **results: Tensor | None) -> None:
    """Raise ValueError for the first result or gradient that has not the shape and dtype of its tensor in `made`.

    The tensors of `made` may be on any device (on `meta` they take no memory).
    """
    for (name, tensor), like in zip(results.items(), made, strict=True):  # none may reach C without a check
        check_shape(name, tensor, tuple(like.shape), like=query)
        if tensor is not None and tensor.dtype != like.dtype:
            raise ValueError(f"`{name}` is {tensor.dtype}; it must be {like.dtype}, as in the forward pass.")


def check_needed(needed: Sequence[bool], count: int) -> None:
    """Raise ValueError unless `needed` says for `count` tensors whether a backward operator computes their gradient."""
    if len(needed) != count:
        raise ValueError(f"`needed` has {len(needed)} entries; it must have one for each of the {count} tensors.")


def check_turns(
    dim: int, has_scores: bool, has_position: bool, tensors: int, pairs: int, first: int, trained_length: int
) -> None:
    """Check that a state of so many tensors has the positions with which keys are turned back.

    Raises:
        ValueError: if it has not, or there are more frequencies than pairs of columns.
    """
    turns_keys = first < pairs or (pairs and trained_length and has_scores)
    if (
        tensors not in ((12, 14) if has_scores else (7, 8))
        or not (has_position or (not pairs and tensors in (7, 12)))
        or (turns_keys and tensors in (7, 12))
        or not 0 <= first <= pairs <= dim // 2
        or trained_length < 0
    ):
        raise ValueError(
            f"Got a state of {tensors} tensors {'with' if has_scores else 'without'} scores, "
            f"{'a' if has_position else 'no'} position, {pairs} frequencies for {dim} columns, of which the map sees "
            f"{first}, and a trained length of {trained_length}. A state has 7 tensors, and 5 more with scores; where "
            "keys are turned back, which needs a position, it has the position of each key too. There is one frequency "
            "for a pair of columns at most."
        )
