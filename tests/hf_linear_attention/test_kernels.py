"""The kernels beneath the mechanisms: decay, block sizes, and what a block may contain."""

from __future__ import annotations

import pytest
import reference
import torch

from hf_linear_attention.features.maps import FEATURE_MAPS, elu_plus_one
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.torch_kernels.attention import elementwise_attention, kernel_attention
from hf_linear_attention.torch_kernels.blocks import BLOCK_SIZES, plain_attention, safe_block_size
from hf_linear_attention.torch_kernels.causal import CausalAttention


def sample(length: int, log_features: bool, std: float = 1.0, dtype=torch.float64):
    query = torch.randn(2, 4, length, 6, dtype=torch.float64) * std
    key = torch.randn(2, 2, length, 6, dtype=torch.float64) * std
    value = torch.randn(2, 2, length, 5, dtype=torch.float64)
    if not log_features:
        query, key = query.exp(), key.exp()
    return [tensor.to(dtype) for tensor in (query, key, value)]


def oracle(query, key, value, log_features, log_decay, mask):
    return reference.kernel_attention(
        query,
        key,
        value,
        log_features=log_features,
        key_mask=mask,
        is_causal=True,
        log_decay=None if log_decay is None else log_decay.repeat_interleave(2),
    )


@pytest.mark.parametrize("log_features", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_decay_is_exact_in_values_gradients_and_splits(log_features, padded):
    query, key, value = sample(150, log_features)
    log_decay = torch.tensor([-0.003, -0.7], dtype=torch.float64, requires_grad=True)
    mask = None
    if padded:
        mask = torch.ones(2, 150, dtype=torch.bool)
        mask[0, :70], mask[1, 20:90] = False, False
    arguments = {"log_features": log_features, "is_causal": True, "log_decay": log_decay}
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)] + [log_decay]
    actual, _ = kernel_attention(query, key, value, key_mask=mask, **arguments)
    expected = oracle(query, key, value, log_features, log_decay, mask)
    seen = torch.ones(2, 150, dtype=torch.bool) if mask is None else mask
    actual, expected = actual.transpose(1, 2)[seen], expected.transpose(1, 2)[seen]
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)
    direction = torch.randn_like(expected)
    for a, e in zip(
        torch.autograd.grad((actual * direction).sum(), leaves),
        torch.autograd.grad((expected * direction).sum(), leaves),
    ):
        torch.testing.assert_close(a, e, rtol=1e-7, atol=1e-8)
    state, outputs = None, []
    for part in (slice(0, 1), slice(1, 80), slice(80, 81), slice(81, 150)):
        piece = [tensor[:, :, part] for tensor in (query, key, value)]
        output, state = kernel_attention(
            *piece, key_mask=None if mask is None else mask[:, part], state=state, **arguments
        )
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=2).transpose(1, 2)[seen], actual, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("log_features", [True, False])
def test_a_steep_decay_neither_over_nor_underflows_in_float32(log_features):
    query, key, value = sample(130, log_features, dtype=torch.float32)
    log_decay = torch.tensor([-0.5, -30.0])
    actual, _ = kernel_attention(query, key, value, log_features=log_features, is_causal=True, log_decay=log_decay)
    expected = oracle(*(x.double() for x in (query, key, value)), log_features, log_decay.double(), None)
    assert ((actual - expected).norm() / expected.norm()) < 1e-5


def loud(length: int, std: float = 80.0):
    """Log features: a large key makes all that were seen before it small."""
    query, key, value = (torch.randn(2, heads, length, 6) for heads in (4, 2, 2))
    return query * std, key * std, value


