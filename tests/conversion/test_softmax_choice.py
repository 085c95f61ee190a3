"""`--softmax_layers`: listed, or chosen; the ranking is that of models built for the purpose."""

from __future__ import annotations

import json
import re

import pytest
import torch
from checkpoints import run
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_linear_attention import convert
from hf_linear_attention.conversion.softmax_choice import rank_layers, with_softmax_layers


LINEAR = ("--attention", "linear", "--feature_map", "elu1")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 300, "max_position_embeddings": 128, "initializer_range": 0.2}


@pytest.fixture
def teacher() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def batches(count: int = 2) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 300, (count, 2, 24), generator=generator)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, 15:] = 0
    return [{"input_ids": part, "attention_mask": mask} for part in ids]


def report_of(folder):
    return json.loads((folder / "conversion_report.json").read_text())


def converted_layers(folder):
    return json.loads((folder / "config.json").read_text())["linear_attention"]["layers"]


@pytest.mark.parametrize("spoilt", [0, 1])
def test_the_layer_that_is_worst_for_the_whole_comes_first(teacher, spoilt: int) -> None:
    """One layer's window is over everything, which is softmax; giving it back can gain nothing."""
    student = convert(teacher, mechanism="hybrid", window_size=64, num_features=8)
    student.model.layers[spoilt].self_attn.linear_attention.window_size = 1
    student.model.layers[spoilt].self_attn.linear_attention.num_sinks = 0
    first, second = rank_layers(student, teacher, batches())
    assert first["layer"] == spoilt
    assert first["divergence"] == pytest.approx(0, abs=1e-6)
    assert first["gain"] > 100 * abs(second["gain"])
    assert second["gain"] == pytest.approx(0, abs=1e-6)


def test_the_figures_are_those_of_models_converted_that_way(teacher) -> None:
    """Padding is in none; an independent form converts the other layer alone."""
    student = convert(teacher, mechanism="linear", feature_map="elu1")
    ranking = {entry["layer"]: entry for entry in rank_layers(student, teacher, batches())}
    for own in rank_layers(student, None, batches()):  # its own softmax attention is the teacher
        assert own["divergence"] == pytest.approx(ranking[own["layer"]]["divergence"], rel=1e-4)  # float32
    for layer in (0, 1):
        other = convert(teacher, mechanism="linear", feature_map="elu1", layers=[1 - layer])
        total, tokens = 0.0, 0
        with torch.no_grad():
            for batch in batches():
                mask = batch["attention_mask"].bool()
                p, q = (m(**batch).logits[mask].double().log_softmax(-1) for m in (teacher, other))
                total += (p.exp() * (p - q)).sum().item()
                tokens += int(mask.sum())
        assert ranking[layer]["divergence"] == pytest.approx(total / tokens, rel=1e-4)


def test_softmax_given_back(teacher) -> None:
    student = convert(teacher, mechanism="linear", feature_map="exp")
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


def test_the_untrained_student_is_ranked(llama, text, tmp_path):
    out = tmp_path / "out"
    words = ("--model_name_or_path", llama, *LINEAR, "--output_dir", out)
    code, stdout, _ = run(*words, "--softmax_layers", "auto:1", "--calibration_file", text)
    assert code == 0
    choice = report_of(out)["softmax_layers"]
    first, *others = choice["ranking"]
    assert choice["layers"] == [first["layer"]]
    assert all(first["gain"] > other["gain"] for other in others)
    assert converted_layers(out) == sorted(other["layer"] for other in others)
    assert re.search(rf"layer {first['layer']} .*{first['gain']:.4g}  stays softmax\n", stdout)
    assert "2 of 3" in stdout


@pytest.mark.long
def test_with_a_preset_the_layers_are_chosen_before_the_last_stage(llama, text, tmp_path):
    out = tmp_path / "out"
    code, stdout, stderr = run(
        *("--model_name_or_path", llama, "--output_dir", out, "--preset", "default", "--train_file", text),
        *("--tokens", "500", "--window_size", 4, "--num_features", 8, "--softmax_layers", "auto:1"),
    )
    assert code == 0, stderr
    assert stderr.index("stage 2 of 2") < stderr.index("ranking the layers")
    left = sorted({0, 1, 2} - set(report_of(out)["softmax_layers"]["layers"]))
    assert converted_layers(out) == left
    assert report_of(out)["figures"]["layers converted"] == "2 of 3"
    assert "stays softmax" in stdout
    names = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert {name.split(".")[2] for name in names if "linear_attention" in name} == {str(layer) for layer in left}
