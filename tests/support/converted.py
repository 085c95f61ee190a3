"""Sources that many tests convert, made once, and brief measurements."""

from __future__ import annotations

import datasets
import pytest
from accelerate.state import AcceleratorState, GradientState
from checkpoints import convert_folder, save_twin

from hf_linear_attention import key_division
from hf_linear_attention.conversion import model_speed
from hf_linear_attention.training import checkpoints
from hf_linear_attention.training.evaluation import recall


@pytest.fixture(scope="session", autouse=True)
def dataset_cache(tmp_path_factory):
    """The data sets' cache is not the user's."""
    cache = tmp_path_factory.mktemp("datasets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        yield cache


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """accelerate keeps one state a process; every test starts its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources") / "llama"
    save_twin(folder, "llama")
    return folder


@pytest.fixture(scope="session")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources") / "bert"
    save_twin(folder, "bert")
    return folder


@pytest.fixture(scope="session")
def linear_llama(llama, tmp_path_factory):
    """A converted folder; tests must not write into it."""
    folder = tmp_path_factory.mktemp("converted") / "llama"
    convert_folder(llama, folder, "--attention", "linear", "--num_features", 16)
    return folder


@pytest.fixture(scope="module", autouse=True)
def brief_timing():
    """A layer is timed once at two lengths, recall measured on two texts, and three numbers of exact keys are tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_division, "SHARES", (1 / 4, 1, 4))
        patch.setattr(key_division, "TOKENS", 1)
        patch.setattr(recall, "MOST_ROWS", 2)
        patch.setattr(model_speed, "ROUNDS", 1)
        patch.setattr(model_speed, "STEPS", 1)
        patch.setattr(model_speed, "LONGEST", 256)
        yield


@pytest.fixture(scope="session", autouse=True)
def undrawn():
    """A picture takes longer than the training whose losses it shows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "plot_metrics", lambda *_: None)
        yield