def relative(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("decay", [None, [-0.01, -3.0]])
@pytest.mark.parametrize("form", ["vmap", "export", "pieces"])
def test_loud_log_features_in_plain_operations(form, decay):
    """A maximum over keys that a query does not see would make its own weights underflow."""
    query, key, value = loud(150)
    log_decay, mask = None if decay is None else torch.tensor(decay), torch.ones(2, 150, dtype=torch.bool)
    mask[0, :3] = mask[1, 60:70] = False
    options = {"log_features": True, "is_causal": True, "log_decay": log_decay}
    expected = oracle(
        *(x.double() for x in (query, key, value)), True, None if decay is None else log_decay.double(), mask
    )
    if form == "vmap":
        attend = torch.vmap(lambda *given: kernel_attention(*given, key_mask=mask, **options)[0])
        actual = attend(*(x.expand(2, *x.shape) for x in (query, key, value)))[1]
    elif form == "export":
        program = torch.export.export(Attention(options), (*loud(150, 1.0), mask), strict=False)
        actual = program.module()(query, key, value, mask)
    else:
        state, outputs = None, []
        for part in (slice(0, 1), slice(1, 64), slice(64, 150)):
            piece = (x[:, :, part] for x in (query, key, value))
            output, _, _, state = plain_attention(*piece, key_mask=mask[:, part], state=state, **options)
            outputs.append(output.flatten(1, 2))
        actual = torch.cat(outputs, dim=2)
    seen = mask[:, None, :, None]
    assert relative(actual * seen, expected * seen) < 5e-5  # float32 rounds an exponent of 300 to 2e-5


class Attention(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value, mask):
        return kernel_attention(query, key, value, key_mask=mask, **self.options)[0]


def test_loud_packed_sequences_are_those_of_each_apart():
    query, key, value = loud(100)
    numbers = torch.tensor([1] * 30 + [2] + [3] * 20 + [0] * 3 + [3] * 13 + [4] * 33).expand(2, -1)
    actual, _ = kernel_attention(query, key, value, log_features=True, is_causal=True, key_mask=numbers)
    for number in (1, 2, 3, 4):
        own = numbers[0] == number
        expected = oracle(*(x[:, :, own].double() for x in (query, key, value)), True, None, None)
        assert relative(actual[:, :, own], expected) < 5e-5


@pytest.mark.parametrize("decay", [None, [-0.01, -3.0]])
def test_second_derivatives_of_loud_log_features(decay):
    log_decay, found = None if decay is None else torch.tensor(decay), []
    inputs = loud(40)
    for dtype, attend in ((torch.float64, oracle), (torch.float32, kernel_attention)):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        fade = None if log_decay is None else log_decay.to(dtype)
        if attend is oracle:
            output = oracle(*leaves, True, fade, None)
        else:
            output, _ = kernel_attention(*leaves, log_features=True, is_causal=True, log_decay=fade)
        first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
        found.append([x.detach() for x in (*first, *second)])
    for expected, actual in zip(*found):
        assert torch.isfinite(actual).all()
        assert relative(actual, expected) < 1e-3


def test_blocks_shrink_only_where_keys_differ_by_more_than_float32_can_hold():
    calm = torch.zeros(1, 1, 200, 3)
    assert safe_block_size(calm, None, None) == BLOCK_SIZES[0]
    rising = calm.clone()
    rising[:, :, 100] = 70.0
    assert safe_block_size(rising, None, None) < BLOCK_SIZES[0]
    # the same jump at the start of a block, or after as large a carried maximum, hides nothing
    at_start = calm.clone()
    at_start[:, :, 0] = 70.0
    assert safe_block_size(at_start, None, None) == BLOCK_SIZES[0]
    assert safe_block_size(rising, None, torch.full((1, 1, 3), 70.0)) == BLOCK_SIZES[0]


def test_padding_at_the_start_of_a_block_does_not_shrink_it():
    key = torch.zeros(1, 1, 64, 3)
    mask = torch.arange(64)[None, None, :, None] >= 30
    assert safe_block_size(key, mask, None) == BLOCK_SIZES[0]


def test_features_that_see_nothing_give_zero():
    query, key, value = sample(9, True)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    for is_causal in (True, False):
        output, state = kernel_attention(query, key, value, log_features=True, is_causal=is_causal, key_mask=mask)
        assert torch.equal(output, torch.zeros_like(output))
        following, _ = kernel_attention(query, key, value, log_features=True, is_causal=True, state=state)
        torch.testing.assert_close(following, kernel_attention(query, key, value, log_features=True, is_causal=True)[0])


def causal_leaves(length: int, features: int, dim: int, with_state: bool, groups: int = 2):
    query = torch.rand(2, 3, groups, length, features, dtype=torch.float64)
    # As a model hands them over: heads beside tokens in memory.
    key = torch.rand(2, length, 3, features, dtype=torch.float64).transpose(1, 2)
    value = torch.randn(2, length, 3, dim, dtype=torch.float64).transpose(1, 2)
    state = torch.rand(2, 3, features, dim + 1, dtype=torch.float64) if with_state else None
    return [query, key, value, state]


def values_and_gradients(leaves, directions):
    leaves = [None if leaf is None else leaf.clone().requires_grad_() for leaf in leaves]
    outputs = CausalAttention.apply(*leaves)
    loss = sum((output * direction).sum() for output, direction in zip(outputs, directions))
    return [*outputs, *torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])]


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(("length", "features", "dim"), [(1, 16, 16), (33, 48, 80), (101, 64, 32)])
def test_float32_kernel_agrees_with_float64(with_state, length, features, dim):
    leaves = causal_leaves(length, features, dim, with_state)
    leaves[1][0, 0, :20] = 0.0  # without a state, the first queries of that head see nothing
    directions = [torch.randn(2, 3, 2, length, dim) * 10, torch.randn(2, 3, 2, length, 1)]
    directions.append(torch.randn(2, 3, features, dim + 1))
    exact = values_and_gradients(leaves, [direction.double() for direction in directions])
    actual = values_and_gradients([None if x is None else x.float() for x in leaves], directions)
    for a, e in zip(actual, exact):
        # float32 rounds at 6e-8, sums of up to 101 terms; with one key alone, terms of about 10 cancel
        assert (a - e).norm() <= 1e-6 * (e.norm() + 10)


