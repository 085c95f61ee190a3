"""The CUDA backend on a CPU: which tensors it takes, and its layout, padding, groups, decay and normalisation.

By default fla-core's functions are stood in for by their formula; with TRITON_INTERPRET=1 the same tests run its real
recurrent kernel in Triton's interpreter (which cannot run the chunked one), in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.kernels import fla as kernels_fla
from hf_linear_attention.torch_kernels.attention import kernel_attention
from hf_linear_attention.torch_kernels.causal import CausalAttention
from hf_linear_attention.torch_kernels.implementations import IMPLEMENTATIONS


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def formula(q, k, v, g, scale, initial_state, output_final_state):
    """What both functions of fla compute, `[B, T, H, K]` and `[B, H, K, V]`, the output in the dtype of q."""
    assert output_final_state
    assert q.dtype == k.dtype == v.dtype
    assert {q.shape[-1] % 16, v.shape[-1] % 16} == {0}  # in 16 bits odd widths are miscompiled
    state = q.new_zeros(*k.shape[::2], k.shape[-1], v.shape[-1], dtype=torch.float32)
    state = state if initial_state is None else initial_state
    outputs = []
    for t in range(q.shape[1]):
        if g is not None:
            state = state * g[:, t, :, None, None].exp()
        state = state + k[:, t, :, :, None].float() * v[:, t, :, None, :].float()
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t].float() * scale, state))
    return torch.stack(outputs, dim=1).to(q.dtype), state


class InterpreterDriver:
    """What Triton's autotuner and fla ask of a GPU: every kernel takes as long as any other."""

    def get_benchmarker(self):
        return lambda call, quantiles: [0.0] * len(quantiles)

    def get_current_target(self):
        return SimpleNamespace(backend="cpu", arch="")


@pytest.fixture
def kernels(monkeypatch):
    """`causal_attention` over the recurrent kernel; the chunked one has its interface and is stood in for by it."""
    kernel = formula
    if INTERPRETED:
        import triton

        triton.runtime.driver.set_active(InterpreterDriver())
        kernel, _ = kernels_fla._kernels()
    monkeypatch.setattr(kernels_fla, "_kernels", lambda: (kernel, kernel))


def leaves_of(length: int, dtype: torch.dtype, with_state: bool) -> list[torch.Tensor | None]:
    query, key = torch.rand(2, 2, 2, length, 20), torch.rand(2, 2, length, 20)
    value = torch.randn(2, 2, length, 12).to(dtype)
    return [query, key, value, torch.rand(2, 2, 20, 13) if with_state else None]


def values_and_gradients(function, leaves, directions):
    leaves = [None if leaf is None else leaf.clone().requires_grad_() for leaf in leaves]
    outputs = function(*leaves)
    loss = sum((output * direction).sum() for output, direction in zip(outputs, directions))
    return [*outputs, *torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])]


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(
    ("dtype", "length", "tolerance"),
    [
        (torch.float32, 1, 2e-6),  # float32 rounds at 6e-8; sums of up to 37 terms that partly cancel
        (torch.float32, 37, 2e-6),
        (torch.float16, 37, 1e-3),  # the gradient of the values is float16, which rounds at 5e-4
        (torch.bfloat16, 80, 1e-2),  # blocks: queries, keys and sums in bfloat16, which rounds at 4e-3
    ],
)
def test_values_and_gradients_are_those_of_torch_in_float64(kernels, dtype, length, tolerance, with_state):
    leaves = leaves_of(length, dtype, with_state)
    directions = [torch.randn(2, 2, 2, length, 12), torch.randn(2, 2, 2, length, 1), torch.randn(2, 2, 20, 13)]
    actual = values_and_gradients(kernels_fla.causal_attention, leaves, directions)
    doubles = [None if leaf is None else leaf.double() for leaf in leaves]
    expected = values_and_gradients(CausalAttention.apply, doubles, [direction.double() for direction in directions])
    for a, e in zip(actual, expected):
        assert a.shape == e.shape
        assert (a - e).norm() <= tolerance * e.norm()


