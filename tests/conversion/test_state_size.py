"""`state_tokens`: the default follows the trained length, what a budget holds is used and never exceeded."""

from __future__ import annotations

import pytest
import torch
from caches import cache_of
from transformers import AutoConfig

from hf_linear_attention import convert, convert_config, state_size
from hf_linear_attention.mechanisms.base import AttentionMechanism
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.state_size import SIZES, default_state_tokens, state_bytes


def size_of(model) -> int:
    """Of the state that a model really keeps after a prompt longer than its window."""
    cache = cache_of(model(torch.randint(3, 64, (1, 20)), use_cache=True))
    return sum(layer.state_bytes() for layer in cache.layers)


@torch.no_grad()
@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"mechanism": "hybrid", "rope": "partial"}, torch.float32),
        ({"mechanism": "hybrid", "num_exact_keys": 0}, torch.bfloat16),
        ({"mechanism": "window"}, torch.bfloat16),
    ],
)
def test_a_budget_is_used_and_not_exceeded(llama, settings, dtype):
    config, tokens = AutoConfig.from_pretrained(llama), 120
    settings |= {"trained_length": 120}
    chosen = convert_config(config, **settings, state_tokens=tokens, dtype=dtype).linear_attention
    budget = tokens * config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * dtype.itemsize
    sized = {**settings, **{name: chosen[name] for name in SIZES if name in chosen}}
    model = convert(str(llama), **sized).to(dtype)
    assert (needed := size_of(model)) <= budget
    assert sum(state_bytes(module, dtype) or 0 for module in linear_attention_modules(model).values()) == needed
    rest = "num_exact_keys" if chosen.get("num_exact_keys") else "window_size"
    assert size_of(convert(str(llama), **{**sized, rest: chosen[rest] + 1}).to(dtype)) > budget


def test_the_division(llama):
    """A quarter is the window, there are four sinks; sizes that are given stay, and the rest follows them."""
    config = AutoConfig.from_pretrained(llama)

    def sizes(**given):
        found = convert_config(config, mechanism="hybrid", trained_length=512, state_tokens=200, **given)
        return {name: found.linear_attention[name] for name in SIZES}

    chosen = sizes()
    assert (chosen["window_size"], chosen["num_sinks"], chosen["num_features"]) == (50, 4, 32)
    with_fewer = sizes(window_size=10, num_sinks=2, num_features=16)
    assert [with_fewer[name] for name in SIZES[:3]] == [10, 2, 16]
    assert with_fewer["num_exact_keys"] > chosen["num_exact_keys"]
    assert sizes(num_exact_keys=7)["window_size"] > 100


def test_layers_that_are_alike_are_measured_once(llama, monkeypatch):
    """Also where a setting is a list: a dry run of 24 layers took a minute when each of them was measured."""
    measured, layout = [], AttentionMechanism.state_layout
    monkeypatch.setattr(state_size, "_MEASURED", {})
    monkeypatch.setattr(
        AttentionMechanism, "state_layout", lambda self, *given: (measured.append(self), layout(self, *given))[1]
    )
    lists = [{"rope_frequencies": frequencies} for frequencies in (1, [1, 1, 1, 1], [1, 2, 1, 2])]
    config, counts = AutoConfig.from_pretrained(llama, num_hidden_layers=4), []
    for settings in lists:
        state_size._MEASURED.clear()
        measured.clear()
        convert_config(config, mechanism="hybrid", rope="partial", trained_length=512, state_tokens=200, **settings)
        counts.append(len(measured))
    assert counts[0] == counts[1] < counts[2]


def test_the_default_follows_the_trained_length(llama):
    """512: 128, 8k: 1,024, 32k: 2,048, 128k: 8,192 (issue W)."""
    lengths = {32: 32, 128: 96, 512: 128, 2048: 512, 8192: 1024, 32768: 2048, 131072: 8192, 2**20: 8192, None: 1024}
    assert {length: default_state_tokens(length) for length in lengths} == lengths
    config = AutoConfig.from_pretrained(llama)
    for length in (512, 8192):
        config.max_position_embeddings = length
        auto, given = (
            convert_config(config, mechanism="hybrid", state_tokens=tokens).linear_attention
            for tokens in ("auto", default_state_tokens(length))
        )
        assert auto == given


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"state_tokens": 95}, "at least 96"),
        ({"state_tokens": 513}, "at most 512"),
        ({"state_tokens": 96, "window_size": 97}, "smaller sizes"),
        ({"state_tokens": 96, "mechanism": "linear"}, "no window"),
    ],
)
def test_impossible_sizes_are_refused(llama, settings, words):
    config = AutoConfig.from_pretrained(llama)
    config.max_position_embeddings = 512
    with pytest.raises(ValueError, match=words):
        convert_config(config, **{"mechanism": "hybrid", **settings})
