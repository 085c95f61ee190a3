"""Recordings from files and from numbers: what is read is what was written, and what cannot be read is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import soundfile

from hf_linear_attention.training.data.recordings import ERRORS, count_samples, read_samples, undecoded


RATE = 16000
TONE = (0.5 * np.sin(np.arange(400) / 7)).astype(np.float32)


def write(path: Path, channels: np.ndarray, rate: int = RATE) -> Path:
    soundfile.write(path, channels, rate)
    return path


@pytest.mark.parametrize("kind", ["wav", "flac"])
def test_every_cell_that_holds_or_names_a_recording(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"tone.{kind}", np.stack([TONE, -0.5 * TONE], axis=1))  # channels are averaged
    numbers = (TONE / 4).tolist()
    cells: list[Any] = [path.name, numbers, {"array": numbers, "sampling_rate": RATE}]
    cells += [{"bytes": path.read_bytes()}, {"bytes": None, "path": path.name}]
    rows = datasets.Dataset.from_dict({"audio": [str(path)]}).cast_column("audio", datasets.Audio())
    for cell in [*cells, undecoded(rows, "audio")[0]]:  # `datasets` would need torchcodec to decode it
        assert count_samples(cell, tmp_path, RATE) == len(TONE)
        found = read_samples(cell, tmp_path, RATE)
        assert found.dtype == np.float32
        assert np.abs(found - TONE / 4).max() < 1e-4


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path / "slow.wav", TONE, rate=8000)
    (tmp_path / "text.wav").write_text("no sound at all, but some text", encoding="utf-8")
    cells: list[tuple[Any, str]] = [
        ("slow.wav", "it has 8,000 Hz, but the model reads 16,000 Hz; resample it"),
        ({"array": [0.1], "sampling_rate": 8000}, "it has 8,000 Hz"),
        ({"array": [0.1]}, "it has no sampling rate"),
        ("absent.wav", "there is no file"),
        ("text.wav", "not recognised"),
        ([[0.1], [0.2]], "one finite number"),
        ([float("nan")], "one finite number"),
        (3, "neither a path nor samples"),
    ]
    for cell, what in cells:
        for read in (count_samples, read_samples):
            with pytest.raises(ERRORS, match=what):
                read(cell, tmp_path, RATE)


def test_without_soundfile_one_error_says_what_to_install(twin, finetune, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    folder = twin("ctc")
    options = ["--task", "ctc", "--model_name_or_path", folder / "original"]
    finetune(*options, "--train_file", folder / "train.jsonl", expect=2)
    assert 'pip install "hf-linear-attention[audio]"' in capsys.readouterr().err
