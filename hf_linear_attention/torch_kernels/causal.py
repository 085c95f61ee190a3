# SPDX-License-Identifier: Apache-2.0
"""Causal kernel attention in torch, computed block by block, with a backward pass that recomputes its sums.

Axes: B batch, Hkv key/value heads, G query heads per key/value head, N tokens, F features, D head dimension of the
values, C tokens in a block. Inside the loops B and Hkv form one axis, and G and C another.

Autograd through such a loop would keep the sums of every block; this implementation stores nothing of size N x F x D.
The backward pass makes two sweeps (Katharopoulos 2020, equations 13-15). The forward sweep computes the gradients of
the queries from the sums of the earlier tokens, and the reverse sweep those of keys and values from later tokens.

In an exported graph whose length is free, the blocks are the steps of a loop of the graph instead.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import (
    BLOCK_SIZE,
    EMPTY_MAXIMUM,
    BlockDecay,
    Parts,
    accumulation_dtype,
    attend_block,
    attend_log_block,
    attend_within,
    exponentiate,
    is_free,
    joined,
    normalize,
    pack_state,
    plain_attention,
    safe_block_size,
    sequence_masks,
    unpack_state,
    with_dtype,
    with_ones,
    with_padding_counted,
)
from .implementations import in_large_pages


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_features: bool,
    key_mask: Tensor | None = None,
    state: Tensor | None = None,
    log_decay: Tensor | None = None,
    gpu_kernel: Callable[..., Any] | None = None,
) -> Parts:
    """Causal `torch_kernels.blocks.plain_attention` in blocks as long as the exponents allow; bool masks only.

    `gpu_kernel` is `kernels.fla.causal_attention` if that accepts these tensors, and None otherwise.
    """
    options: dict[str, Any] = {"log_features": log_features, "state": state}
    if gpu_kernel is not None:
        return _with_gates(query, key, value, mask=key_mask, log_decay=log_decay, kernel=gpu_kernel, **options)
    if log_decay is not None:
        options |= {"key_mask": key_mask, "log_decay": log_decay}
        return plain_attention(query, key, value, is_causal=True, **options)
    mask = None if key_mask is None else key_mask[:, None, :, None]
    sums, maximum = unpack_state(state, log_features)
    dtype = accumulation_dtype(value)
    key = with_dtype(key, dtype)
    size = safe_block_size(key, mask, maximum) if log_features else max(1, key.shape[2])
    query = with_dtype(query, dtype).unflatten(1, (key.shape[1], -1))
    masks = itertools.repeat(None) if mask is None else mask.split(size, dim=2)
    results = []
    # `.split` and not slices: autograd through slices of one tensor costs O(N^2).
    for q, k, v, m in zip(query.split(size, dim=3), key.split(size, dim=2), value.split(size, dim=2), masks):
        scale = None
        if log_features:
            q, scale, k, sums, maximum = exponentiate(q, k, m, sums, maximum)
        output, denominator, sums = CausalAttention.apply(q, k if m is None else k * m, v, sums)
        results.append((output, denominator, scale))
    joint: Any = (None if part[0] is None else joined(part) for part in zip(*results))
    return *joint, pack_state(sums, maximum)


def _with_gates(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_features: bool,
    mask: Tensor | None,
    state: Tensor | None,
    log_decay: Tensor | None,
    kernel: Callable[..., Any],
) -> Parts:
    """`causal_attention` by a kernel with a gate for every token and feature, in one call and with no branch on data.

    Exponents are taken from their maximum over all tokens so far. A gate moves the sums from one maximum to the next,
    and carries the decay; that needs its gradient, the maximum is a constant.
    """
    dtype, (batch, kv_heads, length, features) = accumulation_dtype(value), key.shape
    visible = None if mask is None else mask[:, None, :, None]
    key, query = with_dtype(key, dtype), with_dtype(query, dtype).unflatten(1, (kv_heads, -1))
    sums, before = unpack_state(state, log_features)
    gate = None
    if log_decay is not None:
        gate = log_decay.to(dtype)[:, None, None].expand(batch, -1, length, 1)
        gate = gate if visible is None else gate * visible
    if not log_features:
        key = key if visible is None else key * visible
        gate = None if gate is None else gate.expand(-1, -1, -1, features)
        output, denominator, sums = kernel(query, key, value, sums, gate)
        return output, denominator, None, sums
    passed = 0.0 if gate is None else gate.detach().cumsum(dim=2)
    largest = key.detach() if visible is None else key.detach().masked_fill(~visible, EMPTY_MAXIMUM)
    largest = (largest - passed).cummax(dim=2).values
    if before is not None:
        largest = torch.maximum(largest, before.detach().unsqueeze(2))
    largest = largest + passed
    first = largest[:, :, :1] if before is None else before.unsqueeze(2)
    previous = torch.cat((first, largest[:, :, :-1]), dim=2)
    rise = (previous - largest).masked_fill(previous < EMPTY_MAXIMUM / 2, 0.0)  # of no sums
    key = key - largest
    key = key.exp() if visible is None else key.masked_fill(~visible, 0.0).exp() * visible
    query = query + largest.unsqueeze(2)
    scale = query.detach().amax(dim=-1, keepdim=True)
    gate = rise if gate is None else rise + gate
    output, denominator, sums = kernel((query - scale).exp(), key, value, sums, gate)
    return output, denominator, scale, pack_state(sums, largest[:, :, -1])


def incomplete(length: int, size: int) -> int:
    """The number of tokens that whole blocks of `size` lack; blocks of a free length are two or more.

    Otherwise the graph would depend on whether there is one block, and torch.export would refuse the length.
    """
    return (length // size + 2) * size - length if is_free(length) else -length % size


def scanned_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_features: bool,
    key_mask: Tensor | None = None,
    state: Tensor | None = None,
    log_decay: Tensor | None = None,
) -> Parts:
    """Causal `torch_kernels.blocks.plain_attention` for a free length, which takes one step of a loop per block."""
    from torch._higher_order_ops.scan import scan  # torch has no public name for it yet

    dtype, (batch, kv_heads, length, features) = accumulation_dtype(value), key.shape
    size = BLOCK_SIZE
    missing = incomplete(length, size)

    def blocks(x: Tensor, dim: int) -> Tensor:
        return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)).unflatten(dim, (-1, size)).movedim(dim, 0)

    if key_mask is None:
        key_mask = torch.ones(batch, length, dtype=torch.bool, device=key.device)
    query, key = with_dtype(query, dtype).unflatten(1, (kv_heads, -1)), with_dtype(key, dtype)
    values, mask = with_ones(value, dtype), (key_mask > 0)[:, None, :, None]
    given = [blocks(query, 3), blocks(key, 2), blocks(values, 2), blocks(mask, 2)]
    if key_mask.dtype != torch.bool:
        numbers = with_padding_counted(F.pad(key_mask.abs(), (0, missing)))
        before = torch.cat((numbers[:, :1], numbers[:, :-1]), dim=1)
        given += [x.unflatten(1, (-1, size)).movedim(1, 0) for x in (numbers, before)]

    def step(carried: Sequence[Tensor], block: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        q, k, v, m, *sequences = block
        together = sequence_masks(sequences[0], sequences[1][:, :1]) if sequences else None
        decay = None if log_decay is None else BlockDecay(log_decay.to(dtype), k, m)
        sums, maximum = carried if log_features else (*carried, None)
        if not log_features:
            output, sums = attend_block(q, k, v, m, sums, together, decay)
            return [sums], [output]
        within = attend_within(q, k, v, m, sequences[0] if sequences else None, log_decay)
        output, scale, *new = attend_log_block(q, k, v, m, within, sums, maximum, together, decay)
        return new, [output, scale]

    start = list(unpack_state(state, log_features)) if state is not None else [
        values.new_zeros(batch, kv_heads, features, values.shape[-1]),
        values.new_full((batch, kv_heads, features), EMPTY_MAXIMUM) if log_features else None,
    ]  # fmt: skip
    start = [x.to(dtype).clone(memory_format=torch.contiguous_format) for x in start if x is not None]
    (sums, *maximum), results = scan(step, start, given)
    output, *scale = (x.movedim(0, 3).flatten(3, 4)[:, :, :, :length] for x in results)
    state = pack_state(sums, *(maximum or [None]))
    return normalize(output), output[..., -1:], *(scale or [None]), state


def gradients_with_graph(function: Callable[..., Any], inputs: Any, grad_outputs: Any) -> list[Tensor | None]:
    """Gradients of `inputs` that can be differentiated again, through `function`, which uses torch operations only.

    The backward pass of a custom function calls this while torch keeps a graph of it (`create_graph=True`).
    """
    leaves = [x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in inputs]
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    pairs = [(y, g) for y, g in zip(function(*leaves), grad_outputs) if g is not None and y is not None]
    pairs = [(y, g) for y, g in pairs if y.requires_grad]
    options = {"create_graph": True, "allow_unused": True}
    outputs, grads = [y for y, _ in pairs], [g for _, g in pairs]
    found = iter(torch.autograd.grad(outputs, wanted, grads, **options) if pairs else ())
    return [next(found, None) if isinstance(x, Tensor) and x.requires_grad else None for x in leaves]


class ElementwiseMap(NamedTuple):
    """An elementwise feature map and its derivative; neither may change its argument."""

    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


class CausalAttention(torch.autograd.Function):
    """`apply(query, key, value, state, mask=None, feature_map=None)` -> `(output, denominator, state)`.

    The arguments `query [B, Hkv, G, N, F]`, `key [B, Hkv, N, F]` and `value [B, Hkv, N, D]` have any dtype, and the
    bool `mask [B, 1, N, 1]` is True for visible keys (None: all). The state before the first token, `[B, Hkv, F, D +
    1]` or None, and the results have the accumulation dtype. The output `[B, Hkv, G, N, D]` is normalised, and 0 where
    the denominator `[B, Hkv, G, N, 1]` is 0. Without an ElementwiseMap, queries and keys are features already.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: Tensor | None,
        mask: Tensor | None = None,
        feature_map: ElementwiseMap | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend block by block; see the class for the shapes."""
        dtype = torch.promote_types(value.dtype, torch.float32)
        batch, kv_heads, groups, length, _ = query.shape
        # Models read the output as [B, N, H, D].
        output = query.new_empty(batch, length, kv_heads, groups, value.shape[-1], dtype=dtype)
        output = in_large_pages(output).permute(0, 2, 3, 1, 4)
        denominator = query.new_empty(*query.shape[:-1], 1, dtype=dtype)
        sums, z = _sums_of(state, key, value, dtype)
        for q, k, v, m, out, den in _blocks(query, key, value, mask, output, denominator):
            shape = out.shape
            q, v = _features(_rows(q), dtype, feature_map), v.flatten(0, 1).to(dtype)
            k = _visible(_features(k.flatten(0, 1), dtype, feature_map), m, kv_heads)
            # With Z as one more key, which stands for all earlier ones, the scores of a row sum to its denominator.
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
    def backward(
        ctx: Any, grad_output: Tensor, grad_denominator: Tensor, grad_state: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value and state, from sums that are recomputed block by block."""
        if torch.is_grad_enabled():
            *inputs, _, _ = ctx.saved_tensors
            plain = functools.partial(_plain, feature_map=ctx.feature_map)
            return *gradients_with_graph(plain, inputs, (grad_output, grad_denominator, grad_state)), None
        query, key, value, state, mask, output, denominator = ctx.saved_tensors
        feature_map, dtype, kv_heads = ctx.feature_map, output.dtype, key.shape[1]
        # d output = (d numerator - output d denominator) / denominator, and 0 for queries that see no key
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


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: Tensor | None,
    mask: Tensor | None,
    feature_map: ElementwiseMap | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`CausalAttention` in plain operations, for second derivatives."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    query, key = (_features(x, dtype, feature_map) for x in (query.flatten(1, 2), key))
    key_mask = None if mask is None else mask[:, 0, :, 0]
    output, denominator, _, state = plain_attention(
        query, key, value, log_features=False, is_causal=True, key_mask=key_mask, state=state
    )
    return output, denominator, state


