"""Sources that many tests convert, made once."""

from __future__ import annotations

import pytest
from checkpoints import convert_folder, save_twin


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
