"""The token sequences that a model is trained and evaluated on.

All classes are lists of examples: they have `len`, `[index] -> {"input_ids": int array [N], "labels": ...}`, and
`lengths`, the number of tokens of every example.

A causal language model is evaluated on running text in windows that overlap by half. So every token is scored exactly
once and, after the first window, has at least half a window of context:

    text    t0 t1 t2 t3 t4 t5 t6 t7 t8 ...          max_length 6
    window  B  t0 t1 t2 t3 t4                        scores t0 .. t4
    window           B  t3 t4 t5 t6 t7               scores t5 .. t7     (B is the BOS token, - is not scored)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from hf_linear_attention._common.errors import DataError
from hf_linear_attention.training.recipe import Recipe


if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int64]
Example = dict[str, Any]
IGNORED = -100  # the label that cross-entropy skips


class Examples(Protocol):
    """The interface of a data set for training and evaluation."""

    @property
    def lengths(self) -> Tokens:
        """The number of tokens of every example that count."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example: ...


class Blocks:
    """The blocks of `block_size` tokens into which a text is cut; the last block may be shorter."""

    def __init__(self, stream: Tokens, block_size: int) -> None:
        self.stream, self.block_size = stream, block_size
        self.starts = np.arange(0, len(stream), block_size, dtype=np.int64)
        if len(self.starts) > 1 and len(stream) - self.starts[-1] < 2:
            self.starts = self.starts[:-1]  # a single token predicts nothing

    @property
    def lengths(self) -> Tokens:
        """The number of tokens of every block."""
        return np.minimum(self.starts + self.block_size, len(self.stream)) - self.starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Example:
        block = self.stream[self.starts[index] : self.starts[index] + self.block_size]
        return {"input_ids": block, "labels": block}


class StreamWindows:
    """Overlapping windows over `stream`, as in the picture of this module; without a BOS token, t0 is not scored."""

    def __init__(self, stream: Tokens, max_length: int, bos_token_id: int | None) -> None:
        self.stream, self.bos_token_id = stream, bos_token_id
        self.context = max_length - (bos_token_id is not None)
        stride = max(1, max_length // 2)
        later = np.arange(self.context, len(stream), stride, dtype=np.int64)
        self.scored_from = np.concatenate([[0], later]).astype(np.int64)
        self.scored_to = np.minimum(np.concatenate([[self.context], later + stride]), len(stream)).astype(np.int64)

    @property
    def lengths(self) -> Tokens:
        """The number of tokens that every window scores."""
        return self.scored_to - self.scored_from

    def __len__(self) -> int:
        return len(self.scored_from) if len(self.stream) else 0

    def __getitem__(self, index: int) -> Example:
        first, end = self.scored_from[index], self.scored_to[index]
        start = max(0, end - self.context)
        tokens = self.stream[start:end]
        labels = np.where(np.arange(start, end) >= first, tokens, IGNORED)
        if self.bos_token_id is not None:
            tokens = np.concatenate([[self.bos_token_id], tokens])
            labels = np.concatenate([[IGNORED], labels])
        return {"input_ids": tokens, "labels": labels}


class Documents:
    """One example per text, with the columns `input_ids`, `labels` and whatever else belongs to a text.

    Args:
        documents: the tokens of every text.
        labels: a class or a score for each text, or the labels of its tokens; "tokens" (they are the tokens
            themselves), or None.
        **columns: other fields of the examples, such as `targets`, with a value for each text.
    """

    def __init__(
        self, documents: Sequence[Tokens], labels: Sequence[Any] | str | None = None, **columns: Sequence[Any]
    ) -> None:
        self.columns: dict[str, Any] = {"input_ids": documents, **columns}
        if labels is not None:
            self.columns["labels"] = documents if labels == "tokens" else labels

    @property
    def lengths(self) -> Tokens:
        """The number of tokens of every text, with those of its target."""
        counted = [self.columns[name] for name in ("input_ids", "targets") if name in self.columns]
        return np.array([sum(map(len, parts)) for parts in zip(*counted, strict=True)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def __getitem__(self, index: int) -> Example:
        return {name: values[index] for name, values in self.columns.items()}


class FirstExamples:
    """The first `count` of `examples`."""

    def __init__(self, examples: Examples, count: int) -> None:
        self.count = min(count, len(examples))
        self.examples: Examples = examples.examples if isinstance(examples, FirstExamples) else examples

    @property
    def lengths(self) -> Tokens:
        """The number of tokens of every example."""
        return self.examples.lengths[: self.count]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]


def shorten(examples: Examples, max_tokens: int | None) -> Examples:
    """The first examples: no more than are needed to reach `max_tokens` tokens."""
    if max_tokens is None:
        return examples
    reached = np.flatnonzero(np.cumsum(examples.lengths) >= max_tokens)
    count = int(reached[0]) + 1 if len(reached) else len(examples)
    return examples if count == len(examples) else FirstExamples(examples, count)


@dataclass(frozen=True)
class Part:
    """The rows of one split ("train" or "validation"), and what makes examples of them.

    Texts are cut to `max_length` tokens; `classes` has the class index of every label, for tasks with classes.
    """

    recipe: Recipe
    rows: datasets.Dataset
    split: str
    processor: Any
    max_length: int
    classes: dict[str, int] | None = None


def finished(examples: Examples, part: Part) -> Examples:
    """The examples of a split, of which an evaluation uses only the first (`--max_eval_tokens`).

    Raises:
        DataError: if there are none.
    """
    recipe, split = part.recipe, part.split
    if split == "validation":
        examples = shorten(examples, recipe.data.max_eval_tokens)
    if len(examples) == 0:
        raise DataError(f"the {split} data holds no {recipe.task.inputs}; check the file or folder and its columns")
    if isinstance(examples, Blocks) and len(examples.stream) < examples.block_size:
        text = "the %s data has %d tokens, fewer than the %d of a row, so nothing is learnt of longer inputs"
        logger.warning(text, split, len(examples.stream), examples.block_size)
    logger.info("%s: %d examples, %d %s", split, len(examples), examples.lengths.sum(), recipe.unit)
    return examples
