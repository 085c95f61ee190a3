"""`softmax_heads`: the chosen heads are exact softmax, the others are the mechanism, in every way of computing them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from matrix import add_gates, call_mechanism, sample_inputs, stock_config, stock_model
from transformers import BloomConfig, BloomForCausalLM, StaticCache

from hf_linear_attention import convert, convert_config, modeling_linear_attention, softmax_attention
from hf_linear_attention.attention.softmax_heads import keep_softmax_heads
from hf_linear_attention.mechanisms.base import LayerShape, MechanismInputs
from hf_linear_attention.mechanisms.registry import MECHANISMS


SHAPE = LayerShape(num_heads=6, num_key_value_heads=3, head_dim=8, layer=0, hidden_size=24)
CASES = {
    "linear": {"feature_map": "exp", "num_features": 8, "decay": "learned"},
    "performer": {"num_features": 16},
    "hybrid": {"window_size": 3, "num_sinks": 1, "num_features": 8},
    "window": {"window_size": 3, "num_sinks": 1},
    "gated_delta": {"num_features": 6},
    "hybrid-delta": {"mechanism": "hybrid", "window_size": 3, "num_sinks": 1, "num_features": 8, "far": "gated_delta"},
}
HEADS = [1, 4, 5]  # of the groups 0 and 2
EVERY = [[layer, head] for layer in range(3) for head in range(4)]


def mechanism_of(name: str, heads=(), dtype=torch.float64):
    cls = MECHANISMS[CASES[name].get("mechanism", name)]
    made = cls(cls.filled(CASES[name]), SHAPE).to(dtype)
    made.reset_parameters()
    if made.needs_gates:
        made.register_forward_pre_hook(add_gates)
    return keep_softmax_heads(made, heads) if heads else made


def inputs_of(batch=2, length=13, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sizes = ((batch, heads, length, 8) for heads in (6, 3, 3))
    return [torch.randn(size, generator=generator, dtype=dtype, requires_grad=True) for size in sizes]


def softmax_oracle(query, key, value, mask):
    """All N x N weights; 0 for a query that sees no key."""
    length = query.shape[2]
    visible = torch.ones(length, length, dtype=torch.bool).tril() & mask[:, None, None]
    logits = 0.3 * query @ key.repeat_interleave(2, dim=1).transpose(-1, -2)
    weights = torch.where(visible, logits - logits.masked_fill(~visible, -1e9).amax(-1, keepdim=True), -1e9).exp()
    weights = weights * visible
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return (weights @ value.repeat_interleave(2, dim=1)).transpose(1, 2)


MASKS = {
    "none": torch.ones(2, 13, dtype=torch.bool),
    "left": torch.tensor([[False] * 4 + [True] * 9, [True] * 13]),
    "holes": torch.tensor([[True] * 5 + [False] * 3 + [True] * 5, [False] * 13]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients_are_those_of_softmax_and_of_the_mechanism(name, mask):
    given = None if mask == "none" else MASKS[mask]
    options = {"attention_mask": given, "scaling": 0.3, "is_causal": True, "state": None}
    inputs = inputs_of()
    output, _ = call_mechanism(mechanism_of(name, HEADS), *inputs, **options)
    plain, _ = call_mechanism(mechanism_of(name), *inputs, **options)
    exact = softmax_oracle(*inputs, MASKS[mask])
    is_chosen = torch.tensor([head in HEADS for head in range(6)])[:, None]
    expected = torch.where(is_chosen, exact, plain)
    # float64; a padded query of the mechanism may see nothing, and both are 0 there
    real = MASKS[mask][:, :, None, None]
    torch.testing.assert_close(output * real, expected * real, rtol=1e-9, atol=1e-11)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * real
    found, wanted = (torch.autograd.grad((y * weight).sum(), inputs, retain_graph=True) for y in (output, expected))
    for mine, theirs in zip(found, wanted):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)
    assert output[1].abs().max() == 0 or mask != "holes"


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("split", "mask"), [([1] * 13, "left"), ([5, 1, 1, 6], "holes")])
def test_any_split_gives_one_forward_and_changes_no_state(name, split, mask):
    mechanism, (query, key, value) = mechanism_of(name, HEADS), inputs_of()
    options = {"scaling": 0.3, "is_causal": True}
    given = None if mask == "none" else MASKS[mask]
    whole, _ = call_mechanism(mechanism, query, key, value, attention_mask=given, state=None, **options)
    parts, state, start = [], None, 0
    for size in split:
        place = slice(start, start + size)
        before = copy.deepcopy(state)
        part = given if given is None else given[:, place]
        step = (query[:, :, place], key[:, :, place], value[:, :, place])
        old = state
        output, state = call_mechanism(mechanism, *step, attention_mask=part, state=state, **options)
        for a, b in zip(old or (), before or ()):
            assert a is b or torch.equal(a, b)
        absorbed = mechanism.absorb(MechanismInputs(*step, part, **options), old)
        for a, b in zip(state[-3:], absorbed[-3:]):
            assert a is b or torch.equal(a, b)
        parts.append(output)
        start += size
    assert state[-3].shape == (2, 2, 13, 8)  # of two groups
    real = MASKS[mask][:, :, None, None]
    torch.testing.assert_close(torch.cat(parts, dim=1) * real, whole * real, rtol=1e-9, atol=1e-11)


@pytest.fixture(scope="module")
def exact():
    """A model of which every head is softmax: the stock model, by way of the mechanism and its cache."""
    return convert(stock_model("llama"), mechanism="hybrid", window_size=3, num_features=8, softmax_heads=EVERY)


@pytest.fixture(scope="module")
def some():
    return convert(stock_model("llama"), mechanism="linear", num_features=8, softmax_heads=[[0, 3], [2, 0], [2, 1]])


@torch.no_grad()
def test_with_every_head_the_model_is_the_original(exact):
    stock, ids = stock_model("llama"), torch.randint(5, 60, (2, 21), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    mine, theirs = exact(**inputs).logits, stock(**inputs).logits
    torch.testing.assert_close(mine[mask.bool()], theirs[mask.bool()], rtol=1e-4, atol=1e-5)  # float32
    packed = {"input_ids": ids[1:], "position_ids": torch.cat((torch.arange(8), torch.arange(13)))[None]}
    mine, theirs = (model(**packed, use_cache=False).logits for model in (exact, stock))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine[:, 8:], exact(ids[1:, 8:]).logits, rtol=1e-4, atol=1e-5)
    for options in ({}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}, {"prompt_lookup_num_tokens": 2}):
        rows = slice(1, 2) if "prompt_lookup_num_tokens" in options else slice(None)
        prompt = {"input_ids": ids[rows], "attention_mask": mask[rows], "max_new_tokens": 9, "do_sample": False}
        assert torch.equal(exact.generate(**prompt, **options), stock.generate(**prompt, **options)), options


@torch.no_grad()
def test_a_rollback_and_a_continued_packed_prompt(some):
    ids = torch.randint(5, 60, (2, 15), generator=torch.Generator().manual_seed(0))
    whole = some(ids).logits
    cache = some(ids[:, :4], use_cache=True).past_key_values
    cache.activate_past_recording()
    some(ids[:, 4:9], past_key_values=cache)
    cache.crop(-3)
    logits = some(ids[:, 6:], past_key_values=cache, position_ids=torch.arange(6, 15)[None]).logits
    torch.testing.assert_close(logits, whole[:, 6:], rtol=1e-4, atol=1e-5)
    numbers = torch.tensor([1] * 5 + [2] * 7)
    mask = (numbers[:, None] == numbers).tril()[None, None]
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    first = some(ids[:1, :12], attention_mask=mask, position_ids=positions, use_cache=True)
    following = some(ids[:1, 12:], past_key_values=first.past_key_values, position_ids=torch.arange(7, 10)[None]).logits
    torch.testing.assert_close(following, some(ids[:1, 5:]).logits[:, -3:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_cache_holds_the_keys_of_the_kept_groups_only(some):
    cache = some(torch.randint(5, 60, (1, 11)), use_cache=True).past_key_values
    plain = convert(stock_model("llama"), mechanism="linear", num_features=8)
    other = plain(torch.randint(5, 60, (1, 11)), use_cache=True).past_key_values
    extra = [mine.state_bytes() - theirs.state_bytes() for mine, theirs in zip(cache.layers, other.layers)]
    group = 2 * 11 * 8 * 4  # keys and values of 11 tokens in float32
    assert extra == [group, 0, group]  # heads 0 and 1 of layer 2 share theirs


@torch.no_grad()
def test_a_copy_a_pickle_and_softmax_attention(some, exact):
    inputs = sample_inputs("llama")
    for other in (copy.deepcopy(some), pickle.loads(pickle.dumps(some))):
        assert torch.equal(other(**inputs).logits, some(**inputs).logits)
    with softmax_attention(some) as teacher:
        torch.testing.assert_close(teacher(**inputs).logits, stock_model("llama")(**inputs).logits)
    names = convert(stock_model("llama"), mechanism="linear", num_features=8).state_dict().keys()
    assert some.state_dict().keys() == names  # of a model without softmax heads


def test_a_checkpoint_without_the_code_refuses_such_heads(monkeypatch):
    """The line that gives heads softmax attention is left out of its code."""
    monkeypatch.setattr(modeling_linear_attention, "keep_softmax_heads", lambda mechanism, heads: mechanism)
    with pytest.raises(ValueError, match="needs code that this checkpoint lacks"):
        convert(stock_model("llama"), mechanism="linear", softmax_heads=[[0, 0]])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"softmax_heads": [[0, 4]]}, "heads [4] of layer 0, which has heads 0 to 3"),
        ({"softmax_heads": [[0, 1]], "layers": [1, 2]}, "lacks some of these layers"),
        ({"softmax_heads": "0.1"}, "it must be a list of [layer, head]"),
        ({"softmax_heads": [[0]]}, "it must be a list of [layer, head]"),
        ({"softmax_heads": [[0, 1]], "mechanism": "aft"}, "`aft` has no softmax_heads form"),
        ({"softmax_heads": [[0, 1]], "rope": "partial"}, "with `rope` = `partial` hides rotary positions"),
        ({"softmax_heads": [[0, 1]], "drop": ["softcap"]}, "not possible together with `drop`"),
        ({"softmax_heads": [[7, 1]]}, "layer 7"),
    ],
)
def test_what_is_not_possible_is_refused(settings, said):
    with pytest.raises(ValueError, match="softmax_heads") as caught:
        convert(stock_model("llama"), **{"mechanism": "linear", **settings})
    assert said in str(caught.value)


def test_other_models_and_caches_are_refused(some):
    with pytest.raises(ValueError, match="softmax_heads"):
        convert(stock_model("bert"), mechanism="linear", softmax_heads=[[0, 0]])
    with pytest.raises(ValueError, match="ALiBi"):
        convert(
            BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)),
            mechanism="linear",
            softmax_heads=[[0, 0]],
        )
    cache = StaticCache(config=some.config, max_cache_len=32)
    with pytest.raises(ValueError, match="static cache"):
        some(**sample_inputs("llama"), past_key_values=cache)
    plain = convert(stock_model("llama"), mechanism="linear", num_features=8)
    cache = plain(torch.randint(5, 60, (1, 5)), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="with softmax heads"):
        some(torch.randint(5, 60, (1, 5)), past_key_values=cache)
    assert convert_config(stock_config("llama"), mechanism="linear").linear_attention["softmax_heads"] == []
