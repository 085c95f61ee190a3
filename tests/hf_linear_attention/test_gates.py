"""Gates, computed from hidden states, and what only `gated_delta` has: its rule, its start and its convolution."""

from __future__ import annotations

import pytest
import torch
from architectures import tiny_model
from caches import cache_of, past
from matrix import attend, build_mechanism, hidden_states_of, mechanism_of, move, qkv, stock_model
from oracles import exact
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from hf_linear_attention import convert, softmax_attention
from hf_linear_attention.attention.architectures import attention_modules, refuse_without_hidden_states
from hf_linear_attention.attention_observation import observe_attention
from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.mechanisms.base import LayerShape
from hf_linear_attention.mechanisms.gated_delta import GatedDeltaAttention
from hf_linear_attention.mechanisms.token_gates import INITIAL_SLOPE
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.torch_kernels.delta import gated_delta


def build(**settings):
    return mechanism_of({"mechanism": "gated_delta", **settings}, is_causal=True)


def test_it_is_the_rule_of_qwen3_next():
    """Of transformers' own fallback, which also takes keys of length 1 and scales queries."""
    query, key, value = (torch.randn(2, 4, 33, 16) for _ in range(3))
    log_decay, beta = -torch.rand(2, 4, 33), torch.rand(2, 4, 33)
    state = torch.randn(2, 4, 16, 16)
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    theirs = [x.transpose(1, 2) for x in (query, key, value, log_decay, beta)]
    expected = torch_recurrent_gated_delta_rule(*theirs, initial_state=state, output_final_state=True)
    actual = gated_delta(query / 4, key, value, log_decay, beta, state=state)
    # float32 sums in another order
    torch.testing.assert_close(actual[0].transpose(1, 2), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_the_start_does_not_depend_on_the_hidden_states(decay):
    mechanism = build(decay=decay, trained_length=100)
    gates = mechanism.gates(torch.randn(3, 7, 16))
    width = {"none": 0, "head": 2, "channel": 16}[decay]
    torch.testing.assert_close(gates[..., :2], torch.full((3, 7, 2), 0.5))
    torch.testing.assert_close(gates[..., 2:], torch.full((3, 7, width), -1 / 20))  # whatever the trained length is
    assert torch.equal(mechanism.rule.features.key_projection, torch.eye(8).expand(2, -1, -1))


def test_the_convolution_starts_as_the_identity_and_sees_only_its_tokens():
    plain, mechanism = build(), build(conv_size=4)
    query, key, value = qkv(30)
    gates = plain.gates(torch.randn(2, 30, 16))
    outputs = [attend(each, query, key, value, gates=gates)[0] for each in (mechanism, plain)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)
    with torch.no_grad():
        for convolution in mechanism.convolutions:
            convolution.weight.normal_()
    _, state = attend(mechanism, query, key, value, gates=gates)
    assert [tuple(x.shape) for x in state] == [(2, 2, 8, 8), (2, 4, 3, 8), (2, 2, 3, 8), (2, 2, 3, 8)]
    assert torch.equal(state[1], query[:, :, 27:])
    # three tokens back a change of a key is in the state, four back it is not in the newest key
    convolve = mechanism.convolutions[1]
    line = torch.cat((torch.zeros(2, 2, 3, 8), key), dim=2)
    changed = line.clone()
    changed[:, :, 10] += 1
    difference = (convolve(changed, None) - convolve(line, None)).abs().amax(dim=(0, 1, 3)) > 1e-6
    assert difference.nonzero().flatten().tolist() == [7, 8, 9, 10]


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="`conv_size` = 1 would see no earlier token; use 0 or at least 2"):
        build(conv_size=1)
    with pytest.raises(ValueError, match="needs `gates`; compute them with the method of that name"):
        attend(build(), *qkv(3))


IDS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(2))


def twin(family: str = "llama", **settings):
    """A converted twin whose gates differ from token to token."""
    model = convert(stock_model(family), mechanism="gated_delta", **settings)
    for module in linear_attention_modules(model).values():
        move(module.linear_attention)
    return model


