"""The kernels as operators of torch: opcheck, modes, transformations, second derivatives, two versions at a time."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from kernel_calls import Maker
from matrix import build_mechanism, call_mechanism
from operators import OPERATORS
from torch.utils._python_dispatch import TorchDispatchMode

from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.features.maps import FEATURE_MAPS
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.kernels import operators as kernels_operators
from hf_linear_attention.mechanisms.base import LayerShape
from hf_linear_attention.mechanisms.registry import MECHANISMS


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "native"))
import fuzz  # in another folder of tests, which pytest imports by their paths


needs_c = pytest.mark.skipif(kernels_cpu.library() is None, reason="no C kernels")


HAVE_GRADIENTS = ("attention", "window_attention", "joint_attention", "gated_delta")
CALLS_EACH = 1


class Recorder(TorchDispatchMode):
    """The operators that are called, and the arguments of ours."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kept = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), args)
        result = function(*args, **(kwargs or {}))
        if function.namespace == "hf_linear_attention":
            self.calls.append((function, kept))
        return result


@functools.cache
def recorded() -> dict[str, list]:
    """Calls of every operator as the fuzzer makes them, none of whose tensors is large."""
    found, seed = {name: [] for name in vars(OPERATORS)}, 0
    while any(len(calls) < CALLS_EACH for calls in found.values()):
        call, seed = Maker(seed).call(), seed + 1
        if call.misfit or any(x is not None and x.numel() > 2000 for x in call.tensors.values()):
            continue
        with Recorder() as recorder, contextlib.suppress(NotImplementedError):
            fuzz.values_and_gradients(call, call.clean, {})
        for function, given in recorder.calls:
            calls = found[function._schema.name.partition("::")[2]]
            if len(calls) < CALLS_EACH:
                calls.append((function, given))
    return found


@needs_c
@pytest.mark.parametrize("name", vars(OPERATORS))
def test_opcheck(name):
    for function, given in recorded()[name]:
        for x in given if name in HAVE_GRADIENTS else ():
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.requires_grad_()
        torch.library.opcheck(function, given)


@pytest.mark.parametrize(
    ("row", "mode"), [("hybrid-window-maximum", Recorder), ("gated_delta", contextlib.nullcontext)]
)
def test_gradients_in_torch_are_computed_by_the_thread_that_asks(row, mode, monkeypatch):
    """Another thread has neither the device nor the stream of CUDA that is current here."""
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    threads = {threading.get_ident()}
    gradients_of = kernels_operators.gradients_of
    record = lambda *given: threads.add(threading.get_ident()) or gradients_of(*given)  # noqa: E731
    monkeypatch.setattr(kernels_operators, "gradients_of", record)
    mechanism, inputs = build_mechanism(row), [torch.randn(2, heads, 70, 8, requires_grad=True) for heads in (4, 2, 2)]
    options = {"attention_mask": None, "scaling": 0.3, "is_causal": True, "state": None}
    torch._dynamo.reset()
    eager = lambda *given: call_mechanism(mechanism, *given, **options)[0]  # noqa: E731
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(eager(*inputs).square().sum(), inputs)
    output = compiled(*inputs)
    with mode():
        actual = torch.autograd.grad(output.square().sum(), inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert threads == {threading.get_ident()}


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
        return call_mechanism(mechanism, query, key, value, **options)[0]

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
