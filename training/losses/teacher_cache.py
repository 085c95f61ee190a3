"""The outputs of the teacher on disk, by row of the training data (`--cache_teacher FOLDER`).

    FOLDER/<fingerprint>/facts.json     what the fingerprint is of
    FOLDER/<fingerprint>/<kind>.rows    a place for every row
    FOLDER/<fingerprint>/<kind>.sums    its checksum, which is 0 until the row is there

The fingerprint is of the teacher's weights and config, of the token ids and documents of all rows in their order, and
of the precision. So another teacher, tokenizer, text or length has a folder of its own, and the seed does not matter. A
checksum is of the bytes of a row and of its token ids. A row that was written in part, because a process was killed or
two wrote at once, is therefore not there, and is computed again.

A token takes, in float16,

    logits of up to 512 classes    2 bytes a class: the logarithms of their probabilities
    logits of more classes         1,026 bytes, or 1,538 above 65,536 classes: the 256 largest, and that of the others
    hidden states                  2 bytes a dimension and layer

Outputs that were just computed are used in this form too, so a run that reads them gets what the run got that wrote
them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Iterable
from io import RawIOBase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention._common.errors import TrainingError
from hf_linear_attention._common.folders import staging
from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.data.packing import Examples, Tokens
from hf_linear_attention.training.losses.divergence import TopLogits
from hf_linear_attention.training.losses.output_layer import MEGABYTES, chunks
from hf_linear_attention.training.losses.outputs import Outputs
from hf_linear_attention.training.losses.teacher import Teacher
from hf_linear_attention.training.recipe import MECHANISM


logger = logging.getLogger(__name__)

FORM = 1  # raised when the files change
FULL, LARGEST = 512, 256  # classes up to which all are kept, and how many are kept of more
# What a config says besides how the model computes, and what a conversion adds.
NOT_COMPUTED = {
    "linear_attention",
    "linear_attention_classes",
    "model_type",
    "architectures",
    "auto_map",
    "dtype",
    "transformers_version",
    "use_cache",
}


class Logits:
    """The logarithms of the probabilities at a temperature."""

    def __init__(self, classes: int, temperature: float, megabytes: float = MEGABYTES) -> None:
        self.classes, self.temperature, self.megabytes = classes, temperature, megabytes
        self.name = "logits" if temperature == 1 else f"logits-at-{temperature:g}"
        self.ids = torch.int16 if classes <= 2**16 else torch.int32
        self.size = 2 * classes if classes <= FULL else LARGEST * (2 + self.ids.itemsize) + 2

    def encode(self, outputs: Outputs, rows: Tensor) -> Tensor:
        """The bytes [r, size] of the tokens `rows` [r] of a flattened batch."""
        if outputs.logits is None:
            raise RuntimeError("the teacher has no logits")
        return torch.cat([self._encode(outputs.logits(part)) for part in chunks(rows, self.classes, self.megabytes)])

    def _encode(self, logits: Tensor | TopLogits) -> Tensor:
        if isinstance(logits, TopLogits):
            raise RuntimeError("the outputs that are kept must be whole")
        log_p = torch.log_softmax(logits.float() / self.temperature, dim=-1)
        if self.classes <= FULL:
            return log_p.half().view(torch.uint8).cpu()
        values, ids = log_p.topk(LARGEST, dim=-1)
        others = (1 - values.exp().sum(-1, keepdim=True)).clamp(min=1e-7).log()
        parts = torch.cat((values, others), dim=-1).half().view(torch.uint8), ids.to(self.ids).view(torch.uint8)
        return torch.cat(parts, dim=-1).cpu()

    def decode(self, kept: Tensor) -> Tensor | TopLogits:
        """The logits of tokens whose bytes [r, size] these are."""
        if self.classes <= FULL:
            return kept.view(torch.float16).float() * self.temperature
        end = 2 * (LARGEST + 1)
        values = kept[:, :end].contiguous().view(torch.float16).float()
        ids = kept[:, end:].contiguous().view(self.ids).long()
        ids = ids & 0xFFFF if self.ids == torch.int16 else ids  # there is no unsigned type to index with
        return TopLogits(values[:, :-1], ids, values[:, -1:])


class HiddenStates:
    """The hidden states after the last or after every layer."""

    def __init__(self, layers: str, count: int, width: int) -> None:
        self.name, self.count, self.size = f"hidden-{layers}", count, 2 * count * width

    def encode(self, outputs: Outputs, rows: Tensor) -> Tensor:
        """The bytes [r, size] of the tokens `rows` [r] of a flattened batch.

        Raises:
            TrainingError: if a number is too large for float16.
        """
        states = torch.cat([state.flatten(0, 1)[rows] for state in outputs.hidden_states], dim=-1).half()
        if not states.isfinite().all():
            raise TrainingError("a hidden state of the teacher is too large for float16; leave `--cache_teacher` out")
        return states.view(torch.uint8).cpu()

    def decode(self, kept: Tensor) -> tuple[Tensor, ...]:
        """The states [B, N, D] by layer of a batch whose bytes [B, N, size] these are."""
        return kept.view(torch.float16).float().chunk(self.count, dim=-1)


Kind = Logits | HiddenStates  # a kind of outputs, which takes `size` bytes per token


class RowFile:
    """The rows of one kind."""

    def __init__(self, folder: Path, kind: Kind, lengths: Tokens) -> None:
        """Open the files, or create them."""
        self.kind, self.lengths = kind, lengths
        self.places = np.concatenate(([0], np.cumsum(lengths))) * kind.size
        self.rows, self.sums = (_opened(folder / f"{kind.name}.{part}") for part in ("rows", "sums"))

    def close(self) -> None:
        """Close the files."""
        self.rows.close()
        self.sums.close()

    def read(self, row: int, tokens: bytes) -> Tensor | None:
        """The bytes [n, size] of a row of n tokens; None if it is not there."""
        checksum = int.from_bytes(_read(self.sums, 4, 4 * row), "little")
        if not checksum:
            return None
        data = _read(self.rows, int(self.lengths[row]) * self.kind.size, int(self.places[row]))
        if _checksum(data, tokens) != checksum:
            return None
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, self.kind.size)

    def write(self, row: int, tokens: bytes, kept: Tensor) -> None:
        """Write the bytes [n, size] of a row, unless it is there."""
        if self.read(row, tokens) is not None:
            return
        data = kept.numpy().tobytes()
        _write(self.rows, data, int(self.places[row]))
        _write(self.sums, _checksum(data, tokens).to_bytes(4, "little"), 4 * row)

    def count(self) -> int:
        """The number of rows that are there."""
        data = _read(self.sums, 4 * len(self.lengths), 0)
        return int(np.count_nonzero(np.frombuffer(data[: len(data) // 4 * 4], np.uint32)))  # it may be cut


def _opened(path: Path) -> RawIOBase:
    """A file to read and write anywhere, which is created if it is missing, and never cut."""
    path.touch()
    return path.open("r+b", buffering=0)


def _read(file: RawIOBase, size: int, place: int) -> bytes:
    file.seek(place)
    return file.read(size) or b""


def _write(file: RawIOBase, data: bytes, place: int) -> None:
    file.seek(place)
    done = 0
    while done < len(data):  # a full disk is an OSError
        done += file.write(data[done:]) or 0


def _checksum(data: bytes, tokens: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(tokens)) or 1


class CachedTeacher:
    """A teacher whose outputs for training are kept, and read where they are there already."""

    def __init__(self, teacher: Teacher | None, files: list[RowFile]) -> None:
        """Wrap a teacher, which is None if another model computes its outputs (`note`)."""
        self.teacher, self.files = teacher, files

    def close(self) -> None:
        """Close the files of the outputs."""
        for file in self.files:
            file.close()

    def __call__(self, batch: Batch) -> Outputs:
        """The outputs for a batch, whose logits are `TopLogits` if only the largest are kept."""
        found = self._read(batch)
        if found is None:
            if self.teacher is None:
                raise RuntimeError("there is no teacher to run")
            found = self._write(batch, self.teacher(batch))
        outputs: dict[str, Any] = {}
        for file, kept in zip(self.files, found, strict=True):
            kept = kept.to(batch["input_ids"].device)
            if isinstance(file.kind, Logits):
                outputs["logits"] = _rows_of(file.kind, kept.flatten(0, 1))
            elif isinstance(file.kind, HiddenStates):
                outputs["hidden_states"] = file.kind.decode(kept)
        return Outputs(**outputs)

    @torch.no_grad()
    def note(self, batch: Batch, outputs: Outputs) -> None:
        """Keep the outputs of a model that computes what the teacher computes, unless they are there."""
        if self._read(batch) is None:
            self._write(batch, outputs)

    def _read(self, batch: Batch) -> list[Tensor] | None:
        """By kind, the bytes [B, N, size] of all rows, with 0 at padding; None if one of them is not there."""
        found = []
        for file in self.files:
            whole = torch.zeros(*batch["input_ids"].shape, file.kind.size, dtype=torch.uint8)
            for place, (row, tokens) in enumerate(_rows(batch)):
                kept = file.read(row, tokens.tobytes())
                if kept is None or len(kept) != len(tokens):
                    return None
                whole[place, : len(tokens)] = kept
            found.append(whole)
        return found

    def _write(self, batch: Batch, outputs: Outputs) -> list[Tensor]:
        """What `_read` returns after the outputs are written."""
        mask, found = batch["attention_mask"].bool(), []
        rows = mask.flatten().nonzero().squeeze(-1)
        for file in self.files:
            whole = torch.zeros(*mask.shape, file.kind.size, dtype=torch.uint8)
            whole[mask.cpu()] = file.kind.encode(outputs, rows)
            for place, (row, tokens) in enumerate(_rows(batch)):
                file.write(row, tokens.tobytes(), whole[place, : len(tokens)].contiguous())
            found.append(whole)
        return found


def _rows_of(kind: Logits, kept: Tensor) -> Any:
    return lambda rows: kind.decode(kept[rows])


def _rows(batch: Batch) -> Iterable[tuple[int, Tokens]]:
    """The number and the token ids of every row of a right-padded batch."""
    lengths = batch["attention_mask"].sum(1).tolist()
    tokens = batch["input_ids"].cpu().numpy()
    for row, line, length in zip(batch["index"].tolist(), tokens, lengths, strict=True):
        yield row, line[:length]


def open_cache(
    folder: Path, model: PreTrainedModel, examples: Examples, kinds: list[Kind], precision: str
) -> list[RowFile]:
    """The files of all kinds for a model and the training data, in the folder of their fingerprint.

    Args:
        model: the teacher, or a converted model that computes its softmax attention.
        precision: the mixed precision in which the teacher computes.
    """
    facts = {
        "form": FORM,
        "weights": _digest_of_weights(model),
        "config": _digest_of_config(model),
        "inputs": _digest_of_inputs(examples),
        "precision": precision,
    }
    own = folder / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    if not own.is_dir():
        with staging(own) as unfinished:
            (unfinished / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    lengths = np.asarray(examples.lengths)
    files = [RowFile(own, kind, lengths) for kind in kinds]
    for file in files:
        megabytes = int(file.places[-1]) / 1e6
        done = f"{file.count()} of {len(lengths)} rows of {file.kind.name}"
        logger.info("the outputs of the teacher in %s: %s; all take %.1f MB", own, done, megabytes)
    return files


def _digest_of_weights(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if MECHANISM not in name:
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest_of_config(model: PreTrainedModel) -> str:
    content = {name: value for name, value in model.config.to_diff_dict().items() if name not in NOT_COMPUTED}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _digest_of_inputs(examples: Examples) -> str:
    digest = hashlib.sha256()
    for number in range(len(examples)):
        example = examples[number]
        for name in ("input_ids", "position_ids"):
            value = np.asarray(example.get(name, ()), dtype=np.int64)
            digest.update(len(value).to_bytes(8, "little"))
            digest.update(value.tobytes())
    return digest.hexdigest()
