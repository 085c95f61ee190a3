"""Sound from files and from numbers: what is read is what was written, and what cannot be read is named."""

from __future__ import annotations

import wave
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from hf_linear_attention.training.data import sound
from hf_linear_attention.training.data.sound import ERRORS, count_samples, read_samples


RATE = 16000
TONE = (0.5 * np.sin(np.arange(400) / 7)).astype(np.float32)


@pytest.fixture(params=["alone", "soundfile"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without soundfile and, where it is installed, with it."""
    if request.param == "soundfile":
        pytest.importorskip("soundfile")
    else:
        monkeypatch.setattr(sound, "_soundfile", lambda: None)


def write(path: Path, channels: np.ndarray, width: int = 2, rate: int = RATE) -> Path:
    """A .wav file of `channels` [N, C] as whole numbers of `width` bytes."""
    scaled = np.round(channels * 2.0 ** (8 * width - 1)).astype(np.int64) + (128 if width == 1 else 0)
    raw = scaled.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width]
    with wave.open(str(path), "wb") as file:
        file.setparams((channels.shape[1], width, rate, 0, "NONE", ""))
        file.writeframes(raw.tobytes())
    return path


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_whole_numbers_of_every_width(width: int, tmp_path: Path, reader: None) -> None:
    write(tmp_path / "tone.wav", TONE[:, None], width)
    assert count_samples("tone.wav", tmp_path, RATE) == len(TONE)
    found = read_samples("tone.wav", tmp_path, RATE)
    assert found.dtype == np.float32
    assert np.abs(found - TONE).max() < max(2.0 ** (1 - 8 * width), 1e-6)


def test_channels_are_averaged(tmp_path: Path, reader: None) -> None:
    write(tmp_path / "two.wav", np.stack([TONE, -0.5 * TONE], axis=1))
    assert count_samples("two.wav", tmp_path, RATE) == len(TONE)
    assert np.abs(read_samples("two.wav", tmp_path, RATE) - TONE / 4).max() < 1e-4


def test_numbers_and_bytes_instead_of_a_path(tmp_path: Path, reader: None) -> None:
    path = write(tmp_path / "tone.wav", TONE[:, None])
    cells: list[Any] = [TONE.tolist(), {"array": TONE.tolist(), "sampling_rate": RATE}, {"bytes": path.read_bytes()}]
    for cell in [*cells, {"bytes": None, "path": "tone.wav"}]:
        assert count_samples(cell, tmp_path, RATE) == len(TONE)
        assert np.abs(read_samples(cell, tmp_path, RATE) - TONE).max() < 1e-4


def test_what_cannot_be_read_is_named(tmp_path: Path, reader: None) -> None:
    write(tmp_path / "slow.wav", TONE[:, None], rate=8000)
    (tmp_path / "text.wav").write_text("no sound at all, but some text", encoding="utf-8")
    cells: list[tuple[Any, str]] = [
        ("slow.wav", "it has 8,000 Hz, but the model reads 16,000 Hz; resample it"),
        ({"array": [0.1], "sampling_rate": 8000}, "it has 8,000 Hz"),
        ({"array": [0.1]}, "it has no sampling rate"),
        ("absent.wav", "there is no file"),
        ("text.wav", "RIFF|not recognised"),
        ([[0.1], [0.2]], "one finite number"),
        ([float("nan")], "one finite number"),
        (None, "neither a path nor samples"),
        (3, "neither a path nor samples"),
    ]
    for cell, what in cells:
        for read in (count_samples, read_samples):
            with pytest.raises(ERRORS, match=what):
                read(cell, tmp_path, RATE)


def test_a_file_that_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound, "_soundfile", lambda: None)
    path = write(tmp_path / "tone.wav", TONE[:, None])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="it holds 350 of the 400 samples"):
        read_samples("tone.wav", tmp_path, RATE)


def test_other_formats_need_soundfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(tmp_path / "tone.flac", TONE, RATE)
    assert np.abs(read_samples("tone.flac", tmp_path, RATE) - TONE).max() < 1e-4
    assert count_samples("tone.flac", tmp_path, RATE) == len(TONE)
    monkeypatch.setattr(sound, "_soundfile", lambda: None)
    with pytest.raises(ValueError, match="pip install soundfile"):
        count_samples("tone.flac", tmp_path, RATE)


def test_a_column_of_datasets_is_not_decoded(tmp_path: Path) -> None:
    """`datasets` would need torchcodec for it."""
    from hf_linear_attention.training.data.recordings import undecoded

    path = str(write(tmp_path / "tone.wav", TONE[:, None]))
    rows = datasets.Dataset.from_dict({"audio": [path]}).cast_column("audio", datasets.Audio())
    assert len(read_samples(undecoded(rows, "audio")[0], tmp_path, RATE)) == len(TONE)
