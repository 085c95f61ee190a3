"""`softmax_heads`: the chosen heads are exact softmax, the others are the mechanism, in every way of computing them."""

from __future__ import annotations

import copy
import pickle

import pytest
import reference
import torch
from caches import cache_of, past
from matrix import (
    SCALING,
    add_gates,
    attend,
    hidden_states_of,
    mechanism_of,
    move,
    qkv,
    relative_error,
    sample_inputs,
    stock_config,
    stock_model,
)
from oracles import ORACLES
from transformers import BloomConfig, BloomForCausalLM, StaticCache

from hf_linear_attention import calibrate, convert, convert_config, modeling_linear_attention, softmax_attention
from hf_linear_attention.attention.softmax_heads import keep_softmax_heads
from hf_linear_attention.mechanisms.base import MechanismInputs, Rotary
from hf_linear_attention.modeling_linear_attention import converted_modules


CASES = {
    "linear": {"feature_map": "exp", "num_features": 8, "decay": "learned"},
    "performer": {"num_features": 16},
    "hybrid": {"window_size": 3, "num_sinks": 1, "num_features": 8},
    "gated_delta": {"num_features": 6},
    "hybrid-delta": {"mechanism": "hybrid", "window_size": 3, "num_sinks": 1, "num_features": 8, "far": "gated_delta"},
}
HEADS = [1, 4, 5]  # of the groups 0 and 2
EVERY = [[layer, head] for layer in range(3) for head in range(4)]
IDS = torch.randint(5, 60, (2, 21), generator=torch.Generator().manual_seed(0))
MASKS = {
    "none": torch.ones(2, 13, dtype=torch.bool),
    "left": torch.tensor([[False] * 4 + [True] * 9, [True] * 13]),
    "holes": torch.tensor([[True] * 5 + [False] * 3 + [True] * 5, [False] * 13]),
}


def mechanism_with(name: str, heads=()):
    made = mechanism_of({"mechanism": name, **CASES[name]}, heads=(6, 3)).double()
    if made.needs_gates:
        made.register_forward_pre_hook(add_gates)
    return keep_softmax_heads(made, heads) if heads else made


def inputs():
    return [x.requires_grad_() for x in qkv(13, heads=(6, 3), dtype=torch.float64)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients_are_those_of_softmax_and_of_the_mechanism(name, mask):
    given, (query, key, value) = None if mask == "none" else MASKS[mask], inputs()
    output, _ = attend(mechanism_with(name, HEADS), query, key, value, given)
    plain, _ = attend(mechanism_with(name), query, key, value, given)
    logits = 8**-0.5 * query @ reference.repeat_heads(key, 6).transpose(-1, -2)
    exact = reference.attend(logits, value, MASKS[mask], is_causal=True).transpose(1, 2)
    expected = torch.where(torch.tensor([head in HEADS for head in range(6)])[:, None], exact, plain)
    # float64; a padded query of the mechanism may see nothing, and both are 0 there
    real = MASKS[mask]
    torch.testing.assert_close(output[real], expected[real], rtol=1e-9, atol=1e-11)
    weight = torch.randn(output[real].shape, dtype=torch.float64)
    leaves = (query, key, value)
    found, wanted = (
        torch.autograd.grad((y[real] * weight).sum(), leaves, retain_graph=True) for y in (output, expected)
    )
    for mine, theirs in zip(found, wanted):
        torch.testing.assert_close(mine[real.any(1)], theirs[real.any(1)], rtol=1e-8, atol=1e-10)
        assert torch.isfinite(mine).all()
    assert output[1].abs().max() == 0 or mask != "holes"


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("split", "mask"), [([1] * 13, "left"), ([5, 1, 1, 6], "holes")])
def test_any_split_gives_one_forward_and_changes_no_state(name, split, mask):
    mechanism, given, outputs, state = mechanism_with(name, HEADS), MASKS[mask], [], None
    whole, _ = attend(mechanism, *inputs(), given)
    for *parts, part_mask in zip(*(x.split(split, dim=2) for x in inputs()), given.split(split, dim=1)):
        before = copy.deepcopy(state)
        output, new = attend(mechanism, *parts, part_mask, state)
        assert all(a is b or torch.equal(a, b) for a, b in zip(state or (), before or ()))
        state = new
        outputs.append(output)
    assert state[-3].shape == (2, 2, 13, 8)  # of two groups
    assert relative_error(torch.cat(outputs, dim=1)[given], whole[given]) < 1e-9


FREQUENCIES, KEPT = (1.0, 0.3, 0.09), 1
WITHOUT_POSITIONS = {
    "linear": {"feature_map": "exp", "num_features": 8, "decay": "learned"},
    "t2r": {"mechanism": "linear", "feature_map": "t2r"},
    "performer": {"num_features": 16},
    "gated_delta": {"num_features": 6, "conv_size": 2},
}


