"""Window and sinks in C against the same in torch at float64: values, gradients, and what must not be looked at."""

from __future__ import annotations

import pytest
import torch

from hf_linear_attention.kernels.cpu import library
from hf_linear_attention.torch_kernels import window as kernels_window
from hf_linear_attention.torch_kernels.window import NearKeys, SinkKeys, exact_part


SCALING = 0.3

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")


def sample(length: int, width: int, sinks: int, dim: int = 8, std: float = 1.0, groups: int = 2):
    """Queries with heads beside tokens, as models have them; keys, values and masks of which some are hidden."""
    query = torch.randn(2, length, 2 * groups, dim).transpose(1, 2) * std
    places = length + width - 1
    near = torch.randn(2, 2, places, dim) * std, torch.randn(2, 2, places, dim + 3)
    visible = torch.rand(2, places) > 0.2
    sink = torch.randn(2, 2, sinks, dim) * std, torch.randn(2, 2, sinks, dim + 3)
    seen = torch.arange(sinks) < torch.arange(length)[:, None] - torch.tensor([3, 0])[:, None, None]
    return [query, *near, *sink], visible, seen


def part(tensors, visible, seen, **options):
    query, key, value, sink_key, sink_value = tensors
    distance = torch.zeros(seen.shape, dtype=torch.int64)
    near = NearKeys(key, value, visible, 0)
    return exact_part(query, near, SinkKeys(sink_key, sink_value, seen, distance), SCALING, **options)


def values_and_gradients(tensors, visible, seen):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    output, size, largest = part(leaves, visible, seen)
    is_seen = largest > kernels_window.EMPTY_MAXIMUM
    torch.manual_seed(1)
    output, size = output * is_seen, size * is_seen
    loss = (output * torch.randn(output.shape)).sum() + (size * torch.randn(size.shape)).sum()
    return [output, size, largest, *torch.autograd.grad(loss, leaves)]


def compare(tensors, visible, seen):
    actual = values_and_gradients(tensors, visible, seen)
    exact = values_and_gradients([x.double() for x in tensors], visible, seen)
    for a, e in zip(actual, exact):
        # float32 rounds at 6e-8; a logit of 100 by as much of itself, which its exponential then shows
        assert (a - e).norm() <= 2e-5 * e.norm() + 1e-5


@pytest.mark.parametrize("sinks", [0, 4, 40])
@pytest.mark.parametrize(
    ("length", "width"), [(1, 1), (1, 64), (5, 2), (33, 33), (64, 64), (70, 3), (101, 65), (130, 127)]
)
def test_values_and_gradients_agree_with_float64(length, width, sinks):
    compare(*sample(length, width, sinks))


def test_large_logits_agree_with_float64():
    compare(*sample(70, 20, 3, std=8.0))


def test_whole_vectors_and_a_group_of_one_agree_with_float64():
    compare(*sample(70, 20, 3, dim=32, groups=1))


def test_c_is_at_work():
    inputs = sample(40, 8, 2)
    assert part(*inputs)[0].grad_fn is None
    inputs[0][0].requires_grad_()
    assert "window_attention" in type(part(*inputs)[1].grad_fn).__name__
    assert "window_attention" not in type(part(*inputs, is_scale_constant=False)[1].grad_fn).__name__


def test_what_is_hidden_may_be_anything_and_does_not_matter():
    (query, key, value, *sinks), visible, seen = sample(70, 20, 3)
    expected = values_and_gradients([query, key, value, *sinks], visible, seen)
    hidden = ~visible[:, None, :, None]
    spoiled = key.masked_fill(hidden, float("nan")), value.masked_fill(hidden, float("inf"))
    for a, e in zip(values_and_gradients([query, *spoiled, *sinks], visible, seen), expected):
        assert torch.equal(a, e)


def test_bfloat16_is_as_near_to_float64_as_its_own_rounding():
    tensors, visible, seen = sample(70, 20, 3)
    tensors = [x.bfloat16() for x in tensors]
    actual = values_and_gradients(tensors, visible, seen)
    assert actual[0].dtype == torch.float32
    assert actual[-1].dtype == torch.bfloat16
    for a, e in zip(actual, values_and_gradients([x.double() for x in tensors], visible, seen)):
        assert (a - e).norm() < 3e-3 * e.norm()  # gradients are rounded once, at 2^-9
