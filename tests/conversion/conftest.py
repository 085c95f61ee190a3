"""Fixtures of all tests of conversion."""

from __future__ import annotations

import datasets
import pytest
from accelerate.state import AcceleratorState, GradientState
from converted import (  # noqa: F401  (fixtures, found here by name)
    bert,
    brief_timing,
    linear_llama,
    llama,
    undrawn,
)


@pytest.fixture(autouse=True)
def fresh_accelerate(tmp_path_factory, monkeypatch):
    """accelerate keeps one state a process; the data sets' cache is not the user's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The river had risen in the night, and the lower field was a lake. " * 60, encoding="utf-8")
    return path