@pytest.mark.parametrize("rope", ["none", "partial"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", WITHOUT_POSITIONS)
def test_softmax_heads_see_the_positions_that_rope_hides_from_the_others(backend, name, mask, rope):
    """Values and gradients from queries and keys before rotation; then the same in several calls."""
    settings = {"mechanism": name, **WITHOUT_POSITIONS[name], "rope": rope}
    settings |= {"rope_frequencies": KEPT} if rope == "partial" else {}
    mechanism = mechanism_of(settings, heads=(6, 3), rotary=Rotary(FREQUENCIES))
    mechanism, (query, key, value) = keep_softmax_heads(move(mechanism, 0.1).double(), HEADS), inputs()
    given, real = None if mask == "none" else MASKS[mask], MASKS[mask]
    positions = (real.cumsum(1) - 1).clamp(min=0).int()
    full = [reference.rotated(x, positions, FREQUENCIES) for x in (query, key)]
    kept = FREQUENCIES[:KEPT] if rope == "partial" else ()
    part = [reference.rotated(x, positions, kept + (0.0,) * (3 - len(kept))) for x in (query, key)]
    gates = mechanism.gates(hidden_states_of(part[1])) if mechanism.needs_gates else None

    def run(state=None, tokens=slice(None)):
        q, k, v = (x[:, :, tokens] for x in (*full, value))
        gate, own = (None if x is None else x[:, tokens] for x in (gates, given))
        made = MechanismInputs(q, k, v, own, SCALING, True, positions[:, tokens], gate)
        return mechanism(mechanism.prepare(made), state)

    plain = ORACLES[settings["mechanism"]](mechanism, *part, value, given, True, SCALING)
    logits = SCALING * full[0] @ reference.repeat_heads(full[1], 6).transpose(-1, -2)
    exact = reference.attend(logits, value, real, is_causal=True)
    expected = torch.where(torch.tensor([head in HEADS for head in range(6)])[:, None, None], exact, plain)
    expected, (output, _) = expected.transpose(1, 2), run()
    # float64, but the angles that are taken back are float32: 1e-7 of up to 12 radians
    torch.testing.assert_close(output[real], expected[real], rtol=1e-5, atol=1e-5)
    weight, leaves = torch.randn(output[real].shape, dtype=torch.float64), (query, key, value)
    grads = [torch.autograd.grad((y[real] * weight).sum(), leaves, retain_graph=True) for y in (output, expected)]
    for mine, theirs in zip(*grads):
        torch.testing.assert_close(mine[real.any(1)], theirs[real.any(1)], rtol=1e-4, atol=1e-5)
    outputs, state = [], None
    for tokens in (slice(0, 5), slice(5, 6), slice(6, 7), slice(7, 13)):
        part_output, state = run(state, tokens)
        outputs.append(part_output)
        seen = slice(0, tokens.stop)  # what follows changes nothing
        assert relative_error(run(None, seen)[0][real[:, seen]], output[:, seen][real[:, seen]]) < 1e-9
    assert relative_error(torch.cat(outputs, dim=1)[real], output[real]) < 1e-9


def test_what_is_calibrated_sees_the_positions_that_the_mechanism_sees():
    mask = torch.tensor([[0] * 6 + [1] * 15, [1] * 21])

    def constants(**settings):
        options = {"mechanism": "performer", "features": "favor++", "num_features": 16}
        model = convert(stock_model("llama"), **options, **settings)
        calibrate(model, [{"input_ids": IDS, "attention_mask": mask}])
        return torch.stack([module.linear_attention.feature_map.norm_weight for module in converted_modules(model)])

    expected = constants(rope="none")
    torch.testing.assert_close(constants(rope="none", softmax_heads=[[0, 0], [1, 3]]), expected)
    assert relative_error(constants(), expected) > 1e-3  # with the positions


@pytest.fixture(
    scope="module", params=[{"mechanism": "hybrid", "window_size": 3}, {"mechanism": "linear", "rope": "none"}]
)
def exact(request):
    """A model of which every head is softmax: the stock model, by way of the mechanism and its cache."""
    return convert(stock_model("llama"), **request.param, num_features=8, softmax_heads=EVERY)


@pytest.fixture(scope="module", params=["before_map", "none"])
def some(request):
    settings = {"mechanism": "linear", "num_features": 8, "rope": request.param}
    return convert(stock_model("llama"), **settings, softmax_heads=[[0, 3], [2, 0], [2, 1]])


@torch.no_grad()
def test_with_every_head_the_model_is_the_original(exact):
    stock, mask = stock_model("llama"), torch.ones_like(IDS)
    mask[0, :6] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"input_ids": IDS, "attention_mask": mask, "position_ids": positions}
    mine, theirs = exact(**given).logits, stock(**given).logits
    torch.testing.assert_close(mine[mask.bool()], theirs[mask.bool()], rtol=1e-4, atol=1e-5)  # float32
    packed = {"input_ids": IDS[1:], "position_ids": torch.cat((torch.arange(8), torch.arange(13)))[None]}
    mine, theirs = (model(**packed, use_cache=False).logits for model in (exact, stock))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    for options in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}):
        rows = slice(1, 2) if "prompt_lookup_num_tokens" in options else slice(None)
        prompt = {"input_ids": IDS[rows], "attention_mask": mask[rows], "max_new_tokens": 9, "do_sample": False}
        assert torch.equal(exact.generate(**prompt, **options), stock.generate(**prompt, **options)), options


