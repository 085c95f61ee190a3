"""Fixtures of all tests of conversion."""

from __future__ import annotations

import pytest
from converted import (  # noqa: F401  (fixtures, found here by name)
    bert,
    brief_timing,
    dataset_cache,
    fresh_accelerate,
    linear_llama,
    llama,
    undrawn,
)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The river had risen in the night, and the lower field was a lake. " * 60, encoding="utf-8")
    return path
