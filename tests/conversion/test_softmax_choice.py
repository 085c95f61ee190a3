"""`--softmax_layers` and `--softmax_heads`: listed, or chosen; the ranking is that of models built for the purpose."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn.functional as F
from caches import cache_of
from checkpoints import run
from matrix import stock_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_linear_attention import convert
from hf_linear_attention.attention_observation import observe_attention
from hf_linear_attention.conversion.quality import model_state_bytes
from hf_linear_attention.conversion.softmax_choice import (
    rank_heads,
    rank_layers,
    repeated_tokens,
    set_softmax_heads,
    with_softmax_layers,
)
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


LINEAR = ("--attention", "linear", "--feature_map", "elu1")
EVERY = [[layer, head] for layer in range(3) for head in range(4)]
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


def test_with_a_preset_the_layers_are_chosen_before_the_last_stage(llama, text, tmp_path):
    out = tmp_path / "out"
    code, stdout, stderr = run(
        *("--model_name_or_path", llama, "--output_dir", out, "--preset", "default", "--train_file", text),
        *("--tokens", "2k", "--window_size", 4, "--num_features", 8, "--softmax_layers", "auto:1"),
    )
    assert code == 0, stderr
    assert stderr.index("stage 2 of 2") < stderr.index("ranking the layers")
    left = sorted({0, 1, 2} - set(report_of(out)["softmax_layers"]["layers"]))
    assert converted_layers(out) == left
    assert report_of(out)["figures"]["layers converted"] == "2 of 3"
    assert "stays softmax" in stdout
    names = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert {name.split(".")[2] for name in names if "linear_attention" in name} == {str(layer) for layer in left}


def test_listed_heads_are_kept_and_their_bytes_are_reported(llama, tmp_path):
    code, out, err = run(
        *("--model_name_or_path", llama, "--output_dir", tmp_path / "o", "--attention", "linear"),
        *("--softmax_heads", "2.1,0.3,2.0"),
    )
    assert code == 0, err
    report = report_of(tmp_path / "o")
    assert report["settings"]["softmax_heads"] == [[0, 3], [2, 0], [2, 1]]
    group = 2 * 8 * 4  # one key and one value of 8 float32 numbers
    assert [layer["growing_bytes_per_token"] for layer in report["layers"]] == [group, 0, group]  # two heads, one group
    assert f"heads with softmax add {2 * group} bytes per token" in out
    card = (tmp_path / "o" / "README.md").read_text()
    assert f"| bytes per token of heads with softmax | {2 * group} |" in card
    assert "softmax_heads" in card
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "o")
    plain = convert(str(llama), mechanism="linear")
    assert model_state_bytes(model, 10) == model_state_bytes(plain) + 10 * 2 * group
    cache = cache_of(model(torch.randint(5, 60, (1, 10)), use_cache=True))
    assert sum(layer.state_bytes() for layer in cache.layers) == model_state_bytes(model, 10)


def test_the_score_is_the_rise_of_the_loss_in_a_model_with_one_linear_head():
    model = convert(stock_model("llama"), mechanism="linear", feature_map="elu1")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = repeated_tokens(model)
    assert ids.shape == (8, 2 * 32)  # the model reads 64 tokens
    assert torch.equal(ids[:, :32], ids[:, 32:])
    assert not torch.isin(ids, torch.tensor([0, 1, 2])).any()
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 12:] = 0
    text = [{"input_ids": ids[:2, :20], "attention_mask": mask}]
    ranking = rank_heads(model, ids, text)
    assert sorted([entry["layer"], entry["head"]] for entry in ranking) == EVERY
    assert [entry["score"] for entry in ranking] == sorted((entry["score"] for entry in ranking), reverse=True)

    def losses(any_model):
        with torch.no_grad():
            retrieval = F.cross_entropy(any_model(ids).logits[:, 32:-1].flatten(0, 1), ids[:, 33:].flatten())
            logits = any_model(**text[0]).logits
        rows = [(logits[0, :19], ids[0, 1:20]), (logits[1, :11], ids[1, 1:12])]
        nats = sum(F.cross_entropy(found, wanted, reduction="sum") for found, wanted in rows)
        return retrieval.item(), nats.item() / 30

    stock = losses(stock_model("llama"))
    for entry in ranking:
        kept = [pair for pair in EVERY if pair != [entry["layer"], entry["head"]]]
        ablated = convert(stock_model("llama"), mechanism="linear", feature_map="elu1", softmax_heads=kept)
        found = losses(ablated)
        # float32, differences of losses around 4 nats
        assert entry["retrieval"] == pytest.approx(found[0] - stock[0], abs=2e-5)
        assert entry["text"] == pytest.approx(found[1] - stock[1], abs=2e-5)
    # The model has not changed.
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module.linear_attention.num_growing for module in linear_attention_modules(model).values())


def test_heads_set_in_place_are_those_of_a_new_model():
    model = convert(stock_model("llama"), mechanism={"0": "hybrid", "1-": "linear"})
    new = convert(stock_model("llama"), mechanism={"0": "hybrid", "1-": "linear"}, softmax_heads=[[0, 1], [2, 2]])
    set_softmax_heads(model, [[0, 1], [2, 2]])
    assert model.config.linear_attention == new.config.linear_attention
    ids = torch.randint(5, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, new(ids).logits)
    for mine, theirs in zip(linear_attention_modules(model).values(), linear_attention_modules(new).values()):
        assert mine.linear_attention.signature == theirs.linear_attention.signature
        assert mine.linear_attention.settings == theirs.linear_attention.settings


def test_the_best_heads_are_chosen(llama, tmp_path):
    words = ("--model_name_or_path", llama, *LINEAR, "--output_dir", tmp_path / "o", "--softmax_heads", "auto:3")
    code, out, err = run(*words)
    assert code == 0, err
    report = report_of(tmp_path / "o")
    choice = report["softmax_heads"]
    best = sorted([entry["layer"], entry["head"]] for entry in choice["ranking"][:3])
    config = json.loads((tmp_path / "o" / "config.json").read_text())
    assert choice["heads"] == best == report["settings"]["softmax_heads"] == config["linear_attention"]["softmax_heads"]
    assert len(choice["ranking"]) == 12
    assert all(entry["text"] is None for entry in choice["ranking"])
    assert len(re.findall("stays softmax", out)) == 3
    assert report["figures"]["bytes per token of heads with softmax"] > 0


def test_heads_are_kept_through_healing(llama, text, tmp_path):
    words = ("--attention", "0:hybrid,1-:linear", "--window_size", 4, "--num_features", 8, "--softmax_heads", "auto:2")
    words = (*words, "--num_exact_keys", 2)  # fewer than the text has behind its window
    code, _, err = run(
        *("--model_name_or_path", llama, "--output_dir", tmp_path / "o", *words, "--preset", "default"),
        *("--train_file", text, "--tokens", "2k"),
    )
    assert code == 0, err
    report = report_of(tmp_path / "o")
    heads = report["softmax_heads"]["heads"]
    assert report["softmax_heads"]["inputs"] is not None  # the training text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "o")
    kept = [pair for entry in model.config.linear_attention for pair in entry["softmax_heads"]]
    assert kept == heads
    seen = {}
    with torch.no_grad(), observe_attention(model, lambda call: seen.update({call.module.layer_idx: call})):
        model(torch.randint(5, 60, (2, 20)))
    for layer, head in EVERY:
        error = (seen[layer].output - seen[layer].softmax_output)[:, :, head].norm()
        assert (error < 1e-4 * seen[layer].softmax_output[:, :, head].norm()) == ([layer, head] in heads)
