"""Gates: what a mechanism computes from the hidden states of its layer, on every way that leads to the mechanism."""

from __future__ import annotations

import pytest
import torch
from architectures import tiny_model
from matrix import stock_model
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache

from hf_linear_attention import convert, softmax_attention
from hf_linear_attention.attention.architectures import attention_modules, refuse_without_hidden_states
from hf_linear_attention.attention.cache import state_layer
from hf_linear_attention.attention_observation import observe_attention
from hf_linear_attention.mechanisms.gated_delta import GatedDeltaAttention
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


# `rope` = `partial` moves queries and keys; a convolution keeps queries for a rollback, too.
SETTINGS = {
    "plain": {},
    "channel": {"decay": "channel", "num_features": 6, "rope": "partial", "rope_frequencies": 1},
    "conv": {"conv_size": 3, "decay": "none"},
    "hybrid": {
        "mechanism": "hybrid",
        "far": "gated_delta",
        "window_size": 3,
        "num_sinks": 1,
        "num_features": 6,
        "rope": "partial",
        "rope_frequencies": 1,
    },
}
IDS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(2))
MASK = torch.ones_like(IDS)
MASK[0, :2] = 0


def build(name: str = "plain", family: str = "llama", **changes):
    """A converted twin whose gates differ from token to token."""
    model = convert(stock_model(family, **changes), **{"mechanism": "gated_delta", **SETTINGS[name]})
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for module in linear_attention_modules(model).values():
            for parameter in module.linear_attention.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def assert_close(actual, expected):
    # float32 sums in another order, through three layers
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_they_come_from_the_hidden_states_of_the_layer(family, monkeypatch):
    model, hidden, given = build(family=family), [], []
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


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_packed_sequences_are_as_separate_ones(name):
    model = build(name)
    positions = torch.cat((torch.arange(7), torch.arange(13))).expand(2, -1)
    separate = torch.cat([model(part, use_cache=False).logits for part in IDS.split([7, 13], dim=1)], dim=1)
    assert_close(model(IDS, position_ids=positions, use_cache=False).logits, separate)
    # with a cache, transformers leaves it to the mask
    numbers = torch.arange(20) // 7 > 0
    mask = (numbers[:, None] == numbers).tril().expand(2, 1, -1, -1)
    output = model(IDS, attention_mask=mask, position_ids=positions, use_cache=True)
    assert_close(output.logits, separate)
    token = IDS[:, 3:4]
    following = model(token, position_ids=torch.full((2, 1), 13), past_key_values=output.past_key_values).logits
    assert_close(following, model(torch.cat((IDS[:, 7:], token), dim=1), use_cache=False).logits[:, -1:])


def step(model, cache, start, stop):
    return model(IDS[:, start:stop], attention_mask=MASK[:, :stop], past_key_values=cache).logits


def expected(model, stop):
    return model(IDS[:, :stop], attention_mask=MASK[:, :stop], use_cache=False).logits


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_a_rollback_is_exact_and_saved(name, tmp_path):
    model = build(name)
    cache = DynamicCache(config=model.config)
    for layer in range(3):
        state_layer(cache, layer)
    cache.activate_past_recording()
    step(model, cache, 0, 10)
    cache.crop(-3)
    model.save_prompt_state(cache, tmp_path / "prompt.safetensors")
    restored = model.load_prompt_state(tmp_path / "prompt.safetensors")
    assert_close(step(model, restored, 7, 20), expected(model, 20)[:, 7:])
    assert_close(step(model, cache, 7, 12), expected(model, 12)[:, 7:])
    cache.crop(0)
    step(model, cache, 12, 15)
    cache.crop(-1)
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([0, 1]))
    assert_close(step(model, cache, 12, 20), expected(model, 20)[:, 12:])


@pytest.mark.parametrize("no_grad", [False, True])
def test_attention_transfer_trains_them(no_grad):
    model = build("channel")
    model.requires_grad_(False)
    for module in linear_attention_modules(model).values():
        module.linear_attention.requires_grad_(True)
    seen = []
    with torch.no_grad(), softmax_attention(model):
        logits = model(IDS).logits
    with observe_attention(model, seen.append), torch.no_grad() if no_grad else torch.enable_grad():
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


def test_layers_without_hidden_states_are_refused():
    module = next(iter(attention_modules(tiny_model("mobilebert", "AutoModel")).values()))
    with pytest.raises(ValueError, match=r"MobileBertSelfAttention \(layer 3\) takes `query_tensor`; choose another"):
        refuse_without_hidden_states(module, 3, "causal", "gated_delta")
    module = build().model.layers[0].self_attn
    with pytest.raises(ValueError, match="takes its keys from another sequence"):
        refuse_without_hidden_states(module, 0, "cross", "gated_delta")
    states, angles = torch.zeros(2, 5, 16), (torch.ones(1, 5, 8), torch.zeros(1, 5, 8))
    with pytest.raises(ValueError, match=r"of shape \(2, 5, 16\); GatedDeltaAttention .* \(rows, tokens, 32\)"):
        module(hidden_states=states, position_embeddings=angles, attention_mask=None)


def test_an_encoder_and_cross_attention_are_refused():
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 64}
    bart = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", **sizes, **heads))
    with pytest.raises(ValueError, match="`gated_delta` has no bidirectional form, which layer 0"):
        convert(bart, mechanism="gated_delta")
    with pytest.raises(ValueError, match="`cross_attention` = true, but `mechanism` = `gated_delta` has no cross form"):
        convert(bart, mechanism="gated_delta", layers=[1], cross_attention=True)
    decoder = convert(bart, mechanism="gated_delta", layers=[1]).eval()
    ids = torch.randint(3, 64, (2, 9))
    with torch.no_grad():
        whole = decoder(ids, decoder_input_ids=ids, use_cache=False).logits
        part = decoder(ids, decoder_input_ids=ids[:, :4], use_cache=True)
        rest = decoder(ids, decoder_input_ids=ids[:, 4:], past_key_values=part.past_key_values).logits
    assert_close(rest, whole[:, 4:])
