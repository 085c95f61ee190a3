"""Nystrom attention: exact for short rows, a function of each row alone, and the convolution out of the way."""

from __future__ import annotations

import pytest
import reference
import torch
from matrix import build_mechanism, stock_model

from hf_linear_attention import LinearAttentionSettings, convert
from hf_linear_attention.attention.segments import gather_tokens, real_first, segment_mean_weights
from hf_linear_attention.mechanisms.base import LayerShape
from hf_linear_attention.mechanisms.nystrom import NystromAttention, iterative_pinv


def build(dtype=torch.float64, **options):
    settings = LinearAttentionSettings({"mechanism": "nystrom", **options})
    mechanism = NystromAttention(settings, LayerShape(4, 2, 8, 0))
    mechanism.reset_parameters()
    return mechanism.to(dtype)


def inputs(length, batch=1, std=2.0, dtype=torch.float64):
    torch.manual_seed(length)
    return [torch.randn(batch, heads, length, 8, dtype=dtype) * std for heads in (4, 2, 2)]


def run(mechanism, query, key, value, mask=None):
    return mechanism.attend(query, key, value, attention_mask=mask, scaling=0.3, is_causal=False, state=None)[0]


def softmax(query, key, value):
    return reference.attend(0.3 * query @ reference.repeat_heads(key, 4).transpose(-1, -2), value).transpose(1, 2)


@pytest.mark.parametrize("length", [1, 2, 11, 12])
def test_rows_of_at_most_as_many_tokens_as_landmarks_are_exact(length):
    mechanism, (query, key, value) = build(num_landmarks=12), inputs(length)
    expected = softmax(query, key, value)
    torch.testing.assert_close(run(mechanism, query, key, value), expected)
    # the same row among padding, so that the batch is longer than the landmarks
    places = torch.randperm(30)[:length].sort().values
    mask = torch.zeros(2, 30, dtype=torch.bool)
    mask[0, places], mask[1] = True, True
    padded = inputs(30, batch=2)
    for whole, part in zip(padded, (query, key, value)):
        whole[0][:, places] = part[0]
    torch.testing.assert_close(run(mechanism, *padded, mask=mask)[:1, places], expected)


def test_the_formula_itself_is_near_exact_with_as_many_landmarks_as_tokens():
    """Landmarks that are the tokens give A Z A V, and Z tends to the pseudo-inverse of A."""
    query, key, value = inputs(12, std=1.0)
    logits = 0.3 * query @ reference.repeat_heads(key, 4).transpose(-1, -2)
    exact, matrix = softmax(query, key, value).transpose(1, 2), logits.softmax(-1)
    errors = [
        (matrix @ iterative_pinv(matrix, steps) @ matrix @ reference.repeat_heads(value, 4) - exact).norm()
        / exact.norm()
        for steps in (2, 6, 12, 24)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6


def test_batch_mates_change_nothing():
    """HF's Nystromformer starts its iteration from the maximum over the batch: outputs there move by 4 to 9 %."""
    mechanism, (query, key, value) = build(num_landmarks=6), inputs(40)
    alone = run(mechanism, query, key, value)
    loud = [torch.cat((x, 20.0 * torch.randn_like(x), torch.zeros_like(x))) for x in (query, key, value)]
    torch.testing.assert_close(run(mechanism, *loud)[:1], alone, rtol=1e-12, atol=1e-12)


def test_pseudo_inverse_of_zero_and_of_large_matrices_is_finite():
    matrix = torch.stack((torch.zeros(5, 5), torch.eye(5), torch.full((5, 5), 0.2)))
    inverse = iterative_pinv(matrix.requires_grad_(), 6)
    torch.testing.assert_close(inverse, torch.linalg.pinv(matrix.detach()), rtol=1e-4, atol=1e-4)
    inverse.sum().backward()
    assert matrix.grad.isfinite().all()


def test_an_empty_row_has_finite_gradients():
    mechanism, leaves = build(num_landmarks=6), [x.requires_grad_() for x in inputs(20, batch=2)]
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0] = False
    run(mechanism, *leaves, mask=mask).sum().backward()
    assert all(x.grad.isfinite().all() and (x.grad[0] == 0).all() for x in leaves)


def test_segments_count_real_tokens():
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 0, 0, 1, 0]], dtype=torch.bool)
    weights = segment_mean_weights(mask, 3, torch.float64)
    third = 1 / 3  # ranks 0..6 fall into segments 0 0 0 1 1 2 2
    torch.testing.assert_close(weights[0, 0], torch.tensor([third, third, 0, third, 0, 0, 0, 0, 0]).double())
    torch.testing.assert_close(weights[0, 2], torch.tensor([0, 0, 0, 0, 0, 0, 0, 0.5, 0.5]).double())
    assert weights[1].nonzero().tolist() == [[0, 4], [1, 7]]
    x = torch.arange(9.0).expand(2, 9)[:, None, :, None]
    places = real_first(mask)
    assert gather_tokens(x, places)[1].flatten().tolist() == [4, 7, 0, 1, 2, 3, 5, 6, 8]
    assert torch.equal(gather_tokens(gather_tokens(x, places), places.argsort(dim=1)), x)


def test_the_convolution_starts_as_nothing_and_is_learned():
    plain, convolving = build(num_landmarks=6), build(num_landmarks=6, conv_kernel_size=5)
    parts = inputs(25)
    assert torch.equal(run(plain, *parts), run(convolving, *parts))
    (run(convolving, *parts) * torch.randn(1, 25, 4, 8)).sum().backward()
    assert (convolving.conv_weight.grad != 0).all()


def test_six_iterations_by_default():
    """As in the paper: fewer do not reach it, more bring out the noise of small singular values."""
    assert build().pinv_iterations == 6


def test_an_even_convolution_is_refused():
    with pytest.raises(ValueError, match="`conv_kernel_size` = 4 must be odd"):
        LinearAttentionSettings({"mechanism": "nystrom", "conv_kernel_size": 4})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_only_at_the_ends(dtype):
    parts = [x.to(dtype) for x in inputs(50, dtype=torch.float32)]
    mechanism = build_mechanism("nystrom")
    actual, expected = run(mechanism.to(dtype), *parts), run(mechanism.float(), *[x.float() for x in parts])
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected.to(dtype))


def test_a_converted_encoder_with_enough_landmarks_is_the_original():
    stock = stock_model("bert")
    ids = torch.randint(3, 60, (2, 33))
    model = convert(stock, mechanism="nystrom", num_landmarks=33, conv_kernel_size=3)
    torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)
