"""One sequence in parts on several threads gives what one thread gives."""

from __future__ import annotations

import pytest
import torch

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.kernels.cpu import library
from hf_linear_attention.torch_kernels.attention import map_attention
from hf_linear_attention.torch_kernels.blocks import ELU_PLUS_ONE, EXP, Affine, KernelMap


pytestmark = pytest.mark.skipif(library() is None, reason="the package was installed without its C kernels")


@pytest.fixture
def parts(monkeypatch):
    """How often attention went in parts, with short ones and four threads."""
    calls = []
    states = kernels_cpu._states
    monkeypatch.setattr(kernels_cpu, "SHORTEST_PART", 20)
    monkeypatch.setattr(kernels_cpu, "_states", lambda *given: calls.append(len(given[2])) or states(*given))
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    yield calls
    torch.set_num_threads(threads)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(("is_causal", "with_decay"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("function", [ELU_PLUS_ONE, EXP])
def test_parts_agree_with_the_whole(parts, function, is_causal, with_state, padded, with_decay):
    query, key, value = torch.randn(1, 3, 101, 8) * 3, torch.randn(1, 1, 101, 8) * 3, torch.randn(1, 1, 101, 6)
    affine = Affine(torch.randn(1, 8, 12)) if function == EXP else None
    features = 12 if function == EXP else 8
    options = {"is_causal": is_causal, "key_mask": None, "state": None, "log_decay": None}
    if padded:
        options["key_mask"] = torch.rand(1, 101) > 0.3
        options["key_mask"][:, :40] = False  # a whole part and more
    if with_state:
        options["state"] = torch.rand(1, 1, features, 7 + (function == EXP))
    if with_decay:
        options["log_decay"] = torch.tensor([-0.05])
    feature_map = KernelMap(function, affine, affine)
    actual = map_attention(feature_map, query, key, value, **options)
    assert parts == [4]
    torch.set_num_threads(1)
    expected = map_attention(feature_map, query, key, value, **options)
    assert parts == [4]
    sums = [state[..., :7] * state[..., 7:].exp() if function == EXP else state for *_, state in (actual, expected)]
    for a, e in zip((actual[0], sums[0]), (expected[0], sums[1])):
        # float32 rounds at 6e-8, and exponents of up to 40 at 2e-6 more
        assert (a - e).norm() <= 1e-5 * e.norm()


def test_many_heads_stay_whole(parts):
    map_attention(KernelMap(EXP), *(torch.randn(2, 2, 101, 8) for _ in range(3)), is_causal=True)
    assert parts == []


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("function", [ELU_PLUS_ONE, EXP])
def test_gradients_in_parts_of_the_query_heads_agree_with_the_whole(monkeypatch, function, is_causal):
    calls = []
    run = kernels_cpu.run_attention
    monkeypatch.setattr(
        kernels_cpu, "run_attention", lambda *given, **how: calls.append(len(given) - 2) or run(*given, **how)
    )
    query, key, value = torch.randn(1, 6, 70, 8), torch.randn(1, 2, 70, 8), torch.randn(1, 2, 70, 6)
    query_map, key_map = (
        Affine(torch.randn(6, 8, 12)),
        Affine(*(torch.randn(2, n, m) for n, m in ((8, 12), (1, 12), (1, 1)))),
    )
    affine = (query_map, key_map) if function == EXP else (None, None)
    features = 12 if function == EXP else 8
    state = torch.rand(1, 2, features, 7 + (function == EXP))
    log_decay = torch.tensor([-0.05, -0.9]) if is_causal else None
    leaves = [query, key, value, state, *(x for part in affine if part for x in part if x is not None)]
    leaves += [] if log_decay is None else [log_decay]
    for leaf in leaves:
        leaf.requires_grad_()
    results = []
    for threads in (5, 1):  # the three query heads of each group fall to two threads
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            options = {"is_causal": is_causal, "state": state, "log_decay": log_decay}
            output, _, _, new_state = map_attention(KernelMap(function, *affine), query, key, value, **options)
            torch.manual_seed(1)
            loss = (output * torch.randn(output.shape)).sum() + new_state[..., :7].square().sum() * 1e-3
            calls.clear()
            results.append(torch.autograd.grad(loss, leaves))
        finally:
            torch.set_num_threads(before)
        assert calls == [2 if threads == 5 else 1]
    for actual, expected in zip(*results):
        # sums in another order, in float32; of a number that a head shares, over thousands of terms of both signs
        assert (actual - expected).norm() <= 1e-5 * expected.norm() + (5e-4 if actual.numel() == 2 else 1e-6)
