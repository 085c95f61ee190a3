"""The C kernels against the same computation in torch at float64: values, gradients, and what they must not look at."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from hf_linear_attention.features.maps import EluFeatureMap, ExpFeatureMap, FeatureMap, HedgehogFeatureMap
from hf_linear_attention.features.random_maps import CoshRandomFeatureMap, ExpRandomFeatureMap
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.kernels.cpu import library
from hf_linear_attention.kernels.operators import takes_attention
from hf_linear_attention.torch_kernels.attention import kernel_attention, map_attention
from hf_linear_attention.torch_kernels.blocks import ELU_PLUS_ONE, EXP, Affine, KernelMap


HEADS, KV_HEADS, SCALING = 4, 2, 0.3
MAPS = {
    "elu1": EluFeatureMap,
    "exp": ExpFeatureMap,
    "hedgehog": HedgehogFeatureMap,
    "performer": ExpRandomFeatureMap,
    "cosh": CoshRandomFeatureMap,
}

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")


def build(name: str, dim: int, features: int | None = None) -> FeatureMap:
    feature_map = MAPS[name](HEADS, KV_HEADS, dim, features)
    feature_map.reset_parameters(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in feature_map.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return feature_map


def sample(length: int, dim: int, width: int, std: float = 1.0, keys: int | None = None):
    query = torch.randn(2, length, HEADS, dim).transpose(1, 2) * std  # heads beside tokens, as models have them
    key = torch.randn(2, KV_HEADS, keys or length, dim) * std
    return query, key, torch.randn(2, KV_HEADS, keys or length, width)


def a_state(feature_map: FeatureMap, width: int) -> torch.Tensor:
    state = torch.rand(2, KV_HEADS, feature_map.num_features, width + 1)
    if not feature_map.log_features:
        return state
    return torch.cat((state, torch.randn(2, KV_HEADS, feature_map.num_features, 1)), dim=-1)


def in_torch(feature_map, query, key, value, **options):
    """Plain float64, never C."""
    features = feature_map.forward_queries(query, SCALING), feature_map.forward_keys(key, SCALING)
    output, state = kernel_attention(*features, value, log_features=feature_map.log_features, **options)
    return output.transpose(1, 2), state


def in_c(feature_map, query, key, value, **options):
    output, _, _, state = map_attention(feature_map.kernel_map(SCALING), query, key, value, **options)
    return output, state


def values_and_gradients(function, feature_map, inputs, state, log_decay, **options):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    state = None if state is None else state.clone().requires_grad_()
    log_decay = None if log_decay is None else log_decay.clone().requires_grad_()
    output, new_state = function(feature_map, *leaves, state=state, log_decay=log_decay, **options)
    torch.manual_seed(1)
    loss = (output * torch.randn(output.shape)).sum()
    sums = new_state[..., : inputs[2].shape[-1] + 1]
    if feature_map.log_features:  # where a decay goes, into the sums or the maximum, is a matter of convention
        sums = sums * new_state[..., -1:].exp()
    loss = loss + (sums * torch.randn(sums.shape)).sum() / sums.detach().norm()
    wanted = [*leaves, *(x for x in (state, log_decay) if x is not None), *feature_map.parameters()]
    gradients = list(torch.autograd.grad(loss, wanted))
    if state is not None:  # the maximum is a constant
        gradients[3] = gradients[3][..., : sums.shape[-1]]
    return [output, sums, *gradients]


def compare(feature_map, inputs, state, log_decay, **options):
    actual = values_and_gradients(in_c, feature_map, inputs, state, log_decay, **options)
    exact = values_and_gradients(
        in_torch,
        feature_map.double(),
        [x.double() for x in inputs],
        None if state is None else state.double(),
        None if log_decay is None else log_decay.double(),
        **options,
    )
    for a, e in zip(actual, exact):
        # float32 rounds at 6e-8; the gradient of a number that a whole head shares is a sum of thousands of both signs
        assert (a - e).norm() <= 2e-5 * e.norm() + (5e-4 if a.numel() == KV_HEADS else 1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", MAPS)
def test_values_and_gradients_agree_with_float64(name, padded, with_state, is_causal):
    for length, dim, width, features in ((2, 16, 16, 16), (33, 6, 5, 10), (101, 48, 80, 64)):
        feature_map = build(name, dim, None if name == "elu1" else features)
        mask = torch.rand(2, length) > 0.4 if padded else None
        state = a_state(feature_map, width) if with_state else None
        compare(feature_map, sample(length, dim, width), state, None, is_causal=is_causal, key_mask=mask)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("function", [ELU_PLUS_ONE, EXP])
def test_heads_in_turns_are_those_one_after_the_other(function, is_causal):
    # Heads beside each other in memory take turns, 16 at a time. Exponents of this size end blocks early, and elsewhere
    # in every head.
    shapes = ((2, 20, 150, 16), (2, 20, 150, 16), (2, 20, 150, 32))
    inputs = [torch.randn(shape) * std for shape, std in zip(shapes, (1.0, 30.0, 1.0))]
    mask, log_decay = torch.rand(2, 150) > 0.3, -torch.rand(20) if is_causal else None
    direction = torch.randn(2, 150, 20, 32)

    def attend(*leaves):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        options = {"is_causal": is_causal, "key_mask": mask, "log_decay": log_decay}
        output, denominator, _, state = map_attention(KernelMap(function), *leaves, **options)
        return [output, denominator, state, *torch.autograd.grad(output, leaves, direction)]

    in_turns = attend(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))
    for actual, expected in zip(in_turns, attend(*inputs)):
        assert torch.isfinite(actual).all()
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", ["elu1", "exp", "hedgehog"])
def test_decay_agrees_with_float64(name, padded):
    feature_map, log_decay = build(name, 8), torch.tensor([-0.02, -5.0])
    mask = torch.rand(2, 90) > 0.4 if padded else None
    compare(feature_map, sample(90, 8, 5), a_state(feature_map, 5), log_decay, is_causal=True, key_mask=mask)


def test_keys_of_another_length_agree_with_float64():
    compare(build("exp", 8), sample(40, 8, 16, keys=70), None, None, is_causal=False)


def test_features_given_as_they_are_agree_with_float64():
    """Exponents that rise by hundreds within a block, and plain features."""
    query, key, value = sample(90, 16, 16, std=60.0)
    key[:, :, 40] += 300
    for function, log_features in ((2, True), (0, False)):
        if not log_features:
            query, key = query.abs(), key.abs()
        for is_causal in (True, False):
            options = {"is_causal": is_causal}
            actual = map_attention(KernelMap(function), query, key, value, **options)[0].transpose(1, 2)
            exact, _ = kernel_attention(
                query.double(), key.double(), value.double(), log_features=log_features, **options
            )
            assert (actual - exact).norm() < 3e-5 * exact.norm()  # exponents of 500 round at 3e-5


@pytest.mark.parametrize("name", ["elu1", "exp", "hedgehog"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_bfloat16_is_as_near_to_float64_as_its_own_rounding(name, is_causal):
    for length, dim, width in ((300, 32, 32), (101, 48, 80), (75, 24, 21)):
        feature_map = build(name, dim)
        inputs = [x.bfloat16() for x in sample(length, dim, width)]
        options = {"is_causal": is_causal, "key_mask": torch.rand(2, length) > 0.2}
        actual = values_and_gradients(in_c, feature_map, inputs, None, None, **options)
        exact = values_and_gradients(
            in_torch, feature_map.double(), [x.double() for x in inputs], None, None, **options
        )
        assert actual[0].dtype == actual[2].dtype == torch.bfloat16
        for a, e in zip(actual, exact):
            # The gradient of a number that a head shares is a sum of both signs: products of float32 leave 3e-2 of it.
            if length == 300 or a.numel() != KV_HEADS:
                assert (a - e).norm() < 6e-3 * e.norm()  # one rounding is 2^-9, gradients see that of the output too


@pytest.mark.parametrize("log_decay", [None, torch.tensor([-0.02, -5.0])], ids=["constant", "decay"])
@pytest.mark.parametrize("name", ["elu1", "exp", "hedgehog"])
def test_bfloat16_outputs_stay_means_of_the_values(name, log_decay):
    # Numerator and denominator see the same rounded weights: 1 is in bfloat16, and its neighbours are 2^-8 away.
    query, key, value = (x.bfloat16() for x in sample(150, 32, 16, std=3.0))
    output, state = in_c(build(name, 32), query, key, torch.ones_like(value), is_causal=True, log_decay=log_decay)
    assert torch.equal(output, torch.ones_like(output))
    torch.testing.assert_close(state[..., :16], state[..., 16:17].expand(-1, -1, -1, 16), rtol=1e-5, atol=1e-30)


def test_what_is_padded_may_be_anything_and_does_not_matter():
    query, key, value = sample(70, 8, 8)
    mask = torch.rand(2, 70) > 0.4
    for name in ("elu1", "exp", "hedgehog"):
        feature_map = build(name, 8)
        expected = in_c(feature_map, query, key, value, is_causal=True, key_mask=mask)
        hidden = ~mask[:, None, :, None]
        spoiled = key.masked_fill(hidden, float("nan")), value.masked_fill(hidden, float("inf"))
        actual = in_c(feature_map, query, *spoiled, is_causal=True, key_mask=mask)
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])


def test_threads_share_the_heads():
    feature_map, inputs = build("exp", 8), sample(70, 8, 8)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = values_and_gradients(in_c, feature_map, inputs, None, None, is_causal=True)
        torch.set_num_threads(3)  # the four heads of two sequences fall to them unevenly
        together = values_and_gradients(in_c, feature_map, inputs, None, None, is_causal=True)
    finally:
        torch.set_num_threads(before)
    for a, b in zip(alone, together):
        assert torch.equal(a, b)


def test_gradients_that_nobody_wants_are_not_made():
    query, key, value = sample(40, 8, 8)
    weight = torch.randn(1, 8, 16)
    kernel_map = KernelMap(2, Affine(weight.requires_grad_()), Affine(torch.randn(1, 8, 16)))
    output, *_ = map_attention(kernel_map, query, key, value, is_causal=True)
    (gradient,) = torch.autograd.grad(output.square().sum(), [weight])
    images = [(x @ w).double() for x, w in ((query, weight), (key, kernel_map.key.weight))]
    exact, _ = kernel_attention(*images, value.double(), log_features=True, is_causal=True)
    (expected,) = torch.autograd.grad(exact.square().sum(), [weight])
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)  # a sum over 320 rows


def test_thin_heads_and_what_has_no_bytes_stay_in_torch():
    query, key, value = sample(5, 8, 8)
    assert takes_attention(query, key, value, None, 8)
    assert not takes_attention(query[..., :3], key[..., :3], value, None, 8)
    assert not takes_attention(query, key, value.double(), None, 8)
    assert not takes_attention(query, key, value.to("meta"), None, 8)
    assert not takes_attention(query, key, value, torch.ones(2, 5, dtype=torch.int64), 8)


def test_without_a_compiler_torch_computes_the_same(monkeypatch):
    query, key, value = (F.softplus(x) for x in sample(70, 8, 8))
    native = kernel_attention(query, key, value, log_features=False, is_causal=True)
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    plain = kernel_attention(query, key, value, log_features=False, is_causal=True)
    for a, b in zip(native, plain):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # sums of 70 terms of one sign
    assert not torch.equal(native[0], plain[0])  # another order of summation: C was indeed at work before


def test_an_error_in_one_thread_waits_for_the_others(monkeypatch):
    """Else their tensors could be freed while they are written."""
    ended = []

    def compute(shape, described):
        if shape[-2] == 0:  # the first heads
            return 1
        time.sleep(0.2)
        ended.append(True)
        return 0

    monkeypatch.setattr(kernels_cpu, "library", lambda: SimpleNamespace(attention_forward=compute))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    tensors = [torch.zeros(1, 2, 1, 4, 4) for _ in range(3)]
    with pytest.raises(MemoryError, match="No memory is left"):
        kernels_cpu.run_attention("attention_forward", (4, 0, True), tensors)
    assert ended == [True]
