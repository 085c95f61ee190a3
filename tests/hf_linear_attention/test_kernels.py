"""The kernels beneath the mechanisms where numbers are extreme, and on several threads.

tests/native/fuzz.py compares them with float64 at random: every layout, dtype, length, mask and size.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import reference
import torch
from delta_calls import assert_close
from delta_calls import sample as delta_sample

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.torch_kernels.attention import kernel_attention, map_attention
from hf_linear_attention.torch_kernels.blocks import ELU_PLUS_ONE, EXP, KernelMap, plain_attention
from hf_linear_attention.torch_kernels.delta import gated_delta


needs_c = pytest.mark.skipif(kernels_cpu.library() is None, reason="no C kernels")


def sample(length: int, log_features: bool, batch: int = 2, dtype=torch.float32):
    query, key, value = (torch.randn(batch, heads, length, 6, dtype=torch.float64) for heads in (4, 2, 2))
    if not log_features:
        query, key = query.exp(), key.exp()
    return [tensor.to(dtype) for tensor in (query, key, value)]


def agree(actual, exact, tolerance):
    for a, e in zip(actual, exact, strict=True):
        assert torch.isfinite(a).all()
        assert (a - e).norm() <= tolerance * e.norm()


@pytest.mark.parametrize("decay", [None, [-0.01, -3.0]])
def test_loud_log_features_in_plain_operations(decay):
    """A maximum over keys that a query does not see would make its own weights underflow."""
    query, key, value = sample(150, True)
    query, key, mask = 80 * query, 80 * key, torch.ones(2, 150, dtype=torch.bool)
    log_decay = None if decay is None else torch.tensor(decay)
    mask[0, :3] = mask[1, 60:70] = False
    state, outputs = None, []
    for part in (slice(0, 1), slice(1, 64), slice(64, 150)):
        options = {"log_features": True, "is_causal": True, "log_decay": log_decay, "key_mask": mask[:, part]}
        output, _, _, state = plain_attention(*(x[:, :, part] for x in (query, key, value)), state=state, **options)
        outputs.append(output.flatten(1, 2))
    repeated = None if log_decay is None else log_decay.double().repeat_interleave(2)
    options = {"log_decay": repeated, "key_mask": mask, "is_causal": True}
    seen, expected = mask[:, None, :, None], reference.kernel_attention(query, key, value, **options)
    agree([torch.cat(outputs, dim=2) * seen], [expected * seen], 5e-5)  # float32 rounds an exponent of 300 to 2e-5


def gradients(tensors, rate, log_features, direction, mask=None):
    """The output, and its gradients by inputs and rate, whose decay is -exp(rate)."""
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors, rate)]
    options = {"log_features": log_features, "is_causal": True, "log_decay": -leaves[3].exp(), "key_mask": mask}
    output, _ = kernel_attention(*leaves[:3], **options)
    return [output, *torch.autograd.grad((output * direction).sum(), leaves)]


@pytest.mark.parametrize("log_features", [True, False], ids=["exponents", "features"])
def test_the_gradient_of_the_rate_keeps_its_digits_in_long_inputs(log_features, backend):
    tensors, rate = sample(4096, log_features, batch=1), torch.tensor([-7.0, -3.0])
    direction = torch.randn(1, 4, 4096, 6)
    actual = gradients(tensors, rate, log_features, direction)[-1]
    exact = gradients([x.double() for x in tensors], rate.double(), log_features, direction.double())[-1]
    assert (actual - exact).norm() <= 5e-6 * exact.norm()


def test_no_features_are_refused():
    for log_features in (True, False):
        query, key, value = (torch.rand(2, 2, 5, n) for n in (0, 0, 3))
        with pytest.raises(ValueError, match="0 features"):
            kernel_attention(query, key, value, log_features=log_features, is_causal=True)
        state = torch.rand(2, 2, 0, 4 + log_features)
        one = [x[:, :, :1] for x in (query, key, value)]
        with pytest.raises(ValueError, match="0 features"), torch.no_grad():
            kernel_attention(*one, log_features=log_features, is_causal=True, state=state)


@needs_c
@pytest.mark.parametrize(("function", "is_causal"), [(ELU_PLUS_ONE, False), (EXP, True)])
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


@needs_c
@pytest.mark.parametrize("log_decay", [None, torch.tensor([-0.02, -5.0])], ids=["constant", "decay"])
@pytest.mark.parametrize("function", [ELU_PLUS_ONE, EXP])
def test_bfloat16_outputs_stay_means_of_the_values(function, log_decay):
    # Numerator and denominator see the same rounded weights: 1 is in bfloat16, and its neighbours are 2^-8 away.
    query, key = (3 * torch.randn(2, heads, 150, 32).bfloat16() for heads in (4, 2))
    value, kernel_map = torch.ones(2, 2, 150, 16).bfloat16(), KernelMap(function)
    output, _, _, state = map_attention(kernel_map, query, key, value, is_causal=True, log_decay=log_decay)
    assert torch.equal(output, torch.ones_like(output))
    torch.testing.assert_close(state[..., :16], state[..., 16:17].expand(-1, -1, -1, 16), rtol=1e-5, atol=1e-30)


@needs_c
def test_keys_without_queries_are_added_up_in_parts(monkeypatch):
    """As one thread adds them up."""
    monkeypatch.setattr(kernels_cpu, "SHORTEST_PART", 20)
    key, value, nothing = torch.randn(1, 1, 130, 8), torch.randn(1, 1, 130, 8), torch.zeros(1, 1, 0, 8)
    found = []
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(map_attention(KernelMap(ELU_PLUS_ONE), nothing, key, value, is_causal=False)[3])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-5)  # float32 sums of 130 numbers in another order


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


def test_equal_keys_of_the_delta_rule_are_solved_exactly(backend):
    """The hardest system: with one key and beta 1 every token erases the one before it completely."""
    tensors = delta_sample(128, False, decay=0.0)
    tensors["key"], tensors["beta"] = tensors["key"][:, :, :1].expand(-1, -1, 128, -1), torch.ones(2, 2, 128)
    assert_close(gated_delta(**tensors), reference.gated_delta(**tensors))