@pytest.mark.parametrize("with_state", [True, False])
def test_causal_gradients_in_float64(with_state):
    leaves = [None if x is None else x.requires_grad_() for x in causal_leaves(37, 3, 2, with_state)]
    assert torch.autograd.gradcheck(CausalAttention.apply, leaves, fast_mode=True)


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("name", ["elu1", "relu", "squared_relu"])
def test_features_made_in_blocks_are_those_made_before(monkeypatch, name, with_state):
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    feature_map = FEATURE_MAPS[name](4, 2, 8)
    mask = torch.rand(2, 70) > 0.2
    mask[0, :20] = False
    shapes = [(2, 70, 4, 8), (2, 70, 2, 8), (2, 70, 2, 5)]
    leaves = [torch.randn(shape, dtype=torch.float64).mul(3).transpose(1, 2).requires_grad_() for shape in shapes]
    state = torch.rand(2, 2, 8, 6, dtype=torch.float64).requires_grad_() if with_state else None
    directions = torch.randn(2, 4, 70, 5, dtype=torch.float64), torch.randn(2, 2, 8, 6, dtype=torch.float64)

    def made_before(query, key, value, state):
        query, key = feature_map.forward_queries(query, 1.0), feature_map.forward_keys(key, 1.0)
        return kernel_attention(query, key, value, log_features=False, is_causal=True, key_mask=mask, state=state)

    def made_in_blocks(query, key, value, state):
        return elementwise_attention(feature_map.elementwise_map(), query, key, value, mask, state)

    results = []
    for attend in (made_in_blocks, made_before):
        outputs = attend(*leaves, state)
        loss = sum((output * direction).sum() for output, direction in zip(outputs, directions))
        results.append([*outputs, *torch.autograd.grad(loss, leaves + ([state] if with_state else []))])
    for actual, expected in zip(*results):
        torch.testing.assert_close(actual, expected)  # both in float64


def test_bfloat16_is_widened_in_blocks(monkeypatch):
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    query, key, value = (torch.randn(1, 2, 70, 8).bfloat16() for _ in range(3))
    elu1 = FEATURE_MAPS["elu1"](2, 2, 8)
    wide = elementwise_attention(elu1.elementwise_map(), query.float(), key.float(), value.float(), None, None)
    for actual, expected in zip(elementwise_attention(elu1.elementwise_map(), query, key, value, None, None), wide):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("log_decay", [None, torch.tensor([0.0, -0.7])], ids=["constant", "decay"])
