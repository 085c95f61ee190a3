"""One table for C and torch: strides, dtypes and lengths against float64, and what does not fit, refused alike."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_calls import widened
from operators import OPERATORS
from poison import poisoned_allocations

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.torch_kernels.attention import attention_step, kernel_attention, map_attention
from hf_linear_attention.torch_kernels.blocks import ELU_PLUS_ONE, EXP, HEDGEHOG, PLAIN, Affine, KernelMap
from hf_linear_attention.torch_kernels.slots import slot_attention
from hf_linear_attention.torch_kernels.window import NearKeys, SinkKeys, exact_part


BATCH, HEADS, KV_HEADS, DIM, WIDTH = 2, 4, 2, 8, 12


@pytest.fixture(params=["C", "torch"])
def backend(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    elif kernels_cpu.library() is None:
        pytest.skip(kernels_cpu.kernel_backend().reason)
    return request.param


@pytest.fixture
def poisoned():
    """All new memory holds nan between guards, and the tensors that are placed in it may not change."""
    with poisoned_allocations() as memory:
        yield memory
        memory.check()


def attention(function: int, is_causal: bool):
    def attend(query, key, value):
        output, _, _, state = map_attention(KernelMap(function), query, key, value, is_causal=is_causal)
        return [output, state[..., : value.shape[-1] + 1] if function < EXP else state.new_zeros(())]

    return attend


def features(log_features: bool):
    def attend(query, key, value):
        options = {"log_features": log_features, "is_causal": True}
        return [kernel_attention(query.abs(), key.abs(), value, **options)[0]]

    return attend


def window(query, key, value):
    batch, _, length, _ = query.shape
    visible, seen = torch.ones(batch, length, dtype=torch.bool), torch.ones(batch, length, 2, dtype=torch.bool)
    sinks = SinkKeys(key[:, :, :1].expand(-1, -1, 2, -1), value[:, :, :1].expand(-1, -1, 2, -1), seen, seen.long())
    return list(exact_part(query, NearKeys(key, value, visible, 0), sinks, 0.3)[:2])


def slots(query, key, value):
    return [slot_attention(query, key, value, None, 0.3)]


FUNCTIONS = {
    "elu1": attention(ELU_PLUS_ONE, True),
    "exp": attention(EXP, True),
    "both ways": attention(EXP, False),
    "features": features(False),
    "exponents": features(True),
    "window": window,
    "slots": slots,
}


def sample(length: int, dtypes=(torch.float32,) * 3):
    shapes = ((BATCH, HEADS, length, DIM), (BATCH, KV_HEADS, length, DIM), (BATCH, KV_HEADS, length, WIDTH))
    return [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes)]


def values_and_gradients(function, tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    outputs = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    pairs = [(y, torch.randn(y.shape, generator=generator).to(y.dtype)) for y in outputs if y.requires_grad]
    return [*outputs, *torch.autograd.grad([y for y, _ in pairs], leaves, [g for _, g in pairs])]


def agree(function, tensors, tolerance: float = 2e-5):
    """What float64 gives, in values and gradients."""
    exact = values_and_gradients(function, [widened(x) for x in tensors])
    most = max(e.norm() for e in exact)  # where a gradient is 0, terms of that size cancel
    for a, e in zip(values_and_gradients(function, tensors), exact):
        assert a.shape == e.shape
        assert torch.isfinite(a).all()
        assert (a - e).norm() <= tolerance * (e.norm() + 0.1 * most + 1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_order_in_memory(name, backend, poisoned):
    """All 24, so that in 18 of them rows are not dense: gradients of such tensors were once uninitialised memory."""
    for order in itertools.permutations(range(4)):
        agree(FUNCTIONS[name], [poisoned.place("an input", x, order) for x in sample(35)])
        poisoned.check()


@pytest.mark.parametrize("steps", [(1, 1, 1, 2), (1, 1, 3, 1), (2, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_slices_with_steps(name, steps, backend, poisoned):
    agree(FUNCTIONS[name], [poisoned.place("an input", x, None, steps) for x in sample(35)])


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_expanded_inputs(name, axis, backend, poisoned):
    tensors = [x.narrow(axis, 0, 1).expand(x.shape) for x in sample(35)]
    agree(FUNCTIONS[name], [poisoned.place("an input", x, expanded=(axis,)) for x in tensors])


HALF = torch.bfloat16
DTYPES = {
    "bfloat16": (HALF,) * 3,
    "values alone in bfloat16": (torch.float32, torch.float32, HALF),
    "values alone in float32": (HALF, HALF, torch.float32),
    "float16": (torch.float16,) * 3,
    "float64": (torch.float64,) * 3,
}


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_dtypes(name, dtypes, backend, poisoned):
    agree(FUNCTIONS[name], [poisoned.place("an input", x) for x in sample(35, dtypes)], tolerance=1e-2)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 61, 64, 65])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_lengths(name, length, backend, poisoned):
    agree(FUNCTIONS[name], [poisoned.place("an input", x) for x in sample(length)])


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_gives_nothing(name, batch, length, backend):
    tensors = [x[:batch] for x in sample(length)]
    if name == "window" and not length:
        return  # every query sees one place at least; without queries see the next test
    assert not FUNCTIONS[name](*tensors)[0].numel()


def test_gradients_of_a_window_without_queries_are_0(backend, poisoned):
    leaves = [x.requires_grad_() for x in sample(5)]
    query, (key, value) = leaves[0][:, :, :0], leaves[1:]
    seen = torch.ones(BATCH, 0, 0, dtype=torch.bool)
    sinks = SinkKeys(key[:, :, :0], value[:, :, :0], seen, seen.long())
    output, size, _ = exact_part(query, NearKeys(key, value, torch.ones(BATCH, 5, dtype=torch.bool), 0), sinks, 0.3)
    for grad in torch.autograd.grad(output.sum() + size.sum(), [key, value], allow_unused=True):
        assert grad is None or (grad == 0).all()


def weights(heads: int, query_dim: int = DIM, key_dim: int = DIM):
    return {"query": Affine(torch.randn(heads, query_dim, 6)), "key": Affine(torch.randn(KV_HEADS, key_dim, 6))}


def misfits():
    """A call that does not fit, and the two sizes that its error names."""
    query, key, value = sample(5)
    state, log_state = torch.rand(BATCH, KV_HEADS, DIM, WIDTH + 1), torch.rand(BATCH, KV_HEADS, DIM, WIDTH + 2)
    mask = torch.ones(BATCH, 5, dtype=torch.bool)
    options = {"log_features": False, "is_causal": True}
    one = [x[:, :, :1] for x in (query, key, value)]
    three = [x.repeat(2, 1, 1, 1)[:3] for x in one]
    given = (query, key, value)

    def attend(*tensors, **changed):
        return lambda: kernel_attention(*tensors, **(options | changed))

    def mapped(feature_map, tensors=given, **changed):
        return lambda: map_attention(feature_map, *tensors, is_causal=True, **changed)

    def stepped(tensors, state, log_features=False):
        return lambda: attention_step(*tensors, state, log_features=log_features)

    wide = torch.randn(BATCH, HEADS, 5, DIM + 1)
    near, seen = NearKeys(key, value, mask, 0), torch.ones(BATCH, 5, 1, dtype=torch.bool)
    sinks = SinkKeys(key[:, :, :1], value[:, :, :1], seen, seen.long())
    bias = Affine(weights(HEADS)["key"].weight, torch.randn(KV_HEADS, 1, 6))
    return {
        "a state of another batch": (attend(*three, state=state), ["[2, 2, 8, 13]", "[3, 2, 8, 13]"]),
        "a state of another batch in a step": (stepped(three, state), ["[2, 2, 8, 13]", "[3, 2, 8, 13]"]),
        "a state of one row": (stepped(three, state[:1]), ["[1, 2, 8, 13]", "[3, 2, 8, 13]"]),
        "a state of exponents for features": (stepped(one, log_state), ["[2, 2, 8, 14]", "[2, 2, 8, 13]"]),
        "a state in bfloat16": (stepped(one, state.bfloat16()), ["bfloat16", "float32"]),
        "a mask of another length": (attend(*given, key_mask=mask[:, :4]), ["[2, 4]", "[2, 5]"]),
        "a mask of one row": (attend(*given, key_mask=mask[:1]), ["[1, 5]", "[2, 5]"]),
        "a mask of numbers": (attend(*given, key_mask=mask.float()), ["float32", "bool"]),
        "features of another number": (attend(wide, key, value), ["[2, 4, 5, 9]", "[2, 4, any, 8]"]),
        "values of another length": (attend(query, key, value[:, :, :4]), ["[2, 2, 4, 12]", "[2, 2, 5, any]"]),
        "keys of another length": (attend(query[:, :, :4], key, value), ["4 queries", "5 keys"]),
        "three heads for two": (attend(query[:, :3], key, value), ["3 query", "2 key"]),
        "queries of three axes": (attend(query[0], key, value), ["3, 4 and 4 axes"]),
        "queries of three axes before a state": (attend(query[0], key, value, state=state), ["3, 4 and 4 axes"]),
        "a decay for queries": (attend(*given, log_decay=torch.zeros(4)), ["[4]", "[2]"]),
        "query rows of another width": (
            mapped(KernelMap(EXP, **weights(HEADS, DIM + 1)), (wide, key, value)), ["[2, 4, 5, 9]", "[2, 4, any, 8]"]
        ),
        "a weight of three heads": (mapped(KernelMap(EXP, **weights(3))), ["[3, 8, 6]", "[4, 8, 6]"]),
        "a bias for Hedgehog": (mapped(KernelMap(HEDGEHOG, weights(HEADS)["query"], bias)), ["3"]),
        "an unknown map": (mapped(KernelMap(4)), ["4", "3 (Hedgehog)"]),
        "a sink of another batch": (
            lambda: exact_part(query, near, sinks._replace(key=key[:1, :, :1]), 0.3), ["[1, 2, 1, 8]", "[2, 2, any, 8]"]
        ),
        "a sink of two axes": (lambda: exact_part(query, near, sinks._replace(key=key[0, 0]), 0.3), ["[5, 8]"]),
        "queries for sinks of another length": (
            lambda: exact_part(query, near, sinks, 0.3, sink_query=query[:, :, :4]), ["[2, 4, 4, 8]", "[2, 4, 5, 8]"]
        ),
        "fewer places than queries": (
            lambda: exact_part(torch.cat((query, query), dim=2), near, sinks, 0.3), ["5 keys", "10 queries"]
        ),
        "slots seen by another batch": (lambda: slot_attention(*given, mask[:, None].repeat(2, 1, 1), 0.3), ["[4, 1"]),
    }  # fmt: skip


@pytest.mark.parametrize("name", misfits())
def test_what_does_not_fit_is_refused_with_both_sizes(name, monkeypatch):
    call, sizes = misfits()[name]
    said = []
    with torch.no_grad():
        for library in (kernels_cpu.library(), None):
            monkeypatch.setattr(kernels_cpu, "library", lambda library=library: library)
            with pytest.raises(ValueError, match=r".") as error:
                call()
            said.append(str(error.value))
    assert said[0] == said[1]
    for size in sizes:
        assert size in said[0]


def test_gradients_that_do_not_fit_are_refused(backend):
    query, key, value = sample(5)
    given = (query, key, value, *[None] * 7, PLAIN, True)
    output, denominator, _, _ = OPERATORS.attention(*given)
    needed = [True] * 3 + [False] * 7
    for wrong in (output[:1], output[:, :4], output.double(), output[..., :4]):
        with pytest.raises(ValueError, match="grad_output"):
            OPERATORS.attention_backward(wrong, None, None, *given, output, denominator, needed)
        with pytest.raises(ValueError, match="`output`"):
            OPERATORS.attention_backward(output, None, None, *given, wrong, denominator, needed)
    with pytest.raises(ValueError, match="denominator"):
        OPERATORS.attention_backward(output, None, None, *given, output, denominator[:1], needed)
    with pytest.raises(ValueError, match="10 tensors"):
        OPERATORS.attention_backward(output, None, None, *given, output, denominator, needed[:3])


def test_hedgehog_without_a_projection(backend):
    agree(attention(HEDGEHOG, True), sample(35))


@pytest.mark.parametrize("content", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("function", [PLAIN, ELU_PLUS_ONE, EXP])
@pytest.mark.parametrize("is_causal", [True, False])
def test_what_a_mask_hides_may_be_anything(is_causal, function, content, backend):
    query, key, value = (x.abs() for x in sample(35))
    mask = torch.rand(BATCH, 35) > 0.4
    hidden = ~mask[:, None, :, None]
    options = {"is_causal": is_causal, "key_mask": mask}
    expected = map_attention(KernelMap(function), query, key, value, **options)
    leaves = [query.clone(), key.masked_fill(hidden, content), value.masked_fill(hidden, content)]
    leaves = [x.requires_grad_() for x in leaves]
    actual = map_attention(KernelMap(function), *leaves, **options)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[3], expected[3])
    for grad in torch.autograd.grad(actual[0].sum(), leaves):
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("content", [torch.nan, torch.inf])
def test_hidden_keys_of_a_window_weigh_nothing(content, backend):
    """Exactly 0: neither the value nor the key of a hidden place is seen, and a row that sees nothing is 0."""
    query, key, value = sample(9)
    visible = torch.rand(BATCH, 9) > 0.5
    visible[1] = False
    hidden = ~visible[:, None, :, None]
    seen = torch.zeros(BATCH, 7, 1, dtype=torch.bool)
    sinks = SinkKeys(key[:, :, :1], value[:, :, :1], seen, seen.long())

    def attend(key, value):
        return exact_part(query[:, :, :7] * 5, NearKeys(key, value, visible, 0), sinks, 0.3)

    zero = attend(key, value.masked_fill(hidden, 0.0))
    large = attend(key * (1 + 1e3 * hidden), value.masked_fill(hidden, 1e30))
    spoiled = attend(key.masked_fill(hidden, content), value.masked_fill(hidden, content))
    for expected, other, another in zip(zero, large, spoiled):
        assert torch.equal(expected, other)
        assert torch.equal(expected, another)
    assert (zero[0][1] == 0).all()
    assert (zero[1][1] == -1e30).all()


@pytest.mark.parametrize("groups", [1, 3])
def test_grouped_heads(groups, backend, poisoned):
    for function in FUNCTIONS.values():
        _, key, value = sample(35)
        agree(function, [torch.randn(BATCH, KV_HEADS * groups, 35, DIM), key, value])


@torch.no_grad()
def test_a_step_with_features_in_bfloat16(backend):
    query, key, value = (x.abs().bfloat16() for x in sample(1))
    state = torch.rand(BATCH, KV_HEADS, DIM, WIDTH + 1)
    for actual, exact in zip(
        attention_step(query, key, value, state, log_features=False),
        attention_step(query.double(), key.double(), value.double(), state.double(), log_features=False),
    ):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-5)
