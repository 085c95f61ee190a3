"""The class swap, for every family: what is kept, what is new, what no option can undo."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from matrix import (
    DECODERS,
    FAMILY_ROWS,
    MECHANISM_ROWS,
    sample_inputs,
    stock_config,
    stock_model,
)

import hf_linear_attention
from hf_linear_attention import convert, softmax_attention
from hf_linear_attention.configuration_linear_attention import model_heads
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


SETTINGS = {
    "linear": {"mechanism": "linear", "feature_map": "exp", "num_features": 16},
    "performer": {"mechanism": "performer", "num_features": 16},
    "linformer": {"mechanism": "linformer", "projection_size": 8},
}
# Every family, with each mechanism in turn.
CASES = [(family, ("linear", "performer")[n % 2]) for n, family in enumerate(FAMILY_ROWS)] + [("bert", "linformer")]


def outputs(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_conversion_keeps_the_weights_and_changes_the_attention(family, name, tmp_path):
    stock, inputs = stock_model(family), sample_inputs(family)
    model = convert(stock, **SETTINGS[name])
    base, ours = stock.state_dict(), model.state_dict()
    assert set(base) <= set(ours)
    assert all(torch.equal(base[key], ours[key]) for key in base)
    assert all(".linear_attention." in key for key in set(ours) - set(base))
    assert len(linear_attention_modules(model)) == 3
    assert all(torch.isfinite(tensor).all() for tensor in ours.values())
    assert (outputs(model, inputs) - outputs(stock, inputs)).abs().max() > 1e-3

    # As if trained: a weight that is lost on the way must not come back as what `reset_parameters` draws.
    for key in set(ours) - set(base):
        ours[key].copy_(ours[key] * 1.5)
    output = outputs(model, inputs)
    assert torch.isfinite(output).all()
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(outputs(again, inputs), output)
    assert all(torch.equal(a, b) for a, b in zip(ours.values(), again.state_dict().values()))


@pytest.mark.parametrize("family", FAMILY_ROWS)
def test_softmax_attention_gives_back_the_original(family):
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


@pytest.mark.parametrize("family", FAMILY_ROWS)
def test_no_converted_layers_is_bit_identical(family, tmp_path):
    stock, inputs = stock_model(family), sample_inputs(family)
    model = convert(stock, layers="none")
    assert set(model.state_dict()) == set(stock.state_dict())
    mask = {} if family == "vit" else {"attention_mask": torch.tensor([[0] * 3 + [1] * 10, [1] * 13])}
    expected = stock(**inputs, **mask, output_hidden_states=True)
    actual = model(**inputs, **mask, output_hidden_states=True)
    assert torch.equal(actual[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(actual.hidden_states, expected.hidden_states))


@pytest.mark.parametrize(
    ("family", "auto_class"),
    [
        (f, a)
        for f in ("bert", "vit", "llama", "gpt2")
        for a in model_heads(f)
        if a not in ("AutoModelForPreTraining", "AutoModelWithLMHead")
    ],
)
def test_every_head_loads_through_its_auto_class(family, auto_class, tmp_path):
    config = hf_linear_attention.convert_config(stock_config(family), mechanism="performer", num_features=8)
    model = getattr(transformers, auto_class).from_config(config)
    assert type(model).__name__ == "Linear" + model_heads(family)[auto_class]
    model.save_pretrained(tmp_path)
    again = getattr(transformers, auto_class).from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert len(linear_attention_modules(base)) == 3


@pytest.mark.parametrize("family", [f for f in FAMILY_ROWS if f != "vit"])
def test_padding_changes_no_real_token(family):
    # Absolute positions: padding on the right, so that the real tokens keep theirs.
    for settings in (SETTINGS["linear"], {**SETTINGS["performer"], "layers": [0, 2]}):
        model = convert(stock_model(family), **settings)
        ids = sample_inputs(family)["input_ids"]
        mask = torch.ones_like(ids)
        mask[0, 9:] = 0
        output = outputs(model, {"input_ids": ids, "attention_mask": mask})
        alone = outputs(model, {"input_ids": ids[:1, :9]})
        torch.testing.assert_close(output[:1, :9], alone, rtol=1e-4, atol=1e-4)
        ids[0, 9:] = 5
        torch.testing.assert_close(
            outputs(model, {"input_ids": ids, "attention_mask": mask})[:1, :9], alone, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    ("family", "settings"),
    [(family, {"mechanism": "linear"}) for family in ("gpt2", "gpt_neox")]
    + [
        ("llama", MECHANISM_ROWS[row])
        for row in ("linear-decay", "performer", "hybrid", "gated_delta-conv", "aft-local")
    ],
)
def test_packed_sequences_are_independent(family, settings):
    model = convert(stock_model(family), **settings)
    ids = torch.randint(3, 64, (1, 23))
    lengths = (5, 11, 7)
    with torch.no_grad():
        position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
        packed = model(input_ids=ids, position_ids=position_ids, use_cache=False).logits
        parts = [model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, dim=1)]
        torch.testing.assert_close(packed, torch.cat(parts, dim=1), rtol=1e-4, atol=1e-4)


def test_what_follows_packed_sequences_continues_the_last_one():
    model = convert(stock_model("llama"), mechanism="linear")
    ids, lengths = torch.randint(3, 64, (1, 12)), (5, 7)
    numbers = torch.repeat_interleave(torch.tensor([1, 2]), torch.tensor(lengths))
    mask = (numbers[:, None] == numbers[None, :]).tril()[None, None]
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        first = model(ids, attention_mask=mask, position_ids=position_ids, use_cache=True)
        cache = first.past_key_values
        following = model(ids[:, :3], position_ids=torch.arange(7, 10)[None], past_key_values=cache).logits
        expected = model(torch.cat((ids[:, 5:], ids[:, :3]), dim=1), use_cache=False).logits[:, 7:]
        torch.testing.assert_close(following, expected, rtol=1e-4, atol=1e-4)
        wide = torch.nn.functional.pad(mask, (15, 0), value=False)
        with pytest.raises(ValueError, match="packed sequences after cached tokens"):
            model(ids, attention_mask=wide, position_ids=position_ids, past_key_values=cache)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_arguments_that_cannot_be_honoured_are_refused(name):
    module = next(iter(linear_attention_modules(convert(stock_model("llama"))).values()))
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=f"passes `{name}`"):
        module.attend(query, key, key, None, scaling=1.0, **{name: 30.0})


def test_a_family_without_the_interface_is_refused():
    with pytest.raises(ValueError, match="no self-attention that goes through transformers' attention interface"):
        convert(
            transformers.MPNetModel(
                transformers.MPNetConfig(
                    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
                )
            )
        )


def test_training_moves_the_mechanism_and_the_base_and_checkpointing_agrees():
    losses, gradients = [], []
    for checkpointing in (False, True):
        model = convert(stock_model("llama"), mechanism="linear").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(5))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        assert all(g is not None and g.abs().sum() > 0 for g in gradients[-1].values())
    assert losses[0] == losses[1]
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_half_precision_and_autocast_keep_float32_sums():
    stock, inputs = stock_model("llama"), sample_inputs("llama", length=40)
    model = convert(stock, mechanism="linear")
    expected = outputs(model, inputs)
    for dtype in (torch.bfloat16, torch.float16):
        half = copy.deepcopy(model).to(dtype)
        with torch.no_grad():
            out = half(**inputs, use_cache=True)
        assert out.logits.dtype == dtype
        assert all(layer.state[0].dtype == torch.float32 for layer in out.past_key_values.layers)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        out = model(**inputs, use_cache=True)
    assert out.past_key_values.layers[0].state[0].dtype == torch.float32
    # 8 bits of mantissa through three layers
    assert ((out.logits.float() - expected).norm() / expected.norm()) < 0.1


def test_attention_weights_can_be_looked_at():
    model, inputs = convert(stock_model("llama"), mechanism="linear"), sample_inputs("llama")
    weights = model(**inputs, output_attentions=True).attentions
    assert [w.shape for w in weights] == [(2, 4, 13, 13)] * 3
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, 4, 13))
    assert (weights[0].triu(1) == 0).all()
    torch.testing.assert_close(
        model(**inputs, output_attentions=True).logits, model(**inputs).logits, rtol=1e-4, atol=1e-4
    )


@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile_of_the_whole_forward():
    model = convert(stock_model("bert"), **SETTINGS["linear"])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = sample_inputs("bert", length=37)
    torch.testing.assert_close(outputs(compiled, inputs), outputs(model, inputs), rtol=1e-4, atol=1e-4)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, 20:] = 0
    expected = outputs(model, inputs)
    actual = outputs(compiled, inputs)
    torch.testing.assert_close(actual[0, :20], expected[0, :20], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-4, atol=1e-4)
