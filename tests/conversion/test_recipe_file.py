"""recipe.yaml makes the same weights again, and Python has the same conversion in five lines."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from checkpoints import convert_folder, files, run, save_twin, tiny_tokenizer
from safetensors.torch import load_file, save_file
from task_twins import TWINS
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_linear_attention
from hf_linear_attention import convert, convert_and_heal
from hf_linear_attention._common.errors import TerminatedError, UsageError
from hf_linear_attention.conversion.arguments import RECIPE
from hf_linear_attention.default_settings import DEFAULTS
from hf_linear_attention.modeling_linear_attention import linear_model_class
from hf_linear_attention.training.presets import load_preset


SMALL = {"window_size": 4, "num_features": 8}


def same_weights(one: Path, two: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, two))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("llama", ["--attention", "0-1:hybrid,2-:linear", "--window_size", "0:8,1:4", "--seed", "3"]),
        ("llama", ["--attention", "performer", "--seed", "5", "--layers", "0,2", "--dtype", "bfloat16"]),
        (
            "llama",
            ["--attention", "hybrid", "--state_tokens", "96", "--trained_length", "128", "--softmax_layers", "1"],
        ),
        ("bert", ["--attention", "linformer", "--projection_size", "8,6,4", "--projection", "random"]),
    ],
)
def test_a_recipe_makes_the_same_weights(family, given, tmp_path):
    save_twin(tmp_path / "source", family)
    convert_folder(tmp_path / "source", tmp_path / "one", "--no_verify", *given)
    values = yaml.safe_load((tmp_path / "one" / RECIPE).read_text())
    assert {"output_dir", "no_verify", "evaluate", "trust_remote_code"}.isdisjoint(values)
    code, _, err = run("--config", tmp_path / "one" / RECIPE, "--output_dir", tmp_path / "two", "--no_verify")
    assert code == 0, err
    assert same_weights(tmp_path / "one", tmp_path / "two")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two")]
    assert configs[0] == configs[1]
    assert yaml.safe_load((tmp_path / "two" / RECIPE).read_text()) == values
    if "performer" in given:  # the comparison would notice another seed
        again = ("--config", tmp_path / "one" / RECIPE, "--output_dir", tmp_path / "three", "--seed", 9, "--no_verify")
        assert run(*again)[0] == 0
        assert not same_weights(tmp_path / "one", tmp_path / "three")


@pytest.mark.long
def test_a_recipe_and_python_repeat_a_preset(llama, text, tmp_path):
    words = ("--model_name_or_path", llama, "--preset", "default", "--train_file", text, "--tokens", "500")
    words += ("--window_size", 4, "--num_features", 8, "--allow_missing")
    code, _, err = run(*words, "--output_dir", tmp_path / "one")
    assert code == 0, err
    values = yaml.safe_load((tmp_path / "one" / RECIPE).read_text())
    assert (values["preset"], values["tokens"], values["attention"]) == ("default", 500, "hybrid")
    assert values["allow_missing"] is True
    assert "overwrite" not in values
    model = convert_and_heal(str(llama), "default", text, output_dir=tmp_path / "kept", tokens="500", **SMALL)
    model.save_pretrained(tmp_path / "out")
    assert type(model).__name__ == "LinearLlamaForCausalLM"
    assert not model.training
    assert {"README.md", "conversion_report.json", "training_report.json", RECIPE} <= set(files(tmp_path / "out"))
    assert same_weights(tmp_path / "one", tmp_path / "kept")
    assert same_weights(tmp_path / "kept", tmp_path / "out")
    again = convert_and_heal(str(llama), values)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))


def test_the_default_settings_are_those_of_the_preset():
    settings = load_preset("default").settings
    assert settings == DEFAULTS


def test_without_a_mechanism_the_family_decides(llama, bert, tmp_path):
    for folder, mechanism, sinks, word in ((llama, "hybrid", 4, "decoders"), (bert, "window", 1, "encoders")):
        settings = convert(str(folder)).config.linear_attention
        assert (settings["mechanism"], settings["num_sinks"]) == (mechanism, sinks)
        _, out, _ = run("--model_name_or_path", folder, "--dry_run")
        assert out.startswith(f"No `--attention` was given: `{mechanism}`, the default for {word}")
        assert "No `--attention`" not in run("--model_name_or_path", folder, "--dry_run", "--attention", "linear")[1]
    save_twin(tmp_path / "gpt2", "gpt2")  # no rotary positions
    assert convert(str(tmp_path / "gpt2")).config.linear_attention["rope"] == "before_map"
    assert convert(str(llama)).config.linear_attention["rope"] == "partial"
    given = convert(str(llama), feature_map="hedgehog").config.linear_attention
    assert (given["mechanism"], given["feature_map"], given["window_size"]) == ("hybrid", "hedgehog", 16)


def test_converted_cross_attention_gets_a_mechanism_that_has_a_form_for_it(tmp_path):
    TWINS["seq2seq_lm"](tmp_path, ["a text of some words"] * 33, tiny_tokenizer())
    source = str(tmp_path / "original")
    options = {"cross_attention": True, "drop": ["position_bias"]}
    words = ("--model_name_or_path", source, "--drop", "position_bias", "--cross_attention", "--dry_run")
    assert convert(source, **options).config.linear_attention["mechanism"] == "linear"
    assert run(*words)[1].startswith("No `--attention` was given: `linear`, the default for encoder-decoders")
    code, out, error = run(*words, "--preset", "default", "--train_file", tmp_path / "train.jsonl")
    assert code == 0, error
    assert "linear (" in out
    code, _, error = run(*words, "--preset", "performer", "--train_file", tmp_path / "train.jsonl")
    assert code == 2
    assert "seq2seq_lm" in error


@pytest.mark.parametrize("named", [False, True])
def test_what_was_given_in_memory_is_named_so(named, llama, text, tmp_path):
    """No file names a folder that is removed, and the model is called what the loaded one was."""
    stock, texts = AutoModelForCausalLM.from_pretrained(llama), [text.read_text()[:3000]]
    stock.name_or_path = "me/tiny-llama" if named else ""
    options = {"tokens": "50", "tokenizer": AutoTokenizer.from_pretrained(llama), **SMALL}
    model = convert_and_heal(stock, "default", texts, **options)
    model.save_pretrained(tmp_path / "out")
    everything = "".join(path.read_text() for path in (tmp_path / "out").iterdir() if path.suffix in (".md", ".json"))
    assert "/hf-linear-attention-" not in everything
    assert json.loads((tmp_path / "out" / "conversion_report.json").read_text())["base_model"] == (
        "me/tiny-llama" if named else "a model in memory"
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("huggingface.co/me/tiny-llama" if named else "`a model in memory`") in card
    assert "\n# " + ("tiny-llama" if named else "llama") + "-linear" in card
    recipe = (tmp_path / "out" / RECIPE).read_text()
    assert "# The train_file was in memory" in recipe
    values = yaml.safe_load(recipe)
    assert "train_file" not in values
    assert values.get("model_name_or_path") == ("me/tiny-llama" if named else None)


def test_sigterm_in_python_is_not_an_exception_that_programs_expect(llama, text, monkeypatch, caplog):
    def terminated(*arguments):
        raise TerminatedError("/tmp/checkpoint-3 was written")

    monkeypatch.setattr("hf_linear_attention.conversion.preset_run._train", terminated)
    assert not issubclass(TerminatedError, Exception)
    with pytest.raises(TerminatedError, match=r"^nothing of the run is kept$") as caught:
        convert_and_heal(str(llama), "default", [text.read_text()[:3000]], tokens="500", **SMALL)
    assert caught.value.code == 143
    assert [record.getMessage() for record in caplog.records][-1] == "terminated; nothing of the run is kept"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("SRC", "such"), "`recipe` = 'such' is no preset; presets: default, gated_delta"),
        (("SRC", "default", [1, 2]), "`train_data` holds int; pass a list of texts"),
        (("SRC", "default", []), "`train_data` holds nothing"),
        (("SRC", "default"), "give a `--train_file`"),
        (("SRC", {"attention": "linear"}), "names no preset"),
        (("SRC", {"preset": "default", "dry_run": True}, ["A text."]), "options of the command"),
        (("LOADED", "default", ["A text."]), "pass it as `tokenizer`"),
    ],
)
def test_what_python_refuses(arguments, said, llama):
    model, *others = arguments
    with pytest.raises(UsageError, match=said):
        convert_and_heal(str(llama) if model == "SRC" else AutoModelForCausalLM.from_pretrained(llama), *others)


def test_a_model_converted_in_python_is_saved_with_report_and_card(llama, tmp_path):
    model = convert(str(llama), mechanism="linear", num_features=8)
    model.save_pretrained(tmp_path / "out")
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report["base_model"] == str(llama)
    assert report["figures"]["new weights"] > 0
    assert report["figures"]["layers converted"] == 3
    card = (tmp_path / "out" / "README.md").read_text()
    assert "nothing was measured then" in card
    assert "not trained" not in card  # nobody knows what was done with it afterwards
    (tmp_path / "out" / "README.md").write_text("mine")
    model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text() == "mine"
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other" / "README.md").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again" / "README.md").exists()  # loaded, not converted: checkpoints of a trainer stay small


def test_only_weights_that_should_be_there_are_reported_missing(llama, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    convert(str(llama), mechanism="linear", feature_map="hedgehog")
    assert "MISSING" not in caplog.text
    shutil.copytree(llama, tmp_path / "damaged")
    weights = load_file(llama / "model.safetensors")
    save_file({k: v for k, v in weights.items() if k != "model.norm.weight"}, tmp_path / "damaged/model.safetensors")
    convert(str(tmp_path / "damaged"), mechanism="linear", feature_map="hedgehog")
    assert "model.norm.weight" in caplog.text
    assert ".linear_attention." not in caplog.text


def test_a_linear_class_converts_what_it_loads(llama, linear_llama):
    import transformers

    linear_class = linear_model_class(transformers.LlamaForCausalLM)
    settings = {"mechanism": "linear", "num_features": 8}
    model = linear_class.from_pretrained(llama, linear_attention=settings, dtype=torch.float32)
    assert model.config.linear_attention["num_features"] == 8
    assert type(model) is linear_class
    stock = load_file(llama / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in stock.items())
    with pytest.raises(ValueError, match="already converted"):
        linear_class.from_pretrained(linear_llama, linear_attention=settings)
    with pytest.raises(TypeError, match="from the softmax checkpoint alone"):
        linear_class.from_pretrained(llama, config=model.config, linear_attention=settings)
    assert "convert_and_heal" in hf_linear_attention.__all__
