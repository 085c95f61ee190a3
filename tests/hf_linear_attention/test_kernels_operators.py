"""The kernels as operators of torch: opcheck, modes, transformations, second derivatives, two versions at a time."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading

import pytest
import torch
from matrix import build_mechanism
from operators import OPERATORS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.features.maps import FEATURE_MAPS
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.kernels import delta as kernels_delta
from hf_linear_attention.kernels import hybrid as kernels_hybrid
from hf_linear_attention.kernels import operators as kernels_operators
from hf_linear_attention.mechanisms.base import LayerShape
from hf_linear_attention.mechanisms.registry import MECHANISMS
from hf_linear_attention.torch_kernels.attention import attention_step, map_attention
from hf_linear_attention.torch_kernels.blocks import ELU_PLUS_ONE, EXP, HEDGEHOG, PLAIN, KernelMap


needs_c = pytest.mark.skipif(kernels_cpu.library() is None, reason="no C kernels")


def sample(length: int = 7, dtype=torch.float32, keys: int | None = None):
    shapes = ((2, 4, length, 8), (2, 2, keys or length, 8), (2, 2, keys or length, 12))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def attention_samples():
    weights = [torch.randn(shape).requires_grad_() for shape in ((2, 8, 6), (1, 1, 6), (1, 1, 1), (4, 8, 6))]
    permuted = [x.detach().permute(1, 0, 3, 2).contiguous().permute(1, 0, 3, 2).requires_grad_() for x in sample()]
    state = torch.rand(2, 2, 8, 13).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    log_state = torch.rand(2, 2, 6, 14).requires_grad_()
    decay, mask = torch.tensor([-0.1, -2.0]).requires_grad_(), torch.rand(2, 7) > 0.3
    none = [None] * 4
    yield *sample(), None, None, None, *none, EXP, True
    yield *permuted, mask, decay, state, *none, ELU_PLUS_ONE, True
    yield *sample(keys=5), mask[:, :5], None, None, weights[0], None, None, weights[3], HEDGEHOG, False
    yield *sample(), mask, decay, log_state, *weights, EXP, True
    yield *sample(dtype=torch.float64), None, None, None, *none, EXP, True
    yield *sample(dtype=torch.bfloat16), mask, None, None, *none, ELU_PLUS_ONE, False
    yield *sample(), torch.tensor([[1, 1, 2, 2, 2, 0, 3]] * 2), None, None, *none, EXP, True


def window_samples():
    for dtype, sinks in ((torch.float32, 0), (torch.float32, 3), (torch.bfloat16, 3), (torch.float64, 3)):
        query, key, value = sample(dtype=dtype, keys=9)
        sink = [x.detach()[:, :, :sinks].clone().requires_grad_() for x in (key, value)]
        sink_query = torch.randn_like(query).requires_grad_() if sinks else None
        yield query, key, value, torch.rand(2, 9) > 0.2, *sink, torch.rand(2, 7, sinks) > 0.5, sink_query, 0.3


def joint_samples():
    """From the start and with a state; float32 and bfloat16; some queries, or none, have far keys."""
    for dtype, before, window, is_turned in (
        (torch.float32, 0, 4, True),
        (torch.bfloat16, 4, 4, False),
        (torch.float32, 0, 9, False),
    ):
        query, key, value = sample(dtype=dtype, keys=7 + before)
        sink = [x.detach()[:, :, :2].clone().requires_grad_() for x in (key, value)]
        turns = [torch.randn(1, n, 3).repeat(1, 1, 2) if is_turned else None for n in (7, 7 + before, 7)]
        decay = torch.tensor([-0.1, -2.0]).requires_grad_() if before else None
        state = torch.rand(2, 2, 6, 14).requires_grad_() if before else None
        shapes = ((2, 8, 6), (2, 1, 6), (2, 1, 1), (4, 8, 6), (4,), (4,))
        maps = [torch.randn(shape).requires_grad_() for shape in shapes]
        masks = torch.rand(2, 7 + before) > 0.2, torch.rand(2, 7, 2) > 0.5
        how = EXP, window, 0.3, (0, 1, 4), (1, 1, 4)
        yield query, key, value, masks[0], *sink, masks[1], *turns, decay, state, *maps, *how


def step_samples():
    query, key, value = (x.detach().abs() for x in sample(1))
    yield query, key, value, torch.rand(2, 2, 8, 13), None, False
    yield query, key, value.bfloat16(), torch.rand(2, 2, 8, 14), torch.tensor([-0.1, -2.0]), True


def hybrid_samples():
    query, key, value = (x.detach() for x in sample(1))
    for sinks in (0, 3):
        state = [torch.rand(2, 2, 6, 14), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 12)]
        state += [torch.ones(2, 5, dtype=torch.int8), torch.randn(2, 2, sinks, 8), torch.randn(2, 2, sinks, 12)]
        state.append(torch.tensor([[9], [1]]))
        maps = torch.randn(2, 8, 6), torch.randn(2, 1, 6), torch.rand(2, 1, 1), torch.randn(4, 8, 6)
        far = (torch.randn(2, 4, 1, 8), torch.randn(2, 2, 1, 8)) if sinks else (None, None)
        joint = (torch.randn(4), torch.randn(4)) if sinks else (None, None)
        position = None
        if sinks:
            position, window_position = torch.tensor([[20], [30]]).int(), torch.arange(10).view(2, 5).int()
            state.append(window_position)
        yield query, key, value, None, position, *far, *maps, None, state, *joint, EXP, 0.3


def slot_samples():
    query, key, value = (x.detach() for x in sample(keys=5))
    yield query, key, value, None, 0.3
    yield query.bfloat16(), key.bfloat16(), value, torch.rand(2, 1, 5) > 0.3, 0.3


def delta_samples():
    for dtype, with_state in ((torch.float32, True), (torch.bfloat16, False), (torch.float64, True)):
        query, key, value = sample(dtype=dtype)
        gates = [-torch.rand(2, 2, 7), -torch.rand(2, 2, 7, 8)]
        state = torch.randn(2, 2, 8, 12, dtype=torch.promote_types(dtype, torch.float32))
        state = state.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() if with_state else None
        for log_decay in gates:
            beta = torch.rand(2, 2, 7).requires_grad_()
            yield query, key, value, log_decay.requires_grad_(), beta, state, with_state


def delta_step_samples():
    query, key, value = (x.detach() for x in sample(1))
    for log_decay in (-torch.rand(2, 2, 1), -torch.rand(2, 2, 1, 8)):
        yield query, key, value.bfloat16(), log_decay, torch.rand(2, 2, 1), torch.randn(2, 2, 8, 12), True


def elu_samples():
    yield (torch.randn(2, 3, 5, 7),)
    yield (torch.randn(2, 5, 3, 7).transpose(1, 2),)
    yield (torch.randn(2, 3, 7, 5).transpose(2, 3),)


SAMPLES = {
    "attention": attention_samples,
    "window_attention": window_samples,
    "joint_attention": joint_samples,
    "attention_step": step_samples,
    "hybrid_step": hybrid_samples,
    "hybrid_step_": hybrid_samples,
    "slot_attention": slot_samples,
    "elu_plus_one": elu_samples,
    "gated_delta": delta_samples,
    "gated_delta_step": delta_step_samples,
}
HAVE_GRADIENTS = ("attention", "window_attention", "joint_attention", "gated_delta")


def backward_samples(name: str):
    """The arguments of the backward operators, from those of the forward ones."""
    for given in SAMPLES[name]():
        given = [x.detach() if isinstance(x, torch.Tensor) else x for x in given]
        if name == "gated_delta":
            grads = [torch.randn_like(x) for x in OPERATORS.gated_delta(*given)]
            yield *grads, *given, [x is not None for x in given[:6]]
            continue
        if name == "joint_attention":
            output, *others, state = OPERATORS.joint_attention(*given)
            yield torch.randn_like(output), torch.randn_like(state), *given, output, *others, [True] * 18
            continue
        output, second, _, *state = getattr(OPERATORS, name)(*given)
        grads = [torch.randn_like(x) for x in (output, second, *state)]
        yield *grads, *given, output, second, *([[x is not None for x in given[:10]]] if name == "attention" else [])


def check(operator, given):
    torch.library.opcheck(operator.default, tuple(given))


@needs_c
@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    for given in SAMPLES[name]():
        check(getattr(OPERATORS, name), given)


@needs_c
@pytest.mark.parametrize("name", HAVE_GRADIENTS)
def test_opcheck_of_the_backward_operators(name):
    for given in backward_samples(name):
        if name == "attention":
            given = (*given[:-1], [n and given[3 + i].is_floating_point() for i, n in enumerate(given[-1])])
        check(getattr(OPERATORS, f"{name}_backward"), given)


def test_every_operator_is_checked():
    backward = {f"{name}_backward" for name in HAVE_GRADIENTS}
    assert {*SAMPLES, *backward} == set(vars(OPERATORS))


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [contextlib.nullcontext, Recorder])
@pytest.mark.parametrize("row", ["linear-exp", "hybrid-separate", "gated_delta"])
def test_gradients_in_torch_are_computed_by_the_thread_that_asks(row, mode, monkeypatch):
    """Another thread has neither the device nor the stream of CUDA that is current here."""
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    threads = {threading.get_ident()}
    gradients_of = kernels_operators.gradients_of
    for module in (kernels_operators, kernels_hybrid, kernels_delta):
        record = lambda *given: threads.add(threading.get_ident()) or gradients_of(*given)  # noqa: E731
        monkeypatch.setattr(module, "gradients_of", record)
    mechanism, inputs = build_mechanism(row), [torch.randn(2, heads, 70, 8, requires_grad=True) for heads in (4, 2, 2)]
    options = {"attention_mask": None, "scaling": 0.3, "is_causal": True, "state": None}
    torch._dynamo.reset()
    eager = lambda *given: mechanism.attend(*given, **options)[0]  # noqa: E731
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(eager(*inputs).square().sum(), inputs)
    output = compiled(*inputs)
    with mode():
        actual = torch.autograd.grad(output.square().sum(), inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert threads == {threading.get_ident()}


@needs_c
def test_a_mode_sees_the_operators():
    query, key, value = sample()
    with Recorder() as recorder:
        output, *_ = map_attention(KernelMap(EXP), query, key, value, is_causal=True)
        output.sum().backward()
    seen = {name.split(".")[1] for name in recorder.names if name.startswith("hf_linear_attention")}
    assert seen == {"attention", "attention_backward"}
    given = next(step_samples())[:4]
    with torch.no_grad(), Recorder() as recorder:
        attention_step(*given, log_features=False)
    assert any("attention_step" in name for name in recorder.names)


def test_tensors_without_memory_have_the_shapes_of_real_ones():
    query, key, value = sample()
    expected = map_attention(KernelMap(EXP), query, key, value, is_causal=True)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fakes = [mode.from_tensor(x) for x in (query, key, value)]
        for actual, real in zip(map_attention(KernelMap(EXP), *fakes, is_causal=True), expected):
            assert actual.shape == real.shape
            assert actual.dtype == real.dtype


MECHANISM_SETTINGS = {
    "elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "exp": {"mechanism": "linear", "feature_map": "exp", "num_features": 6},
    "hedgehog": {"mechanism": "linear", "feature_map": "hedgehog"},
    "hybrid": {"mechanism": "hybrid", "window_size": 3, "num_sinks": 2, "num_features": 6},
    "performer": {"mechanism": "performer", "num_features": 6},
}


def attend_with(name: str, dtype):
    settings = LinearAttentionSettings(MECHANISM_SETTINGS[name], is_causal=True, model_type="test")
    mechanism = MECHANISMS[settings["mechanism"]](settings, LayerShape(4, 2, 4, 0, None)).eval().to(dtype)
    mechanism.reset_parameters()
    for parameter in mechanism.parameters():
        parameter.requires_grad_(False)

    def attend(query, key, value):
        options = {"attention_mask": None, "scaling": 0.5, "is_causal": True, "state": None}
        return mechanism.attend(query, key, value, **options)[0]

    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 4, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4))
    return attend, [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def grad_of_grad(attend, inputs):
    """Gradients of the squares of gradients."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    first = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)