@pytest.mark.parametrize("log_features", [False, True], ids=["features", "exponents"])
def test_native_step_agrees_with_torch(monkeypatch, log_features, log_decay):
    arguments = (torch.rand(2, 4, 1, 32), torch.rand(2, 2, 1, 32) * 4, torch.randn(2, 2, 1, 48))
    options = {"log_features": log_features, "log_decay": log_decay, "is_causal": True}
    options["state"] = torch.rand(2, 2, 32, 50 if log_features else 49)
    before = options["state"].clone()
    with torch.no_grad():
        native = kernel_attention(*arguments, **options)
        monkeypatch.setattr(kernels_cpu, "library", lambda: None)
        plain = kernel_attention(*arguments, **options)
    assert torch.equal(options["state"], before)
    for a, e in zip(native, plain):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)  # both round at 6e-8


@torch.no_grad()
@pytest.mark.parametrize("log_features", [False, True], ids=["features", "exponents"])
def test_a_traced_step_computes(log_features):
    def step(*arguments):
        query, key, value, state = arguments
        return kernel_attention(query, key, value, state=state, log_features=log_features, is_causal=True)

    def tokens():
        state = torch.rand(2, 2, 16, 14 if log_features else 13)
        return torch.rand(2, 4, 1, 16), torch.rand(2, 2, 1, 16), torch.randn(2, 2, 1, 12), state

    traced, other = torch.jit.trace(step, tokens()), tokens()
    for actual, expected in zip(traced(*other), step(*other)):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)  # both round at 6e-8


@torch.no_grad()
def test_kernel_map_agrees_with_torch(monkeypatch):
    x = torch.linspace(-80, 20, 4 * 5 * 15).view(1, 4, 5, 15)
    x[0, 0, 0, 0], x[0, 0, 0, 1] = float("nan"), float("inf")
    native = elu_plus_one(x)
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    # the exponential is within 3e-7
    torch.testing.assert_close(native, elu_plus_one(x), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_the_kernel_map_keeps_relative_accuracy_where_features_are_tiny():
    x = torch.linspace(-80, 0, 4 * 5 * 16).view(1, 4, 5, 16)
    torch.testing.assert_close(elu_plus_one(x), x.double().exp().float(), rtol=1e-6, atol=0)


def test_what_is_hidden_may_be_nan_where_features_are_made_in_blocks(monkeypatch):
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    query, key, value = sample(40, False)
    mask = torch.rand(2, 40) > 0.3
    elu1 = FEATURE_MAPS["elu1"](4, 2, 6).elementwise_map()
    expected = elementwise_attention(elu1, query, key, value, mask, None)
    key, value = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (key, value))
    for actual, wanted in zip(elementwise_attention(elu1, query, key, value, mask, None), expected):
        assert torch.equal(actual, wanted)


def test_no_features_are_refused():
    for log_features in (True, False):
        query, key, value = (torch.rand(2, 2, 5, n) for n in (0, 0, 3))
        with pytest.raises(ValueError, match="0 features"):
            kernel_attention(query, key, value, log_features=log_features, is_causal=True)
        state = torch.rand(2, 2, 0, 4 + log_features)
        one = [x[:, :, :1] for x in (query, key, value)]
        with pytest.raises(ValueError, match="0 features"), torch.no_grad():
            kernel_attention(*one, log_features=log_features, is_causal=True, state=state)


@pytest.mark.skipif(kernels_cpu.library() is None, reason="no C kernels")
@pytest.mark.parametrize(
    "tensor", [torch.ones((1,) * 5, dtype=torch.float64), torch.ones(1), torch.ones(5, device="meta")]
)
def test_c_reads_no_tensor_of_another_kind(tensor):
    given = [torch.rand(1, 1, 1, 4, 8)] * 3
    with pytest.raises(TypeError, match="C reads float32, bfloat16 and bool"):
        kernels_cpu.run_attention("attention_forward", (8, 0, True), (*given, tensor))
