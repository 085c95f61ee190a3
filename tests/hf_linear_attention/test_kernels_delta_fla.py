"""The gated delta rule by fla-core, on a CPU: which tensors it takes, and its layout, padding, groups and decays.

By default fla-core's functions are stood in for by their formula; with TRITON_INTERPRET=1 the same tests run its real
recurrent kernels in Triton's interpreter (which cannot run the chunked ones), in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import reference
import torch
from delta_calls import assert_close, sample, values_and_gradients

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.kernels import delta_fla as kernels_delta_fla
from hf_linear_attention.kernels.delta_fla import delta_on_gpu, takes_on_gpu
from hf_linear_attention.torch_kernels.delta import gated_delta


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def formula(q, k, v, g, beta, scale, initial_state, output_final_state):
    """What fla's functions compute, `[B, T, H, K]` and `[B, H, K, V]`, the output in the dtype of q."""
    assert output_final_state
    assert q.dtype == k.dtype == v.dtype
    assert q.shape == k.shape
    assert {q.shape[-1] % 16, v.shape[-1] % 16} == {0}
    assert initial_state is None or initial_state.dtype == torch.float32
    q, k, v, g, beta = (x.transpose(1, 2).float() for x in (q, k, v, g, beta))
    output, state = reference.gated_delta(q * scale, k, v, g, beta, state=initial_state)
    return output.transpose(1, 2).to(v.dtype), state.float()


class InterpreterDriver:
    """What Triton's autotuner and fla ask of a GPU: every kernel takes as long as any other."""

    def get_benchmarker(self):
        return lambda call, quantiles: [0.0] * len(quantiles)

    def get_current_target(self):
        return SimpleNamespace(backend="cpu", arch="")


@pytest.fixture
def kernels(monkeypatch):
    """Recurrent and chunked kernels; only the former can be real, without gradients."""
    found = dict.fromkeys((False, True), (formula, formula))
    if INTERPRETED:
        import triton

        triton.runtime.driver.set_active(InterpreterDriver())
        found = {by_feature: kernels_delta_fla._kernels(by_feature) for by_feature in found}
        assert None not in found.values()
    monkeypatch.setattr(kernels_delta_fla, "_kernels", found.get)
    monkeypatch.setattr(kernels_delta_fla, "is_on_cuda", lambda tensor: True)
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)


@pytest.mark.parametrize("per_feature", [False, True])
@pytest.mark.parametrize("decay", [1.0, 50.0])
@pytest.mark.parametrize("length", [1, 37])
def test_the_recurrent_kernel_gives_what_the_oracle_gives(kernels, length, decay, per_feature):
    tensors, mask = sample(length, per_feature, decay), torch.arange(length) // torch.tensor([[7], [40]]) + 1
    mask = mask * (torch.rand(2, length) > 0.3)
    with torch.no_grad():
        for key_mask in (None, mask):
            actual = gated_delta(**tensors, key_mask=key_mask)
            # float32 token by token: 6e-8 of each of 37 terms
            assert_close(actual, reference.gated_delta(**tensors, key_mask=key_mask), [2e-6, 2e-6])
        del tensors["state"]
        assert_close(gated_delta(**tensors), reference.gated_delta(**tensors), [2e-6, 2e-6])


@pytest.mark.skipif(INTERPRETED, reason="the kernels with gradients do not run there")
@pytest.mark.parametrize("per_feature", [False, True])
def test_the_chunked_kernel_has_gradients(kernels, per_feature, monkeypatch):
    tensors = sample(80, per_feature, dtype=torch.bfloat16)
    calls = []
    monkeypatch.setattr(
        kernels_delta_fla,
        "_kernels",
        lambda by_feature: (None, lambda *given, **options: calls.append(by_feature) or formula(*given, **options)),
    )
    actual = values_and_gradients(gated_delta, tensors)
    assert calls == [per_feature]
    # bfloat16 rounds outputs and gradients at 4e-3
    assert_close(actual, values_and_gradients(reference.gated_delta, tensors), [1e-2] * 8)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(gated_delta(**leaves)[0].sum(), leaves["query"], create_graph=True)


@pytest.mark.skipif(INTERPRETED, reason="no kernel is called")
def test_what_goes_to_fla(kernels, monkeypatch):
    def takes(length, dtype=torch.float32, erases=True, dim=12, gradient=False):
        tensors = sample(length, False, dim=dim, dtype=dtype).values()
        return takes_on_gpu(*(x.requires_grad_(gradient) for x in tensors), erases)

    assert takes(64)  # token by token, in float32
    assert not takes(65)
    assert not takes(64, gradient=True)
    assert takes(64, torch.bfloat16, gradient=True)
    assert takes(1000, torch.float16)
    assert not takes(64, torch.float64)
    assert not takes(64, erases=False)
    assert not takes(4, dim=257)
    monkeypatch.setattr(kernels_delta_fla, "is_tf32_allowed", lambda: True)
    assert takes(65, gradient=True)
    monkeypatch.setattr(kernels_delta_fla, "requested_backend", lambda: "torch")
    assert not takes(64)


@pytest.mark.skipif(INTERPRETED, reason="fla is there")
def test_without_fla_torch_computes(monkeypatch, tmp_path):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("raise ModuleNotFoundError('no triton here')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    assert kernels_delta_fla._kernels.__wrapped__(True) is None
    monkeypatch.setattr(kernels_delta_fla, "_kernels", lambda by_feature: None)
    with pytest.raises(ImportError, match="fla-core"):
        delta_on_gpu(*sample(3, False).values())


@pytest.mark.skipif(INTERPRETED, reason="this is the run that it starts")
def test_the_real_kernels_in_the_interpreter():
    if missing := [name for name in ("fla", "triton") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed (extra `gpu`)")
    chosen = ["-k", "recurrent", "-m", "", "-p", "no:cacheprovider", "-p", "no:xdist"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *chosen, __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout
    assert "8 passed" in result.stdout
