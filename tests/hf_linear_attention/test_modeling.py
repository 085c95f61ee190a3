"""The class swap, for every family: what is kept, what is new, what no option can undo."""

from __future__ import annotations

import pytest
import torch
import transformers
from caches import cache_of, past
from matrix import DECODERS, FAMILY_ROWS, MECHANISM_ROWS, move, sample_inputs, stock_config, stock_model

import hf_linear_attention
from hf_linear_attention import convert, softmax_attention
from hf_linear_attention.configuration_linear_attention import model_heads
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


LINEAR = {"mechanism": "linear", "feature_map": "exp", "num_features": 16}
PERFORMER = {"mechanism": "performer", "num_features": 16}


def outputs(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize("family", FAMILY_ROWS)
def test_softmax_attention_gives_back_the_original(family):
    """And so does a conversion of no layer."""
    stock, inputs = stock_model(family), sample_inputs(family)
    model = convert(stock, mechanism="linear")
    options = {"max_new_tokens": 5, "do_sample": False}
    before, text = outputs(model, inputs), model.generate(**inputs, **options) if family in DECODERS else None
    with softmax_attention(model) as teacher:
        assert torch.equal(outputs(teacher, inputs), outputs(stock, inputs))
        if family in DECODERS:
            assert torch.equal(teacher.generate(**inputs, **options), stock.generate(**inputs, **options))
    assert torch.equal(outputs(model, inputs), before)
    assert text is None or torch.equal(model.generate(**inputs, **options), text)
    none = convert(stock, layers="none")
    assert set(none.state_dict()) == set(stock.state_dict())
    mask = {} if family == "vit" else {"attention_mask": torch.tensor([[0] * 3 + [1] * 10, [1] * 13])}
    actual, expected = (each(**inputs, **mask, output_hidden_states=True) for each in (none, stock))
    assert torch.equal(actual[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(actual.hidden_states, expected.hidden_states))


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_every_head_loads_through_its_auto_class(family, tmp_path):
    config = hf_linear_attention.convert_config(stock_config(family), mechanism="performer", num_features=8)
    for auto_class, stock in model_heads(family).items():
        if auto_class in ("AutoModelForPreTraining", "AutoModelWithLMHead"):
            continue
        model = getattr(transformers, auto_class).from_config(config)
        assert type(model).__name__ == "Linear" + stock
        model.save_pretrained(tmp_path / auto_class)
        again = getattr(transformers, auto_class).from_pretrained(tmp_path / auto_class)
        assert type(again) is type(model)
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    base = transformers.AutoModel.from_pretrained(tmp_path / auto_class)
    assert len(linear_attention_modules(base)) == 3


# A convolution keeps queries, `rope` = `partial` moves queries and keys, and gates come from the hidden states.
PACKED = {
    "gpt2": ("gpt2", {"mechanism": "linear"}),
    "gpt_neox": ("gpt_neox", {"mechanism": "linear"}),
    **{row: ("llama", MECHANISM_ROWS[row]) for row in ("linear-decay", "performer", "gated_delta-conv", "aft-local")},
    "default": ("llama", {"window_size": 4, "num_features": 8}),
    "partial": ("llama", {**MECHANISM_ROWS["hybrid-decay"], "rope": "partial", "rope_frequencies": 1}),
    "channel": ("llama", {**MECHANISM_ROWS["gated_delta-channel"], "rope": "partial", "rope_frequencies": 1}),
}


def packed_model(name):
    """Whose gates differ from token to token."""
    family, settings = PACKED[name]
    model = convert(stock_model(family), **settings)
    for module in linear_attention_modules(model).values():
        move(module.linear_attention)
    return model


@pytest.mark.parametrize("name", PACKED)
@torch.no_grad()
def test_packed_sequences_are_independent(name):
    model, ids, lengths = packed_model(name), torch.randint(3, 64, (1, 23)), (5, 11, 7)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    parts = [model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, dim=1)]
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, torch.cat(parts, dim=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in PACKED if PACKED[name][0] == "llama" and name != "aft-local"])
@torch.no_grad()
def test_what_follows_packed_sequences_continues_the_last_one(name):
    """With a cache, transformers leaves it to the mask that they are packed."""
    model, ids, lengths = packed_model(name), torch.randint(3, 64, (2, 12)), (5, 7)
    numbers = torch.repeat_interleave(torch.tensor([1, 2]), torch.tensor(lengths))
    mask = (numbers[:, None] == numbers[None, :]).tril().expand(2, 1, -1, -1)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    first = model(ids, attention_mask=mask, position_ids=positions, use_cache=True)
    cache, after = cache_of(first), torch.arange(7, 10).expand(2, -1)
    following = model(ids[:, :3], position_ids=after, **past(cache)).logits
    expected = model(torch.cat((ids[:, 5:], ids[:, :3]), dim=1), use_cache=False).logits
    torch.testing.assert_close(torch.cat((first.logits[:, 5:], following), dim=1), expected, rtol=1e-4, atol=1e-4)
    wide = torch.nn.functional.pad(mask, (15, 0), value=False)
    with pytest.raises(ValueError, match="packed sequences after cached tokens"):
        model(ids, attention_mask=wide, position_ids=positions, **past(cache))


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_arguments_that_cannot_be_honoured_are_refused(name):
    module = next(iter(linear_attention_modules(convert(stock_model("llama"))).values()))
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=f"passes `{name}`"):
        module.attend(query, key, key, None, scaling=1.0, **{name: 30.0})


