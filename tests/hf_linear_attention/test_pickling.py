"""Models, their modules and their configs go through pickle into a process that has made no class of ours yet."""

from __future__ import annotations

import json
import pickle

import processes
import pytest
import torch
import transformers
from architectures import tiny_model
from matrix import stock_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_linear_attention import configuration_linear_attention, convert, modeling_linear_attention
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(3))


def load(folders):
    """A config, with which vLLM's processes start, a model, and an attention module of it alone."""
    made = []
    assert not modeling_linear_attention.CLASSES
    for folder in folders:
        config = pickle.loads((folder / "config.pkl").read_bytes())
        assert type(config) in transformers.AutoModel._model_mapping
        model = torch.load(folder / "model.pt", weights_only=False)
        with torch.no_grad():
            torch.save(model(**torch.load(folder / "inputs.pt"))[0], folder / "outputs.pt")
        module = pickle.loads((folder / "module.pkl").read_bytes())
        made.append([*(type(part).__name__ for part in (model, config, module)), len(list(module.parameters()))])
    (folders[0].parent / "made.json").write_text(json.dumps(made))


@pytest.mark.long
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
            expected[folder] = [*parts, len(list(module.parameters()))], model(**given)[0]
    done = processes.finish(processes.start(load, list(expected), stderr=tmp_path / "stderr"))
    assert done == [0], (tmp_path / "stderr-0").read_text()
    made = json.loads((tmp_path / "made.json").read_text())
    for found, (folder, (parts, outputs)) in zip(made, expected.items(), strict=True):
        assert found == parts
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
