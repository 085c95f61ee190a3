"""Benchmarks are imported from the root of the repository; their data sets' cache is not the user's."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def _importable(monkeypatch, tmp_path_factory):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
