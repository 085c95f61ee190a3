"""Kernel attention in C (`native_source`), map included: what lies between queries, keys and the output never exists.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, S keys, D their head dimension, F features,
W head dimension of the values. Inside, every tensor is `[B, Hkv, G or 1, rows, columns]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .backends import in_large_pages
from .backends import is_tracing
from .backends import native_library
from .backends import run_attention


# What a map does to numbers, as native_blocks counts them: nothing, elu(x) + 1, exp with a running maximum, and the
# same of [log softmax(u), log softmax(-u)] for the affine images u.
PLAIN, ELU_PLUS_ONE, EXP, HEDGEHOG = 0, 1, 2, 3
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
# Heads are filled up to 16 columns; narrower ones than this (`aft` has 1) are faster in torch.
NARROWEST = 4


class Affine(NamedTuple):
    """x W + b - norm |x|^2 / 2, in float32, each with one or H (for keys Hkv) heads."""

    weight: torch.Tensor  # [heads, D, F]
    bias: torch.Tensor | None = None  # [heads, 1, F]
    norm: torch.Tensor | None = None  # [heads, 1, 1]


class NativeMap(NamedTuple):
    """A feature map that the C kernels know: a function of the elements of queries and keys or of their images."""

    function: int
    query: Affine | None = None
    key: Affine | None = None


def takes_native(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None) -> bool:
    """Whether `native_attention` is the way: on a CPU, outside a graph, no sequences by number, no thin heads."""
    if is_tracing():
        return False
    if key_mask is not None and key_mask.dtype != torch.bool:
        return False
    if min(query.shape[-1], value.shape[-1]) < NARROWEST:
        return False
    return native_library(query, key, value, dtypes=NATIVE_DTYPES) is not None


def native_attention(
    feature_map: NativeMap,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool,
    key_mask: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    log_decay: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`attention_kernels.kernel_attention` (arguments as there) from what its features are made of.

    Returns:
        The output `[B, N, H, W]` in the dtype of `query`, and in float32 its denominator and log scale (None without
        exponents) `[B, Hkv, G, N, 1]`, and the state.
    """
    affine = (part for pair in (feature_map.key, feature_map.query) for part in (pair or (None, None, None)))
    features = key.shape[-1] if feature_map.key is None else feature_map.key.weight.shape[-1]
    function = (features * (1 + (feature_map.function == HEDGEHOG)), feature_map.function, is_causal)
    return _NativeAttention.apply(function, query, key, value, key_mask, log_decay, state, *affine)


class _NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, query, key, value, key_mask, log_decay, state, *affine):
        (batch, heads, length, _), kv_heads, width = query.shape, key.shape[1], value.shape[-1]
        features = function[0]
        is_exp = function[1] >= EXP
        output = in_large_pages(query.new_empty(batch, length, heads, width))
        numbers = (batch, kv_heads, heads // kv_heads, length, 1)
        denominator = query.new_empty(numbers, dtype=torch.float32)
        scale = torch.empty_like(denominator) if is_exp else None
        new_state = denominator.new_empty(batch, kv_heads, features, width + 1 + is_exp)
        given = (query, key, value, key_mask, log_decay, state, *affine)
        arguments = _arguments(given, kv_heads)
        results = (_grouped(output.transpose(1, 2), kv_heads), denominator, scale, new_state.unsqueeze(2))
        run_attention("attention_forward", function, (*arguments, *results))
        ctx.function = function
        ctx.save_for_backward(*given, output, denominator)
        ctx.set_materialize_grads(False)
        if is_exp:
            ctx.mark_non_differentiable(scale)
        return output, denominator, scale, new_state

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, grad_denominator, _, grad_state):
        *given, output, denominator = ctx.saved_tensors
        query, key, value, _, log_decay, _, *affine = given
        kv_heads = key.shape[1]
        arguments = _arguments(given, kv_heads)
        needed = ctx.needs_input_grad
        # The C code always makes these three.
        grads = [in_large_pages(torch.empty_like(tensor)) for tensor in (query, key, value)]
        made = [_grouped(grads[0], kv_heads), *(grad.unsqueeze(2) for grad in grads[1:])]
        # These it makes for every batch member and head.
        others = [
            torch.empty(argument.shape, dtype=torch.float32) if need and argument is not None else None
            for argument, need in zip(arguments[4:], (needed[5], *needed[7:], needed[6]))
        ]
        grad_output = None if grad_output is None else _with_rows(grad_output).transpose(1, 2)
        incoming = (
            None if grad_output is None else _grouped(grad_output, kv_heads),
            grad_denominator,
            None if grad_state is None else grad_state.contiguous().unsqueeze(2),
        )
        results = (_grouped(output.transpose(1, 2), kv_heads), denominator, None, None)
        run_attention("attention_backward", ctx.function, (*arguments, *results, *incoming, *made, *others))
        grad_decay, *grad_affine, grad_first = others
        grad_affine = [None if grad is None else _shared(grad, x) for grad, x in zip(grad_affine, affine)]
        return (
            None,
            *grads,
            None,
            None if grad_decay is None else grad_decay.sum(0).view_as(log_decay),
            None if grad_first is None else grad_first.squeeze(2),
            *grad_affine,
        )


