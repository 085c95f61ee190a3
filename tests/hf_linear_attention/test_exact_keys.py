"""Exact keys behind the window: what they start as, and who refuses them; which ones are kept, the matrix tests."""

from __future__ import annotations

import pytest
import torch
from matrix import attend, mechanism_of, qkv, sample_inputs, stock_model
from transformers import BloomConfig, BloomForCausalLM

from hf_linear_attention import convert
from hf_linear_attention.torch_kernels.exact_keys import NEVER, kept_at_chunks


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


@torch.no_grad()
@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("trained_length", [12, None])
@pytest.mark.parametrize(
    "more", [{}, {"decay": "learned", "num_sinks": 0}, {"feature_map": "hedgehog", "rope": "before_map"}]
)
def test_steps_in_torch_are_a_prompt(count, trained_length, more):
    """From any token on, in float64, which no kernel takes: with an empty window and a full one, with equal scores
    and without sums, and the state as well."""
    settings = {**SETTINGS, "num_exact_keys": count, "num_sinks": 3, "trained_length": trained_length, **more}
    model = convert(stock_model("llama"), **settings).double().eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.3)
    length, inputs = 30, sample_inputs("llama", length=30)["input_ids"]
    inputs[:, 10:16] = inputs[:, 10:11]  # equal hidden states, so that their scores differ by their positions only
    for layer in model.model.layers:
        if count:
            layer.self_attn.linear_attention.score_slope.zero_()
    whole = model(inputs, use_cache=True)
    for first in (1, 2, 6, 11, 20):
        cache, found = model(inputs[:, :first], use_cache=True).past_key_values, []
        for place in range(first, length):
            found.append(model(inputs[:, place : place + 1], past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(found, dim=1), whole.logits[:, first:], rtol=1e-9, atol=1e-9)
        for layer, other in zip(cache.layers, whole.past_key_values.layers):
            torch.testing.assert_close(layer.state, other.state, rtol=1e-6, atol=1e-6)  # scores are float32


@pytest.mark.parametrize(("count", "chunks", "size"), [(5, 13, 4), (9, 8, 4), (3, 5, 7), (3, 1, 7)])
def test_the_scan_keeps_what_one_chunk_after_the_other_keeps(count, chunks, size):
    """With equal scores, of which the first one wins, and places without a key."""
    batch, heads, total = 2, 3, count + chunks * size
    score = torch.randn(batch, heads, total).mul(2).round()
    score = score.masked_fill(torch.rand(batch, 1, total) < 0.4, NEVER)
    score[1, :, :count] = NEVER
    numbers = torch.randint(1, 4, (batch, chunks * size)).sort(dim=1).values
    following = torch.cat((numbers[:, size::size], numbers[:, -1:]), dim=1)
    own = torch.cat((numbers.new_zeros(batch, count), numbers), dim=1)[:, None].expand(-1, heads, -1)
    for packed in (None, (own, following)):
        if packed:
            score[..., :count] = NEVER  # nothing precedes packed sequences
        found = kept_at_chunks(score, count, size, packed)
        for b, h in torch.cartesian_prod(torch.arange(batch), torch.arange(heads)).tolist():
            kept = [place for place in range(count) if score[b, h, place] > NEVER]
            for chunk in range(chunks + 1):
                places = found[b, h, chunk].tolist()
                assert places == sorted(places)
                # The others are empty: those that were so at the start.
                assert kept == [place for place in places if place >= count or score[b, h, place] > NEVER]
                new = range(count + chunk * size, min(count + (chunk + 1) * size, total))
                seen = [place for place in (*kept, *new) if score[b, h, place] > NEVER]
                if packed and chunk < chunks:
                    seen = [place for place in seen if own[b, h, place] == following[b, chunk]]
                kept = sorted(sorted(seen, key=lambda place: (-score[b, h, place].item(), place))[:count])
