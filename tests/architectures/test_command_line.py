"""The conversion script with what is no plain decoder or encoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from architectures import inputs_of, tiny_model
from checkpoints import convert_folder, run
from transformers import AutoModel

from hf_linear_attention.conversion.plan import Plan
from hf_linear_attention.conversion.result_text import healing_lines


@pytest.mark.parametrize(
    ("model_type", "head", "flags", "num_layers"),
    [
        ("bart", "AutoModelForSeq2SeqLM", ["--cross_attention"], 9),
        ("t5", "AutoModelForSeq2SeqLM", ["--drop", "position_bias"], 6),
        ("whisper", "AutoModelForSpeechSeq2Seq", ["--layers", "0,2,4"], 3),
        ("wav2vec2", "AutoModelForCTC", [], 3),
    ],
)
def test_conversion(model_type, head, flags, num_layers, tmp_path):
    stock = tiny_model(model_type, head)
    stock.save_pretrained(tmp_path / "source")
    # a window that the small inputs exceed; converted cross-attention gets `linear`, which has none
    sizes = ("--num_features", 16) if "--cross_attention" in flags else ("--window_size", 2)
    report = convert_folder(tmp_path / "source", tmp_path / "out", *sizes, *flags)
    assert len(report["layers"]) == num_layers
    assert report["dropped_features"] == (
        ["position_bias: T5Attention adds a learned position bias to its logits"] if model_type == "t5" else []
    )
    figures = report["checks"]["student_against_teacher"]
    assert 0.01 < figures["hidden_state_error"] < 2
    model = AutoModel.from_pretrained(tmp_path / "out").eval()
    assert type(model).__name__.startswith("Linear")
    with torch.no_grad():
        assert torch.isfinite(model(**inputs_of(model))[0]).all()


def test_what_is_refused_says_what_to_do(tmp_path):
    tiny_model("mistral", "AutoModelForCausalLM", sliding_window=8).save_pretrained(tmp_path)
    code, _, error = run("--model_name_or_path", tmp_path, "--dry_run")
    assert code == 2
    assert "MistralAttention sees the nearest 8 tokens only, in layers 0, 1, 2" in error
    assert "`--drop sliding_window`" in error
    assert run("--model_name_or_path", tmp_path, "--dry_run", "--drop", "sliding_window")[0] == 0


@pytest.mark.parametrize(
    ("model_type", "head", "recipe"),
    [
        ("t5", "AutoModelForSeq2SeqLM", "distil_seq2seq_lm.yaml"),
        ("bart", "AutoModel", None),
        ("bert", "AutoModelForTokenClassification", None),
        ("vit", "AutoModel", "distil_image_embedding.yaml"),
        ("wav2vec2", "AutoModelForCTC", None),
    ],
)
def test_the_hint_after_a_conversion_names_the_recipe_of_the_head(model_type, head, recipe):
    """A head that no task trains has none, instead of a task that would train something else."""
    stock = tiny_model(model_type, head)
    plan = Plan(stock, stock.config, type(stock), 0, [], [], [], [], [], [], {})
    found = plan.head
    assert found.recipe == recipe
    assert (found.task is None) == (recipe is None)
    if recipe is None:
        assert f"no task for {type(stock).__name__}" in healing_lines(plan, None, "OUT")[0]
    else:
        path = Path(__file__).resolve().parents[2] / "training" / "configs" / recipe
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["task"] == found.task
