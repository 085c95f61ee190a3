"""A cache belongs to its rows, its mechanism and its kind of attention, and can be what `generate` asks for."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
from architectures import tiny_model
from caches import cache_of, past
from matrix import recording_cache, stock_model
from transformers import QuantizedCache, StaticCache, cache_utils

from hf_linear_attention import convert, softmax_attention
from hf_linear_attention.attention.cache import LinearAttentionStateLayer
from hf_linear_attention.kernels import cpu as kernels_cpu


IDS = torch.randint(3, 64, (3, 9), generator=torch.Generator().manual_seed(3))
CASES = {
    "linear": {"mechanism": "linear", "num_features": 16},
    "performer": {"mechanism": "performer", "num_features": 16},
    "hybrid": {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 16},
    "softmax-first": {"mechanism": "linear", "num_features": 16, "layers": [1, 2]},
    "softmax-last": {"mechanism": "hybrid", "window_size": 4, "num_features": 16, "layers": [0, 1]},
}


@functools.cache
def build(name, **changes):
    return convert(stock_model("llama", **changes), **CASES[name])


@torch.no_grad()
def read(model, ids, cache=None):
    return model(ids, **past(cache), use_cache=True)


def tensors(cache):
    """All that a cache holds, and how many tokens it says these are."""
    held = []
    for layer in cache.layers:
        parts = [getattr(layer, name, None) or () for name in ("state", "state_at_crop", "pending")]
        held.append(([t for part in parts for t in part if t is not None], int(layer.get_seq_length())))
        if not isinstance(layer, LinearAttentionStateLayer):
            held.append(([layer.keys, layer.values], layer.keys.shape[2]))
    return held


def refuses(model, ids, cache, match, **inputs):
    """A call is refused, and the cache is as it was."""
    before = copy.deepcopy(tensors(cache))
    with torch.no_grad(), pytest.raises(ValueError, match=match):
        model(ids, **past(cache), **inputs)
    for (now, count), (then, count_then) in zip(tensors(cache), before, strict=True):
        assert count == count_then
        assert len(now) == len(then)
        assert all(torch.equal(*pair) for pair in zip(now, then))


def goes_on(model, cache, rows, start=5):
    """And the cache still goes on as if nothing had been."""
    expected = read(model, IDS[:rows]).logits[:, start:]
    torch.testing.assert_close(read(model, IDS[:rows, start:], cache).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("rows", "new"), [((1, 3), 1), ((3, 2), 4)], ids=str)
def test_other_rows_are_refused_before_anything_changes(name, rows, new):
    model, (cached, given) = build(name), rows
    cache = cache_of(read(model, IDS[:cached, :5]))
    repeat = r".*cache.batch_repeat_interleave\(3\)" if cached == 1 else ""
    said = rf"a cache of {cached} rows? and an input of {given}\.{repeat}"
    refuses(model, IDS[:given, 5 : 5 + new], cache, said)
    goes_on(model, cache, cached)


@pytest.mark.skipif(kernels_cpu.library() is None, reason="only the C kernel of a step writes over a state")
def test_a_step_writes_over_the_state_that_a_step_before_it_made():
    """And over no other: not over that of a prompt, whose memory others may have, a copied or a recorded one."""
    expected = read(model := build("hybrid"), IDS).logits
    cache = cache_of(read(model, IDS[:, :4]))
    held, layer = [], cache.layers[0]
    for place in range(4, 9):
        if place == 7:
            copied, recorded = copy.deepcopy(cache), copy.deepcopy(cache)
            recorded.activate_past_recording()
        held.append((layer.state, [x.clone() for x in layer.state]))
        found = read(model, IDS[:, place : place + 1], cache).logits
        torch.testing.assert_close(found, expected[:, place : place + 1], atol=1e-4, rtol=1e-4)
    assert [all(map(torch.equal, *pair)) for pair in held] == [True, False, False, False, False]
    goes_on(model, copied, 3, start=7)
    read(model, IDS[:, 7:8], recorded)
    recorded.crop(-1)
    goes_on(model, recorded, 3, start=7)
    cache.reset()
    assert not layer.owns_state


def test_a_step_does_not_write_over_a_state_that_a_graph_may_need():
    model = convert(stock_model("llama"), **{**CASES["hybrid"], "num_sinks": 0})  # no state is a part of a tensor
    cache = cache_of(read(model, IDS[:, :4]))
    model(IDS[:, 4:5], **past(cache))
    state, values = cache.layers[0].state, copy.deepcopy([x.detach() for x in cache.layers[0].state])
    read(model, IDS[:, 5:6], cache)
    assert all(map(torch.equal, state, values))


def test_an_emptied_cache_takes_any_rows_which_can_be_repeated_and_chosen():
    model = build("hybrid")
    cache = recording_cache(model)
    read(model, IDS[:1, :5], cache)
    cache.crop(-5)
    torch.testing.assert_close(read(model, IDS, cache).logits, read(model, IDS).logits)
    cache.reset()
    torch.testing.assert_close(read(model, IDS[:2], cache).logits, read(model, IDS[:2]).logits)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    cache.crop(-4)
    goes_on(model, cache, 2)


@pytest.mark.parametrize("cross", [True, False])
@torch.no_grad()
def test_an_encoder_decoder(cross):
    stock = tiny_model("bart", "AutoModelForSeq2SeqLM")
    model = convert(stock, num_features=16, cross_attention=cross)
    encoded = model.get_encoder()(IDS)
    one = type(encoded)(last_hidden_state=encoded.last_hidden_state[:1])
    cache = cache_of(model(encoder_outputs=one, decoder_input_ids=IDS[:1, :4], use_cache=True))
    for _ in range(1 + cross):
        with pytest.raises(ValueError, match="a cache of 1 row and an input of 3"):
            model(encoder_outputs=encoded, decoder_input_ids=IDS[:, 4:6], **past(cache))
        # the decoder's own state repeated, the encoder's forgotten
        cache.self_attention_cache.batch_repeat_interleave(3)


@pytest.mark.parametrize(
    "other",
    [
        {"mechanism": "hybrid", "window_size": 4, "num_features": 16},
        {"mechanism": "performer", "num_features": 16, "seed": 1},
        {"mechanism": "linear", "num_features": 24},
        {"mechanism": "aft", "variant": "simple"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["linear", "hybrid"])
def test_the_state_of_another_mechanism_is_refused(name, other):
    cache = cache_of(read(convert(stock_model("llama"), **other), IDS[:, :5]))
    said = r"with the state of \w+Attention\(.*\) in a layer of \w+Attention\(.*\)\."
    refuses(build(name), IDS[:, 5:], cache, said)


def test_the_state_of_other_heads_or_another_dtype_is_refused():
    strangers = build("hybrid", num_key_value_heads=1), build("hybrid", hidden_size=64)
    for stranger in (*strangers, copy.deepcopy(build("hybrid")).to(torch.bfloat16)):
        cache = cache_of(read(stranger, IDS[:, :5]))
        said = r"made of keys and values with \d heads of .*, and new ones with 2 heads"
        refuses(build("hybrid"), IDS[:, 5:], cache, said)


def test_softmax_and_linear_attention_refuse_the_cache_of_each_other():
    model, stock = build("linear"), stock_model("llama")
    cache, said = (cache_of(read(model, IDS[:, :5])), "a cache of linear attention in a layer that computes softmax")
    with softmax_attention(model):
        refuses(model, IDS[:, 5:], cache, said)
        exact = cache_of(read(model, IDS[:, :5]))
    refuses(stock, IDS[:, 5:], cache, said)
    goes_on(model, cache, 3)
    for other in (exact, cache_of(read(stock, IDS[:, :5]))):
        with pytest.raises(ValueError, match="already holds 5 tokens of softmax keys and values"):
            read(model, IDS[:, 5:], other)


def test_a_refused_mask_does_not_count_its_tokens():
    model = build("linear")
    cache = cache_of(read(model, IDS[:, :5]))
    hole = torch.ones(9, 9, dtype=torch.bool).tril()[None, None, 5:].expand(3, -1, -1, -1).clone()
    hole[..., 2, 6] = False
    refuses(model, IDS[:, 5:], cache, "see more than causality", attention_mask=hole)
    assert cache.get_seq_length() == 5


PROMPT = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(3))


class NoStream(contextlib.nullcontext):
    """In the place of a CUDA stream."""

    def wait_stream(self, other):
        pass


@pytest.fixture(params=["all", [0, 2]], ids=str, scope="module")
def model(request):
    converted = convert(stock_model("llama"), mechanism="linear", num_features=16, layers=request.param)
    converted.generation_config.pad_token_id, converted.generation_config.eos_token_id = 0, None
    return converted


def generate(model, **kwargs):
    return model.generate(PROMPT, max_new_tokens=8, do_sample=False, **kwargs)


def test_offloaded(model, monkeypatch):
    monkeypatch.setattr(torch, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: NoStream())
    result = generate(model, cache_implementation="offloaded", return_dict_in_generate=True)
    assert torch.equal(result.sequences, generate(model))
    # what remains softmax is still offloaded
    assert cache_of(result).offloading == (not all(hasattr(x, "state_bytes") for x in cache_of(result).layers))


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="the one backend without another package")
def test_quantized(model):
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    result = generate(model, **options, return_dict_in_generate=True)
    cache = cache_of(result)
    assert isinstance(cache, QuantizedCache)
    quantized = [index for index, layer in enumerate(cache.layers) if "Quantized" in type(layer).__name__]
    assert quantized == [index for index, layer in enumerate(cache.layers) if not hasattr(layer, "state_bytes")]
    if not quantized:  # the state is float32 all the same
        assert torch.equal(result.sequences, generate(model))


def test_static_has_room_for_what_it_was_made_for(model):
    cache = StaticCache(config=model.config, max_cache_len=PROMPT.shape[1] + 8)
    assert torch.equal(generate(model, **past(cache)), generate(model))
    assert cache.get_max_length() == PROMPT.shape[1] + 8


def test_continuous_batching_is_refused(model):
    said = "cannot store the recurrent state of linear attention; use `generate`"
    with pytest.raises(NotImplementedError, match=said):
        model.generate_batch([[3, 4, 5]], max_new_tokens=2)
    with softmax_attention(model):  # the stock model's own answer
        assert model.init_continuous_batching() is not None
