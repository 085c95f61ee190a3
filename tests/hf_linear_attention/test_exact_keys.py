"""Exact keys behind the window: what they start as, and who refuses them; which ones are kept, the matrix tests."""

from __future__ import annotations

import pytest
import torch
from matrix import attend, mechanism_of, qkv, sample_inputs, stock_model
from transformers import BloomConfig, BloomForCausalLM

from hf_linear_attention import convert


SETTINGS = {"mechanism": "hybrid", "window_size": 4, "num_sinks": 1, "num_exact_keys": 3, "num_features": 8}


@torch.no_grad()
@pytest.mark.parametrize(("count", "window"), [(3, 7), (40, 40)])
def test_before_training_they_are_a_longer_window(count, window):
    """With as many exact keys as there are behind the window, attention is that of softmax."""
    model, inputs = stock_model("llama").eval(), sample_inputs("llama", length=30)
    kept = convert(model, **{**SETTINGS, "num_exact_keys": count})(**inputs).logits
    longer = convert(model, **{**SETTINGS, "num_exact_keys": 0, "window_size": window})(**inputs).logits
    torch.testing.assert_close(kept, longer, rtol=1e-4, atol=1e-4)
    if window > 30:
        torch.testing.assert_close(kept, model(**inputs).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("given", [{}, {"window_size": 5}, {"num_exact_keys": 0}])
def test_a_default_that_is_impossible_is_left_out(given, caplog):
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4))
    settings = convert(model, **given).config.linear_attention
    assert settings["num_exact_keys"] == 0
    # Without a limit of positions the state has 1,024 tokens, of which the window takes all but sinks and features.
    assert settings["window_size"] == given.get("window_size", 996)
    said = "has ALiBi positions, and `hybrid` with `num_exact_keys`"
    assert (said in caplog.text) == ("num_exact_keys" not in given)


@torch.no_grad()
def test_it_needs_the_scores():
    mechanism = mechanism_of(SETTINGS)
    with pytest.raises(ValueError, match="`num_exact_keys` needs `gates`"):
        attend(mechanism, *qkv(9))
