"""`--state_bytes`: what a budget holds, and that it is never exceeded."""

from __future__ import annotations

import pytest
import torch
from caches import cache_of
from transformers import AutoConfig, LlamaForCausalLM

from hf_linear_attention import convert
from hf_linear_attention.conversion.plan import LINEAR_SHARE, VECTOR, split_budget, state_bytes, with_budget
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


def size_of(folder, dtype=torch.float32, **settings) -> int:
    """Of the state that a model really keeps after a prompt longer than its window."""
    model = convert(str(folder), **settings).to(dtype)
    cache = cache_of(model(torch.randint(3, 64, (1, 20)), use_cache=True))
    return sum(layer.state_bytes() for layer in cache.layers)


@torch.no_grad()
@pytest.mark.parametrize(
    ("mechanism", "budget", "dtype"),
    [("hybrid", 20_000, torch.float32), ("hybrid", 100_001, torch.bfloat16), ("window", 33_333, torch.bfloat16)],
)
def test_a_budget_is_used_and_not_exceeded(llama, mechanism, budget, dtype):
    settings = {"mechanism": mechanism, "rope": "partial"} if mechanism == "hybrid" else {"mechanism": mechanism}
    config = AutoConfig.from_pretrained(llama)
    chosen = with_budget({**settings, "state_bytes": budget}, LlamaForCausalLM, config, dtype)
    needed = size_of(llama, dtype, **chosen)
    assert needed <= budget
    assert size_of(llama, dtype, **{**chosen, "window_size": chosen["window_size"] + 1}) > budget
    modules = linear_attention_modules(convert(str(llama), **chosen)).values()
    assert sum(state_bytes(module, dtype) or 0 for module in modules) == needed
    if mechanism == "hybrid":
        assert chosen["num_features"] % VECTOR == 0
        without = size_of(llama, dtype, **{**chosen, "num_features": chosen["num_features"] - VECTOR or 1})
        assert abs((needed - without) / VECTOR * chosen["num_features"] - LINEAR_SHARE * budget) < 16 * (
            needed - without
        )


def test_a_given_size_stays():
    def bytes_of(sized):
        tokens = sized["window_size"] + sized["num_sinks"] + sized["num_exact_keys"]
        return 100 * tokens + 50 * sized["num_features"] + 7

    def divided(budget, **given):
        chosen = split_budget(budget, {"mechanism": "hybrid", **given}, bytes_of)
        return [chosen[name] for name in ("num_features", "num_sinks", "num_exact_keys", "window_size")]

    assert divided(12_000, num_features=10, num_sinks=1, num_exact_keys=0) == [10, 1, 0, 113]
    # A sixth of 13,000 bytes is 43 features; of 99 tokens that are left behind the first two, 74 are exact keys.
    assert divided(13_000) == [48, 4, 75, 26]
    assert divided(13_000, window_size=40) == [48, 4, 61, 40]
    assert divided(13_000, num_exact_keys=30) == [48, 4, 30, 71]


def test_a_preset_splits_its_own_bytes_where_heads_are_small(llama):
    config = AutoConfig.from_pretrained(llama)
    sizes = {"window_size": 16, "num_sinks": 4, "num_features": 64, "num_exact_keys": 48}
    small = with_budget(
        {"mechanism": "hybrid", **sizes, "state_bytes": "as_sized"}, LlamaForCausalLM, config, torch.float32
    )
    assert small["num_features"] < 64
    assert small["num_exact_keys"] > 48
    assert size_of(llama, **small) <= size_of(llama, mechanism="hybrid", **sizes)
    config.head_dim = 64
    large = with_budget(
        {"mechanism": "hybrid", **sizes, "state_bytes": "as_sized"}, LlamaForCausalLM, config, torch.float32
    )
    assert large == {"mechanism": "hybrid", **sizes}
