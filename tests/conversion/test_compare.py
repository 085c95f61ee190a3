"""`compare`: its figures, its sentence, what it refuses and what it writes."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pydoc_data.topics import topics

import pytest
import torch
from checkpoints import files, run, save_twin
from transformers import AutoModelForCausalLM, BertConfig, BertLMHeadModel, BertModel

from hf_linear_attention import convert
from hf_linear_attention.conversion import model_speed
from hf_linear_attention.conversion.commands import compare as main
from hf_linear_attention.conversion.comparison import preset_for, recommendation
from hf_linear_attention.conversion.model_speed import first_faster


answer = functools.partial(run, command=main)


@pytest.fixture(autouse=True)
def short_timings(monkeypatch):
    monkeypatch.setattr(model_speed, "LONGEST", 128)


@pytest.mark.long
def test_one_row_per_mechanism_before_and_after_a_training(llama, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(topics[name] for name in sorted(topics))[:60_000], encoding="utf-8")
    out = tmp_path / "out"
    code, shown, err = answer(
        *("--model_name_or_path", llama, "--mechanisms", "hybrid,performer,nystrom", "--train_file", text),
        *("--tokens", "500", "--output_dir", out),
    )
    assert code == 0, err
    assert files(out) == ["comparison.json"]
    content = json.loads((out / "comparison.json").read_text())
    hybrid, performer, nystrom = content["mechanisms"]
    assert nystrom.keys() == {"mechanism", "refused"}
    assert "has no causal form" in nystrom["refused"]
    assert content["measure"] == "kl"
    assert all(row["minutes"] > 0 and row["reading"] for row in (hybrid, performer))
    assert 0 <= hybrid["untrained"] < performer["untrained"]  # it holds most of such short texts exactly
    assert 0 < performer["trained"] != performer["untrained"] > 0
    assert (hybrid["preset"], performer["preset"]) == ("default", "performer")
    assert hybrid["settings"]["decay"] == "learned"  # of the preset
    assert content["recommendation"] in shown
    assert re.search(r"(?m)^performer +\d\.\d{4} +\d\.\d{4} .* bytes +[\d,.]+ min$", shown)
    assert "tokens_per_second" not in shown  # progress belongs to stderr


def test_without_a_text_an_encoder_is_compared_on_the_built_in_sentences(tmp_path):
    save_twin(tmp_path / "bert", "bert", "AutoModel")
    out = tmp_path / "out"
    out.mkdir()
    (out / "comparison.json").write_text("of an earlier comparison")
    words = ("--mechanisms", "nystrom,linear", "--output_dir", out, "--overwrite")
    code, shown, err = answer("--model_name_or_path", tmp_path / "bert", *words)
    assert code == 0, err
    rows = json.loads((out / "comparison.json").read_text())["mechanisms"]
    assert [(row["mechanism"], row["trained"], row["minutes"]) for row in rows] == [
        ("nystrom", None, None),
        ("linear", None, None),
    ]
    assert "cosine to the original's embeddings, on the built-in sentences." in shown
    assert re.search(r"(?m)^nystrom +[01]\.\d{4} +- ", shown)
    assert shown.splitlines()[-1].startswith("Take `")


def test_a_model_without_figures_is_refused(tmp_path):
    save_twin(tmp_path / "vit", "vit")
    code, _, err = answer("--model_name_or_path", tmp_path / "vit")
    assert code == 2
    assert "there are figures for causal_lm, embedding, and its task is" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mechanisms", "hybrid,flash", "--tokens", "1k"], ["'flash'", "`--tokens` needs text"]),
        (["--output_dir", "."], ["exists", "`--overwrite`"]),
        (["--output_dir", ".", "--overwrite"], ["holds more than a comparison"]),
        (["--overwrite"], ["needs `--output_dir`"]),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(llama, words, said):
    code, shown, err = answer("--model_name_or_path", llama, *words)
    assert (code, shown, err.count("\n")) == (2, "", 1)
    assert all(part in err for part in said), err


def test_pickles_are_read_only_when_allowed(llama, tmp_path):
    shutil.copytree(llama, tmp_path / "source")
    (tmp_path / "source" / "model.safetensors").unlink()
    torch.save(AutoModelForCausalLM.from_pretrained(llama).state_dict(), tmp_path / "source" / "pytorch_model.bin")
    words = ("--model_name_or_path", tmp_path / "source", "--mechanisms", "nystrom")  # which no decoder can have
    code, _, err = answer(*words)
    assert code == 2
    assert "allow_pickle" in err
    assert answer(*words, "--allow_pickle")[0] == 0


def test_the_first_length_from_which_it_is_faster_at_all():
    curve = [{"length": n, "seconds": 1.0, "softmax_seconds": s} for n, s in ((128, 1.0), (256, 0.5), (512, 1.0))]
    assert first_faster(curve) == 512
    assert first_faster(curve[:2]) is None


@pytest.mark.parametrize("writes", [False, True])
def test_the_curves_end_where_the_positions_of_the_models_do(writes):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**sizes, vocab_size=50, max_position_embeddings=192, is_decoder=writes)
    teacher = (BertLMHeadModel if writes else BertModel)(config).eval()
    student = convert(teacher, mechanism="linear").eval()
    curves = model_speed.model_speed(student, teacher, 192, writes)["model"]
    assert [point["length"] for point in curves["reading"]] == [128]
    assert [point["length"] for point in curves["writing"]] == ([128] if writes else [])
    assert all(point["seconds"] > 0 and point["softmax_seconds"] > 0 for curve in curves.values() for point in curve)


def row(name: str, untrained: float, trained: float | None, faster: int | None) -> dict:
    reading = [{"length": length, "seconds": 1.0, "softmax_seconds": length / 512} for length in (128, 1024)]
    figures = {"untrained": untrained, "trained": trained, "faster_from": faster, "reading": reading}
    return {"mechanism": name, "refused": None, "state_bytes": 1000, "minutes": None, **figures}


def content_of(*rows: dict, **changes) -> dict:
    facts = {"base_model": "org/x", "max_length": 512, "tokens": 40_000, "measure": "kl", "text": "a.txt"}
    content = {**facts, "mechanisms": list(rows), **changes}
    return {**content, "recommendation": recommendation(content)}


def test_the_recommendation_is_one_sentence_about_the_nearest():
    content = content_of(row("linear", 0.1, 0.5, 256), row("hybrid", 0.2, 0.02, 1024))
    assert content["recommendation"] == (
        "Take `hybrid`: after 40,000 tokens it is nearest to the original (kl 0.02, `linear` 0.5); faster here: never "
        "within its 512 positions."
    )
    content = content_of(row("linear", 0.9, None, 256), row("nystrom", 0.8, None, None), tokens=None, measure="cosine")
    assert content["recommendation"].startswith("Take `linear`: without training it is nearest to the original (cosine")
    assert content["recommendation"].endswith("faster here: 256 tokens.")
    assert "nothing to recommend" in recommendation({**content, "mechanisms": [{"refused": "x"}]})


@pytest.mark.parametrize(
    ("mechanism", "direction", "preset"),
    [("hybrid", "causal", "default"), ("linear", "causal", "linear"), ("linear", "bidirectional", "default")],
)
def test_the_preset_of_a_mechanism(mechanism, direction, preset):
    assert preset_for(mechanism, direction) == preset