def assert_close(actual, expected):
    # float32 sums in another order, through three layers
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_they_come_from_the_hidden_states_of_the_layer(family, monkeypatch):
    model, hidden, given = twin(family), [], []
    gates = GatedDeltaAttention.gates

    def spy(self, hidden_states):
        given.append((hidden_states, gates(self, hidden_states)))
        return given[-1][1]

    monkeypatch.setattr(GatedDeltaAttention, "gates", spy)
    for module in linear_attention_modules(model).values():
        assert module.linear_attention.shape.hidden_size == 32
        module.register_forward_pre_hook(
            lambda _, args, kwargs: hidden.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
    model(IDS)
    assert len(given) == len(hidden) == 3
    for (taken, values), expected in zip(given, hidden):
        assert taken is expected
        assert values.std(dim=1).min() > 1e-4  # they differ between tokens


def test_attention_transfer_trains_them():
    model = twin(decay="channel", num_features=6, rope="partial", rope_frequencies=1)
    model.requires_grad_(False)
    for module in linear_attention_modules(model).values():
        module.linear_attention.requires_grad_(True)
    seen = []
    with torch.no_grad(), softmax_attention(model):
        logits = model(IDS).logits
    with observe_attention(model, seen.append), torch.no_grad():
        assert torch.equal(model(IDS).logits, logits)
    sum((call.output - call.softmax_output).square().mean() for call in seen).backward()
    for call in seen:
        for name, parameter in call.module.linear_attention.named_parameters():
            assert parameter.grad.abs().max() > 0, name
    # what the mechanism makes of the same activations is what it makes of them in the converted model
    kept = []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        model(IDS)
    assert_close(seen[0].output.flatten(2), kept[0])


def test_a_shape_without_a_hidden_size_is_refused():
    with pytest.raises(ValueError, match="give the layer's `hidden_size`"):
        GatedDeltaAttention(LinearAttentionSettings({"mechanism": "gated_delta"}), LayerShape(4, 2, 8, 0))


def test_layers_without_hidden_states_are_refused():
    module = next(iter(attention_modules(tiny_model("mobilebert", "AutoModel")).values()))
    with pytest.raises(ValueError, match=r"MobileBertSelfAttention \(layer 3\) takes `query_tensor`; choose another"):
        refuse_without_hidden_states(module, 3, "causal", "gated_delta")
    module = twin().model.layers[0].self_attn
    with pytest.raises(ValueError, match="takes its keys from another sequence"):
        refuse_without_hidden_states(module, 0, "cross", "gated_delta")
    states, angles = torch.zeros(2, 5, 16), (torch.ones(1, 5, 8), torch.zeros(1, 5, 8))
    with pytest.raises(ValueError, match=r"of shape \(2, 5, 16\); GatedDeltaAttention .* \(rows, tokens, 32\)"):
        module(hidden_states=states, position_embeddings=angles, attention_mask=None)


def test_it_serves_the_decoder_of_an_encoder_decoder():
    decoder = convert(tiny_model("bart", "AutoModelForSeq2SeqLM"), mechanism="gated_delta", layers=[3, 4, 5]).eval()
    ids = torch.randint(3, 64, (2, 9))
    with torch.no_grad():
        whole = decoder(ids, decoder_input_ids=ids, use_cache=False).logits
        part = decoder(ids, decoder_input_ids=ids[:, :4], use_cache=True)
        rest = decoder(ids, decoder_input_ids=ids[:, 4:], **past(cache_of(part))).logits
    assert_close(rest, whole[:, 4:])


@torch.no_grad()
def test_a_strong_decay_keeps_its_digits_in_a_long_input():
    mechanism, inputs = build_mechanism("linear-gated"), qkv(10_000, batch=1)
    mechanism.gate.forget.rate.fill_(3.0)  # about 3 nats per token, 30,000 over the input
    output, _ = attend(mechanism, *inputs)
    expected = exact("linear-gated", mechanism.double(), *(x[:, :, 9_900:] for x in inputs))
    # Exponents reach 12,000 within a part of 4,096 tokens, where neighbouring float32 numbers are .001 apart; the
    # first of these 100 queries still see keys that the oracle does not.
    torch.testing.assert_close(output[:, 9_950:].double(), expected[:, 50:], atol=5e-3, rtol=0)


def test_gates_of_linear_start_as_a_constant_decay():
    mechanism = build_mechanism("linear-gated")
    mechanism.gate.reset_parameters(mechanism.generator())
    weight, forget = mechanism.gate.split(mechanism.gates(hidden_states_of(qkv(5)[1])), None)
    assert weight.abs().max() == 0
    torch.testing.assert_close(forget, torch.full_like(forget, -INITIAL_SLOPE))
