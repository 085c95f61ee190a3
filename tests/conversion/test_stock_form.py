"""`--form qwen3_5`: the result of a conversion is a stock Qwen3.5 checkpoint that computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from checkpoints import run, save_twin
from matrix import stock_model
from transformers import AutoModelForCausalLM

from hf_linear_attention import convert, convert_and_heal
from hf_linear_attention.conversion import commands
from hf_linear_attention.conversion.export import qwen3_5
from hf_linear_attention.conversion.export.qwen3_5 import TOLERANCE, largest_difference
from hf_linear_attention.conversion.export.qwen3_5 import stock_model as rewritten


FORM = {"mechanism": "gated_delta", "form": "qwen3_5"}
COMMAND = ("--attention=gated_delta", "--form=qwen3_5")


def twin(family: str, **changes):
    """A random twin of four layers whose norms and biases are not those of the start."""
    model = stock_model(family, num_hidden_layers=4, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def student(source, layers):
    """A converted model whose linear layers, which start with an output of 0, give something."""
    model = convert(source, **FORM, layers=layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".linear_attention." in name:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sources") / "qwen3"
    save_twin(folder, "qwen3", num_hidden_layers=4)
    return folder


@pytest.mark.parametrize(
    ("family", "layers"), [("qwen3", [2]), ("qwen2", [0, 1, 2]), ("llama", [0, 1, 2]), ("mistral", [2])]
)
def test_it_computes_what_the_student_computes(family, layers):
    model = student(twin(family, sliding_window=None), layers)
    assert qwen3_5.obstacles(model.config) == []
    stock, difference = rewritten(model, torch.float32)  # which refuses more
    assert type(stock).__module__.startswith("transformers.models.qwen3_5.")
    assert 0 < difference <= TOLERANCE


def test_kept_layers_of_qwen3_are_the_same_to_the_last_bit():
    assert rewritten(convert(twin("qwen3"), **FORM, layers="none"), torch.float32)[1] == 0


def test_small_norms_survive_bfloat16():
    """Qwen3.5 stores w - 1, of which bfloat16 keeps no more than two digits where w is small."""
    source = twin("qwen3")
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            if name.endswith("layernorm.weight"):
                parameter.uniform_(0.01, 0.2)
            parameter.copy_(parameter.bfloat16())
    model = student(source, [0, 1, 2])
    ids = torch.randint(3, 64, (2, 50), generator=torch.Generator().manual_seed(0))
    errors = []
    for dtype in (torch.bfloat16, torch.float32):
        stored = qwen3_5.rewritten(model, dtype)
        for parameter in stored.parameters():
            parameter.data = parameter.bfloat16().float()
        with torch.no_grad():
            errors.append((stored(ids).logits - model(ids).logits).abs().mean())
    assert errors[0] < errors[1] / 3


def test_the_command_writes_a_checkpoint_that_needs_no_code(qwen3, tmp_path):
    code, out, err = run(f"--model_name_or_path={qwen3}", f"--output_dir={tmp_path / 'out'}", *COMMAND)
    assert code == 0, err
    assert "trust_remote_code" not in out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["full_attention_interval"]) == ("qwen3_5_text", 4)
    assert {"auto_map", "linear_attention"}.isdisjoint(config)
    assert not [*(tmp_path / "out").glob("*.py")]
    assert "trust_remote_code" not in (tmp_path / "out" / "README.md").read_text()
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report["stock"]["architecture"] == "Qwen3_5ForCausalLM"
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        convert(AutoModelForCausalLM.from_pretrained(qwen3), **FORM, layers=[0, 1, 2]),
    ]
    assert type(models[0]).__module__.startswith("transformers.models.qwen3_5.")
    assert torch.equal(
        *(model.generate(torch.arange(3, 20)[None], max_new_tokens=12, do_sample=False) for model in models)
    )


def test_a_saved_student_is_exported_over_another_result_if_that_is_asked_for(qwen3, tmp_path):
    student(str(qwen3), [0, 2]).save_pretrained(tmp_path / "student")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    words = ("export", tmp_path / "student", "--to=qwen3_5", f"--output_dir={tmp_path / 'out'}")
    code, _, err = run(*words, command=commands.main)
    assert (code, "`--overwrite`" in err) == (2, True)
    code, out, err = run(*words, "--overwrite", command=commands.main)
    assert code == 0, err
    assert "Qwen3_5ForCausalLM" in out
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("student", "out")]
    assert largest_difference(*models) <= TOLERANCE


def test_what_computes_something_else_is_not_written(qwen3, tmp_path, monkeypatch):
    monkeypatch.setattr(qwen3_5, "SMALL", 1.0)  # then the norm of queries, which a Llama does not have, changes them
    save_twin(tmp_path / "llama", "llama", num_hidden_layers=4)
    code, _, err = run(f"--model_name_or_path={tmp_path / 'llama'}", f"--output_dir={tmp_path / 'out'}", *COMMAND)
    assert code == 1
    assert "does not compute what the converted model computes" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_preset_heals_it_from_python(qwen3, tmp_path):
    texts = [topics[name][:600] for name in sorted(topics)[:4]]
    options = {"tokens": "300", "tokenizer": None, "output_dir": tmp_path / "out", "softmax_layers": "1"}
    model = convert_and_heal(str(qwen3), "qwen3_5", texts, **options)
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert model.config.layer_types == ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    assert "full_attention_interval" not in model.config.to_dict()
    assert "Trained" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("family", "changes", "options", "reason"),
    [
        ("gpt2", {}, (), "`--form qwen3_5`: a `gpt2` model has other layers"),
        ("llama", {"mlp_bias": True}, (), "`mlp_bias` is true"),
        ("llama", {"attention_bias": True}, (), "the output projection of a linear layer of Qwen3.5 has no bias"),
        ("llama", {"hidden_act": "gelu"}, (), "linear layers have the same, which must be `silu`"),
        ("mistral", {"sliding_window": 4}, ("--drop=sliding_window",), "`sliding_window` = 4 in the softmax layers 3"),
        ("qwen3", {}, ("--layers=all", "--softmax_layers=every:9"), "K must be from 2 to 4"),
        ("qwen3", {"num_hidden_layers": 3}, (), "K must be from 2 to 3"),
        ("qwen3", {}, ("--preset=gated_delta", "--train_file=t.txt"), "give `--preset qwen3_5`"),
        ("qwen3", {}, ("--conv_size=3",), "`conv_size` = `3` has no effect with `form` = `qwen3_5`"),
        ("llama", {}, ("--dtype=float16",), "give `--dtype bfloat16`"),
    ],
)
def test_what_the_architecture_cannot_hold_is_refused_before_weights_are_read(
    family, changes, options, reason, tmp_path, monkeypatch
):
    save_twin(tmp_path / "source", family, **{"num_hidden_layers": 4, **changes})
    monkeypatch.setattr("safetensors.torch.load_file", None)
    code, _, err = run(f"--model_name_or_path={tmp_path / 'source'}", "--output_dir=o", "--dry_run", *COMMAND, *options)
    assert code == 2
    assert reason in err
