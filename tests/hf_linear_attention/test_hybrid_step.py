"""A token of `hybrid` in C, and in few operations of torch, against the form of many tokens."""

from __future__ import annotations

import pytest
import torch
from matrix import call_mechanism
from torch._inductor.utils import run_and_get_code

from hf_linear_attention.attention.cache import LinearAttentionStateLayer
from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.kernels.cpu import library
from hf_linear_attention.mechanisms.base import LayerShape, Rotary
from hf_linear_attention.mechanisms.hybrid import HybridAttention
from hf_linear_attention.torch_kernels.implementations import IMPLEMENTATIONS


HEADS, KV_HEADS, DIM, LENGTH = 4, 2, 16, 14
SETTINGS = [
    {},
    {"window_size": 1, "num_sinks": 0, "decay": "learned"},
    {"window_size": 5, "feature_map": "hedgehog", "normalization": "window_maximum"},
    {"window_size": 5, "normalization": "window_maximum", "rope": "none"},
    {"window_size": 3, "num_sinks": 7, "decay": "learned", "rope": "partial", "rope_frequencies": 1},
    {"window_size": 3, "num_sinks": 2, "trained_length": 5},
    {"window_size": 1, "num_sinks": 3, "feature_map": "hedgehog"},
]


def hybrid(settings) -> HybridAttention:
    checked = LinearAttentionSettings({"mechanism": "hybrid", **settings}, is_causal=True, model_type="test")
    mechanism = HybridAttention(checked, LayerShape(HEADS, KV_HEADS, DIM, 0, None, rotary=Rotary((1.0, 0.1)))).eval()
    mechanism.reset_parameters()
    for parameter in mechanism.feature_map.parameters():  # some of which start at 0
        torch.nn.init.normal_(parameter, std=0.3)
    if mechanism.decay is not None:
        torch.nn.init.constant_(mechanism.decay.rate, -1.0)  # from 0.3 nats a token
    return mechanism


def at(mechanism, start, stop):
    """The second row has no padding, and is one token ahead."""
    positions = torch.arange(start, stop).expand(2, -1) + torch.tensor([[-1], [0]])
    return {"positions": positions.clamp(min=0).int()} if mechanism.needs_positions else {}


