"""The Python API with arguments of the wrong type or value: a TypeError or ValueError in our own words."""

from __future__ import annotations

import os
import traceback

import pytest
import torch
from faults import limited
from matrix import stock_model
from torch import nn

import hf_linear_attention
from hf_linear_attention import calibrate, convert, softmax_attention
from hf_linear_attention.mechanisms.performer import PerformerAttention


SETTINGS = {
    "mechanism": [3, "nosuch", {}, {"x": "linear"}, {3: "linear"}, {"0-": 3}],
    "layers": [3, "x", [0.5], [-1], [99], {"a": 1}, [True], None, range(3)],
    "num_features": ["x", 0, True, 10**30, float("nan"), {}, {"9": 8}],
    "feature_map": [3, "nosuch", None],
    "decay": ["nosuch", True],
    "drop": ["softcap", ["nosuch"], [3], None],
    "cross_attention": ["x", 1],
    "trained_length": ["x", -1],
    "nosuch": [1],
    "format_version": [99, "x"],
    "settings": [3, [], [{}], [{"layers": [0]}, {"layers": [0]}], [{"layers": "all"}], {"mechanism": 3}],
    "model_class": ["LlamaForCausalLM", nn.Linear],
    "from_pretrained": [3, [1]],
}


def _assert_our_own(call, *said):
    """`call` raises a TypeError or ValueError, and the place is in this package."""
    with limited(), pytest.raises((TypeError, ValueError)) as caught:
        call()
    place = traceback.extract_tb(caught.value.__traceback__)[-1].filename
    assert "hf_linear_attention" in place or "/wt-" in place or "/conversion/" in place, f"{place}: {caught.value}"
    assert type(caught.value).__module__ != "huggingface_hub.errors"
    assert str(caught.value)
    assert all(part in str(caught.value) for part in said), str(caught.value)


@pytest.fixture(scope="module")
def stock():
    return stock_model("llama")


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SETTINGS.items() for value in values])
def test_settings(stock, llama, name, value):
    _assert_our_own(lambda: convert(llama if name == "from_pretrained" else stock, **{name: value}))


@pytest.mark.parametrize("model", [3, nn.Linear(2, 2), int, b"x", "", "/nowhere/at/all", "a" * 300])
def test_models(model):
    _assert_our_own(lambda: convert(model))


@pytest.mark.parametrize("model", [3, "stock"])
def test_functions_of_models(stock, model, tmp_path):
    model = stock if model == "stock" else model
    (tmp_path / "x").write_text("x")
    for act in (
        lambda: calibrate(model, []),
        lambda: softmax_attention(model).__enter__(),
        lambda: hf_linear_attention.save_prompt_state(model, None, tmp_path / "x"),
        lambda: hf_linear_attention.load_prompt_state(model, tmp_path / "x"),
    ):
        _assert_our_own(act)


BATCHES = [3, [{}], [{"input_ids": [1, 2]}], [{"nosuch": torch.zeros(1, 2)}], {"input_ids": torch.ones(1, 2)}, []]


@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_calibrate(stock, batches):
    model = convert(stock, mechanism="performer", features="favor++")
    _assert_our_own(lambda: calibrate(model, batches))


def test_what_is_no_prompt(stock, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    decoder = convert(stock, num_features=8)
    _assert_our_own(lambda: hf_linear_attention.load_prompt_state(decoder, tmp_path / "pipe"), "not a file")


@pytest.mark.parametrize("kind", ["loaded", "folder"])
def test_impossible_sizes(stock, kind, tmp_path, monkeypatch):
    stock.save_pretrained(tmp_path)
    source = stock if kind == "loaded" else tmp_path
    _assert_our_own(lambda: convert(source, mechanism="performer", num_features=10**9), "at most", "smaller")

    def full(*_):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(PerformerAttention, "__init__", full)
    _assert_our_own(lambda: convert(source, mechanism="performer"), "do not fit into memory", "smaller sizes")
