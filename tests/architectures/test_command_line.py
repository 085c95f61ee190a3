"""The conversion script with what is no plain decoder or encoder."""

from __future__ import annotations

import pytest
import torch
from architectures import inputs_of, tiny_model
from checkpoints import convert_folder, run
from transformers import AutoModel

from hf_linear_attention.conversion.convert_checkpoint import architecture_table


@pytest.mark.parametrize(
    ("model_type", "head", "flags", "num_layers"),
    [
        ("bart", "AutoModelForSeq2SeqLM", ["--cross_attention"], 9),
        ("t5", "AutoModelForSeq2SeqLM", ["--drop", "position_bias"], 6),
        ("whisper", "AutoModelForSpeechSeq2Seq", ["--layers", "0,2,4"], 3),
        ("speech_to_text", "AutoModelForSpeechSeq2Seq", [], 6),
        ("wav2vec2", "AutoModelForCTC", [], 3),
        ("siglip_vision_model", "AutoModel", [], 3),
    ],
)
def test_conversion(model_type, head, flags, num_layers, tmp_path):
    stock = tiny_model(model_type, head)
    stock.save_pretrained(tmp_path / "source")
    report = convert_folder(tmp_path / "source", tmp_path / "out", "--num_features", 16, *flags)
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
    assert "give `--drop sliding_window`" in error
    assert run("--model_name_or_path", tmp_path, "--dry_run", "--drop", "sliding_window")[0] == 0
    assert "must be a list with any of" in run("--model_name_or_path", tmp_path, "--dry_run", "--drop", "windows")[2]
    assert (
        "no layer of this type" in run("--model_name_or_path", tmp_path, "--dry_run", "--layers", "full_attention")[2]
    )


def test_the_table_can_be_printed():
    code, out, _ = run("--list_architectures")
    assert code == 0
    assert out.strip() == architecture_table()
