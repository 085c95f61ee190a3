"""The speed benchmarks run, compare what they say they compare, and count what they say they count."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("speed_break_even", "speed_kernels", "speed_models")


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_quick_run_prints_its_tables_and_writes_its_figures(name, tmp_path, capsys):
    script = importlib.import_module(f"benchmarks.{name}")
    assert f"python benchmarks/{name}.py" in script.__doc__
    script.main(["--quick", "--output_dir", str(tmp_path)])
    result = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert result["benchmark"] == name
    assert result["environment"]["threads"] == 1
    printed = capsys.readouterr().out
    assert "linear elu1" in printed or "sdpa" in printed
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


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


def test_break_even_is_the_length_from_which_softmax_stays_slower():
    break_even = importlib.import_module("benchmarks.speed_break_even").break_even
    assert break_even([1, 2, 4], [0.5, 1.1, 2.0]) == "2"
    assert break_even([1, 2, 4], [1.5, 0.9, 2.0]) == "4"
    assert break_even([1, 2, 4], [0.1, 0.2, 0.9]) == "> 4"


def test_the_peak_of_new_memory_counts_the_output():
    peak = importlib.import_module("benchmarks.speed_kernels").peak_tensors("sdpa", 4096, False)
    assert 0.9 < peak < 2  # one output, and what softmax keeps of a block of rows
