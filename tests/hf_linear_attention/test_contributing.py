"""The picture of the repository in CONTRIBUTING.md is that of the repository."""

from __future__ import annotations

import re
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
COPIED = ("hf_linear_attention", "conversion", "training", "model_cards", "tests", "docs")
PACKAGE = "hf_linear_attention"


def section(title: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.search(rf"(?ms)^## {title}\n(.*?)(?=^## |\Z)", text)[1]


def test_the_tree_is_that_of_the_repository():
    """What it names is there, wherever in the repository; the flat files and the folders of both packages are named."""
    tree = "".join(re.findall(r"(?s)```\n(.*?)```", section("How the pieces fit")))
    names = set(re.findall(r"[\w<>]+\.py\b", tree)) | set(re.findall(r"\w+/", tree))
    paths = [
        path
        for name in (*COPIED, "csrc", "benchmarks", "examples")
        for path in (ROOT / name, *(ROOT / name).rglob("*"))
    ]
    there = {f"{path.name}/" if path.is_dir() else path.name for path in paths if "__pycache__" not in path.parts}
    patterns = {name: re.compile(re.escape(name).replace("<name>", r"\w+")) for name in names}
    assert [name for name, pattern in patterns.items() if not any(map(pattern.fullmatch, there))] == []
    needed = {path.name for path in (ROOT / PACKAGE).glob("*.py")} - {"__init__.py"}
    for folder in (PACKAGE, "conversion", "training"):
        needed |= {f"{path.name}/" for path in (ROOT / folder).iterdir() if path.is_dir()}
    unnamed = {name for name in needed if not any(pattern.fullmatch(name) for pattern in patterns.values())}
    assert unnamed - {"__pycache__/", "model_cards/"} == set()
