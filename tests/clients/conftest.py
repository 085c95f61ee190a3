"""`test_transformers_suite.py` downloads and imports a large file: collected only where `-m` selects `clients`."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark.expression import Expression


# Markers that transformers' tests carry; `--strict-markers` wants every one declared.
FOREIGN_MARKERS = (
    "accelerate_tests",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "flash_attn_test",
    "is_training_test",
    "order",
    "slow",
    "torch_compile_test",
)


def pytest_configure(config: pytest.Config) -> None:
    for marker in FOREIGN_MARKERS:
        config.addinivalue_line("markers", f"{marker}: of transformers' tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.name != "test_transformers_suite.py" or not config.option.markexpr:
        return None
    selected = Expression.compile(config.option.markexpr).evaluate(lambda name, **_: name == "clients")
    return None if selected else True