def _features(x: Tensor, dtype: torch.dtype, feature_map: ElementwiseMap | None) -> Tensor:
    return x.to(dtype) if feature_map is None else feature_map.function(x.to(dtype))


def _before_map(grad: Tensor, x: Tensor, feature_map: ElementwiseMap | None) -> Tensor:
    """The gradient of `x`, computed in place from the gradient of its features."""
    return grad if feature_map is None else grad.mul_(feature_map.slope(x.to(grad.dtype)))


def _visible(key: Tensor, mask: Tensor | None, kv_heads: int) -> Tensor:
    """`key [B Hkv, C, F]` with 0 where the `mask [B, 1, C, 1]` is False."""
    return key if mask is None else key * mask.expand(-1, kv_heads, -1, -1).flatten(0, 1)


def _blocks(*tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Views of blocks of C tokens; N is the last axis but one of each tensor, and a missing tensor gives None."""
    return zip(*(itertools.repeat(None) if x is None else x.split(BLOCK_SIZE, dim=-2) for x in tensors))


def _rows(x: Tensor) -> Tensor:
    """`[B, Hkv, G, C, X]` -> `[B Hkv, G C, X]`."""
    return x.flatten(2, 3).flatten(0, 1)


def _tril(scores: Tensor, before: int = 0) -> Tensor:
    """Set scores `[B Hkv, G C, before + C]` to 0, in place, where the key comes after the query."""
    columns = scores.shape[-1]
    if scores.numel():
        scores.view(scores.shape[0], -1, columns - before, columns).tril_(before)
    return scores


def _grad_of_sums(
    grad_output: Tensor, grad_denominator: Tensor, output: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of numerator `[B Hkv, G C, D]` and denominator `[B Hkv, G C, 1]` of a block."""
    grad = grad_output * inverse
    return _rows(grad), _rows(grad_denominator - (grad * output).sum(dim=-1, keepdim=True))


def _sums_of(state: Tensor | None, key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copies of S `[B Hkv, F, D]` and Z `[B Hkv, 1, F]` of a state, which the caller may change."""
    if state is None:
        heads, features = key.shape[0] * key.shape[1], key.shape[-1]
        sums = key.new_zeros(heads, features, value.shape[-1], dtype=dtype)
        return sums, sums.new_zeros(heads, 1, features)
    state = state.flatten(0, 1)
    return state[..., :-1].clone(memory_format=torch.contiguous_format), state[:, None, :, -1].clone()


def _state_of(sums: Tensor, z: Tensor, heads: torch.Size) -> Tensor:
    """The inverse of `_sums_of`."""
    return torch.cat((sums, z.transpose(1, 2)), dim=-1).unflatten(0, heads)
