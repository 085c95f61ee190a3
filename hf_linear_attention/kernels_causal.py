# SPDX-License-Identifier: Apache-2.0
"""Causal kernel attention in torch, block by block, with a backward pass that recomputes its sums.

Axes: B batch, Hkv key/value heads, G query heads per key/value head, N tokens, F features, D head dimension of the
values, C tokens in a block. Inside the loops B and Hkv are one axis, and G and C another.

Autograd through such a loop keeps every block's sums; here nothing of size N x F x D is kept or made. The backward pass
is two sweeps (Katharopoulos 2020, equations 13-15): forwards for the queries, which meet the sums of what lies before
them, and backwards for keys and values, which meet those of what lies behind.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import torch

from .kernels_cpu import in_large_pages
from .kernels_torch import BLOCK_SIZE
from .kernels_torch import Parts
from .kernels_torch import accumulation_dtype
from .kernels_torch import exponentiate
from .kernels_torch import joined
from .kernels_torch import pack_state
from .kernels_torch import plain_attention
from .kernels_torch import safe_block_size
from .kernels_torch import unpack_state
from .kernels_torch import with_dtype


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    log_features: bool,
    key_mask: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    log_decay: torch.Tensor | None = None,
    gpu_kernel: Callable[..., Any] | None = None,
) -> Parts:
    """`kernels_torch.plain_attention`, causal, in blocks as long as the exponents allow; bool masks only.

    `gpu_kernel` is `kernels_fla.causal_attention` where it takes these tensors.
    """
    mask = None if key_mask is None else key_mask[:, None, :, None]
    sums, maximum = unpack_state(state, log_features)
    steepest = 0.0 if log_decay is None or gpu_kernel is None else -log_decay.min().item()
    dtype = accumulation_dtype(value)
    key = with_dtype(key, dtype)
    size = safe_block_size(key, mask, maximum, steepest) if log_features else max(1, key.shape[2])
    if log_decay is not None and gpu_kernel is None:
        options: dict[str, Any] = {"key_mask": key_mask, "state": state, "log_decay": log_decay}
        options["block_size"] = min(size, BLOCK_SIZE)
        return plain_attention(query, key, value, log_features=log_features, is_causal=True, **options)
    query = with_dtype(query, dtype).unflatten(1, (key.shape[1], -1))
    if gpu_kernel is not None and not log_features:  # it takes a decay of any steepness as it is
        visible = key if mask is None else key * mask
        output, denominator, sums = gpu_kernel(query, visible, value, sums, _faded(log_decay, key, mask))
        return output, denominator, None, sums
    attend = CausalAttention.apply if gpu_kernel is None else gpu_kernel
    masks = itertools.repeat(None) if mask is None else mask.split(size, dim=2)
    results = []
    # `.split` and not slices: autograd through slices of one tensor costs O(N^2).
    for q, k, v, m in zip(query.split(size, dim=3), key.split(size, dim=2), value.split(size, dim=2), masks):
        scale, faded = None, _faded(log_decay, k, m)
        if log_features:
            q, scale, k, sums, maximum = exponentiate(q, k, m, sums, maximum)
        k = k if m is None else k * m
        output, denominator, sums = attend(q, k, v, sums, *(() if faded is None else (faded,)))
        if faded is not None and maximum is not None:  # the sums fade inside, and the maximum takes that over
            total = faded.sum(dim=2)
            sums, maximum = sums * (-total.detach()).exp()[..., None, None], maximum + total.detach().unsqueeze(2)
        results.append((output, denominator, scale))
    joint: Any = (None if part[0] is None else joined(part) for part in zip(*results))
    return *joint, pack_state(sums, maximum)


def _faded(log_decay: torch.Tensor | None, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """By how much each token makes all before it fade, `[B, Hkv, N]`."""
    if log_decay is None:
        return None
    faded = log_decay[None, :, None].expand(key.shape[:3])
    return faded if mask is None else faded * mask[..., 0]


def gradients_with_graph(function: Callable[..., Any], inputs: Any, grad_outputs: Any) -> list[torch.Tensor | None]:
    """Gradients of `inputs` that can be differentiated again: through `function`, made of operations of torch alone.

    For the backward pass of a function of our own while torch keeps a graph of it (`create_graph=True`).
    """
    leaves = [x.view_as(x) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in inputs]
    wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    pairs = [(y, g) for y, g in zip(function(*leaves), grad_outputs) if g is not None and y is not None]
    pairs = [(y, g) for y, g in pairs if y.requires_grad]
    found = iter(_grad(pairs, wanted) if pairs else ())
    return [next(found, None) if isinstance(x, torch.Tensor) and x.requires_grad else None for x in leaves]


def _grad(pairs, wanted):
    outputs, grads = zip(*pairs)
    return torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True)


class ElementwiseMap(NamedTuple):
    """A feature of every number, and the derivative there; both of a block, which they may not change."""

    function: Callable[[torch.Tensor], torch.Tensor]
    slope: Callable[[torch.Tensor], torch.Tensor]


class CausalAttention(torch.autograd.Function):
    """`apply(query, key, value, state, mask=None, feature_map=None)` -> `(output, denominator, state)`.

    `query [B, Hkv, G, N, F]`, `key [B, Hkv, N, F]`, `value [B, Hkv, N, D]` in any dtype, `mask` bool `[B, 1, N, 1]`
    (the keys that count; None for all), `state [B, Hkv, F, D + 1]` (what came before, or None) in the accumulation
    dtype, as are the results: the output `[B, Hkv, G, N, D]` is normalised, 0 where the denominator
    `[B, Hkv, G, N, 1]` is 0. Without an ElementwiseMap queries and keys are features already.
    """

    @staticmethod
    def forward(ctx, query, key, value, state, mask=None, feature_map=None):
        dtype = torch.promote_types(value.dtype, torch.float32)
        batch, kv_heads, groups, length, _ = query.shape
        # Heads beside tokens, as models go on with it.
        output = query.new_empty(batch, length, kv_heads, groups, value.shape[-1], dtype=dtype)
        output = in_large_pages(output).permute(0, 2, 3, 1, 4)
        denominator = query.new_empty(*query.shape[:-1], 1, dtype=dtype)
        sums, z = _sums_of(state, key, value, dtype)
        for q, k, v, m, out, den in _blocks(query, key, value, mask, output, denominator):
            shape = out.shape
            q, v = _features(_rows(q), dtype, feature_map), v.flatten(0, 1).to(dtype)
            k = _visible(_features(k.flatten(0, 1), dtype, feature_map), m, kv_heads)
            # Z is the key of all that came before: with it the scores of a row add up to its denominator.
            scores = _tril(torch.bmm(q, torch.cat((z, k), dim=1).transpose(1, 2)), before=1)
            total = scores.sum(dim=-1, keepdim=True)
            numerator = torch.bmm(q, sums).baddbmm_(scores[..., 1:], v)
            den.copy_(total.view(*shape[:-1], 1))
            total.clamp_(min=torch.finfo(dtype).tiny)
            torch.div(numerator.view(shape), total.view(*shape[:-1], 1), out=out)
            sums.baddbmm_(k.transpose(1, 2), v)
            z.add_(k.sum(dim=1, keepdim=True))
        ctx.save_for_backward(query, key, value, state, mask, output, denominator)
        ctx.feature_map = feature_map
        return output, denominator, _state_of(sums, z, key.shape[:2])

    @staticmethod
    def backward(ctx, grad_output, grad_denominator, grad_state):
        if torch.is_grad_enabled():
            *inputs, _, _ = ctx.saved_tensors
            plain = functools.partial(_plain, feature_map=ctx.feature_map)
            return *gradients_with_graph(plain, inputs, (grad_output, grad_denominator, grad_state)), None
        query, key, value, state, mask, output, denominator = ctx.saved_tensors
        feature_map, dtype, kv_heads = ctx.feature_map, output.dtype, key.shape[1]
        # d output = d numerator / denominator - output d denominator / denominator; none where nothing is to be seen
        is_nothing = denominator < torch.finfo(dtype).tiny
        inverse = denominator.reciprocal().masked_fill_(is_nothing, 0.0)
        grads = [in_large_pages(torch.empty_like(tensor)) for tensor in (query, key, value)]
        blocks = list(_blocks(query, key, value, mask, output, inverse, grad_output, grad_denominator, *grads))
        sums, z = _sums_of(state, key, value, dtype)
        for q, k, v, m, out, inv, g, g_den, grad_query, _, _ in blocks:
            k, v = _features(k.flatten(0, 1), dtype, feature_map), v.flatten(0, 1).to(dtype)
            k = _visible(k, m, kv_heads)
            g, c = _grad_of_sums(g, g_den, out, inv)
            pairs = _tril(torch.baddbmm(c, g, v.transpose(1, 2)))
            grad = torch.bmm(pairs, k).baddbmm_(g, sums.transpose(1, 2)).addcmul_(c, z)
            grad_query.copy_(_before_map(grad, _rows(q), feature_map).view(q.shape))
            sums.baddbmm_(k.transpose(1, 2), v)
            z.add_(k.sum(dim=1, keepdim=True))
        sums, z = _sums_of(grad_state, key, value, dtype)
        for q, x, v, m, out, inv, g, g_den, _, grad_key, grad_value in reversed(blocks):
            q, v, x = _features(_rows(q), dtype, feature_map), v.flatten(0, 1).to(dtype), x.flatten(0, 1)
            k = _visible(_features(x, dtype, feature_map), m, kv_heads)
            g, c = _grad_of_sums(g, g_den, out, inv)
            scores = _tril(torch.bmm(q, k.transpose(1, 2)))
            pairs = _tril(torch.baddbmm(c, g, v.transpose(1, 2)))
            grad = torch.bmm(pairs.transpose(1, 2), q).baddbmm_(v, sums.transpose(1, 2)).add_(z)
            grad_key.copy_(_before_map(_visible(grad, m, kv_heads), x, feature_map).view(grad_key.shape))
            grad_value.copy_(torch.bmm(scores.transpose(1, 2), g).baddbmm_(k, sums).view(grad_value.shape))
            sums.baddbmm_(q.transpose(1, 2), g)
            z.add_((q * c).sum(dim=1, keepdim=True))
        return *grads, None if state is None else _state_of(sums, z, key.shape[:2]), None, None


def _plain(query, key, value, state, mask, feature_map):
    """The same in plain operations."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    query, key = (_features(x, dtype, feature_map) for x in (query.flatten(1, 2), key))
    key_mask = None if mask is None else mask[:, 0, :, 0]
    output, denominator, _, state = plain_attention(
        query, key, value, log_features=False, is_causal=True, key_mask=key_mask, state=state
    )
    return output, denominator, state


