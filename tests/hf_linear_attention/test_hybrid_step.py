"""A token of `hybrid` in C, and in few operations of torch, against the form of many tokens."""

from __future__ import annotations

import pytest
import torch
from matrix import add_gates, attend, mechanism_of, qkv
from torch._inductor.utils import run_and_get_code

from hf_linear_attention.attention.cache import LinearAttentionStateLayer
from hf_linear_attention.kernels.cpu import library
from hf_linear_attention.mechanisms.base import Rotary
from hf_linear_attention.mechanisms.hybrid import HybridAttention
from hf_linear_attention.torch_kernels.implementations import IMPLEMENTATIONS


LENGTH = 14
SETTINGS = [
    {},
    {"window_size": 1, "num_sinks": 0, "decay": "learned"},
    {"window_size": 3, "num_sinks": 7, "decay": "learned", "rope": "partial", "rope_frequencies": 1},
    {"window_size": 3, "num_sinks": 2, "trained_length": 5},
    {"window_size": 1, "num_sinks": 0, "num_exact_keys": 1, "feature_map": "hedgehog", "trained_length": 4},
    {"window_size": 3, "num_exact_keys": 4, "rope": "partial", "rope_frequencies": 1, "trained_length": 5},
]
needs_c = pytest.mark.skipif(library() is None, reason="the package was installed without its C kernels")


def hybrid(settings) -> HybridAttention:
    rotary = Rotary((1.0, 0.1))
    mechanism = mechanism_of({"mechanism": "hybrid", **settings}, head_dim=16, rotary=rotary, is_causal=True)
    for parameter in mechanism.feature_map.parameters():  # some of which start at 0
        torch.nn.init.normal_(parameter, std=0.3)
    if mechanism.decay is not None:
        torch.nn.init.constant_(mechanism.decay.rate, -1.0)  # from 0.3 nats a token
    if mechanism.num_exact_keys:
        mechanism.register_forward_pre_hook(add_gates)
        torch.nn.init.constant_(mechanism.score_slope, 0.1)
        torch.nn.init.normal_(mechanism.score_projection[:1])  # all scores of the second head are 0 before the slope
        torch.nn.init.zeros_(mechanism.score_slope[1:])
    return mechanism


def run(mechanism, inputs, start, stop, state=None, mask=None, **options):
    """From one token to another; the second row has no padding, and is one token ahead."""
    positions = torch.arange(start, stop).expand(2, -1) + torch.tensor([[-1], [0]])
    given = {"positions": positions.clamp(min=0).int()} if mechanism.needs_positions else {}
    return attend(mechanism, *(x[:, :, start:stop] for x in inputs), mask, state, **given, **options)


def decoded(mechanism, inputs):
    """Outputs of all tokens but the first two, of which one is padding in the first row, and the last state."""
    outputs = []
    _, state = run(mechanism, inputs, 0, 2, mask=torch.tensor([[False, True], [True, True]]))
    for t in range(2, LENGTH):
        output, state = run(mechanism, inputs, t, t + 1, state)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


@torch.no_grad()
@pytest.mark.parametrize("settings", [SETTINGS[2], SETTINGS[5]], ids=str)
def test_a_step_far_from_the_start_is_the_form_of_many_tokens(settings, backend):
    """After a million tokens, float32 angles are 1e-3 of a turn apart, so turns have to be reduced in float64."""
    mechanism, inputs = hybrid(settings), qkv(LENGTH, dim=16)
    positions = (torch.arange(LENGTH) + 1_000_003).expand(2, -1).int()
    expected, _ = attend(mechanism, *inputs, positions=positions)
    state, outputs = None, []
    for t in range(LENGTH):
        given = (x[:, :, t : t + 1] for x in inputs)
        output, state = attend(mechanism, *given, None, state, positions=positions[:, t : t + 1])
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=2e-5, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_step_is_the_form_of_many_tokens(monkeypatch, settings, backend):
    mechanism, calls = hybrid(settings), []
    if backend == "C":
        step = IMPLEMENTATIONS["hybrid_step"]
        monkeypatch.setitem(IMPLEMENTATIONS, "hybrid_step", lambda *given: calls.append(1) or step(*given))
    else:
        in_torch = HybridAttention._step_in_torch
        monkeypatch.setattr(HybridAttention, "_step_in_torch", lambda *given: calls.append(1) or in_torch(*given))
    # In torch a window that still holds a sink, or nothing, is left to the form of many tokens.
    sinks_leave = mechanism.num_sinks + mechanism.window_size - 1
    for dtype in (torch.float32, torch.bfloat16):
        inputs = qkv(LENGTH, dim=16, dtype=dtype)
        calls.clear()
        output, state = decoded(mechanism, inputs)
        has_step = backend == "C" or not mechanism.num_exact_keys
        assert (LENGTH - 2 - (0 if backend == "C" else sinks_leave)) * has_step <= len(calls) <= LENGTH - 2
        with monkeypatch.context() as patched:
            patched.setattr(HybridAttention, "_step", lambda *given: None)
            expected, expected_state = decoded(mechanism, inputs)
        # sums of 14 terms of the size of 1, which float32 rounds at 6e-8; bfloat16 rounds the outputs at 4e-3
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(state, expected_state, rtol=1e-5, atol=1e-5)
        for kept, expected_kept in zip(state[1:], expected_state[1:]):  # behind the sums: copies
            assert torch.equal(kept, expected_kept)


def static_layer(mechanism, inputs, count):
    """A static cache layer after `count` tokens."""
    layer = LinearAttentionStateLayer(64, static=True)
    layer.store(run(mechanism, inputs, 0, count)[1])
    return layer


@torch.no_grad()
@needs_c
def test_a_static_cache_holds_dense_tensors_so_that_no_step_copies_them():
    mechanism, layer = hybrid({"window_size": 3, "num_sinks": 2}), LinearAttentionStateLayer(64, static=True)
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(LENGTH, dim=16)]
    _, state = run(mechanism, inputs, 0, LENGTH)
    assert not all(tensor.is_contiguous() for tensor in state)  # else the next line would not show anything
    layer.store(state)
    assert all(tensor.is_contiguous() for tensor in layer.state)


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
@needs_c
def test_a_compiled_step_writes_a_static_cache_without_a_copy():
    mechanism, inputs = hybrid({"window_size": 5}), qkv(LENGTH, dim=16)
    layers = [static_layer(mechanism, inputs, LENGTH - 1) for _ in range(2)]

    def step(layer, *tensors):
        output, state = run(mechanism, tensors, LENGTH - 1, LENGTH, layer.state, in_place=True)
        layer.store(state)
        return output

    output, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), layers[0], *inputs)
    torch.testing.assert_close(output, step(layers[1], *inputs))
    torch.testing.assert_close(layers[0].state, layers[1].state)
    assert ".hybrid_step_.default(" in code
    assert "copy__" not in code  # what the compiler calls its copies into the tensors of a cache
