# SPDX-License-Identifier: Apache-2.0
"""What the kernels take: every shape, dtype and device is compared here, once, before anything is computed.

The same checks serve C and torch, so that a mistake is the same ValueError on every machine. Axes: B batch, H query
heads, Hkv key/value heads, N queries, S keys, D head_dim, W head dimension of the values, F features.
"""

from __future__ import annotations

import torch

from .kernels_cpu import EXP
from .kernels_cpu import HEDGEHOG
from .kernels_cpu import PLAIN
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


def check_window(query, key, value, visible, sink_key, sink_value, seen, sink_query) -> int:
    """The arguments of the operator `window_attention` fit each other -> how many places a query sees.

    Raises:
        ValueError: for the first that does not.
    """
    batch, heads, kv_heads = check_heads(query, key, value)
    length, places = query.shape[2], key.shape[2]
    check_shape("query", query, (batch, heads, length, key.shape[3]), like=query)
    if places < max(length, 1):
        raise ValueError(f"Got {places} places of keys for {length} queries; every query needs at least one.")
    check_shape("visible", visible, (batch, places), like=query)
    check_shape("sink_key", sink_key, (batch, kv_heads, None, key.shape[3]), like=query)
    sinks = sink_key.shape[2]
    check_shape("sink_value", sink_value, (batch, kv_heads, sinks, value.shape[3]), like=query)
    check_shape("seen", seen, (batch, length, sinks), like=query)
    check_shape("sink_query", sink_query, tuple(query.shape), like=query)
    if visible.dtype != torch.bool or seen.dtype != torch.bool:
        raise ValueError(f"`visible` and `seen` are {visible.dtype} and {seen.dtype}; both must be bool.")
    return places - length + 1


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


def check_window_results(query, key, value, grad_output, grad_log_size, output, log_size) -> None:
    """What the operator `window_attention_backward` takes besides the arguments of `window_attention`.

    Raises:
        ValueError: for the first that does not fit.
    """
    (batch, heads, length, _), kv_heads, dtype = query.shape, key.shape[1], accumulation_dtype(query)
    by_head, per_query = (batch, length, heads, value.shape[3]), (batch, kv_heads, heads // kv_heads, length, 1)
    check_results(
        query,
        grad_output=(grad_output, by_head, dtype),
        grad_log_size=(grad_log_size, per_query, dtype),
        output=(output, by_head, dtype),
        log_size=(log_size, per_query, dtype),
    )


def check_slots(query, key, value, visible) -> None:
    """The arguments of the operator `slot_attention` fit each other.

    Raises:
        ValueError: for the first that does not.
    """
    batch, heads, kv_heads = check_heads(query, key, value)
    check_shape("query", query, (batch, heads, None, key.shape[3]), like=query)
    if visible is None:
        return
    check_shape("visible", visible, *((b, h, key.shape[2]) for b in (batch, 1) for h in (kv_heads, 1)), like=query)
    if visible.dtype != torch.bool:
        raise ValueError(f"`visible` is {visible.dtype}; it must be bool, True where a key takes part.")


def check_hybrid_step(
    query, key, value, sink_query, position, query_exponent, key_exponent, log_decay, state, log_scale, norm_weight,
    key_dim,
) -> None:  # fmt: skip
    """The arguments of the operator `hybrid_step` fit each other and the state, in the order of `HybridState`.

    Raises:
        ValueError: for the first that does not.
    """
    if not query.ndim == key.ndim == value.ndim == 4 or query.shape[1] % (key.shape[1] or 1) or not key.shape[1]:
        check_heads(query, key, value)
    (batch, heads), kv_heads = query.shape[:2], key.shape[1]
    if len(state) != (7 if position is None else 8):
        raise ValueError(f"Got a state of {len(state)} tensors; that of `hybrid` has 7, and 8 with positions.")
    sums, window_key, window_value, kind, sink_key, sink_value, num_seen, *window_position = state
    stored, width, features = key.shape[3], value.shape[3], key_exponent.shape[-1] if key_exponent.ndim else 0
    places, sinks = (x.shape[2] if x.ndim == 4 else 0 for x in (window_key, sink_key))
    per_head, keys, values = (heads,), key.dtype, value.dtype
    expected = (
        ("query", query, (batch, heads, 1, stored), None),
        ("key", key, (batch, kv_heads, 1, stored), None),
        ("value", value, (batch, kv_heads, 1, width), None),
        ("sink_query", sink_query, (batch, heads, 1, stored), None),
        ("query_exponent", query_exponent, (batch, heads, 1, features), torch.float32),
        ("key_exponent", key_exponent, (batch, kv_heads, 1, features), torch.float32),
        ("log_decay", log_decay, (kv_heads,), torch.float32),
        ("log_scale", log_scale, per_head, torch.float32),
        ("norm_weight", norm_weight, per_head, torch.float32),
        ("state", sums, (batch, kv_heads, features, width + 2), torch.float32),
        ("state", window_key, (batch, kv_heads, places, stored), keys),
        ("state", window_value, (batch, kv_heads, places, width), values),
        ("state", kind, (batch, places), torch.int8),
        ("state", sink_key, (batch, kv_heads, sinks, stored), keys),
        ("state", sink_value, (batch, kv_heads, sinks, width), values),
        ("state", num_seen, (batch, 1), torch.int64),
        ("position", position, (batch, 1), torch.int32),
        *(("state", x, (batch, places), torch.int32) for x in window_position),
    )
    device = query.device
    for name, tensor, shape, dtype in expected:
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.device != device:
            check_shape(name, tensor, shape, like=query)
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"`{name}` has a tensor of {tensor.dtype}; with these tokens it must be {dtype}.")
    if (log_scale is None) != (norm_weight is None):
        raise ValueError("`log_scale` and `norm_weight` go together; give both or none.")
    if not places or not 0 < key_dim <= stored:
        raise ValueError(
            f"Got a window of {places} places and `key_dim` = {key_dim}; it needs one place at least, and keys of "
            f"{stored} numbers 1 to {stored}."
        )
