"""The CUDA backend on a CPU: which tensors it takes, and its layout, padding, groups, decay and normalisation.

fla-core's functions are stood in for by their formulas; `make test-triton` runs its real kernels (tests/triton).
"""

from __future__ import annotations

import importlib
import sys

import pytest
import reference
import torch
from delta_calls import assert_close, sample, values_and_gradients

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.kernels import fla as kernels_fla
from hf_linear_attention.torch_kernels.attention import kernel_attention
from hf_linear_attention.torch_kernels.delta import gated_delta
from hf_linear_attention.torch_kernels.implementations import IMPLEMENTATIONS


def gla(q, k, v, scale, initial_state, output_final_state, g=None, gk=None):
    """What the functions for linear attention compute, `[B, T, H, K]` and `[B, H, K, V]`, the output as q."""
    assert output_final_state
    assert q.dtype == k.dtype == v.dtype
    assert {q.shape[-1] % 16, v.shape[-1] % 16} == {0}  # in 16 bits odd widths are miscompiled
    state = q.new_zeros(*k.shape[::2], k.shape[-1], v.shape[-1], dtype=torch.float32)
    state = state if initial_state is None else initial_state
    gate, outputs = gk if g is None else g, []
    for t in range(q.shape[1]):
        if gate is not None:
            state = state * gate[:, t, :, :, None].exp()
        state = state + k[:, t, :, :, None].float() * v[:, t, :, None, :].float()
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t].float() * scale, state))
    return torch.stack(outputs, dim=1).to(q.dtype), state


def delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state):
    """What the functions for the gated delta rule compute, in the same layout."""
    assert output_final_state
    assert q.dtype == k.dtype == v.dtype
    assert q.shape == k.shape
    assert {q.shape[-1] % 16, v.shape[-1] % 16} == {0}
    assert initial_state is None or initial_state.dtype == torch.float32
    q, k, v, g, beta = (x.transpose(1, 2).float() for x in (q, k, v, g, beta))
    output, state = reference.gated_delta(q * scale, k, v, g, beta, state=initial_state)
    return output.transpose(1, 2).to(v.dtype), state.float()


@pytest.fixture
def kernels(monkeypatch):
    """Stand-ins for fla's functions."""
    monkeypatch.setattr(kernels_fla, "_kernels", lambda gated: (gla, gla))
    monkeypatch.setattr(kernels_fla, "_delta_kernels", lambda by_feature: (delta_rule, delta_rule))
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)  # torch on both sides, but for the kernel


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(kernels_fla, "is_on_cuda", lambda tensor: True)


@pytest.mark.parametrize(
    ("log_features", "decay", "dtype"),
    [
        (True, True, torch.float32),
        (False, True, torch.float32),
        (True, False, torch.bfloat16),  # by blocks
    ],
)
def test_the_kernel_interface_gives_what_it_gives_on_a_cpu(kernels, log_features, decay, dtype, monkeypatch):
    length, split = 75, 30
    if dtype == torch.float32:
        monkeypatch.setattr(kernels_fla, "LONGEST_RECURRENT", length)
    query, key, value = torch.randn(2, 4, length, 6), torch.randn(2, 2, length, 6), torch.randn(2, 2, length, 5)
    value = value.to(dtype)
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
        if log_features:  # the maximum is a matter of convention
            state = state[..., :-1] * state[..., -1:].exp()
        return [output, state, *torch.autograd.grad((output * direction).sum(), leaves)]

    expected, calls = run(), []
    monkeypatch.setitem(IMPLEMENTATIONS, "gpu_kernel", lambda value, n: calls.append(n) or kernels_fla.causal_attention)
    for a, e in zip(run(), expected):
        # float32 on both sides, sums of 75 terms in another order; a decay of -0.9 shrinks some by exp(-60). In
        # bfloat16 queries, keys and sums round at 4e-3.
        assert (a - e).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * e.norm()
    assert calls == [split, length - split]


