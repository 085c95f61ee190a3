"""How layers rotate queries and keys: what is observed against what a model really computes."""

from __future__ import annotations

import pytest
import torch
from architectures import tiny_model
from transformers import AttentionInterface

from hf_linear_attention import convert
from hf_linear_attention.attention.architectures import attention_modules
from hf_linear_attention.attention.layer import LinearizedAttention
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.rotary_positions import RotaryFacts, rotary_facts


SCALED = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    },
}
# (model type, rotary_dim of 8 channels, pairing)
FAMILIES = [
    ("llama", 8, "half"),
    ("gpt_neox", 2, "half"),
    ("phi", 4, "half"),
    ("cohere", 8, "interleaved"),
    ("glm", 4, "interleaved"),
    ("gpt_oss", 8, "half"),
    ("nanochat", 8, "half"),
    ("modernbert", 8, "half"),
    ("gpt2", 0, None),
    ("deepseek_v3", 0, None),
]


def scaled_llama(kind: str):
    return tiny_model("llama", "AutoModel", rope_parameters={"rope_type": kind, "rope_theta": 1e4, **SCALED[kind]})


def queries_of(model, ids: torch.Tensor, positions: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """`{name: query [1, H, N, D]}` of the whole model; with the rotation left out where `positions` is None."""
    seen = {}
    names = {module: name for name, module in attention_modules(model).items()}

    def record(module, query, key, value, attention_mask, **kwargs):
        seen[names[module]] = query
        return value.new_zeros(query.transpose(1, 2).shape), None  # nothing of one layer reaches the next

    AttentionInterface.register("test_record", record)
    model.set_attn_implementation("test_record")
    handles = []
    if positions is None:
        handles = [
            m.register_forward_hook(lambda m, a, output: (torch.ones_like(output[0]), torch.zeros_like(output[1])))
            for m in model.modules()
            if "rotary" in type(m).__name__.lower()
        ]
    with torch.no_grad():
        model(input_ids=ids, **({} if positions is None else {"position_ids": positions}))
    for handle in handles:
        handle.remove()
    return seen


def rotated(query: torch.Tensor, facts: RotaryFacts, positions: torch.Tensor) -> torch.Tensor:
    """By complex numbers, in float64: nothing of ours and nothing of transformers'."""
    if facts.pairing is None:
        return query
    x, half = query[..., : facts.rotary_dim].double(), facts.rotary_dim // 2
    if facts.pairing == "half":
        pairs = torch.complex(x[..., :half], x[..., half:])
    else:
        pairs = torch.complex(x[..., ::2].contiguous(), x[..., 1::2].contiguous())
    angles = positions.double()[:, None, :, None] * torch.tensor(facts.inv_freq, dtype=torch.float64)
    pairs = facts.attention_factor * pairs * torch.polar(torch.ones_like(angles), angles)
    parts = (pairs.real, pairs.imag)
    x = torch.cat(parts, dim=-1) if facts.pairing == "half" else torch.stack(parts, dim=-1).flatten(-2)
    return torch.cat((x.to(query.dtype), query[..., facts.rotary_dim :]), dim=-1)


def assert_facts_hold(model) -> dict[str, RotaryFacts]:
    torch.manual_seed(1)
    ids, positions = torch.randint(5, 64, (1, 6)), torch.tensor([[0, 1, 2, 5, 9, 14]])
    facts = rotary_facts(model)
    plain, actual = queries_of(model, ids, None), queries_of(model, ids, positions)
    assert set(facts) == set(plain)
    for name in facts:
        expected = rotated(plain[name], facts[name], positions)
        # angles from float32 cosines and sines, 15 times as wide at the last position
        torch.testing.assert_close(actual[name], expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    return facts


@pytest.mark.parametrize(("row", "rotary_dim", "pairing"), [family for family in FAMILIES if family[2]])
def test_facts_are_what_the_model_computes(row, rotary_dim, pairing):
    for facts in assert_facts_hold(tiny_model(row, "AutoModel")).values():
        assert (facts.rotary_dim, facts.pairing) == (rotary_dim, pairing)
        assert len(facts.inv_freq) == rotary_dim // 2
        assert not facts.depends_on_input


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_rotary_positions(kind):
    model = scaled_llama(kind)
    (facts, *others) = assert_facts_hold(model).values()
    assert all(other == facts for other in others)
    assert facts.depends_on_input == (kind in ("dynamic", "longrope"))
    assert (facts.attention_factor != pytest.approx(1.0)) == (kind in ("yarn", "longrope"))
    torch.testing.assert_close(torch.tensor(facts.inv_freq), model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


def test_layers_without_among_others_that_rotate():
    facts = assert_facts_hold(tiny_model("smollm3", "AutoModel", num_hidden_layers=5))
    assert [fact.pairing for fact in facts.values()] == ["half"] * 3 + [None, "half"]


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
    with pytest.raises(ValueError, match=reason):
        rotary_facts(model)
    with pytest.raises(ValueError, match=rf"`rope` = `none`, but .*{reason}"):
        convert(model, rope="none")


def test_input_dependent_frequencies_are_refused():
    for kind in ("dynamic", "longrope"):
        with pytest.raises(
            ValueError, match=r"`rope` = `partial`, but the rotary frequencies of LlamaAttention change"
        ):
            convert(scaled_llama(kind), mechanism="hybrid", rope="partial")
        assert convert(scaled_llama(kind), mechanism="hybrid").config.linear_attention["rotary"] == []


@pytest.mark.parametrize("row", ["smollm3", "gpt_oss", "nanochat", "glm", "cohere"])
def test_unrotated_is_what_the_projections_gave(row, monkeypatch):
    """Layers without rotary positions, half as many columns as channels, another direction, interleaved pairs."""
    settings = {"drop": ["attention_sinks"]} if row == "gpt_oss" else {}
    changes = {"smollm3": {"num_hidden_layers": 5}}.get(row, {})
    stock = tiny_model(row, "AutoModel", **changes)
    factor = next(iter(rotary_facts(stock).values())).attention_factor  # gpt_oss has YaRN, whose factor stays
    model = convert(stock, mechanism="linear", feature_map="elu1", rope="none", **settings)
    seen = {name: [] for name in linear_attention_modules(model)}
    for name, module in linear_attention_modules(model).items():

        def observe(inputs, state, seen=seen[name]):
            seen.append((inputs.query, inputs.key))
            return torch.zeros_like(inputs.query.transpose(1, 2)), None

        module.linear_attention.forward = observe
    inputs = {"input_ids": torch.randint(5, 64, (2, 6)), "use_cache": False}
    with torch.no_grad():
        model(**inputs)
        nowhere = torch.zeros(2, 6, dtype=torch.int32)
        monkeypatch.setattr(LinearizedAttention, "_positions", lambda *given: nowhere)
        for module in model.modules():
            if type(module).__name__.lower().endswith("rotaryembedding"):
                module.register_forward_hook(lambda m, a, out: (torch.ones_like(out[0]), torch.zeros_like(out[1])))
        model(**inputs)
    for with_rotation, without in seen.values():
        for actual, expected in zip(with_rotation, without):
            # float32 rotates there and back
            expected = factor * expected
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_a_default_that_cannot_be_had_is_replaced_with_a_warning(caplog):
    """And without one where there is nothing to lose: GPT-2 has no rotary positions."""
    model = convert(scaled_llama("dynamic"))
    assert model.config.linear_attention["rope"] == "before_map"
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "`rope` = `partial`" in warning
    assert "`rope` = `before_map`" in warning
    caplog.clear()
    convert(tiny_model("gpt2", "AutoModel"))
    assert not caplog.records
