"""Exact keys behind the window: which ones are kept, who refuses them, and what their scores learn from."""

from __future__ import annotations

import pytest
import reference
import torch
from matrix import attend, hidden_states_of, mechanism_of, move, padding, qkv, sample_inputs, stock_model
from transformers import BloomConfig, BloomForCausalLM

from hf_linear_attention import convert
from hf_linear_attention.kernels.cpu import library
from hf_linear_attention.mechanisms.base import Rotary
from hf_linear_attention.torch_kernels import exact_keys
from hf_linear_attention.torch_kernels.implementations import IMPLEMENTATIONS


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


LONG = {"mechanism": "hybrid", "window_size": 5, "num_sinks": 2, "num_exact_keys": 19, "num_features": 8}
LAYERS = [
    {"decay": "learned", "feature_map": "hedgehog", "num_exact_keys": 40},
    {"rope": "partial", "rope_frequencies": 1, "trained_length": 30, "decay": "learned"},
]
PARTS = ([133], [70, 1, 1, 61], [20, 53, 1, 59])  # single tokens behind all padding


@torch.no_grad()
@pytest.mark.skipif(library() is None, reason="the package was installed without its C kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["left", "interior"])
@pytest.mark.parametrize("settings", LAYERS, ids=str)
def test_c_keeps_what_torch_keeps_and_either_goes_on_where_the_other_stopped(settings, kind, dtype, monkeypatch):
    mechanism = move(mechanism_of({**LONG, **settings}, head_dim=16, rotary=Rotary((1.0, 0.03)), is_causal=True))
    mechanism.score_projection[1], mechanism.score_slope[1] = 0, 0  # the second head has equal scores alone
    inputs, mask = qkv(133, dim=16, dtype=dtype), padding(133, kind)
    gates = mechanism.gates(hidden_states_of(inputs[1]))
    positions = (torch.ones(2, 133) if mask is None else mask).cumsum(dim=1).int() - 1

    def run(lengths, without):
        """Outputs and the last state, of which the implementations in C compute all parts or all but every second."""
        state, outputs, start, calls = None, [], 0, []
        for number, length in enumerate(lengths):
            part = slice(start, start + length)
            start += length
            with monkeypatch.context() as patched:
                for name in ("hybrid", "hybrid_step"):
                    found = IMPLEMENTATIONS[name]
                    patched.setitem(IMPLEMENTATIONS, name, lambda *x, f=found: calls.append(f(*x)) or calls[-1])
                    if number % 2 == without or without == "always":
                        patched.delitem(IMPLEMENTATIONS, name)
                given = {"positions": positions[:, part].clamp(min=0)} if mechanism.needs_positions else {}
                given["gates"], of_part = gates[:, part], None if mask is None or length == 1 else mask[:, part]
                output, state = attend(mechanism, *(x[:, :, part] for x in inputs), of_part, state, **given)
            outputs.append(output)
        return torch.cat(outputs, dim=1), state, calls

    expected, expected_state, _ = run([133], "always")
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for lengths in PARTS:
        for without in (None, 0, 1):
            output, state, calls = run(lengths, without)
            assert all(found is not None for found in calls)
            assert len(calls) == sum(number % 2 != without for number in range(len(lengths)))
            torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(state[0], expected_state[0], rtol=1e-4, atol=1e-4)
            for kept, expected_kept in zip(state[1:], expected_state[1:]):
                torch.testing.assert_close(kept, expected_kept, rtol=0, atol=0)
