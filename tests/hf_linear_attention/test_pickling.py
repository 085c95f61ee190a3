"""Models, their modules and their configs go through pickle into a process that has made no class of ours yet."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import torch
from architectures import tiny_model
from matrix import stock_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import hf_linear_attention
from hf_linear_attention import configuration_linear_attention, convert
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


ROOT = Path(hf_linear_attention.__file__).parents[1]
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(3))
# A config, with which vLLM's processes start, a model, and an attention module of it alone.
LOADER = """
import pickle, sys, torch, transformers
for folder in sys.argv[1:]:
    with open(f"{folder}/config.pkl", "rb") as file:
        config = pickle.load(file)
    assert type(config) in transformers.AutoModel._model_mapping
    model = torch.load(f"{folder}/model.pt", weights_only=False)
    with torch.no_grad():
        outputs = model(**torch.load(f"{folder}/inputs.pt"))
    torch.save(outputs[0], f"{folder}/outputs.pt")
    with open(f"{folder}/module.pkl", "rb") as file:
        module = pickle.load(file)
    print(*(type(part).__name__ for part in (model, config, module)), len(list(module.parameters())))
"""


def test_a_saved_model_loads_where_none_was_made(tmp_path):
    inputs, expected = {"input_ids": IDS}, {}
    hybrid = {"mechanism": "hybrid", "window_size": 4, "rope": "none", "layers": [1, 2]}
    models = {
        "llama": (convert(stock_model("llama"), **hybrid), inputs),
        "bart": (
            convert(tiny_model("bart", "AutoModelForSeq2SeqLM"), mechanism="linear", cross_attention=True),
            {**inputs, "decoder_input_ids": IDS[:, :5]},
        ),
    }
    for name, (model, given) in models.items():
        folder = tmp_path / name
        folder.mkdir()
        module = list(linear_attention_modules(model).values())[-1]
        torch.save(model, folder / "model.pt")
        torch.save(given, folder / "inputs.pt")
        (folder / "config.pkl").write_bytes(pickle.dumps(model.config))
        (folder / "module.pkl").write_bytes(pickle.dumps(module))
        parts = [type(part).__name__ for part in (model, model.config, module)]
        with torch.no_grad():
            expected[folder] = [*parts, str(len(list(module.parameters())))], model(**given)[0]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-c", LOADER, *map(str, expected)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    for line, (folder, (parts, outputs)) in zip(process.stdout.splitlines(), expected.items(), strict=True):
        assert line.split() == parts
        assert torch.equal(torch.load(folder / "outputs.pt"), outputs)


def test_every_config_class_is_found_by_its_name():
    """Also those of parts of composites, which transformers does not export."""
    names = sorted({f"Linear{name}" for name in CONFIG_MAPPING_NAMES.values()})[::8]
    assert [name for name in names if not hasattr(configuration_linear_attention, name)] == []


def test_what_derives_from_a_class_of_ours_is_found_by_its_own_name():
    model = convert(stock_model("llama"))
    model_class = type("DerivedModel", (type(model),), {"__module__": __name__, "__qualname__": "DerivedModel"})
    globals()["DerivedModel"] = model_class
    derived = model_class(model.config)
    assert type(pickle.loads(pickle.dumps(derived))) is model_class
