"""Positions: ALiBi, how layers rotate queries and keys, observed against what a model really computes, and tables."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import transformers
from architectures import tiny_model
from caches import cache_of, past
from matrix import sample_inputs, stock_model
from transformers import BloomConfig, BloomForCausalLM, MptConfig, MptForCausalLM

from hf_linear_attention import convert, softmax_attention
from hf_linear_attention.attention.architectures import attention_modules
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.observed_rotary import observed_rotary
from hf_linear_attention.positions.rotary import RotaryShift


# 3 heads: not a power of two, for which ALiBi's slopes have a formula of their own
_WIDE = {"vocab_size": 64, "initializer_range": 0.3}
ALIBI = {
    "bloom": (BloomForCausalLM, BloomConfig(hidden_size=24, n_layer=2, n_head=3, **_WIDE)),
    "mpt": (MptForCausalLM, MptConfig(d_model=24, n_layers=2, n_heads=3, max_seq_len=64, **_WIDE)),
}


def alibi_model(family: str):
    torch.manual_seed(0)
    model_class, config = ALIBI[family]
    return model_class(config).eval()


@torch.no_grad()
def assert_decoding_is_one_forward(model, ids):
    whole, cache, outputs = model(ids).logits, None, []
    for part in ids.split([5, 1, 1, ids.shape[1] - 7], dim=1):
        output = model(part, **past(cache), use_cache=True)
        cache = cache_of(output)
        outputs.append(output.logits)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("layers", ["all", [1]])
@pytest.mark.parametrize("family", ALIBI)
@torch.no_grad()
def test_alibi_is_exact(family, layers):
    """A window over everything is the stock model, whose bias grows with the distance; half of it far away is not."""
    stock = alibi_model(family)
    ids, mask = torch.randint(3, 64, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[0, :6] = 0
    expected = stock(ids, attention_mask=mask).logits
    model = convert(stock, mechanism="hybrid", window_size=64, layers=layers)
    actual = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=2e-5)
    with softmax_attention(model):
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)
    for module in linear_attention_modules(model).values():
        module.linear_attention.alibi.log_decay.zero_()
    assert (model(ids, attention_mask=mask).logits - expected)[mask.bool()].abs().max() > 0.1


@pytest.mark.parametrize("settings", [{"mechanism": "linear"}, {"mechanism": "hybrid", "window_size": 4}])
def test_alibi_decodes_as_in_one_forward(settings):
    for family in ALIBI:
        assert_decoding_is_one_forward(convert(alibi_model(family), **settings), torch.randint(3, 64, (2, 20)))
    with pytest.raises(ValueError, match=r"BloomAttention has ALiBi positions.*`hybrid`, `linear`, `performer`"):
        convert(alibi_model("bloom"), mechanism="aft")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox", "phi3"])
@torch.no_grad()
def test_without_rope_only_what_is_far_is_not_rotated(family):
    """A window over everything is the stock model; what is far away does not depend on where it stood."""
    stock, inputs = stock_model(family), sample_inputs(family)
    wide = convert(stock, mechanism="hybrid", window_size=64, rope="none")
    torch.testing.assert_close(wide(**inputs).logits, stock(**inputs).logits, rtol=1e-4, atol=1e-4)
    for settings in ({"mechanism": "performer"}, {"mechanism": "hybrid", "window_size": 3}):
        model, rotating = convert(stock, **settings, rope="none"), convert(stock, **settings)
        assert_decoding_is_one_forward(model, inputs["input_ids"])
        assert (rotating(**inputs).logits - model(**inputs).logits).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_rope_is_refused_where_there_is_none(family):
    with pytest.raises(ValueError, match=r"`rope` = `none`, but \w+ has no rotary positions"):
        convert(stock_model(family), mechanism="linear", rope="none")


_LONGER = {"factor": 4.0, "original_max_position_embeddings": 16}
SCALED = {
    "llama3": {**_LONGER, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": _LONGER,
    "dynamic": {"factor": 4.0},
    "longrope": {**_LONGER, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}
# (model type, rotary_dim of 8 channels, pairing)
FAMILIES = {
    "llama3": (8, "half"),
    "yarn": (8, "half"),
    "gpt_neox": (2, "half"),
    "phi": (4, "half"),
    "cohere": (8, "interleaved"),
    "glm": (4, "interleaved"),
    "gpt_oss": (8, "half"),
    "nanochat": (8, "half"),
    "modernbert": (8, "half"),
    "smollm3": (8, "half"),
}


def model_of(name: str):
    if name in SCALED:
        rope = {"rope_type": name, "rope_theta": 1e4, **SCALED[name]}
        return tiny_model("llama", "AutoModel", rope_parameters=rope)
    return tiny_model(name, "AutoModel", **{"smollm3": {"num_hidden_layers": 5}}.get(name, {}))


def rotary_entry(model) -> dict:
    """The entry of the first layer that rotates."""
    return observed_rotary(model, dict(enumerate(attention_modules(model).values())))[0]


def test_the_frequencies_are_those_of_the_model_in_the_layers_that_rotate():
    for kind in SCALED.keys() - {"dynamic", "longrope"}:
        model = model_of(kind)
        entry = rotary_entry(model)
        assert len(entry["layers"]) == model.config.num_hidden_layers
        found = torch.tensor(entry["inverse_frequencies"])
        torch.testing.assert_close(found, model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
    assert rotary_entry(model_of("smollm3"))["layers"] == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("deepseek_v3", "not in the first channels"),  # multi-head latent attention
        ("llama4_text", "not a pair of cos and sin"),  # complex
        ("dinov3_vit", "no rotary embedding of token positions"),  # of the two axes of an image
    ],
)
def test_other_kinds_are_refused(row, reason):
    model = tiny_model(row, "AutoModel" if row == "dinov3_vit" else "AutoModelForCausalLM")
    with pytest.raises(ValueError, match=rf"`rope` = `none`, but .*{reason}"):
        convert(model, mechanism="linear", rope="none")


def test_input_dependent_frequencies_are_refused():
    for kind in ("dynamic", "longrope"):
        with pytest.raises(ValueError, match="`rope` = `partial`, but the rotary frequencies of LlamaAttention change"):
            convert(model_of(kind), mechanism="hybrid", rope="partial")
        assert convert(model_of(kind), mechanism="hybrid").config.linear_attention["rotary"] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_unrotated_is_what_the_projections_gave(name, monkeypatch):
    """Layers without rotary positions, half as many columns as channels, another direction, interleaved pairs."""
    stock = model_of(name)
    entry = rotary_entry(stock)
    factor = getattr(getattr(stock, "rotary_emb", None), "attention_scaling", 1.0)
    assert (2 * len(entry["inverse_frequencies"]), entry["pairing"]) == FAMILIES[name]
    settings = {"drop": ["attention_sinks"]} if name == "gpt_oss" else {}
    settings |= {"drop": ["sliding_window"]} if name == "modernbert" else {}
    model = convert(stock, mechanism="linear", feature_map="elu1", rope="none", **settings)
    model.config.use_cache = False
    seen = {layer: [] for layer in linear_attention_modules(model)}
    for layer, module in linear_attention_modules(model).items():

        def observe(inputs, state, seen=seen[layer]):
            seen.append((inputs.query, inputs.key))
            return torch.zeros_like(inputs.query.transpose(1, 2)), None

        module.linear_attention.forward = observe
    inputs = {"input_ids": torch.randint(5, 64, (2, 6))}
    with torch.no_grad():
        model(**inputs)
        monkeypatch.setattr(RotaryShift, "__call__", lambda self, x, tokens: x)
        for module in model.modules():
            if type(module).__name__.lower().endswith("rotaryembedding"):
                module.register_forward_hook(lambda m, a, out: (torch.ones_like(out[0]), torch.zeros_like(out[1])))
        model(**inputs)
    for with_rotation, without in seen.values():
        for actual, expected in zip(with_rotation, without):
            # float32 rotates there and back; the factor of YaRN stays
            expected = factor * expected
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_a_default_that_cannot_be_had_is_replaced_with_a_warning(caplog):
    """And without one where there is nothing to lose: GPT-2 has no rotary positions."""
    model = convert(model_of("dynamic"))
    assert model.config.linear_attention["rope"] == "before_map"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "`rope` = `partial`" in warning
    assert "`rope` = `before_map`" in warning
    caplog.clear()
    convert(tiny_model("gpt2", "AutoModel"))
    assert not caplog.records


TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
WIDE = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
# Some count the first rows of a table, which are not positions, and some do not; all read 64 tokens.
TABLES = {
    "roberta": lambda: transformers.RobertaConfig(**TINY, **WIDE, max_position_embeddings=66),
    "opt": lambda: transformers.OPTConfig(
        **TINY, **WIDE, max_position_embeddings=64, ffn_dim=48, word_embed_proj_dim=32
    ),
    "bart": lambda: transformers.BartConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, **WIDE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", ["bert", "gpt2", *TABLES])
def test_an_input_beyond_the_last_position_is_refused_by_its_length(family):
    stock = transformers.AutoModel.from_config(TABLES[family]()) if family in TABLES else stock_model(family)
    model = convert(stock)
    ids = torch.randint(3, 60, (2, 65))
    with torch.no_grad():
        assert torch.isfinite(model.base_model(input_ids=ids[:, :64]).last_hidden_state).all()
    words = r"65 tokens.* learned positions for 64\. .*max_length=64"
    for other in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        with pytest.raises(ValueError, match=words):
            other.base_model(input_ids=ids)
