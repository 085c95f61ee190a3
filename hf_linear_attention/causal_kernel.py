"""Causal kernel attention on plain features, block by block, with a backward pass that recomputes its sums.

Axes: B batch, Hkv key/value heads, G query heads per key/value head, N tokens, F features, D head dimension of the
values, C tokens in a block. Inside the loops B and Hkv are one axis, and G and C another.

Autograd through such a loop keeps every block's sums; here nothing of size N x F x D is kept or made. The backward pass
is two sweeps (Katharopoulos 2020, equations 13-15): forwards for the queries, which meet the sums of what lies before
them, and backwards for keys and values, which meet those of what lies behind.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.autograd.function import once_differentiable


def block_length(tensor: torch.Tensor) -> int:
    """C: products of small matrices want many rows, the square of scores within a block wants few."""
    return 32 if tensor.device.type == "cpu" and torch.get_num_threads() == 1 else 64


class CausalAttention(torch.autograd.Function):
    """`apply(query, key, value, state)` -> `(output, denominator, state)`.

    `query [B, Hkv, G, N, F]`, `key [B, Hkv, N, F]` and `state [B, Hkv, F, D + 1]` (what came before, or None) in one
    dtype, `value [B, Hkv, N, D]` in any; the output `[B, Hkv, G, N, D]` is normalised, 0 where the denominator
    `[B, Hkv, G, N, 1]` is 0.
    """

    @staticmethod
    def forward(ctx, query, key, value, state):
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        denominator = query.new_empty(*query.shape[:-1], 1)
        sums, z = _sums_of(state, key, value)
        for q, k, v, out, den in _blocks(query, key, value, output, denominator):
            shape = out.shape
            q, k, v = _rows(q), k.flatten(0, 1), v.flatten(0, 1).to(key.dtype)
            scores = _tril(q @ k.transpose(1, 2))
            total = (q * z).sum(dim=-1, keepdim=True).add_(scores.sum(dim=-1, keepdim=True))
            numerator = torch.bmm(q, sums).baddbmm_(scores, v)
            den.copy_(total.view(*shape[:-1], 1))
            out.copy_(numerator.div_(total.clamp_(min=torch.finfo(total.dtype).tiny)).view(shape))
            sums.baddbmm_(k.transpose(1, 2), v)
            z.add_(k.sum(dim=1, keepdim=True))
        ctx.save_for_backward(query, key, value, state, output, denominator)
        return output, denominator, _state_of(sums, z, key.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output, grad_denominator, grad_state):
        query, key, value, state, output, denominator = ctx.saved_tensors
        # d output = d numerator / denominator - output d denominator / denominator; none where nothing is to be seen
        is_nothing = denominator < torch.finfo(denominator.dtype).tiny
        inverse = denominator.reciprocal().masked_fill_(is_nothing, 0.0)
        grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
        blocks = list(_blocks(query, key, value, output, inverse, grad_output, grad_denominator, *grads))
        sums, z = _sums_of(state, key, value)
        for q, k, v, out, inv, g, g_den, grad_query, _, _ in blocks:
            k, v = k.flatten(0, 1), v.flatten(0, 1).to(key.dtype)
            g, c = _grad_of_sums(g, g_den, out, inv)
            pairs = _tril(torch.baddbmm(c, g, v.transpose(1, 2)))
            grad = torch.bmm(pairs, k).baddbmm_(g, sums.transpose(1, 2)).addcmul_(c, z)
            grad_query.copy_(grad.view(q.shape))
            sums.baddbmm_(k.transpose(1, 2), v)
            z.add_(k.sum(dim=1, keepdim=True))
        sums, z = _sums_of(grad_state, key, value)
        for q, k, v, out, inv, g, g_den, _, grad_key, grad_value in reversed(blocks):
            q, k, v = _rows(q), k.flatten(0, 1), v.flatten(0, 1).to(key.dtype)
            g, c = _grad_of_sums(g, g_den, out, inv)
            scores = _tril(q @ k.transpose(1, 2))
            pairs = _tril(torch.baddbmm(c, g, v.transpose(1, 2)))
            grad = torch.bmm(pairs.transpose(1, 2), q).baddbmm_(v, sums.transpose(1, 2)).add_(z)
            grad_key.copy_(grad.view(grad_key.shape))
            grad_value.copy_(torch.bmm(scores.transpose(1, 2), g).baddbmm_(k, sums).view(grad_value.shape))
            sums.baddbmm_(q.transpose(1, 2), g)
            z.add_((q * c).sum(dim=1, keepdim=True))
        return *grads, None if state is None else _state_of(sums, z, key.shape[:2])


def _blocks(query, key, value, *others) -> Iterator[tuple[torch.Tensor, ...]]:
    """The blocks of C tokens of tensors whose last axis but one is N, views."""
    size = block_length(query)
    return zip(*(tensor.split(size, dim=-2) for tensor in (query, key, value, *others)))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`[B, Hkv, G, C, X]` -> `[B Hkv, G C, X]`."""
    return x.flatten(2, 3).flatten(0, 1)


def _tril(scores: torch.Tensor) -> torch.Tensor:
    """`[B Hkv, G C, C]`, 0 where the key comes after the query; in place."""
    size = scores.shape[-1]
    scores.view(scores.shape[0], -1, size, size).tril_()
    return scores


def _grad_of_sums(grad_output, grad_denominator, output, inverse):
    """Gradients of numerator `[B Hkv, G C, D]` and denominator `[B Hkv, G C, 1]` of a block."""
    grad = grad_output * inverse
    return _rows(grad), _rows(grad_denominator - (grad * output).sum(dim=-1, keepdim=True))


def _sums_of(state, key, value) -> tuple[torch.Tensor, torch.Tensor]:
    """S `[B Hkv, F, D]` and Z `[B Hkv, 1, F]` of a state, copies that may be changed."""
    if state is None:
        heads, features = key.shape[0] * key.shape[1], key.shape[-1]
        return key.new_zeros(heads, features, value.shape[-1]), key.new_zeros(heads, 1, features)
    state = state.flatten(0, 1)
    return state[..., :-1].clone(memory_format=torch.contiguous_format), state[:, None, :, -1].clone()


def _state_of(sums, z, heads) -> torch.Tensor:
    """The inverse of `_sums_of`."""
    return torch.cat((sums, z.transpose(1, 2)), dim=-1).unflatten(0, heads)
