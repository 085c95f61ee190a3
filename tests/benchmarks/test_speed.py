"""The speed benchmarks run, compare what they say they compare, and count what they say they count."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = (
    *("speed_break_even", "speed_conversion", "speed_decoding", "speed_kernels", "speed_models"),
    *("speed_without_kernels", "speed_delta", "shared_prefix", "speed_embeddings"),
)


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.benchmarks
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_quick_run_prints_its_tables_and_writes_its_figures(name, tmp_path, capsys):
    script = importlib.import_module(f"benchmarks.{name}")
    assert f"python benchmarks/{name}.py" in script.__doc__
    script.main(["--quick", "--output_dir", str(tmp_path)])
    result = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert result["benchmark"] == name
    assert result["environment"]["threads"] == 1
    printed = capsys.readouterr().out
    assert any(
        word in printed
        for word in ("linear elu1", "sdpa", "conversion, no verification", "transformers / C", "sooner", "texts/s")
    )
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.mark.benchmarks
def test_long_prefills_have_a_result_of_their_own(tmp_path):
    script = importlib.import_module("benchmarks.speed_models")
    script.main(["--quick", "--long", "--output_dir", str(tmp_path)])
    assert [path.name for path in tmp_path.glob("*.json")] == ["speed_models_long.json"]
    result = json.loads((tmp_path / "speed_models_long.json").read_text(encoding="utf-8"))
    assert result["training step"] == []
    assert set(result["forward"][0]["softmax over it"]) == {"softmax", "linear elu1", "linear exp", "hybrid"}
    with pytest.raises(SystemExit):
        script.main(["--long", "--parts", "training"])


def test_every_form_of_the_kernel_is_what_its_column_says():
    script = importlib.import_module("benchmarks.speed_kernels")
    calls, tensors = script.calls(), script.inputs(100)
    outputs = {name: call(*tensors) for name, call in calls.items()}
    # float32 sums of 100 terms in another order
    torch.testing.assert_close(outputs[script.OURS], outputs[script.PLAIN_TORCH], rtol=1e-5, atol=1e-5)
    if "performer-pytorch" in outputs:  # the same formula, but for its epsilon of 1e-6 under the sum
        torch.testing.assert_close(outputs["performer-pytorch"], outputs[script.OURS], rtol=1e-4, atol=1e-4)
    for name in ("exp", "decay", "hybrid"):
        assert (outputs[name] - outputs[script.OURS]).abs().max() > 1e-3, name


def test_the_kernel_alone_against_a_matrix_product_and_threads(capsys):
    script = importlib.import_module("benchmarks.speed_kernels")
    threads = torch.get_num_threads()
    try:
        script.main(["--sgemm", "--lengths", "64", "--rounds", "1"])
        script.main(["--threads", "2", "--lengths", "64", "--rounds", "1"])
    finally:
        torch.set_num_threads(threads)
    rows = [line.strip("| ").split() for line in capsys.readouterr().out.splitlines()]
    assert [row[-1][-1] for row in rows if row and row[0] == "64"] == ["x"] * 6


@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_the_delta_rule_is_the_one_of_transformers(rule):
    script = importlib.import_module("benchmarks.speed_delta")
    calls, tensors = script.calls(rule), script.inputs(70)
    state = torch.randn(1, script.HEADS, script.DIM, script.DIM)
    exact = calls[script.PEER]({name: x.double() for name, x in tensors.items()}, state.double())
    for name, call in calls.items():
        if "feature" in name:  # the same decay for every feature
            tensors["by feature"] = tensors["by head"].unsqueeze(3).expand_as(tensors["query"])
        for a, e in zip(call(tensors, state), exact):
            # float32 on both sides (transformers computes in it whatever it is given): sums of 128 terms, 70 times
            assert (a.double() - e.double()).abs().max() <= 1e-5 * e.abs().max(), name


def test_the_delta_rules_of_transformers_stay_as_they_were():
    script, models = importlib.import_module("benchmarks.speed_delta"), ("kimi_linear", "qwen3_next")
    modules = [importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in models]
    before = [vars(module).copy() for module in modules]
    script.calls("torch_chunk_gated_delta_rule")
    for layer in script.stock_layers().values():
        script.layer_seconds(layer, 4, with_backward=False, rounds=1)
    assert [vars(module) for module in modules] == before


def test_break_even_is_the_length_from_which_softmax_stays_slower():
    break_even = importlib.import_module("benchmarks.speed_break_even").break_even
    assert break_even([1, 2, 4], [0.5, 1.1, 2.0]) == 2
    assert break_even([1, 2, 4], [1.5, 0.9, 2.0]) == 4
    assert break_even([1, 2, 4], [0.1, 0.2, 0.9]) is None


def test_the_peak_of_new_memory_counts_the_output():
    peak = importlib.import_module("benchmarks.speed_kernels").peak_tensors("sdpa", 4096, False)
    assert 0.9 < peak < 2  # one output, and what softmax keeps of a block of rows


def test_the_gpu_benchmark_refuses_without_one_and_runs_through_with_one(monkeypatch, tmp_path, capsys):
    script = importlib.import_module("benchmarks.speed_gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        script.main(["--output_dir", str(tmp_path)])
    assert "no CUDA device" in capsys.readouterr().err
    # All but the clock and the memory of the device, on the CPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(script, "DEVICE", "cpu")
    monkeypatch.setattr(script, "LARGE", "Llama 15M")
    monkeypatch.setattr(script, "seconds_of", lambda call: call() is not call and 1e-3)
    monkeypatch.setattr(script, "peak_bytes", lambda call: call() is not call and 1000)
    monkeypatch.setattr(
        script, "calls", lambda calls=script.calls: {k: v for k, v in calls().items() if k != script.FLA}
    )
    script.main(["--quick", "--output_dir", str(tmp_path)])
    result = json.loads((tmp_path / "speed_gpu.json").read_text(encoding="utf-8"))
    assert set(result["forward"]["64"]["seconds"]) == {script.OURS, script.PLAIN_TORCH, script.SDPA}
    assert result["decoding"]["64"]["softmax"] == pytest.approx(1000)


def test_the_longest_sequence_follows_from_the_line_through_two_peaks():
    script = importlib.import_module("benchmarks.speed_models")
    results = [
        {"model": "a", "tokens": tokens, "parameters": 10**9, "peak": {"softmax": 10**6 * tokens + 10**9}}
        for tokens in (512, 2048)
    ]
    # 20 GB, less 16 bytes a parameter and the constant part
    assert script.longest_sequences(results) == {"a": {"softmax": 3000}}
    assert script.longest_sequences([results[0], results[1] | {"model": "b"}]) == {}


def test_the_peak_of_a_call_is_what_it_allocates_at_once():
    script = importlib.import_module("benchmarks.speed_models")
    one = 1 << 25
    peak = script.peak_bytes(lambda: [torch.ones(one // 4) for _ in range(2)])
    assert 1.98 * one <= peak < 2.2 * one  # Linux counts pages in batches, for each processor by itself


def test_own_memory_leaves_out_the_pages_of_files():
    script = importlib.import_module("benchmarks.speed_conversion")
    assert script.own_bytes("VmRSS:\t  900 kB\nRssAnon:\t   400 kB\nRssFile:\t  500 kB\n") == 400 * 1024
    assert script.own_bytes("State:\tZ (zombie)\n") == 0


def test_the_synthetic_checkpoint_is_a_loadable_llama_in_shards(tmp_path):
    from transformers import AutoModelForCausalLM

    script = importlib.import_module("benchmarks.speed_conversion")
    script.write_checkpoint(tmp_path, 1e7, 256)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert 0.8e7 < stored < 1.4e7


@pytest.mark.benchmarks
def test_long_prompts_are_measured_in_processes_of_their_own(tmp_path, capsys):
    script = importlib.import_module("benchmarks.long_prompts")
    assert "python benchmarks/long_prompts.py" in script.__doc__
    script.main(["--quick", "--output_dir", str(tmp_path), "--lengths", "8"])
    rows = json.loads((tmp_path / "long_prompts.json").read_text(encoding="utf-8"))["rows"]
    assert {mode: list(found) for mode, found in rows.items()} == {"in chunks": ["512", "9000"], "whole": ["512"]}
    assert all(row["bytes"] > 0 and row["seconds"] > 0 for found in rows.values() for row in found.values())
    assert "| in chunks |  9,000 |" in capsys.readouterr().out


@pytest.mark.benchmarks
def test_memory_by_length_is_that_of_processes_of_their_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_LINEAR_ATTENTION_BACKEND", "torch")
    script = importlib.import_module("benchmarks.memory_length")
    assert "python benchmarks/memory_length.py" in script.__doc__
    script.main(["--quick", "--output_dir", str(tmp_path), "--rows", "linear, exp"])
    found = json.loads((tmp_path / "memory_length.json").read_text(encoding="utf-8"))["megabytes"]
    assert {name: list(sizes) for name, sizes in found.items()} == {"linear, exp": ["512", "4096"]}
    assert 0 < found["linear, exp"]["4096"] < 40
    assert "linear, exp" in capsys.readouterr().out
