"""The cache of tokens where several processes write it at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_linear_attention.training.data import tokenization


def test_processes_of_equal_number_do_not_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in two containers that share a disk: each writes a file of its own, and one of them is the result, whole."""
    save, written = np.save, []

    def shared(path: Path, array: Any) -> None:
        written.append(path)
        save(path, array)
        if len(written) == 1:  # the other one is faster: it begins later and ends before
            tokenization._write(tmp_path / "key.tokens.npy", np.arange(5))
            assert np.array_equal(np.load(path), array)

    monkeypatch.setattr(np, "save", shared)
    tokenization._write(tmp_path / "key.tokens.npy", np.arange(3))
    assert len(set(written)) == 2
    assert np.array_equal(np.load(tmp_path / "key.tokens.npy"), np.arange(3))
    assert [path.name for path in tmp_path.iterdir()] == ["key.tokens.npy"]
