"""Exact keys behind the window: which ones are kept, who refuses them, and what their scores learn from."""

from __future__ import annotations

import pytest
import reference
import torch
from matrix import attend, mechanism_of, qkv, sample_inputs, stock_model
from transformers import BloomConfig, BloomForCausalLM

from hf_linear_attention import convert
from hf_linear_attention.torch_kernels import exact_keys


SETTINGS = {"mechanism": "hybrid", "window_size": 4, "num_sinks": 1, "num_exact_keys": 3, "num_features": 8}


def chosen(scores, count, chunk, monkeypatch):
    """What `choose` keeps behind a window of 1 for each of N queries, bool `[B, Hkv, N, N]`, and what it displaces."""
    monkeypatch.setattr(exact_keys, "CHUNK", chunk)
    batch, heads, length = scores.shape
    padded = torch.nn.functional.pad(scores, (count, 0), value=exact_keys.NEVER)
    places = torch.arange(count + length).expand(batch, heads, -1)
    held, kept, displaced = places[..., :count], torch.zeros(batch, heads, length, count + length, dtype=torch.bool), []
    for steps in exact_keys.chunks_of(length):
        found = torch.cat((held, places[..., count + steps.start : count + steps.stop]), dim=2)
        choice = exact_keys.Choice(
            *(x[:, :, 0] for x in exact_keys.choose(padded.gather(2, found).unsqueeze(2), found.unsqueeze(2), count))
        )
        rows = kept[:, :, steps]
        rows.scatter_(3, choice.places.unsqueeze(2).expand(-1, -1, rows.shape[2], -1), choice.kept)
        displaced.append(torch.where(choice.is_displaced, choice.displaced - count, -1))
        held = found.gather(2, exact_keys.kept_after(padded.gather(2, found), count))
    return kept[..., count:], torch.cat(displaced, dim=2)


@pytest.mark.parametrize("chunk", [1, 3, 64])
@pytest.mark.parametrize("levels", [3, 1000])
def test_the_largest_scores_are_kept_and_each_other_key_is_displaced_once(chunk, levels, monkeypatch):
    """With few levels, most scores are equal, and then the earlier key stays."""
    scores = torch.randint(levels, (2, 3, 40), generator=torch.Generator().manual_seed(levels)).float()
    kept, displaced = chosen(scores, 5, chunk, monkeypatch)
    expected = reference.kept_keys(scores, 0, 0, 5)  # a key is behind a window of 0 from its own query on
    assert torch.equal(kept, expected)
    for row, head in ((row, head) for row in range(2) for head in range(3)):
        gone = displaced[row, head]
        assert sorted(gone[5:].tolist()) == sorted(
            {*range(40)} - {*expected[row, head, -1].nonzero().flatten().tolist()}
        )
        assert (gone[:5] == -1).all()


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
    assert settings["window_size"] == given.get("window_size", 16 if given else 64)
    said = "has ALiBi positions, and `hybrid` with `num_exact_keys` = 48 has no alibi form"
    assert (said in caplog.text) == ("num_exact_keys" not in given)


@torch.no_grad()
def test_it_needs_the_scores():
    mechanism = mechanism_of(SETTINGS)
    with pytest.raises(ValueError, match="`num_exact_keys` needs `gates`"):
        attend(mechanism, *qkv(9))


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("bert", {}, "with `num_exact_keys` = 3 has no bidirectional form"),
        ("llama", {"far": "gated_delta"}, "`num_exact_keys`"),
        ("llama", {"normalization": "window_maximum"}, "`num_exact_keys`"),
    ],
)
def test_who_has_none_refuses_it_by_name(model, settings, message):
    with pytest.raises(ValueError, match=message):
        convert(stock_model(model), **SETTINGS, **settings)


def test_alibi_refuses_it_by_name():
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match="with `num_exact_keys` = 3 has no alibi form"):
        convert(model, **SETTINGS)
