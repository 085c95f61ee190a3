"""Two mechanisms in different layers of one model: converted, saved, loaded with and without this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matrix import sample_inputs, stock_config, stock_model
from transformers import AutoModelForCausalLM

from hf_linear_attention import calibrate, convert
from hf_linear_attention._common.model_card import write_model_card
from hf_linear_attention.conversion.softmax_choice import with_softmax_layers
from hf_linear_attention.conversion_api import convert_config
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


HYBRID = {"mechanism": "hybrid", "window_size": 4, "num_features": 8, "layers": [0]}
FITTED = {"mechanism": "performer", "features": "favor++", "num_features": 8, "layers": [2]}  # layer 1 stays softmax


@pytest.fixture(scope="module")
def model():
    return convert(stock_model("llama"), settings=[HYBRID, FITTED])


def test_every_layer_has_its_own_mechanism(model):
    found = {m.linear_attention.shape.layer: m.linear_attention for m in linear_attention_modules(model).values()}
    assert {layer: m.settings["mechanism"] for layer, m in found.items()} == {0: "hybrid", 2: "performer"}
    assert all(model.config.settings_of(layer) == m.settings for layer, m in found.items())
    assert model.config.settings_of(1) is None
    assert model.config.settings_of(0)["num_sinks"] == 4  # filled in
    single = convert_config(stock_config("llama"), mechanism="performer")
    assert single.settings_of(1) == single.linear_attention


def test_only_the_layers_that_need_it_are_calibrated(model):
    performer = linear_attention_modules(model)["model.layers.2.self_attn"].linear_attention
    before = {name: tensor.clone() for name, tensor in performer.state_dict().items()}
    assert calibrate(model, [sample_inputs("llama")]) == 26
    assert any(not torch.equal(before[name], tensor) for name, tensor in performer.state_dict().items())


def test_it_computes_what_the_layers_compute_in_models_of_their_own(model):
    """Each layer with its weights, under the settings that it has alone."""
    for settings in (HYBRID, FITTED):
        alone = convert(stock_model("llama"), settings=settings)
        both = with_softmax_layers(model, [layer for layer in (0, 2) if layer not in settings["layers"]])
        alone.load_state_dict(both.state_dict())
        with torch.no_grad():
            outputs = [other(**sample_inputs("llama")).logits for other in (alone, both)]
        assert torch.equal(*outputs)


def test_saved_it_generates_the_same_with_and_without_the_package(model, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)  # without the package there are no C kernels
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    inputs = sample_inputs("llama")
    with torch.no_grad():
        expected = {"output": model(**inputs)[0], "tokens": model.generate(**inputs, max_new_tokens=5, do_sample=False)}
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.linear_attention == model.config.linear_attention
    assert torch.equal(loaded.generate(**inputs, max_new_tokens=5, do_sample=False), expected["tokens"])
    torch.save({"inputs": inputs, "new_tokens": 5, **expected}, tmp_path / "inputs.pt")
    job = {"auto_class": "AutoModelForCausalLM", "checkpoint": str(folder), "inputs": str(tmp_path / "inputs.pt")}
    jobs = {"once": job, "again": {**job, "resave": str(tmp_path / "again")}}
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("alone.py")), str(tmp_path / "jobs.json")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"once": "equal", "again": "equal", "imported": []}


def test_the_card_names_both(model, tmp_path):
    model.save_pretrained(tmp_path)
    write_model_card(tmp_path, {"base_model": "original", "settings": model.config.linear_attention})
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| hybrid in layers 0.window_size | 4 |" in card
    assert "| performer in layers 2.features | favor++ |" in card
    assert "- hybrid\n- performer\n" in card


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([HYBRID, {**FITTED, "layers": [0, 2]}], "the entries 0 and 1 both name layer 0"),
        ([HYBRID, {**FITTED, "layers": "all"}], "`layers` = 'all' in entry 1 of the list"),
        ([HYBRID, {"mechanism": "performer"}], "`layers` = None in entry 1 of the list"),
        ([HYBRID, {**FITTED, "layers": [7]}], "`layers` names [7]"),
        ([HYBRID, {**FITTED, "window_size": 3}], "`window_size` is not an option of `mechanism` = `performer`"),
        ([HYBRID, {**FITTED, "mechanism": "latent"}], "`latent` has no causal form"),
        ([{**HYBRID, "cross_attention": True}, {**FITTED, "cross_attention": True}], "`cross_attention` = true in"),
        ([], "one dict for each group of layers"),
        (["hybrid"], "one dict for each group of layers"),
    ],
)
def test_what_no_list_can_mean_is_refused(settings, said):
    with pytest.raises(ValueError, match="Invalid `linear_attention` settings") as caught:
        convert_config(stock_config("llama"), settings)
    assert said in str(caught.value)


def test_settings_come_whole_or_one_by_one():
    with pytest.raises(TypeError, match="Got `settings` and also `window_size`"):
        convert_config(stock_config("llama"), [HYBRID], window_size=3)