def native_window(*tensors: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`exact_window.exact_part` without ALiBi; the largest logit has no gradient.

    The tensors are queries, near keys and values, where those are visible, sink keys and values, and who sees those.
    """
    return _NativeWindow.apply(scaling, *tensors)


class _NativeWindow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scaling, *given):
        query, key, value, _, sink_key, *_ = given
        (batch, heads, length, _), (_, kv_heads, places, _) = query.shape, key.shape
        output = in_large_pages(query.new_empty(batch, length, heads, value.shape[-1], dtype=torch.float32))
        output = _grouped(output.transpose(1, 2), kv_heads)
        size, largest = (output.new_empty(*output.shape[:-1], 1) for _ in range(2))
        ctx.function, ctx.scaling = (places - length + 1, sink_key.shape[2], True), scaling
        arguments = _window_arguments(scaling, *given)
        run_attention("window_forward", ctx.function, (*arguments, output, size, largest))
        ctx.save_for_backward(*given, output, size)
        ctx.mark_non_differentiable(largest)
        ctx.set_materialize_grads(False)
        return output, size, largest

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, grad_size, _):
        *given, output, size = ctx.saved_tensors
        query, key, value, _, sink_key, sink_value, _ = given
        grads = [in_large_pages(x.new_empty(x.shape)) for x in (query, key, value, sink_key, sink_value)]
        incoming = (None if grad_output is None else _with_rows(grad_output), grad_size)
        made = (_grouped(grads[0], key.shape[1]), *(grad.unsqueeze(2) for grad in grads[1:]))
        arguments = _window_arguments(ctx.scaling, *given)
        run_attention("window_backward", ctx.function, (*arguments, output, size, None, *incoming, *made))
        return None, *grads[:3], None, *grads[3:], None


def native_softmax(query, key, value, visible: torch.Tensor | None, scaling: float) -> torch.Tensor:
    """`slot_attention.slot_attention`, without a gradient."""
    (batch, heads, length, _), kv_heads = query.shape, key.shape[1]
    output = in_large_pages(query.new_empty(batch, length, heads, value.shape[-1])).transpose(1, 2)
    are_few_keys = key.shape[2] <= length
    query, key = (query, key * scaling) if are_few_keys else (query * scaling, key)
    if visible is not None:
        visible = visible[:, :, None, :, None].expand(batch, kv_heads, -1, -1, -1)
    query, output = (_grouped(_with_rows(x), kv_heads) for x in (query, output))
    key, value = (_with_rows(x).unsqueeze(2) for x in (key, value))
    run_attention("slots_forward", (0, PLAIN, are_few_keys), (query, key, value, visible, output))
    return output.flatten(1, 2)


def _window_arguments(scaling: float, query, key, value, visible, sink_key, sink_value, seen) -> list[torch.Tensor]:
    """In five axes each."""
    kv_heads = key.shape[1]
    numbers = (visible[:, None, None, :, None], seen[:, None, None], torch.full((1, 1, 1, 1, 1), scaling))
    visible, seen, scale = (_with_rows(x).expand(query.shape[0], kv_heads, -1, -1, -1) for x in numbers)
    key, value, sink_key, sink_value = (_with_rows(x).unsqueeze(2) for x in (key, value, sink_key, sink_value))
    return [_grouped(_with_rows(query), kv_heads), key, value, visible, sink_key, sink_value, seen, scale]


def _arguments(given, kv_heads: int) -> list[torch.Tensor | None]:
    """Queries, keys, values, mask, decay, the affine maps of keys and of queries, and the state, in five axes each."""
    query, key, value, mask, log_decay, state, *affine = given
    batch = query.shape[0]
    return [
        _grouped(_with_rows(query), kv_heads),
        _with_rows(key).unsqueeze(2),
        _with_rows(value).unsqueeze(2),
        None if mask is None else mask[:, None, None, :, None].expand(-1, kv_heads, -1, -1, -1),
        None if log_decay is None else log_decay.float()[None, :, None, None, None].expand(batch, -1, -1, -1, -1),
        *(_per_head(x, batch, kv_heads, kv_heads) for x in affine[:3]),
        *(_per_head(x, batch, kv_heads, query.shape[1]) for x in affine[3:]),
        None if state is None else state.contiguous().unsqueeze(2),
    ]


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy whose rows are dense in memory, as the C kernels need them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[B, H, N, X]` -> `[B, Hkv, G, N, X]`."""
    return x.unflatten(1, (kv_heads, -1))


def _per_head(x: torch.Tensor | None, batch: int, kv_heads: int, heads: int) -> torch.Tensor | None:
    """`[heads or 1, rows, columns]` -> `[B, Hkv, G, rows, columns]`, a view."""
    return None if x is None else _grouped(_with_rows(x).expand(batch, heads, -1, -1), kv_heads)


def _shared(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Summed over the batch, and over the heads if one `x` serves all."""
    return grad.flatten(1, 2).sum(0).sum_to_size(x.shape)
