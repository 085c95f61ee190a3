"""Which layers stay softmax: ranked by what their softmax brings the whole model."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from hf_linear_attention import convert
from hf_linear_attention.conversion.softmax_choice import rank_layers, with_softmax_layers


def batches(count: int = 2) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 300, (count, 2, 24), generator=generator)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, 15:] = 0
    return [{"input_ids": part, "attention_mask": mask} for part in ids]


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 300, "max_position_embeddings": 128, "initializer_range": 0.2}


@pytest.fixture
def teacher() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@pytest.mark.parametrize("spoilt", [0, 1])
def test_the_layer_that_is_worst_for_the_whole_comes_first(teacher, spoilt: int) -> None:
    """One layer's window is over everything, which is softmax; giving it back can gain nothing."""
    student = convert(teacher, mechanism="hybrid", window_size=64, num_features=8)
    student.model.layers[spoilt].self_attn.linear_attention.window_size = 1
    student.model.layers[spoilt].self_attn.linear_attention.num_sinks = 0
    first, second = rank_layers(student, teacher, batches())
    assert first.layer == spoilt
    assert first.divergence == pytest.approx(0, abs=1e-6)
    assert first.gain > 100 * abs(second.gain)
    assert second.gain == pytest.approx(0, abs=1e-6)


def test_the_figures_are_those_of_models_converted_that_way(teacher) -> None:
    """Padding is in none; an independent form converts the other layer alone."""
    student = convert(teacher, mechanism="linear", feature_map="elu1")
    ranking = {entry.layer: entry for entry in rank_layers(student, teacher, batches())}
    for layer in (0, 1):
        other = convert(teacher, mechanism="linear", feature_map="elu1", layers=[1 - layer])
        total, tokens = 0.0, 0
        with torch.no_grad():
            for batch in batches():
                mask = batch["attention_mask"].bool()
                p, q = (m(**batch).logits[mask].double().log_softmax(-1) for m in (teacher, other))
                total += (p.exp() * (p - q)).sum().item()
                tokens += int(mask.sum())
        assert ranking[layer].divergence == pytest.approx(total / tokens, rel=1e-4)


def test_an_encoder_without_logits_is_ranked_by_its_hidden_states() -> None:
    torch.manual_seed(1)
    teacher = BertModel(BertConfig(**SIZES)).eval()
    student = convert(teacher, mechanism="linear", feature_map="elu1")
    ranking = rank_layers(student, teacher, batches())
    assert {entry.layer for entry in ranking} == {0, 1}
    assert ranking[0].gain >= ranking[1].gain > 0


def test_softmax_given_back(teacher) -> None:
    student = convert(teacher, mechanism="linear", feature_map="t2r")
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.01
    model = with_softmax_layers(student, [0])
    assert model.config.linear_attention["layers"] == [1]
    state = student.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    assert not any("layers.0.self_attn.linear_attention" in name for name in model.state_dict())
    with pytest.raises(ValueError, match=r"layers \[0\], which are not converted; choose from \[1\]"):
        with_softmax_layers(model, [0])