@pytest.mark.parametrize("name", MECHANISM_SETTINGS)
def test_second_derivatives(name, monkeypatch):
    torch.manual_seed(0)
    attend, inputs = attend_with(name, torch.float64)
    leaves = [x.requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, leaves, fast_mode=True)
    exact = grad_of_grad(attend, [x.detach() for x in leaves])
    torch.manual_seed(0)
    narrow, _ = attend_with(name, torch.float32)
    for library in (kernels_cpu.library(), None):
        monkeypatch.setattr(kernels_cpu, "library", lambda library=library: library)
        for actual, expected in zip(grad_of_grad(narrow, [x.detach().float() for x in leaves]), exact):
            assert (actual - expected).norm() <= 2e-5 * expected.norm() + 1e-6


@pytest.mark.parametrize("function", [PLAIN, ELU_PLUS_ONE, EXP])
def test_gradients_of_the_initial_state(function):
    query, key, value = (x.detach().double().abs().requires_grad_() for x in sample(5))
    state = torch.rand(2, 2, 8, 13, dtype=torch.float64).requires_grad_()

    def attend(query, key, value, state):
        if function == EXP:
            state = torch.cat((state, torch.zeros_like(state[..., :1])), dim=-1)
        output, *_, state = map_attention(KernelMap(function), query, key, value, is_causal=True, state=state)
        state = state[..., :-1] * state[..., -1:].exp() if function == EXP else state
        return output, state

    assert torch.autograd.gradcheck(attend, (query, key, value, state), fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, (query, key, value, state), fast_mode=True)


