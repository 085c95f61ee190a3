"""Nats by position, far beyond the trained length, of several models on the same text.

The text is cut into windows that do not overlap; each holds BOS and as many tokens as fit. So different buckets of
positions hold different tokens, and models are compared within a bucket, token by token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_linear_attention.training.data.batches import Batch, EvaluationBatches, Stream, loader
from hf_linear_attention.training.data.packing import IGNORED, Example, Examples, FirstExamples, StreamWindows, Tokens


TIMES_TRAINED = 8
# Tokens per batch; a window that is at least this long is a batch of its own.
BATCH_TOKENS = 4096
# The largest number of rows that a table of learned positions has in addition to its positions.
EXTRA_ROWS = 8


class SeparateWindows:
    """`stream` cut into full windows of `length` tokens, including the BOS, that do not overlap; the rest is unused."""

    def __init__(self, stream: Tokens, length: int, bos_token_id: int | None) -> None:
        self.stream, self.bos_token_id = stream, bos_token_id
        self.body = length - (bos_token_id is not None)

    @property
    def lengths(self) -> Tokens:
        """The number of tokens of every window, without the BOS."""
        return np.full(len(self), self.body, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.stream) // self.body

    def __getitem__(self, index: int) -> Example:
        tokens = self.stream[index * self.body : (index + 1) * self.body]
        if self.bos_token_id is None:
            return {"input_ids": tokens, "labels": tokens}
        return {
            "input_ids": np.concatenate([[self.bos_token_id], tokens]),
            "labels": np.concatenate([[IGNORED], tokens]),
        }


def running_text(examples: Examples) -> Tokens:
    """The tokens from which examples of held-out text were cut; separate documents are joined."""
    shown = len(examples)
    whole = examples.examples if isinstance(examples, FirstExamples) else examples
    if isinstance(whole, StreamWindows):
        return whole.stream[: int(whole.scored_to[shown - 1])]
    return np.concatenate([examples[index]["input_ids"] for index in range(shown)])


def longest_window(
    trained_length: int, num_tokens: int, max_eval_length: int, positions: int | None
) -> tuple[int, str]:
    """The length of the windows, including the BOS, and what limits it.

    Args:
        positions: the largest number of positions of the models, or None (see `most_positions`).
    """
    ends = {
        f"{TIMES_TRAINED} times the trained length": TIMES_TRAINED * trained_length,
        "the text": num_tokens,
        "`--max_eval_length`": max_eval_length,
        **({"the last position that the model has": positions} if positions is not None else {}),
    }
    reason = min(ends, key=lambda name: ends[name])
    return ends[reason], reason


def most_positions(model: PreTrainedModel) -> int | None:
    """The number of positions of a model with a table of them; None if they are computed, such as rotary ones."""
    known, words = getattr(model.config, "max_position_embeddings", None), model.get_input_embeddings()
    if known is None:
        return None
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
    tables += [buffer for buffer in model.buffers() if buffer.ndim == 2]
    return known if any(0 <= len(table) - known <= EXTRA_ROWS for table in tables) else None


def batches_of(examples: Examples, max_length: int, padding: int) -> list[Batch]:
    """All examples, which have up to `max_length` tokens, as batches."""
    plan = EvaluationBatches(len(examples), max(1, BATCH_TOKENS // max_length), 0, 1)
    return list(loader(Stream(examples, 0, shuffle=False), plan, padding))


def bucket_edges(trained_length: int, length: int) -> list[int]:
    """The edges of the buckets: 0, an eighth of the trained length and its doubles, and the length of the windows."""
    inside = [trained_length // 8, trained_length // 4, trained_length // 2]
    beyond = [trained_length * 2**power for power in range(TIMES_TRAINED.bit_length())]
    return sorted({0, *(edge for edge in (*inside, *beyond) if 0 < edge < length), length})


def target_positions(batches: list[Batch]) -> Tensor:
    """For every target, the position from which it is predicted, in the order of `nats_of`."""
    return torch.cat([(batch["labels"][:, 1:] != IGNORED).nonzero()[:, 1] for batch in batches])


def position_buckets(
    position: Tensor, nats: Mapping[str, Tensor], edges: list[int], pairs: list[tuple[str, str]]
) -> list[dict[str, Any]]:
    """The means of `nats` between the edges, by model.

    Args:
        position: the position of every target, `[targets]`.
        nats: those of every target by model, `[targets]` each.
        pairs: models whose mean difference on the same targets is given with its standard error, if both are in `nats`.
    """
    buckets = []
    for first, end in itertools.pairwise(edges):
        chosen = (position >= first) & (position < end)
        part = {name: values[chosen] for name, values in nats.items()}
        bucket: dict[str, Any] = {"from": first, "to": end, "targets": int(chosen.sum())}
        bucket |= {name: values.mean().item() for name, values in part.items()}
        for mine, other in pairs:
            if mine in part and other in part:
                bucket[f"{mine}_minus_{other}"] = paired_difference(part[mine], part[other])
        buckets.append(bucket)
    return buckets


def paired_difference(mine: Tensor, other: Tensor) -> dict[str, float]:
    """The mean of `mine - other`, `[targets]` each, and its standard error, which is NaN for fewer than two targets."""
    difference = mine - other
    error = difference.std().item() / math.sqrt(len(difference)) if len(difference) > 1 else math.nan
    return {"mean": difference.mean().item(), "standard_error": error}
