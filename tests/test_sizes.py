"""Functions stay small enough to be read at once: the limit of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(
    path for folder in ("hf_linear_attention", "conversion", "training") for path in (ROOT / folder).rglob("*.py")
)


def functions_of(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def test_a_function_has_60_lines_and_the_median_one_12_at_most() -> None:
    functions = [(path, function) for path in FILES for function in functions_of(path)]
    long = [
        f"{path.name}:{function.lineno} {function.name}" for path, function in functions if length_of(function) > 60
    ]
    assert not long
    assert statistics.median(length_of(function) for _, function in functions) <= 12
