"""`hybrid` by its joint operator in C against its parts in torch at float64, in one go and in two."""

from __future__ import annotations

import pytest
import torch

from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.kernels.cpu import library
from hf_linear_attention.mechanisms import hybrid as mechanism_hybrid
from hf_linear_attention.mechanisms.base import LayerShape, MechanismInputs, Rotary
from hf_linear_attention.mechanisms.hybrid import HybridAttention


pytestmark = pytest.mark.skipif(library() is None, reason="no C kernels")

HEADS, KV_HEADS, DIM = 4, 2, 8
PARTIAL = {"rope": "partial", "trained_length": 40, "decay": "learned"}
# Settings, tokens, and after how many of them the rest follows with a state.
CASES = {
    "shorter than the window": ({"window_size": 64}, 13, None),
    "one token after others": ({"window_size": 5}, 31, 30),
    "window of one block and one": ({"window_size": 33, "num_sinks": 0}, 130, None),
    "in two parts": ({"window_size": 44, "num_sinks": 4}, 101, 60),
    "everything": ({"window_size": 20, "num_sinks": 3} | PARTIAL, 101, 7),
    "interleaved": ({"window_size": 20, "num_sinks": 3, "interleaved": True} | PARTIAL, 70, None),
    "hedgehog": ({"window_size": 20, "feature_map": "hedgehog"} | PARTIAL, 70, 33),
}


def mechanism_of(interleaved: bool = False, **settings) -> HybridAttention:
    settings = {"mechanism": "hybrid", "num_features": 6} | settings
    checked = dict(LinearAttentionSettings(settings, is_causal=True, model_type="test", max_length=None))
    checked["rope_frequencies"] = [2]
    rotary = Rotary((1.0, 0.3, 0.09, 0.01), interleaved)
    mechanism = HybridAttention(checked, LayerShape(HEADS, KV_HEADS, DIM, 0, None, rotary=rotary))
    mechanism.reset_parameters()
    for parameter in mechanism.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return mechanism


def tensors_of(length: int, std: float) -> list[torch.Tensor]:
    """With heads beside tokens, as models have them."""
    made = [torch.randn(2, length, heads, DIM).transpose(1, 2) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [made[0] * std, made[1] * std, made[2]]


def results(mechanism, tensors, split, mask=None):
    """The output, and the gradients of the inputs and of the parameters."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    length = leaves[0].shape[2]
    positions = (torch.ones(2, length) if mask is None else mask).cumsum(dim=1).int().sub(1).clamp(min=0)
    outputs, state = [], None
    for part in (slice(0, split), slice(split, None)) if split else (slice(None),):
        output, state = mechanism.attend(
            *(x[:, :, part] for x in leaves),
            attention_mask=None if mask is None else mask[:, part],
            **{"scaling": 0.3, "is_causal": True, "state": state, "positions": positions[:, part]},
        )
        outputs.append(output)
    output = torch.cat(outputs, dim=1)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(0)).to(output.dtype)
    parameters = list(mechanism.parameters())
    return [output, *torch.autograd.grad((output * direction).sum(), [*leaves, *parameters], materialize_grads=True,
                                         allow_unused=True)]  # fmt: skip


def compare(mechanism, tensors, split, mask=None, error: float = 2e-5):
    actual = results(mechanism, tensors, split, mask)
    exact = results(mechanism.double(), [x.double() for x in tensors], split, mask)
    for a, e in zip(actual, exact):
        assert (a - e).norm() <= error * (e.norm() + exact[1].norm() / 100)


@pytest.mark.parametrize("std", [1.0, 6.0])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_agree_with_float64(name, std):
    settings, length, split = CASES[name]
    compare(mechanism_of(**settings), tensors_of(length, std), split)


def test_padding_agrees_with_float64():
    settings, length, split = CASES["everything"]
    mask = torch.rand(2, length) > 0.3
    compare(mechanism_of(**settings), tensors_of(length, 1.0), split, mask)


def test_bfloat16_is_as_near_to_float64_as_its_own_rounding():
    mechanism, tensors = mechanism_of(window_size=20), [x.bfloat16() for x in tensors_of(70, 1.0)]
    compare(mechanism, tensors, 33, error=1e-2)


def test_one_operator_computes_window_and_far_keys(monkeypatch):
    mechanism, tensors = mechanism_of(window_size=5), tensors_of(20, 1.0)
    monkeypatch.setattr(mechanism_hybrid, "map_attention", None)
    assert results(mechanism, tensors, None)[0].isfinite().all()
    mechanism = mechanism_of(window_size=5, normalization="separate")
    with pytest.raises(TypeError):  # two denominators: the far keys alone
        results(mechanism, tensors, None)


def test_a_state_without_the_keys_of_its_window_is_refused():
    mechanism, (query, key, value) = mechanism_of(window_size=5), tensors_of(20, 1.0)
    state = torch.zeros(2, KV_HEADS, 6, DIM + 2)
    seen = torch.ones(2, 20, 4, dtype=torch.bool)
    line = mechanism_hybrid.Line(key, value, torch.ones(2, 20, dtype=torch.bool), None)
    inputs = MechanismInputs(query, key, value, None, 0.3, is_causal=True)
    with pytest.raises(ValueError, match="20 queries, 20 keys, a window of 5, a state"):
        mechanism._at_once(inputs, line, (key[:, :, :4], value[:, :, :4]), seen, state)
