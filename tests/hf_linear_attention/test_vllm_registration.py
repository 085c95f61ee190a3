"""Which versions of vLLM the plugin takes."""

from __future__ import annotations

import logging
import sys
import types

import pytest

from hf_linear_attention import vllm_plugin


OLDER = "Got vLLM {}; hf-linear-attention serves its models from 0.32 on."
OTHER = "hf-linear-attention was tested with vLLM 0.32, and this is {}."
SAID = {
    "0.32.4": (),
    **dict.fromkeys(("0.31.2", "0.9.1.dev3+cpu"), ((logging.ERROR, OLDER),)),
    **dict.fromkeys(("0.33.0rc1", "1.0.0", "dev"), ((logging.WARNING, OTHER),)),
}


@pytest.mark.parametrize("version", SAID)
def test_an_older_version_is_refused_and_a_newer_one_warned_of(version, monkeypatch, caplog):
    calls = []
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__=version))
    monkeypatch.setattr(vllm_plugin, "_register_models", lambda: calls.append("models"))
    monkeypatch.setattr(vllm_plugin, "_register_backend", lambda: calls.append("backend"))
    vllm_plugin.register()
    assert calls == ([] if SAID[version] == ((logging.ERROR, OLDER),) else ["models", "backend"])
    assert [x[1:] for x in caplog.record_tuples] == [(level, text.format(version)) for level, text in SAID[version]]
