"""The minutes and gigabytes that a dry run prints, by the formulas of docs/scale.md."""

from __future__ import annotations

import re

import torch
from checkpoints import run, save_twin
from transformers import AutoModelForCausalLM

from hf_linear_attention.conversion import estimate
from hf_linear_attention.conversion.plan import make_plan
from hf_linear_attention.conversion.source import open_source
from hf_linear_attention.training.data.processors import mean_exact_tokens


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 500}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}


def test_the_estimate(tmp_path, monkeypatch):
    speeds = {torch.float32: 1e-7, torch.bfloat16: 4e-8}
    monkeypatch.setattr(estimate, "seconds_per_operation", lambda width, dtype, _: speeds[dtype] * (width == 64))
    monkeypatch.setattr(estimate, "multiplies_bfloat16", lambda device: True)
    monkeypatch.setattr(estimate, "IMPORTS", 0.0)
    monkeypatch.setattr(estimate, "MOST_LOGITS", 1e9)
    save_twin(tmp_path / "llama", "llama", max_position_embeddings=4096, **SIZES, **HEADS)
    plan = make_plan(open_source(str(tmp_path / "llama")), {"mechanism": "hybrid", "state_tokens": 128})
    found = estimate.Estimate(plan)
    layers, output = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96), 500 * 64
    minutes = 2 * estimate.BESIDES * 1e-7 / 60

    def figures(text):
        pattern = rf"about (\d+) minutes and ([\d.]+) GB in {dtype}"
        return [float(number) for number in re.fullmatch(pattern, text).groups()]

    dtype = "float32"
    divided = estimate.DIVISION
    assert abs(figures(found.scores(10_000, True))[0] - minutes * (10_000 + divided) * layers) < 1
    assert (
        found.scores(10**6, True)
        == f"about {minutes * (10**6 + divided) * layers / 60:.0f} hours and 0.0 GB in float32"
    )
    words = ["--model_name_or_path", tmp_path / "llama", "--attention", "hybrid", "--state_tokens", 128, "--dry_run"]
    assert (
        f"scores      fitted on up to 4,096 tokens of Python's documentation, {found.scores(4096, True)}"
        in run(*words)[1]
    )
    given = found.scores(4096, False)
    assert given != found.scores(4096, True)
    assert f"Python's documentation, {given}" in run(*words, "--num_exact_keys", 80)[1]
    adapters = {"use_peft": True, "gradient_checkpointing": True}
    base, tokens, exact = layers + output + 7 * 64, 4 * 10**6, mean_exact_tokens(plan.config)
    rows = 64 * tokens
    for options, products, size in (
        ({"attention_transfer_weight": 1.0}, layers, 4 * base + 68 * rows + 60 * 4 * exact * tokens + 1e9),
        (adapters, 4 * layers + 3 * output, 12 * base + (3 * 4 + 88) * rows + 60 * 4 * exact * tokens + 1e9),
        ({}, 4 * (layers + output), 20 * base + 3 * 88 * rows + 1e9),
    ):
        where = {"per_device_train_batch_size": 4, "max_length": 10**6}
        time, memory = figures(found.stage({**options, **where}, 10_000))
        assert abs(time - minutes * 10_000 * products) < 1
        assert abs(memory - size / 1e9) <= 0.05
    found.base, large = 10**10, {**adapters, "per_device_train_batch_size": 4, "max_length": 10**6}
    memory = figures(found.stage(large, 10_000))[1]  # of three copies
    assert abs(memory - (12 * 10**10 + (3 * 4 + 88) * rows + 60 * 4 * exact * tokens + 1e9) / 1e9) <= 0.05
    assert figures(found.scores(10_000, True))[1] == 120.0
    AutoModelForCausalLM.from_pretrained(tmp_path / "llama").bfloat16().save_pretrained(tmp_path / "half")
    found_plan = make_plan(open_source(str(tmp_path / "half")), {"mechanism": "hybrid"})
    found = estimate.Estimate(found_plan)
    dtype, exact = "bfloat16", mean_exact_tokens(found_plan.config)
    more = 0.4 * estimate.BESIDES_BFLOAT16 / estimate.BESIDES
    assert abs(figures(found.scores(10_000, True))[0] - more * minutes * (10_000 + divided) * layers) < 1
    time, memory = figures(found.stage({**adapters, "per_device_train_batch_size": 4, "max_length": 10**6}, 10_000))
    assert abs(time - 0.4 * minutes * 10_000 * (4 * layers + 3 * output)) < 1
    assert abs(memory - ((3 * 4 + 88) * rows + 60 * 4 * exact * tokens + 1e9) / 1e9) <= 0.05
    found.base = 10**10
    memory = figures(found.stage(large, 10_000))[1]
    assert abs(memory - (6 * 10**10 + (3 * 4 + 88) * rows + 60 * 4 * exact * tokens + 1e9) / 1e9) <= 0.05