def test_a_family_without_the_interface_is_refused():
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(ValueError, match="no self-attention that goes through transformers' attention interface"):
        convert(transformers.MPNetModel(transformers.MPNetConfig(**sizes, intermediate_size=16)))


EXACT_KEYS = {"mechanism": "hybrid", "window_size": 4, "num_features": 8, "num_exact_keys": 3}


@pytest.mark.parametrize("settings", [{"mechanism": "linear"}, {"mechanism": "gated_delta"}, EXACT_KEYS])
def test_training_moves_the_mechanism_and_the_base_and_checkpointing_agrees(settings):
    losses, gradients = [], []
    for checkpointing in (False, True):
        model = convert(stock_model("llama"), **settings).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(5))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        # Scores only choose keys, which has no gradient.
        gradients.append({name: p.grad for name, p in model.named_parameters() if "score" not in name})
        assert all(g is not None and g.abs().sum() > 0 for g in gradients[-1].values())
    assert losses[0] == losses[1]
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_attention_weights_can_be_looked_at():
    model, inputs = convert(stock_model("llama"), mechanism="linear"), sample_inputs("llama")
    output = model(**inputs, output_attentions=True)
    assert [w.shape for w in output.attentions] == [(2, 4, 13, 13)] * 3
    torch.testing.assert_close(output.attentions[0].sum(-1), torch.ones(2, 4, 13))
    assert (output.attentions[0].triu(1) == 0).all()
    torch.testing.assert_close(output.logits, model(**inputs).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile_of_the_whole_forward():
    model = convert(stock_model("bert", num_hidden_layers=1), **LINEAR)
    compiled, inputs = torch.compile(model, fullgraph=True, backend="aot_eager"), sample_inputs("bert", length=37)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, 20:] = 0
    real = inputs["attention_mask"].bool()
    actual, expected = outputs(compiled, inputs)[real], outputs(model, inputs)[real]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_backend_takes_the_place_of_the_mechanism():
    """That of an engine that keeps the states of its requests itself."""
    model = convert(stock_model("llama"), mechanism="linear")
    ids, seen, modules = torch.arange(12, dtype=torch.long)[None], [], [x.self_attn for x in model.model.layers]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        for module in modules:

            def compute(inputs, mechanism=module.linear_attention):
                seen.append(inputs)
                return mechanism(inputs)[0]

            module.linear_attention_backend = compute
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        model(ids[:, :1], use_cache=False)
    assert len(seen) == 2 * len(modules)
    assert all(inputs.positions is None for inputs in seen)
