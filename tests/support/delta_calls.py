"""Calls of the gated delta rule, and how far their results may be from float64."""

from __future__ import annotations

import torch


# With keys of norm 1 no product grows, so float32 keeps 6e-8 of each of a few hundred terms; 2e-6 was the largest
# difference seen. The aim is 1e-4 of the output's scale.
VALUES, GRADIENTS = 1e-5, 3e-5


def sample(
    length: int, per_feature: bool, decay: float = 1.0, dim: int = 12, width: int = 20, heads=(4, 2), dtype=None
):
    """Random tensors by name; `decay` is the largest decay of a token in nats."""
    torch.manual_seed(length + 1000 * per_feature)
    batch, (num_heads, kv_heads) = 2, heads
    per_token = (batch, kv_heads, length) + (dim,) * per_feature
    normal = torch.nn.functional.normalize
    tensors = {
        "query": normal(torch.randn(batch, length, num_heads, dim).transpose(1, 2), dim=-1),
        "key": normal(torch.randn(batch, kv_heads, length, dim), dim=-1),
        "value": torch.randn(batch, kv_heads, length, width),
        "log_decay": -decay * torch.rand(per_token) ** 3,
        "beta": torch.rand(batch, kv_heads, length) * 1.2,
        "state": torch.randn(batch, kv_heads, dim, width),
    }
    return {name: x if dtype is None or name == "state" else x.to(dtype) for name, x in tensors.items()}


def values_and_gradients(function, tensors, **options):
    """Output and state, then the gradients of all tensors for the same random direction."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    results = function(**leaves, **options)
    torch.manual_seed(7)
    loss = sum((x * torch.randn(x.shape)).double().sum() for x in results)
    return [*results, *torch.autograd.grad(loss, list(leaves.values()))]


def assert_close(actual, exact, tolerances=None):
    tolerances = tolerances or [VALUES] * 2 + [GRADIENTS] * (len(exact) - 2)
    for number, (a, e, tolerance) in enumerate(zip(actual, exact, tolerances, strict=True)):
        assert a.shape == e.shape
        error, size = (a.double() - e.double()).abs().max(), e.abs().max()
        assert error <= tolerance * max(size, 1e-3), f"result {number}: {error:.3g} of {size:.3g}"