@pytest.mark.parametrize(("length", "per_feature"), [(1, False), (37, True)])
@torch.no_grad()
def test_the_recurrent_delta_rule_is_the_oracle(kernels, on_cuda, length, per_feature):
    tensors, mask = sample(length, per_feature, 50.0), torch.arange(length) // torch.tensor([[7], [40]]) + 1
    mask = mask * (torch.rand(2, length) > 0.3)
    for key_mask in (None, mask):
        actual = gated_delta(**tensors, key_mask=key_mask)
        # float32 token by token: 6e-8 of each of 37 terms
        assert_close(actual, reference.gated_delta(**tensors, key_mask=key_mask), [2e-6, 2e-6])
    del tensors["state"]
    assert_close(gated_delta(**tensors), reference.gated_delta(**tensors), [2e-6, 2e-6])


def test_the_chunked_delta_rule_has_gradients(kernels, on_cuda):
    tensors = sample(80, True, dtype=torch.bfloat16)
    actual = values_and_gradients(gated_delta, tensors)
    # bfloat16 rounds outputs and gradients at 4e-3
    assert_close(actual, values_and_gradients(reference.gated_delta, tensors), [1e-2] * 8)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(gated_delta(**leaves)[0].sum(), leaves["query"], create_graph=True)


def test_what_goes_to_fla(kernels, on_cuda, monkeypatch):
    """Float32 goes to tensor cores only where torch may use them; token by token it stays float32."""

    def takes(length, dtype=torch.float32, erases=True, dim=12, gradient=False):
        tensors = sample(length, False, dim=dim, dtype=dtype).values()
        return kernels_fla.takes_on_gpu(*(x.requires_grad_(gradient) for x in tensors), erases)

    def kernel(dtype, length):
        return kernels_fla.gpu_kernel(torch.zeros(1, dtype=dtype), length)

    assert takes(64)
    assert not takes(65)
    assert not takes(64, gradient=True)
    assert takes(64, torch.bfloat16, gradient=True)
    assert not takes(64, torch.float64)
    assert not takes(64, erases=False)
    assert not takes(4, dim=257)
    assert kernel(torch.bfloat16, 4096) is kernels_fla.causal_attention
    assert kernel(torch.float32, 4096) is kernel(torch.float64, 1) is None
    assert kernel(torch.float32, 64) is not None
    with monkeypatch.context() as allowed:
        allowed.setattr(kernels_fla, "is_tf32_allowed", lambda: True)
        assert takes(65, gradient=True)
        assert kernel(torch.float32, 4096) is not None
    monkeypatch.setattr(kernels_fla, "requested_backend", lambda: "torch")
    assert not takes(64)
    assert kernel(torch.bfloat16, 4096) is None


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Makes packages in front of all others, whose `fla` is forgotten before and at the end."""
    monkeypatch.syspath_prepend(tmp_path)

    def forget():
        for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
            monkeypatch.delitem(sys.modules, name)

    def write(name: str, text: str = "") -> None:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "__init__.py").write_text(text, encoding="utf-8")

    forget()
    yield write
    forget()


def test_on_a_cpu_fla_is_never_imported(packages):
    packages("fla", "raise RuntimeError('imported')")
    with pytest.raises(RuntimeError, match="imported"):
        importlib.import_module("fla")
    for length in (1, 70):
        query = torch.rand(1, 2, length, 16, requires_grad=True)
        kernel_attention(query, query, query, log_features=False, is_causal=True)[0].sum().backward()
    assert "fla" not in sys.modules


def test_without_fla_torch_computes_on_cuda_too(packages, monkeypatch):
    packages("fla", "raise ModuleNotFoundError('no triton here')")
    assert kernels_fla._kernels.__wrapped__(True) is None
    assert kernels_fla._delta_kernels.__wrapped__(True) is None
    monkeypatch.setattr(kernels_fla, "_delta_kernels", lambda by_feature: None)
    with pytest.raises(ImportError, match="fla-core"):
        kernels_fla.delta_on_gpu(*sample(3, False).values())


def test_the_models_of_fla_stay_out(packages):
    models = "import importlib\ntry:\n    importlib.import_module('fla.models')\nexcept ImportError: pass"
    packages("fla", models)
    packages("fla/models")
    packages("fla/ops")
    packages("fla/ops/gla", "chunk_gla, fused_recurrent_gla = 'chunked', 'recurrent'")
    assert kernels_fla._kernels.__wrapped__(True) == ("recurrent", "chunked")
    assert "fla.models" not in sys.modules
    importlib.import_module("fla.models")  # whoever wants them can still have them
