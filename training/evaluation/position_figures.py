"""Nats by position far beyond the trained length, of several models on the same text.

The text is cut into windows that do not overlap, BOS and as many tokens as fit, each as long as may be: so every bucket
of positions holds other tokens, and models are compared within a bucket, token by token.
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
# Tokens of one batch: long windows go one by one.
BATCH_TOKENS = 4096
# Rows that a table of learned positions has beyond its positions at most.
EXTRA_ROWS = 8


class SeparateWindows:
    """`stream` in full windows of `length` tokens, the BOS included, that do not overlap; the rest is left out."""

    def __init__(self, stream: Tokens, length: int, bos_token_id: int | None) -> None:
        self.stream, self.bos_token_id = stream, bos_token_id
        self.body = length - (bos_token_id is not None)

    @property
    def lengths(self) -> Tokens:
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
    """The tokens that examples of held-out text are cut from; of separate documents, these joined."""
    shown = len(examples)
    whole = examples.examples if isinstance(examples, FirstExamples) else examples
    if isinstance(whole, StreamWindows):
        return whole.stream[: int(whole.scored_to[shown - 1])]
    return np.concatenate([examples[index]["input_ids"] for index in range(shown)])


def longest_window(
    trained_length: int, num_tokens: int, max_eval_length: int, positions: int | None
) -> tuple[int, str]:
    """How long the windows are, BOS included, and what ended them.

    Args:
        positions: how many the models have at most, or None (see `most_positions`).
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
    """Where a model with a table of positions ends; None where they are computed, as rotary ones."""
    known, words = getattr(model.config, "max_position_embeddings", None), model.get_input_embeddings()
    if known is None:
        return None
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
    tables += [buffer for buffer in model.buffers() if buffer.ndim == 2]
    return known if any(0 <= len(table) - known <= EXTRA_ROWS for table in tables) else None


def batches_of(examples: Examples, max_length: int, padding: int) -> list[Batch]:
    """All examples, of up to `max_length` tokens, as batches."""
    plan = EvaluationBatches(len(examples), max(1, BATCH_TOKENS // max_length), 0, 1)
    return list(loader(Stream(examples, 0, shuffle=False), plan, padding))


def bucket_edges(trained_length: int, length: int) -> list[int]:
    """0, from an eighth of the trained length on its powers of two, and the length where the windows end."""
    inside = [trained_length // 8, trained_length // 4, trained_length // 2]
    beyond = [trained_length * 2**power for power in range(TIMES_TRAINED.bit_length())]
    return sorted({0, *(edge for edge in (*inside, *beyond) if 0 < edge < length), length})


def target_positions(batches: list[Batch]) -> Tensor:
    """Of every target the position that it is predicted from, in the order of `nats_of`."""
    return torch.cat([(batch["labels"][:, 1:] != IGNORED).nonzero()[:, 1] for batch in batches])


def position_buckets(
    position: Tensor, nats: Mapping[str, Tensor], edges: list[int], pairs: list[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Means of `nats` `[targets]` by model between the edges; of every pair of models that are there, the mean
    difference of the same targets and its standard error."""
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
    """Mean of `mine - other` `[targets]` and its standard error, NaN for fewer than two targets."""
    difference = mine - other
    error = difference.std().item() / math.sqrt(len(difference)) if len(difference) > 1 else math.nan
    return {"mean": difference.mean().item(), "standard_error": error}
