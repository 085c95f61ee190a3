"""`serve`: transformers' own server finds the classes of a converted model, and only this command changes that."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_linear_attention.attention.transformers_internals import server_namespace
from hf_linear_attention.conversion import serve
from hf_linear_attention.conversion.commands import main


def manager():
    from transformers.cli.serving.model_manager import ModelManager

    return ModelManager(device="cpu", dtype="float32", model_timeout=-1)


def test_the_manager_of_the_server_loads_a_registered_model(linear_llama, monkeypatch):
    name = f"{linear_llama}@main"
    monkeypatch.delattr(server_namespace(), "LinearLlamaForCausalLM", raising=False)
    with pytest.raises(AttributeError, match="no attribute LinearLlamaForCausalLM"):
        manager().load_model_and_processor(name)
    found = serve.register_model(str(linear_llama))
    model, tokenizer = manager().load_model_and_processor(name)
    assert type(model) is found
    inputs = tokenizer("some text", return_tensors="pt")
    expected = AutoModelForCausalLM.from_pretrained(linear_llama).eval()
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, expected(**inputs).logits)
    monkeypatch.delattr(server_namespace(), "LinearLlamaForCausalLM")


def test_options_go_to_the_engine(monkeypatch):
    started = []
    monkeypatch.setattr(serve, "start_transformers", lambda *given: started.append(given))
    monkeypatch.setattr(serve, "start_vllm", lambda *given: started.append(given))
    assert main(["serve", "OUT", "--port", "9", "--", "--dtype", "float32"]) == 0
    assert main(["serve", "OUT", "--engine", "vllm", "--host", "0.0.0.0", "--api-key", "secret"]) == 0
    assert started == [
        ("OUT", "localhost", ["--port", "9", "--dtype", "float32"]),
        ("OUT", "0.0.0.0", ["--api-key", "secret"]),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is no model; give the folder"),
        (["--port", "9"], "`--port` is not an option here; give the folder"),
        (["OUT", "--engine", "sglang"], "argument --engine: invalid choice: 'sglang'"),
        (
            ["OUT", "--host", "0.0.0.0"],
            "`0.0.0.0`: the server of transformers has no key and no limits, so it listens on",
        ),
        (["OUT", "--api_key=secret"], "`--api_key`: the server of transformers has no key"),
        (["./such-a-model"], "config.json of './such-a-model' cannot be used"),
        (["~nosuchuser/x"], "`~nosuchuser/x` cannot be used"),
    ],
)
def test_what_cannot_be_served(words, said, capsys, monkeypatch):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: True)
    assert main(["serve", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_model_that_is_not_converted(llama, capsys, monkeypatch):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: True)
    assert main(["serve", str(llama)]) == 2
    assert "is no converted model (llama); `transformers serve" in capsys.readouterr().err


def test_without_the_libraries_it_says_what_to_install(linear_llama, monkeypatch, capsys):
    monkeypatch.setattr("transformers.utils.import_utils.is_serve_available", lambda: False)
    assert main(["serve", str(linear_llama)]) == 2
    assert 'run `pip install "hf-linear-attention[serve]"`' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, 'vLLM is not installed; run `pip install "hf-linear-attention[vllm]"`; docs/serve.md says'),
        ("0.31.2", "vLLM 0.31.2 is older than 0.32, which converted models need"),
    ],
)
def test_what_the_engine_vllm_refuses(version, said, linear_llama, monkeypatch, capsys):
    """Without vLLM; tests/vllm_plugin has what it does with vLLM."""
    monkeypatch.setitem(sys.modules, "vllm", version and types.SimpleNamespace(__version__=version))
    assert main(["serve", str(linear_llama), "--engine", "vllm"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
