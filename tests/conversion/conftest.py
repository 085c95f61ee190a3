"""Sources that many tests convert, and timing that is brief, because no test is about the times."""

from __future__ import annotations

import datasets
import pytest
from accelerate.state import AcceleratorState, GradientState
from converted import bert, linear_llama, llama  # noqa: F401  (fixtures, which pytest finds here by name)

from hf_linear_attention.conversion import layer_speed


@pytest.fixture(scope="session", autouse=True)
def brief_timing():
    """A layer is timed once at two lengths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_speed, "ROUNDS", 1)
        patch.setattr(layer_speed, "STEPS", 1)
        patch.setattr(layer_speed, "LONGEST", 256)
        yield


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
