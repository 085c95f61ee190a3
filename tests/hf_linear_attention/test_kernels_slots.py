"""Softmax with few keys or few queries: C, torch's fused kernel and float64 agree, whatever is hidden."""

from __future__ import annotations

import pytest
import torch
from reference import attend, repeat_heads

from hf_linear_attention.attention.segments import segment_mean_weights, segment_means, weigh_tokens
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.torch_kernels.slots import slot_attention


SCALING = 0.3


def sample(length: int, keys: int, dim: int, width: int):
    torch.manual_seed(length)
    query = torch.randn(2, length, 4, dim).transpose(1, 2) * 3  # heads beside tokens, as models have them
    return query, torch.randn(2, 2, keys, dim), torch.randn(2, 2, keys, width)


def exact(query, key, value, visible):
    logits = SCALING * query.double() @ repeat_heads(key.double(), 4).transpose(-1, -2)
    if visible is not None:
        shown = visible.expand(2, 2, -1).repeat_interleave(2, dim=1).unsqueeze(2)
        logits = logits.masked_fill(~shown, -torch.inf)
    return attend(logits, value)


def masks(keys: int):
    """None, some keys for each row, some for each head, and the last ones alone (the first hundred is hidden)."""
    some = torch.rand(2, 1, keys) > 0.4, torch.rand(2, 2, keys) > 0.4
    for mask in some:
        mask[..., 0] = True
    return None, *some, (torch.arange(keys) > 0.7 * keys - 1).expand(1, 1, -1)


@pytest.fixture(params=["C", "torch"])
def kernel(request, monkeypatch):
    """Both, where there is a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    elif kernels_cpu.library() is None:
        pytest.skip("no C compiler")


@pytest.mark.parametrize(("length", "keys"), [(70, 33), (33, 128), (33, 300), (1, 1), (5, 2)])
def test_values_agree_with_float64(length, keys, kernel):
    for dim, width in ((6, 5), (16, 48)):
        tensors = sample(length, keys, dim, width)
        for visible in masks(keys):
            # float32 rounds at 6e-8, and logits of up to 30 at 2e-6 more
            torch.testing.assert_close(
                slot_attention(*tensors, visible, SCALING).double(), exact(*tensors, visible), rtol=1e-5, atol=1e-5
            )


def test_gradients_agree_with_float64():
    tensors, visible = [x.requires_grad_() for x in sample(40, 20, 8, 6)], masks(20)[1]
    actual = slot_attention(*tensors, visible, SCALING)
    direction = torch.randn(actual.shape)
    for a, e in zip(
        torch.autograd.grad((actual * direction).sum(), tensors),
        torch.autograd.grad((exact(*tensors, visible) * direction).sum(), tensors),
    ):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)  # sums of 40 terms of both signs


def test_what_is_hidden_may_be_anything_and_rows_without_keys_are_0(kernel):
    query, key, value = sample(40, 150, 8, 8)
    visible = masks(150)[1]
    visible[1] = False
    expected = slot_attention(query, key, value, visible, SCALING)
    key, value = (x.masked_fill(~visible.unsqueeze(3), float("nan")) for x in (key, value))
    actual = slot_attention(query, key, value, visible, SCALING)
    assert torch.equal(actual, expected)
    assert (actual[1] == 0).all()


@pytest.mark.parametrize("length", [5, 12, 24, 31])
def test_means_of_segments_are_those_of_the_matrix(length):
    x = torch.randn(2, 3, length, 4, dtype=torch.float64)
    weights = segment_mean_weights(torch.ones(1, length, dtype=torch.bool), 12, x.dtype)
    torch.testing.assert_close(segment_means(x, 12), weights @ x)


@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_weighing_tokens_does_not_depend_on_their_order_in_memory(batch, heads):
    x, weights = torch.randn(3, 9, 2, 4, dtype=torch.float64).transpose(1, 2), torch.randn(batch, heads, 5, 9).double()
    torch.testing.assert_close(weigh_tokens(weights, x), weights @ x)
    torch.testing.assert_close(weigh_tokens(weights, x.contiguous()), weights @ x)
