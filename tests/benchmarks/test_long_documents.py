"""long_documents.py: its collections, its figure, and a quick run that also heals."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import datasets
import pytest
import torch


@pytest.fixture
def script(monkeypatch, tmp_path_factory):
    """The module; its data sets' cache is not the user's."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")
    return importlib.import_module("benchmarks.long_documents")


def test_mixed_documents_have_quarters_of_four(script):
    texts = ["\n\n".join(f"{name}{number}" for number in range(8)) for name in "abcd"]
    mixed = script.mixed(texts)
    for own, text in zip(texts, mixed, strict=True):
        parts = text.split()
        assert parts[6:] == own.split()[6:]
        assert len({part[0] for part in parts}) == 4
        assert [int(part[1]) for part in parts] == list(range(8))


def test_recall_counts_the_most_similar_chunk_of_every_document(script):
    documents = [torch.eye(4)[:1], torch.eye(4)[1:3], torch.eye(4)[3:]]
    query = torch.tensor([0.5, 0.0, 0.8, 0.3])
    assert script.recall(documents, [(1, query)]) == 1
    assert script.recall(documents, [(1, query), (0, query), (2, query)]) == pytest.approx(1 / 3)
    assert script.recall(documents, [(1, query), (0, query), (2, query)], 2) == pytest.approx(2 / 3)


@pytest.mark.benchmarks
def test_a_quick_run_reads_with_every_model(script, tmp_path, capsys):
    assert "python benchmarks/long_documents.py" in script.__doc__
    script.main(["--quick", "--output_dir", str(tmp_path), "--models", "original", "hybrid"])
    result = json.loads((tmp_path / "long_documents.json").read_text(encoding="utf-8"))
    ways = ["original, cut at 512", "original, chunks of 512", "original, mean of its chunks"]
    ways += [f"hybrid {state}, {way}" for state in ("untrained", "healed") for way in ("one vector", "late chunking")]
    for most in ("recall@1", "recall@5"):
        assert set(result[most]) == {f"{name}: {way}" for name in ("as they are", "mixed") for way in ways}
        assert all(0 <= share <= 1 for share in result[most].values())
    assert result["recall@1"]["mixed: hybrid untrained, late chunking"] > 0.2  # of 6 documents, at random a sixth
    assert {rival: set(row) for rival, row in result["speed"]["times as fast as"].items()} == {
        "chunks of 512": {"hybrid"},
        "softmax": {"hybrid"},
    }
    assert (tmp_path / "long_documents" / "hybrid-2k" / "model.safetensors").is_file()
    assert "Times as fast at 1024 tokens" in capsys.readouterr().out
