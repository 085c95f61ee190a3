"""Tiny checkpoints and files to damage. What a command must answer is in `tests/support/faults.py`."""

from __future__ import annotations

import json

import pytest
from checkpoints import save_twin
from converted import bert, dataset_cache, linear_llama, llama, undrawn  # noqa: F401  (fixtures, found here by name)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder with good data: rows of text, with labels."""
    folder = tmp_path_factory.mktemp("files")
    rows = [(f"the {number} quick words of a row that is long enough", number % 2) for number in range(24)]
    (folder / "good.txt").write_text("\n\n".join(text for text, _ in rows))
    (folder / "good.jsonl").write_text("".join(json.dumps({"text": text, "label": n}) + "\n" for text, n in rows))
    return folder


@pytest.fixture(scope="session")
def vit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources") / "vit"
    names = {"id2label": {0: "bright", 1: "dark"}, "label2id": {"bright": 0, "dark": 1}}
    save_twin(folder, "vit", "AutoModelForImageClassification", **names)
    return folder