@torch.no_grad()
def test_a_rollback_and_a_continued_packed_prompt(some):
    ids = IDS[:, :15]
    whole = some(ids).logits
    cache = cache_of(some(ids[:, :4], use_cache=True))
    cache.activate_past_recording()
    some(ids[:, 4:9], **past(cache))
    cache.crop(-3)
    logits = some(ids[:, 6:], **past(cache), position_ids=torch.arange(6, 15)[None]).logits
    torch.testing.assert_close(logits, whole[:, 6:], rtol=1e-4, atol=1e-5)
    numbers = torch.tensor([1] * 5 + [2] * 7)
    mask = (numbers[:, None] == numbers).tril()[None, None]
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    first = some(ids[:1, :12], attention_mask=mask, position_ids=positions, use_cache=True)
    following = some(ids[:1, 12:], **past(cache_of(first)), position_ids=torch.arange(7, 10)[None]).logits
    torch.testing.assert_close(following, some(ids[:1, 5:]).logits[:, -3:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_copy_a_pickle_softmax_attention_and_the_size_of_the_cache(some):
    given, rope = sample_inputs("llama"), some.config.linear_attention["rope"]
    plain = convert(stock_model("llama"), mechanism="linear", num_features=8, rope=rope)
    for other in (copy.deepcopy(some), pickle.loads(pickle.dumps(some))):
        assert torch.equal(other(**given).logits, some(**given).logits)
    with softmax_attention(some) as teacher:
        torch.testing.assert_close(teacher(**given).logits, stock_model("llama")(**given).logits)
    assert some.state_dict().keys() == plain.state_dict().keys()
    caches = [cache_of(model(IDS[:1, :11], use_cache=True)) for model in (some, plain)]
    extra = [mine.state_bytes() - theirs.state_bytes() for mine, theirs in zip(*(cache.layers for cache in caches))]
    group = 2 * 11 * 8 * 4  # keys and values of 11 tokens in float32
    assert extra == [group, 0, group]  # heads 0 and 1 of layer 2 share theirs


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"softmax_heads": [[0, 4]]}, "heads [4] of layer 0, which has heads 0 to 3"),
        ({"softmax_heads": [[0, 1]], "layers": [1, 2]}, "lacks some of these layers"),
        ({"softmax_heads": "0.1"}, "it must be a list of [layer, head]"),
        ({"softmax_heads": [[0]]}, "it must be a list of [layer, head]"),
        ({"softmax_heads": [[0, 1]], "mechanism": "aft"}, "`aft` has no softmax_heads form"),
        ({"softmax_heads": [[0, 1]], "drop": ["softcap"]}, "not possible together with `drop`"),
        ({"softmax_heads": [[7, 1]]}, "layer 7"),
    ],
)
def test_what_is_not_possible_is_refused(settings, said):
    with pytest.raises(ValueError, match="softmax_heads") as caught:
        convert(stock_model("llama"), **{"mechanism": "linear", **settings})
    assert said in str(caught.value)


def test_other_models_and_caches_are_refused(some, monkeypatch):
    bloom = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2))
    for stock, said in ((stock_model("bert"), "softmax_heads"), (bloom, "ALiBi")):
        with pytest.raises(ValueError, match=said):
            convert(stock, mechanism="linear", softmax_heads=[[0, 0]])
    cache = StaticCache(config=some.config, max_cache_len=32)
    with pytest.raises(ValueError, match="static cache"):
        some(**sample_inputs("llama"), **past(cache))
    plain = convert(stock_model("llama"), mechanism="linear", num_features=8)
    cache = cache_of(plain(IDS[:1, :5], use_cache=True))
    with pytest.raises(ValueError, match="with softmax heads"):
        some(IDS[:1, :5], **past(cache))
    assert convert_config(stock_config("llama"), mechanism="linear").linear_attention["softmax_heads"] == []
    # the line that gives heads softmax attention is left out of the code of a checkpoint without them
    monkeypatch.setattr(modeling_linear_attention, "keep_softmax_heads", lambda mechanism, heads: mechanism)
    with pytest.raises(ValueError, match="needs code that this checkpoint lacks"):
        convert(stock_model("llama"), mechanism="linear", softmax_heads=[[0, 0]])
