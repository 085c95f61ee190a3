"""Files and functions stay small enough to be read at once: the limits of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    path for folder in ("hf_linear_attention", "conversion", "training") for path in (ROOT / folder).rglob("*.py")
)


def functions_of(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_has_450_lines_and_a_function_60_at_most(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 450
    for function in functions_of(path):
        assert length_of(function) <= 60, f"{path.name}:{function.lineno} {function.name}"


def test_the_median_file_has_160_lines_and_the_median_function_12_at_most() -> None:
    assert statistics.median(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES) <= 160
    assert statistics.median(length_of(function) for path in FILES for function in functions_of(path)) <= 12
