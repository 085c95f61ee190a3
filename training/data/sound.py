"""Sound in files or as numbers: its samples as the mean of its channels, refused at another sampling rate.

soundfile reads all formats that libsndfile knows; without it, the standard library reads .wav files of whole numbers.
Nothing is resampled, because what a filter does to the sound is for its owner to choose.
"""

from __future__ import annotations

import wave
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


Samples = npt.NDArray[np.float32]
# What reading a recording may raise; soundfile's own errors are RuntimeErrors.
ERRORS = (OSError, EOFError, ValueError, TypeError, RuntimeError)


def count_samples(value: Any, root: Path, rate: int) -> int:
    """The number of samples in a recording (`read_samples`); of a file, only the beginning is read.

    Raises:
        ValueError: if it has another sampling rate, or cannot be read; so do the other `ERRORS`.
    """
    if (numbers := _numbers(value, rate)) is not None:
        return len(numbers)
    source, soundfile = _source(value, root), _soundfile()
    if soundfile is not None:
        header = soundfile.info(source)
        found, count = header.samplerate, header.frames
    else:
        with _wav(source) as file:
            found, count = file.getframerate(), file.getnframes()
    _require_rate(found, rate)
    return count


def read_samples(value: Any, root: Path, rate: int) -> Samples:
    """The samples [N] of a recording, in [-1, 1] if they are whole numbers in the file.

    Args:
        value: a cell: a path relative to `root`, a list of samples, or a dictionary of `datasets` with `array` and
            `sampling_rate`, or with `bytes` or `path`.
        root: the folder of the data file.
        rate: the samples per second that the recording must have.

    Raises:
        ValueError: if it has another sampling rate, or cannot be read; so do the other `ERRORS`.
    """
    if (numbers := _numbers(value, rate)) is not None:
        return numbers
    source, soundfile = _source(value, root), _soundfile()
    if soundfile is None:
        channels, found = _read_wav(source)
    else:
        channels, found = soundfile.read(source, dtype="float32", always_2d=True)
    _require_rate(found, rate)
    return channels.mean(axis=1, dtype=np.float32)


def _numbers(value: Any, rate: int) -> Samples | None:
    """The samples of a cell that holds them itself; None if it names or holds a file."""
    if isinstance(value, dict) and value.get("array") is not None:
        _require_rate(value.get("sampling_rate"), rate)
        value = value["array"]
    if not isinstance(value, (list, np.ndarray)):
        return None
    samples = np.asarray(value, np.float32)
    if samples.ndim != 1 or not np.isfinite(samples).all():
        raise ValueError(f"samples of the shape {list(samples.shape)}; give one finite number for each moment")
    return samples


def _require_rate(found: Any, rate: int) -> None:
    if found != rate:
        shown = f"{found:,} Hz" if isinstance(found, int) else "no sampling rate"
        raise ValueError(f"it has {shown}, but the model reads {rate:,} Hz; resample it")


def _source(value: Any, root: Path) -> Path | BytesIO:
    if isinstance(value, dict):
        if value.get("bytes") is not None:
            return BytesIO(value["bytes"])
        value = value.get("path")
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is neither a path nor samples")
    if not (root / value).is_file():
        raise FileNotFoundError(f"there is no file {root / value}")
    return root / value


def _soundfile() -> Any:
    """The package soundfile; None if it or its library is missing."""
    try:
        import soundfile
    except (ImportError, OSError):
        return None
    return soundfile


@contextmanager
def _wav(source: Path | BytesIO) -> Iterator[wave.Wave_read]:
    try:
        with wave.open(str(source) if isinstance(source, Path) else source, "rb") as file:
            yield file
    except (wave.Error, EOFError) as error:
        raise ValueError(
            f"{error or 'it is cut off'}; without soundfile, only .wav files of whole numbers can be read: install it "
            "with `pip install soundfile`"
        ) from error


def _read_wav(source: Path | BytesIO) -> tuple[Samples, int]:
    """The samples [N, channels] and the rate of a .wav file."""
    with _wav(source) as file:
        width, count, channels, rate = (
            file.getsampwidth(), file.getnframes(), file.getnchannels(), file.getframerate(),
        )  # fmt: skip
        raw = file.readframes(count)
    if len(raw) != width * count * channels:
        raise ValueError(f"it holds {len(raw) // (width * channels):,} of the {count:,} samples that its header names")
    parts = np.frombuffer(raw, np.uint8).reshape(-1, width)
    wide = np.zeros((len(parts), 4), np.uint8)  # the number in the highest bytes, so that every width has one scale
    wide[:, 4 - width :] = parts ^ 0x80 if width == 1 else parts  # 8 bits are unsigned
    return (wide.view("<i4") / 2.0**31).astype(np.float32).reshape(-1, channels), rate
