"""Reading of training rows as they are needed (`--streaming`), for data that does not fit into memory or on the disk.

Every process reads different rows (`datasets.distributed.split_dataset_by_node`), shuffled in a buffer of `BUFFER` rows
by the seed and the epoch. A resumed run reads the data again, and skips the examples that it has trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.distributed import split_dataset_by_node
from transformers import PreTrainedTokenizerBase

from hf_linear_attention._common.errors import DataError
from hf_linear_attention.training.data.batches import Batch, Masking, pad
from hf_linear_attention.training.data.packing import Example, Tokens, boundaries
from hf_linear_attention.training.data.rows import READERS, bad_text, report
from hf_linear_attention.training.data.tokenization import document_tokens
from hf_linear_attention.training.recipe import Recipe


BUFFER = 10_000
TOKENIZED_AT_ONCE = 64
ROW = "__row__"


class StreamedExamples:
    """An endless stream of examples for each process; with `is_packed`, documents share blocks (causal_lm only)."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self.recipe, self.tokenizer, self.max_length = recipe, tokenizer, max_length
        self.is_packed = recipe.model.task == "causal_lm"

    def batches(
        self, start: int, batch_size: int, rank: int, world_size: int, masking: Masking | None, pad_token_id: int
    ) -> Iterator[Batch]:
        """The batches of process `rank` of `world_size`, starting with number `start`."""
        examples = itertools.islice(enumerate(self._examples(rank, world_size)), start * batch_size, None)
        while rows := list(itertools.islice(examples, batch_size)):
            yield pad([self._finished(number * world_size + rank, row, masking) for number, row in rows], pad_token_id)

    def _finished(self, position: int, example: Example, masking: Masking | None) -> Example:
        example = {**example, "index": position}
        return example if masking is None else {**example, **masking(example, self.recipe.run.seed, position)}

    def _examples(self, rank: int, world_size: int) -> Iterator[Example]:
        documents = self._documents(rank, world_size)
        if self.is_packed:
            return packed(documents, self.max_length)
        names = ("input_ids", "labels") if self.recipe.model.task == "causal_lm" else ("input_ids",)
        return (dict.fromkeys(names, document) for document in self._cut(documents))

    def _cut(self, documents: Iterable[Tokens]) -> Iterator[Tokens]:
        """The documents, cut into pieces of max_length tokens; only those of a causal model can be longer."""
        for document in documents:
            for start in range(0, len(document), self.max_length):
                yield document[start : start + self.max_length]

    def _documents(self, rank: int, world_size: int) -> Iterator[Tokens]:
        rows = split_dataset_by_node(self._rows(), rank, world_size)
        is_causal = self.recipe.model.task == "causal_lm"
        for epoch in itertools.count():
            rows.set_epoch(epoch)
            count = 0
            for chunk in _chunks(self._texts(rows), TOKENIZED_AT_ONCE):
                for document in document_tokens(chunk, self.tokenizer, self.recipe.model.task, self.max_length):
                    if len(document) > is_causal:  # for a causal model, a single token predicts nothing
                        count += 1
                        yield document
            if count == 0:
                raise DataError(
                    f"process {rank} of {world_size} found no text in the streamed training data; check the data, or "
                    "launch fewer processes"
                )

    def _rows(self) -> datasets.IterableDataset:
        data = self.recipe.data
        if data.train_file is not None:
            builder, options = READERS[Path(data.train_file).suffix]
            rows = datasets.load_dataset(
                builder, data_files=[data.train_file], split="train", streaming=True, **options
            )
        else:
            rows = datasets.load_dataset(data.dataset_name, data.dataset_config_name, split="train", streaming=True)
        numbered = rows.map(lambda row, number: {**row, ROW: number}, with_indices=True)
        return numbered.shuffle(seed=self.recipe.run.seed, buffer_size=BUFFER)

    def _texts(self, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
        data = self.recipe.data
        prompt = self.recipe.text_prompt if self.recipe.model.task == "embedding" else ""
        for row in rows:
            if data.text_column_name not in row:
                columns = ", ".join(name for name in row if name != ROW)
                raise DataError(f"`--text_column_name {data.text_column_name}` is not a column; the data has {columns}")
            text = row[data.text_column_name]
            if isinstance(text, str):
                yield prompt + text
            else:
                report([f"row {row[ROW]}: {bad_text(data.text_column_name, text)}"], "the stream", data)


def packed(documents: Iterable[Tokens], size: int) -> Iterator[Example]:
    """Blocks of `size` tokens, like those of `packing.PackedBlocks`."""
    tokens, starts = np.empty(0, np.int64), np.empty(0, np.int64)
    for document in documents:
        starts, tokens = np.append(starts, len(tokens)), np.concatenate([tokens, document])
        while len(tokens) >= size:
            block, inside = tokens[:size], starts[(starts > 0) & (starts < size)]
            more = boundaries(block, inside) if len(inside) else {"labels": block}
            yield {"input_ids": block, **more}
            tokens, starts = tokens[size:], starts[starts >= size] - size


def _chunks(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    iterator = iter(texts)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
