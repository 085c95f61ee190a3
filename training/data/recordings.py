"""Recordings of speech (`--task speech_seq2seq`, `--task ctc`), which are read and processed when they are needed.

A row is a recording and, where it is needed, the text that is said in it. soundfile reads recordings, as the mean of
their channels, because `datasets` would need torchcodec and FFmpeg. Nothing is resampled, because what a filter does to
the sound is for its owner to choose. The model's feature extractor prepares the samples, and its tokenizer the texts;
there is no augmentation.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedConfig

from hf_linear_attention._common.errors import DataError, SetupError
from hf_linear_attention.attention.transformers_internals import count_frames
from hf_linear_attention.training.data.packing import Example, Examples, Part, Tokens, finished
from hf_linear_attention.training.data.processors import load_config
from hf_linear_attention.training.data.rows import bad_texts, folder_of, refuse_bad, require_column
from hf_linear_attention.training.data.texts import target_tokens
from hf_linear_attention.training.models import empty_model
from hf_linear_attention.training.recipe import Recipe


logger = logging.getLogger(__name__)

Samples = npt.NDArray[np.float32]
# What reading a recording may raise; soundfile's own errors are RuntimeErrors.
ERRORS = (OSError, ValueError, TypeError, RuntimeError)


def count_samples(value: Any, root: Path, rate: int) -> int:
    """The number of samples in a recording (`read_samples`); of a file, only the beginning is read.

    Raises:
        ValueError: if it has another sampling rate, or cannot be read; so do the other `ERRORS`.
    """
    if (numbers := _numbers(value, rate)) is not None:
        return len(numbers)
    import soundfile

    header = soundfile.info(_source(value, root))
    _require_rate(header.samplerate, rate)
    return header.frames


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
    import soundfile

    channels, found = soundfile.read(_source(value, root), dtype="float32", always_2d=True)
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


class Recordings:
    """One example per recording: what its model reads, the number of its frames and, if there are texts, their tokens.

    `input_values` are [S] samples, `input_features` [T, F] spectra. An extractor with a window (Whisper's) pads every
    recording to it, [F, T], and all frames count, because the model attends to all of them.
    """

    def __init__(
        self,
        recordings: Sequence[Any],
        root: Path,
        processor: Any,
        frames: Callable[[int], int],
        labels: dict[str, list[Tokens]],
        texts: Sequence[str] | None,
    ) -> None:
        """Keep the cells of a column.

        Args:
            root: the folder to which paths are relative.
            frames: the number of frames that the model makes of an input of this length.
            labels: the tokens of every text by their name in an example; none if there are no texts.
            texts: the texts.
        """
        self.recordings, self.root, self.processor, self.frames = recordings, root, processor, frames
        self.labels, self.references = labels, texts

    @property
    def lengths(self) -> Tokens:
        """The length of every example, which is 1: training is counted in recordings."""
        return np.ones(len(self.recordings), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.recordings)

    def __getitem__(self, index: int) -> Example:
        extractor = self.processor.feature_extractor
        try:
            samples = read_samples(self.recordings[int(index)], self.root, extractor.sampling_rate)
            found = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="np")
        except (*ERRORS, AssertionError) as error:  # only the beginning of a file was read before
            raise DataError(f"recording {index} of the data cannot be read ({error}); replace or remove it") from error
        example = {name: value[0] for name, value in found.items()}
        values = next(iter(example.values()))
        length = values.shape[-1] if longest_of(extractor) is not None else len(values)
        own = {name: rows[index] for name, rows in self.labels.items()}
        return {**example, "frames": self.frames(length), **own}

    def texts(self, rows: Sequence[tuple[int, Any]]) -> tuple[list[str], list[str]]:
        """The text of the likeliest token of every frame, and the text of the data; `rows` are numbers and tokens."""
        references = self.references or ()
        tokenizer = self.processor.tokenizer  # which merges repeated tokens and leaves out the blank
        return [tokenizer.decode(ids) for _, ids in rows], [references[number] for number, _ in rows]


def longest_of(extractor: Any) -> int | None:
    """The samples of the window of an extractor, which all recordings are padded to; None if it has no window."""
    return getattr(extractor, "n_samples", None)


def check_recordings(part: Part) -> None:
    """Refuse recordings that cannot be read or are too long, and texts that are none or too long.

    Raises:
        DataError: if there are any, or a column is missing.
        SetupError: if soundfile is missing.
    """
    try:
        import soundfile  # noqa: F401 (every recording needs it, so it is asked for once)
    except (ImportError, OSError) as error:  # an OSError without libsndfile
        raise SetupError(
            f"`--task {part.recipe.model.task}` reads recordings with soundfile ({error}); install it with "
            '`pip install "hf-linear-attention[audio]"`'
        ) from error
    recipe, rows, processor = part.recipe, part.rows, part.processor
    column = recipe.task_options.audio_column_name
    require_column(rows, "audio_column_name", column)
    rate, longest = processor.feature_extractor.sampling_rate, longest_of(processor.feature_extractor)
    counts, bad = np.zeros(len(rows), np.int64), {}
    for number, value in enumerate(undecoded(rows, column)):
        try:
            counts[number] = count_samples(value, folder_of(part), rate)
        except ERRORS as error:
            bad[number] = f"`{column}` cannot be read ({error})"
            continue
        if longest is not None and counts[number] > longest:
            long = f"{counts[number] / rate:.1f} s long, but the model reads at most {longest / rate:.1f} s"
            bad[number] = f"`{column}` is {long}; divide it"
    if _needs_text(part):
        name = recipe.data.text_column_name
        require_column(rows, "text_column_name", name)
        texts = list(rows[name])
        bad |= bad_texts(rows, [name], may_be_empty=True)
    if longest is None and "input_values" in processor.feature_extractor.model_input_names:
        needed = np.ones(len(rows), np.int64)
        if recipe.task.logits == "frames" and _needs_text(part):
            strings = [text if isinstance(text, str) else "" for text in texts]
            tokens = processor.tokenizer(strings)["input_ids"]
            # An alignment has at least one frame for each token, and a blank between two equal ones.
            needed = np.array([max(1, len(ids) + sum(a == b for a, b in itertools.pairwise(ids))) for ids in tokens])
        for number, found in enumerate(map(_frame_counter(recipe), counts.tolist())):
            if found < needed[number]:
                what = f"{max(found, 0)} frames, but {needed[number]} are needed"
                bad.setdefault(number, f"`{column}` is too short: the model makes {what}")
    refuse_bad(bad, recipe.data, part.split)


def recording_examples(part: Part) -> Examples:
    """The recordings of the rows of one split; targets of a decoder are cut to `max_length` tokens.

    Raises:
        DataError: if there are none, or the tokenizer has tokens that the model does not know.
    """
    recipe, rows, labels, texts = part.recipe, part.rows, {}, None
    if _needs_text(part):
        config, tokenizer = load_config(recipe), part.processor.tokenizer
        texts = list(rows[recipe.data.text_column_name])
        if recipe.task.logits == "targets":
            labels = {"targets": _targets(texts, tokenizer, part.max_length, config)}
        else:
            labels = {"labels": [np.array(ids, np.int64) for ids in tokenizer(texts)["input_ids"]]}
            _check_labels(labels["labels"], tokenizer, config, part.split)
    recordings = undecoded(rows, recipe.task_options.audio_column_name)
    examples = Recordings(recordings, folder_of(part), part.processor, _frame_counter(recipe), labels, texts)
    return finished(examples, part)


def _targets(texts: list[str], tokenizer: Any, max_length: int, config: PreTrainedConfig) -> list[Tokens]:
    """The tokens that the decoder predicts: without the one that it starts with, which Whisper's tokenizer writes."""
    start, found = getattr(config, "decoder_start_token_id", None), target_tokens(texts, tokenizer, max_length)
    return [ids[1:] if len(ids) > 1 and ids[0] == start else ids for ids in found]


def _check_labels(labels: list[Tokens], tokenizer: Any, config: PreTrainedConfig, split: str) -> None:
    flat = np.concatenate(labels) if labels else np.zeros(0, np.int64)
    if flat.max(initial=0) >= config.vocab_size:
        raise DataError(
            f"the tokenizer gives token {flat.max()} for the {split} data, but the model has {config.vocab_size} "
            "(`vocab_size`); give the model its own tokenizer"
        )
    unknown = int((flat == tokenizer.unk_token_id).sum())
    if unknown:
        logger.warning(
            "%d of %d characters of the %s data are not in the tokenizer's vocabulary; write the texts as the model "
            "does (upper case, for example)", unknown, len(flat), split,
        )  # fmt: skip


def _needs_text(part: Part) -> bool:
    """Whether the texts are used: by a decoder, by the task's loss, or by the figures of an evaluation."""
    is_used = part.split == "validation" or bool(part.recipe.objective.task_loss_weight)
    return is_used or part.recipe.task.logits == "targets"


def _frame_counter(recipe: Recipe) -> Callable[[int], int]:
    path = str(recipe.model.model_name_or_path)
    model = empty_model(recipe.model.task, path, recipe.model.trust_remote_code)
    return lambda length: count_frames(model, length)


def undecoded(rows: datasets.Dataset, name: str) -> Any:
    """The column of recordings as paths, bytes or samples; `datasets` would decode it with torchcodec."""
    if isinstance(rows.features[name], datasets.Audio):
        rows = rows.cast_column(name, datasets.Audio(decode=False))
    return rows[name]
