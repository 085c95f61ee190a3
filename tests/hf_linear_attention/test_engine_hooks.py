"""What an engine that keeps the states of its requests itself finds in a converted model."""

from __future__ import annotations

import pytest
import torch
from caches import cache_of
from matrix import stock_config
from transformers import AutoModelForCausalLM

from hf_linear_attention import convert


SETTINGS = {
    "hybrid": {"mechanism": "hybrid", "window_size": 4, "num_sinks": 1},
    "linear": {"mechanism": "linear"},
    "gated": {"mechanism": "linear", "decay": "gated"},
    "gated_delta": {"mechanism": "gated_delta"},
    "window": {"mechanism": "window", "window_size": 4},
    "performer": {"mechanism": "performer"},
}


def modules_of(model):
    return [layer.self_attn for layer in model.model.layers]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_layout_is_that_of_the_state_at_any_length(name):
    model = convert(AutoModelForCausalLM.from_config(stock_config("llama")), **SETTINGS[name]).eval()
    for length in (1, 20):
        with torch.no_grad():
            cache = cache_of(model(torch.ones(1, length, dtype=torch.long), use_cache=True))
        for module, layer in zip(modules_of(model), cache.layers):
            found = [(tensor.shape, tensor.dtype) for tensor in layer.state]
            assert module.linear_attention.state_layout(torch.float32) == found


def test_a_backend_takes_the_place_of_the_mechanism():
    model = convert(AutoModelForCausalLM.from_config(stock_config("llama")), mechanism="linear").eval()
    ids, seen = torch.arange(12, dtype=torch.long)[None], []
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        for module in modules_of(model):

            def compute(inputs, mechanism=module.linear_attention):
                seen.append(inputs)
                return mechanism(inputs)[0]

            module.linear_attention_backend = compute
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        model(ids[:, :1], use_cache=False)
    assert len(seen) == 2 * len(modules_of(model))
    assert all(inputs.positions is None for inputs in seen)
