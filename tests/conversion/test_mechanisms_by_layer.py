"""`--attention 0:hybrid,1-:linear`: converted, healed, reported and loaded, and what the command refuses."""

from __future__ import annotations

import json
import re

import pytest
import torch
from caches import cache_of
from checkpoints import run
from matrix import sample_inputs
from transformers import AutoModelForCausalLM

from hf_linear_attention.conversion.arguments import parse


SIZED = ("--attention", "0:hybrid,1-:linear", "--num_features", 8, "--window_size", 4, "--num_exact_keys", 2)


@pytest.fixture(scope="module")
def healed(llama, text, tmp_path_factory) -> dict:
    """Converted with two mechanisms and healed by the default preset, whose settings are those of `hybrid`."""
    out = tmp_path_factory.mktemp("healed") / "out"
    code, stdout, stderr = run(
        *("--model_name_or_path", llama, "--output_dir", out, *SIZED, "--preset", "default", "--train_file", text),
        *("--tokens", "500", "--validation_file", text, "--max_eval_tokens", 400, "--max_eval_length", 64),
    )
    assert code == 0, stderr
    return {"folder": out, "stdout": stdout, "report": json.loads((out / "conversion_report.json").read_text())}


@pytest.mark.long
def test_the_preset_completes_its_own_mechanism_and_no_other(healed, llama):
    model = AutoModelForCausalLM.from_pretrained(healed["folder"])
    settings = model.config.linear_attention
    assert [(entry["mechanism"], entry["layers"]) for entry in settings] == [("hybrid", [0]), ("linear", [1, 2])]
    assert [healed["report"]["settings"][0][name] for name in ("window_size", "num_features")] == [4, 8]
    assert [(entry["decay"], entry["rope"]) for entry in settings] == [("learned", "partial"), ("none", "before_map")]
    untrained, trained = AutoModelForCausalLM.from_pretrained(llama).state_dict(), model.state_dict()
    assert not any(torch.equal(trained[name], untrained[name]) for name in untrained if "_proj" in name)


def test_report_card_and_terminal_have_the_sizes_per_layer_and_in_all(healed):
    model = AutoModelForCausalLM.from_pretrained(healed["folder"])
    with torch.no_grad():
        cache = cache_of(model(**sample_inputs("llama"), use_cache=True))
    rows = len(sample_inputs("llama")["input_ids"])
    sizes = [layer.state_bytes() // rows for layer in cache.layers]
    assert sizes[0] != sizes[1] == sizes[2]
    report, card = healed["report"], (healed["folder"] / "README.md").read_text()
    assert [(layer["mechanism"], layer["state_bytes"]) for layer in report["layers"]] == [
        ("hybrid", sizes[0]), ("linear", sizes[1]), ("linear", sizes[2]),
    ]  # fmt: skip
    assert report["state_bytes"] == report["figures"]["state bytes per sequence"] == sum(sizes)
    assert f"| state bytes per layer and sequence, layer 0 | {sizes[0]:,} |" in card
    assert f"| state bytes per layer and sequence, layers 1-2 | {sizes[1]:,} |" in card
    assert f"| state bytes per sequence | {sum(sizes):,} |" in card
    assert "| hybrid in layers 0.window_size | 4 |" in card
    assert "| linear in layers 1-2.num_features | 8 |" in card
    assert f"{sizes[0]:,} in layer 0; {sizes[1]:,} in layers 1-2; {sum(sizes):,} in all" in healed["stdout"]
    assert re.search(r"attention +hybrid \(window_size=4, .*\) in layer 0 of 3\n", healed["stdout"])
    assert re.search(r"attention +linear \(.*\) in layers 1-2 of 3\n", healed["stdout"])
    assert report["quality"]["control"]["state_bytes"] <= sum(sizes)


def test_the_sizes_of_a_preset_are_divided_for_its_own_layers(llama, text):
    """Heads are small here, so that the preset divides the bytes of its own sizes, of one layer as of three."""
    words = ("--model_name_or_path", llama, "--dry_run", "--preset", "default", "--train_file", text)
    whole, some = (run(*words, *more)[1] for more in ((), ("--attention", "0:hybrid,1-:window")))
    sizes = [
        re.search(r"hybrid \(window_size=(\d+), num_sinks=(\d+).*num_features=(\d+)", out) for out in (whole, some)
    ]
    assert sizes[0].groups() == sizes[1].groups()
    assert "window (window_size=64, num_sinks=4" in some  # the defaults of `window`


def test_values_by_layer_are_read_with_the_type_of_their_option(tmp_path):
    words = ["--model_name_or_path", "x", "--attention", "0-1:hybrid,2-:linear", "--num_sinks", "0:0,1:4"]
    path = tmp_path / "defaults.yaml"
    path.write_text("decay: 0:learned,1-:none\nlayers: [0, 1, 2]\n")
    assert parse([*words, "--config", str(path)]).given == {
        "mechanism": {"0-1": "hybrid", "2-": "linear"},
        "num_sinks": {"0": 0, "1": 4},
        "decay": {"0": "learned", "1-": "none"},
        "layers": [0, 1, 2],
    }