@pytest.mark.parametrize("log_features", [True, False])
@pytest.mark.parametrize("decay", [True, False])
def test_the_kernel_interface_gives_what_it_gives_on_a_cpu(kernels, log_features, decay, monkeypatch):
    length, split = 75, 30
    monkeypatch.setattr(kernels_fla, "LONGEST_RECURRENT", length)
    query, key, value = torch.randn(2, 4, length, 6), torch.randn(2, 2, length, 6), torch.randn(2, 2, length, 5)
    if not log_features:
        query, key = query.exp(), key.exp()
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :20], mask[1, 25:40] = False, False
    log_decay = torch.tensor([-0.01, -0.9], requires_grad=True) if decay else None
    leaves = [leaf.requires_grad_() for leaf in (query, key, value)] + [log_decay] * decay
    direction = torch.randn(2, 4, length, 5) * mask[:, None, :, None]

    def run():
        state, outputs = None, []
        for part in (slice(0, split), slice(split, length)):
            output, state = kernel_attention(
                *(leaf[:, :, part] for leaf in (query, key, value)),
                **{"log_features": log_features, "is_causal": True, "log_decay": log_decay},
                key_mask=mask[:, part],
                state=state,
            )
            outputs.append(output)
        output = torch.cat(outputs, dim=2) * mask[:, None, :, None]
        if log_features:  # where a decay goes, into the sums or the maximum, is a matter of convention
            state = state[..., :-1] * state[..., -1:].exp()
        return [output, state, *torch.autograd.grad((output * direction).sum(), leaves)]

    monkeypatch.setattr(kernels_cpu, "library", lambda: None)  # torch on both sides, but for the kernel
    expected = run()
    calls = []
    monkeypatch.setitem(IMPLEMENTATIONS, "gpu_kernel", lambda value, n: calls.append(n) or kernels_fla.causal_attention)
    for a, e in zip(run(), expected):
        # float32 on both sides, sums of 75 terms in another order; a decay of -0.9 shrinks some by exp(-60)
        assert (a - e).norm() <= 1e-5 * e.norm()
    assert calls == [split, length - split]


def test_float32_goes_to_tensor_cores_only_where_torch_may_use_them(kernels, monkeypatch):
    monkeypatch.setattr(kernels_fla, "is_on_cuda", lambda tensor: True)
    values = {dtype: torch.zeros(1, dtype=dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)}
    assert kernels_fla.gpu_kernel(values[torch.bfloat16], 4096) is kernels_fla.causal_attention
    assert kernels_fla.gpu_kernel(values[torch.float16], 4096) is not None
    assert kernels_fla.gpu_kernel(values[torch.float32], 4096) is None
    assert kernels_fla.gpu_kernel(values[torch.float32], 64) is not None  # token by token, in float32
    monkeypatch.setattr(kernels_fla, "is_tf32_allowed", lambda: True)
    assert kernels_fla.gpu_kernel(values[torch.float32], 4096) is not None
    assert kernels_fla.gpu_kernel(values[torch.float32].double(), 1) is None
    monkeypatch.setattr(kernels_fla, "requested_backend", lambda: "torch")
    assert kernels_fla.gpu_kernel(values[torch.bfloat16], 4096) is None


def test_tensors_without_memory_are_none_of_its_business():
    with FakeTensorMode():
        assert not kernels_fla.is_on_cuda(torch.empty(2, device="cuda"))


def test_tf32_is_allowed_where_torch_was_told_so():
    assert not kernels_fla.is_tf32_allowed()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert kernels_fla.is_tf32_allowed()
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder of packages in front of all others, whose `fla` is forgotten at the end."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        del sys.modules[name]


def write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text(text, encoding="utf-8")


def test_on_a_cpu_fla_is_never_imported(packages):
    write(packages / "fla", "raise RuntimeError('imported')")
    with pytest.raises(RuntimeError, match="imported"):
        importlib.import_module("fla")
    for length in (1, 70):
        query = torch.rand(1, 2, length, 16, requires_grad=True)
        kernel_attention(query, query, query, log_features=False, is_causal=True)[0].sum().backward()
    assert "fla" not in sys.modules


def test_without_fla_torch_computes_on_cuda_too(packages):
    write(packages / "fla", "raise ModuleNotFoundError('no triton here')")
    assert kernels_fla._kernels.__wrapped__() is None


def test_the_models_of_fla_stay_out(packages):
    write(
        packages / "fla", "import importlib\ntry:\n    importlib.import_module('fla.models')\nexcept ImportError: pass"
    )
    write(packages / "fla" / "models", "")
    write(packages / "fla" / "ops", "")
    write(
        packages / "fla" / "ops" / "simple_gla", "chunk_simple_gla, fused_recurrent_simple_gla = 'chunked', 'recurrent'"
    )
    assert kernels_fla._kernels.__wrapped__() == ("recurrent", "chunked")
    assert "fla.models" not in sys.modules
    importlib.import_module("fla.models")  # whoever wants them can still have them


@pytest.mark.skipif(INTERPRETED, reason="this is the run that it starts")
def test_the_real_kernels_in_the_interpreter():
    if missing := [name for name in ("fla", "triton") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed (extra `gpu`)")
    chosen = ["-k", "values_and_gradients or kernel_interface", "-m", "", "-p", "no:cacheprovider", "-p", "no:xdist"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *chosen, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout
    assert "12 passed" in result.stdout
