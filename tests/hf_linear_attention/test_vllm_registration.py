"""What the plugin for vLLM does without vLLM: it imports nothing, and knows which versions it was tested with."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import types

import pytest
from transformers import LlamaConfig

from hf_linear_attention import convert_config, vllm_plugin


@pytest.fixture
def registered(monkeypatch):
    """A function from the version of a vLLM that only says this to how often the plugin registered something."""

    def register(version):
        calls = []
        monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__=version))
        monkeypatch.setattr(vllm_plugin, "_register_models", lambda: calls.append("models"))
        monkeypatch.setattr(vllm_plugin, "_register_backend", lambda: calls.append("backend"))
        vllm_plugin.register()
        return calls

    return register


def test_the_tested_version_is_taken_without_a_word(registered, caplog):
    assert registered("0.32.4") == ["models", "backend"]
    assert caplog.messages == []


@pytest.mark.parametrize("version", ["0.31.2", "0.9.1.dev3+cpu"])
def test_an_older_version_is_refused_in_one_line(registered, caplog, version):
    assert registered(version) == []
    ((_, level, message),) = caplog.record_tuples
    assert level == logging.ERROR
    assert message == f"Got vLLM {version}; hf-linear-attention serves its models from 0.32 on."


@pytest.mark.parametrize("version", ["0.33.0rc1", "1.0.0", "dev"])
def test_another_version_is_taken_with_a_warning(registered, caplog, version):
    assert registered(version) == ["models", "backend"]
    ((_, level, message),) = caplog.record_tuples
    assert level == logging.WARNING
    assert message == f"hf-linear-attention was tested with vLLM 0.32, and this is {version}."


def run(code: str, given: bytes = b"") -> str:
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_importing_the_plugin_imports_nothing_heavy():
    code = (
        "import sys, hf_linear_attention.vllm_plugin\n"
        "print(sorted({'torch', 'transformers', 'vllm'} & {name.partition('.')[0] for name in sys.modules}))"
    )
    assert run(code).strip() == "[]"


def test_a_config_from_another_process_registers_its_models():
    """vLLM pickles a config for each of its processes, in which none was made by the class."""
    config = convert_config(LlamaConfig(num_hidden_layers=2), mechanism="linear")
    code = (
        "import pickle, sys, transformers\n"
        "config = pickle.load(sys.stdin.buffer)\n"
        "print(transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__)"
    )
    assert run(code, pickle.dumps(config)).strip() == "LinearLlamaForCausalLM"