def decoded(mechanism, query, key, value):
    """Outputs of all tokens but the first two, of which one is padding in the first row, and the last state."""
    mask = torch.tensor([[False, True], [True, True]])
    options = {"scaling": 0.25, "is_causal": True}
    outputs = []
    first = (x[:, :, :2] for x in (query, key, value))
    _, state = call_mechanism(mechanism, *first, attention_mask=mask, state=None, **options, **at(mechanism, 0, 2))
    for t in range(2, LENGTH):
        token = (x[:, :, t : t + 1] for x in (query, key, value))
        output, state = call_mechanism(
            mechanism, *token, attention_mask=None, state=state, **options, **at(mechanism, t, t + 1)
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


@torch.no_grad()
@pytest.mark.parametrize("backend", ["c", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_step_is_the_form_of_many_tokens(monkeypatch, settings, dtype, backend):
    if backend == "c" and library() is None:
        pytest.skip("the package was installed without its C kernels")
    if backend == "torch":
        monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    mechanism = hybrid(settings)
    inputs = [torch.randn(2, heads, LENGTH, DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    calls = []
    if backend == "c":
        step = IMPLEMENTATIONS["hybrid_step"]
        monkeypatch.setitem(IMPLEMENTATIONS, "hybrid_step", lambda *given: calls.append(1) or step(*given))
    else:
        in_torch = HybridAttention._step_in_torch
        monkeypatch.setattr(HybridAttention, "_step_in_torch", lambda *given: calls.append(1) or in_torch(*given))
    output, state = decoded(mechanism, *inputs)
    # In torch a window that still holds a sink, or nothing, is left to the form of many tokens.
    sinks_leave = mechanism.num_sinks + mechanism.window_size - 1
    assert LENGTH - 2 - (0 if backend == "c" else sinks_leave) <= len(calls) <= LENGTH - 2
    monkeypatch.setattr(HybridAttention, "_step", lambda *given: None)
    expected, expected_state = decoded(mechanism, *inputs)
    # sums of 14 terms of the size of 1, which float32 rounds at 6e-8; bfloat16 rounds the outputs at 4e-3
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    for actual, wanted in zip(state, expected_state):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.skipif(library() is None, reason="the package was installed without its C kernels")
def test_a_static_cache_holds_dense_tensors_so_that_no_step_copies_them():
    mechanism, layer = hybrid({"window_size": 3, "num_sinks": 2}), LinearAttentionStateLayer(64, static=True)
    query, key, value = (torch.randn(2, LENGTH, heads, DIM).transpose(1, 2) for heads in (HEADS, KV_HEADS, KV_HEADS))
    _, state = call_mechanism(
        mechanism, query, key, value, attention_mask=None, state=None, scaling=0.25, is_causal=True
    )
    assert not all(tensor.is_contiguous() for tensor in state)  # else the next line would not show anything
    layer.store(state)
    assert all(tensor.is_contiguous() for tensor in layer.state)


def static_layer(mechanism, query, key, value, count):
    """A static cache layer after `count` tokens."""
    layer = LinearAttentionStateLayer(64, static=True)
    first = (x[:, :, :count] for x in (query, key, value))
    options = {"attention_mask": None, "scaling": 0.25, "is_causal": True}
    layer.store(call_mechanism(mechanism, *first, state=None, **options, **at(mechanism, 0, count))[1])
    return layer


@torch.no_grad()
@pytest.mark.skipif(library() is None, reason="the package was installed without its C kernels")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_step_in_place_is_one_that_is_not(settings):
    mechanism = hybrid(settings)
    inputs = [torch.randn(2, heads, LENGTH, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    layer, options = static_layer(mechanism, *inputs, 1), {"attention_mask": None, "scaling": 0.25, "is_causal": True}
    state, memory = tuple(x.clone() for x in layer.state), [x.data_ptr() for x in layer.state]
    for t in range(1, LENGTH):
        token, further = [x[:, :, t : t + 1] for x in inputs], {**options, **at(mechanism, t, t + 1)}
        expected, state = call_mechanism(mechanism, *token, state=state, **further)
        output, new = call_mechanism(mechanism, *token, state=layer.state, in_place=True, **further)
        layer.store(new)
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
        torch.testing.assert_close(layer.state, state, rtol=0, atol=0)
    assert [x.data_ptr() for x in layer.state] == memory


@torch.no_grad()
@pytest.mark.skipif(library() is None, reason="the package was installed without its C kernels")
def test_a_step_in_place_that_is_refused_changes_nothing():
    mechanism = hybrid({"window_size": 3, "num_sinks": 2})
    inputs = [torch.randn(2, heads, LENGTH, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    state = static_layer(mechanism, *inputs, LENGTH - 1).state
    kept = [x.clone() for x in state]
    query, key, value = (x[:, :, -1:] for x in inputs)
    options = {"attention_mask": None, "scaling": 0.25, "is_causal": True, "in_place": True}
    strided = (*state[:1], state[1].mT.contiguous().mT, *state[2:])
    with pytest.raises(ValueError, match=r"`state` has a tensor with strides .* dense"):
        call_mechanism(mechanism, query, key, value, state=strided, **options)
    with pytest.raises(ValueError, match="it must have"):
        call_mechanism(mechanism, query, key[..., :8], value, state=state, **options)
    torch.testing.assert_close(list(state), kept, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(library() is None, reason="the package was installed without its C kernels")
def test_a_compiled_step_writes_a_static_cache_without_a_copy():
    mechanism = hybrid({"window_size": 5})
    inputs = [torch.randn(2, heads, LENGTH, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    layers = [static_layer(mechanism, *inputs, LENGTH - 1) for _ in range(2)]
    token = [x[:, :, -1:] for x in inputs]
    options = {"attention_mask": None, "scaling": 0.25, "is_causal": True, **at(mechanism, LENGTH - 1, LENGTH)}

    def step(layer, *tensors):
        output, state = call_mechanism(mechanism, *tensors, state=layer.state, in_place=True, **options)
        layer.store(state)
        return output

    compiled = torch.compile(step, fullgraph=True)
    output, (code,) = run_and_get_code(compiled, layers[0], *token)
    torch.testing.assert_close(output, step(layers[1], *token))
    torch.testing.assert_close(layers[0].state, layers[1].state)
    assert ".hybrid_step_.default(" in code
    assert "copy__" not in code  # what the compiler calls its copies into the tensors of a cache
