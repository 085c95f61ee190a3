"""Benchmarks are imported from the root; their data sets' cache is not the user's, and what they time is short."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from hf_linear_attention.conversion import model_speed


@pytest.fixture(autouse=True)
def _importable(monkeypatch, tmp_path_factory):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")
    for name, value in {"ROUNDS": 1, "STEPS": 1, "LONGEST": 256}.items():
        monkeypatch.setattr(model_speed, name, value)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