@pytest.mark.parametrize("name", MECHANISM_SETTINGS)
def test_functional_transformations(name):
    torch.manual_seed(0)
    attend, inputs = attend_with(name, torch.float64)
    torch.manual_seed(0)
    narrow, _ = attend_with(name, torch.float32)
    inputs32 = [x.float() for x in inputs]

    def loss(query, key, value, attend=narrow):
        return attend(query, key, value).square().sum()

    def near(actual, expected):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)

    leaves = [x.clone().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(attend(*leaves).square().sum(), leaves)
    for actual, expected in zip(torch.func.grad(loss, argnums=(0, 1, 2))(*inputs32), exact):
        near(actual, expected)
    stacked = [torch.stack((x, 2 * x, -x)) for x in inputs]
    rows = torch.stack([attend(*row) for row in zip(*stacked)])
    near(torch.func.vmap(narrow)(*(x.float() for x in stacked)), rows)
    tangents = [torch.randn_like(x) for x in inputs]
    _, forward = torch.func.jvp(narrow, tuple(inputs32), tuple(x.float() for x in tangents))
    step = 1e-6  # in float64 differences keep nine digits
    moved = [attend(*(x + sign * step * t for x, t in zip(inputs, tangents))) for sign in (1, -1)]
    near(forward, (moved[0] - moved[1]) / (2 * step))
    near(torch.func.jacrev(loss, argnums=2)(*inputs32), exact[2])


TWICE = """
import sys, torch
import hf_linear_attention
from hf_linear_attention.kernels import operators as first
for name in [name for name in sys.modules if name.startswith("hf_linear_attention")]:
    del sys.modules[name]
import hf_linear_attention
from hf_linear_attention.kernels import operators as second
from hf_linear_attention.torch_kernels.attention import kernel_attention
assert first is not second and first.OPERATORS is second.OPERATORS is torch.ops.hf_linear_attention
x = torch.randn(1, 2, 40, 8, requires_grad=True)
output, _ = kernel_attention(x, x, x, log_features=True, is_causal=True)
output.sum().backward()
assert x.grad.isfinite().all()
"""


def test_operators_are_registered_once_whatever_is_imported_twice():
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_map_that_c_knows_has_second_derivatives_tested():
    known = {name for name, kind in FEATURE_MAPS.items() if kind(4, 2, 4).kernel_map(1.0) is not None}
    assert known <= set(MECHANISM_SETTINGS)
