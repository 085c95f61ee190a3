"""Checkpoints and prompt states of earlier versions are read by this one."""

from __future__ import annotations

import json

import pytest
import torch
from caches import past
from earlier import FIRST
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hf_linear_attention
from hf_linear_attention import load_prompt_state, save_prompt_state, softmax_attention


# The logits have a standard deviation of 1.1. Two float32 evaluations of the same two layers differ by their order
# of summation; the one stored lies 3e-6 from float64. A parameter of the mechanism set to 0 moves them by 0.1 or more.
TOLERANCE = {"atol": 5e-5, "rtol": 0.0}
PROMPT = 16


@pytest.fixture(scope="module")
def model():
    assert hf_linear_attention.__file__  # registers the classes: the fixture carries no code
    return AutoModelForCausalLM.from_pretrained(FIRST / "converted").eval()


@pytest.fixture(scope="module")
def expected():
    return load_file(FIRST / "expected.safetensors")


def inputs(expected, start=0):
    tokens = {name: expected[name][:, start:] for name in ("input_ids", "position_ids")}
    return {**tokens, "attention_mask": expected["attention_mask"]}


@torch.no_grad()
def test_a_checkpoint_computes_what_it_did(model, expected):
    saved = json.loads((FIRST / "converted" / "config.json").read_text())["linear_attention"]
    assert "format_version" not in saved
    unknown, off = {"rope_frequencies": None, "trained_length": None, "rotary": None}, {"softmax_heads": []}
    later = {**unknown, **off, "far": "linear", "num_exact_keys": 0}
    assert model.config.linear_attention == {**saved, **later, "format_version": 1}
    real = expected["attention_mask"].bool()
    actual = model(**inputs(expected)).logits
    torch.testing.assert_close(actual[real], expected["logits"][real], **TOLERANCE)
    assert expected["logits"].std() > 1
    with softmax_attention(model):  # the tolerance tells one function from another
        assert (model(**inputs(expected)).logits - expected["logits"])[real].abs().max() > 0.1


@torch.no_grad()
def test_a_prompt_state_without_a_checksum_goes_on(model, expected, tmp_path):
    with safe_open(FIRST / "prompt.safetensors", framework="pt") as file:
        assert "sha256" not in json.loads(file.metadata()["prompt_state"])
    cache = load_prompt_state(model, FIRST / "prompt.safetensors")
    assert cache.get_seq_length() == PROMPT
    save_prompt_state(model, cache, tmp_path / "prompt.safetensors")  # in the format of today
    for again in (cache, load_prompt_state(model, tmp_path / "prompt.safetensors")):
        output = model(**inputs(expected, PROMPT), **past(again))
        torch.testing.assert_close(output.logits, expected["continued"], **TOLERANCE)
        torch.testing.assert_close(output.logits, expected["logits"][:, PROMPT:], **TOLERANCE)