def _features(x: torch.Tensor, dtype: torch.dtype, feature_map: ElementwiseMap | None) -> torch.Tensor:
    return x.to(dtype) if feature_map is None else feature_map.function(x.to(dtype))


def _before_map(grad: torch.Tensor, x: torch.Tensor, feature_map: ElementwiseMap | None) -> torch.Tensor:
    """The gradient of `x` from that of its features; in place."""
    return grad if feature_map is None else grad.mul_(feature_map.slope(x.to(grad.dtype)))


def _visible(key: torch.Tensor, mask: torch.Tensor | None, kv_heads: int) -> torch.Tensor:
    """`key [B Hkv, C, F]` and 0 where the `mask [B, 1, C, 1]` is False."""
    return key if mask is None else key * mask.expand(-1, kv_heads, -1, -1).flatten(0, 1)


def _blocks(*tensors: torch.Tensor | None) -> Iterator[tuple[Any, ...]]:
    """The blocks of C tokens of tensors whose last axis but one is N, views; None for what is missing."""
    return zip(*(itertools.repeat(None) if x is None else x.split(BLOCK_SIZE, dim=-2) for x in tensors))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[B, Hkv, G, C, X]` -> `[B Hkv, G C, X]`."""
    return x.flatten(2, 3).flatten(0, 1)


def _tril(scores: torch.Tensor, before: int = 0) -> torch.Tensor:
    """`[B Hkv, G C, before + C]`, 0 where the key comes after the query; in place."""
    columns = scores.shape[-1]
    if scores.numel():
        scores.view(scores.shape[0], -1, columns - before, columns).tril_(before)
    return scores


def _grad_of_sums(grad_output, grad_denominator, output, inverse):
    """Gradients of numerator `[B Hkv, G C, D]` and denominator `[B Hkv, G C, 1]` of a block."""
    grad = grad_output * inverse
    return _rows(grad), _rows(grad_denominator - (grad * output).sum(dim=-1, keepdim=True))


def _sums_of(state, key, value, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """S `[B Hkv, F, D]` and Z `[B Hkv, 1, F]` of a state, copies that may be changed."""
    if state is None:
        heads, features = key.shape[0] * key.shape[1], key.shape[-1]
        sums = key.new_zeros(heads, features, value.shape[-1], dtype=dtype)
        return sums, sums.new_zeros(heads, 1, features)
    state = state.flatten(0, 1)
    return state[..., :-1].clone(memory_format=torch.contiguous_format), state[:, None, :, -1].clone()


def _state_of(sums, z, heads) -> torch.Tensor:
    """The inverse of `_sums_of`."""
    return torch.cat((sums, z.transpose(1, 2)), dim=-1).unflatten(0, heads)
