"""Recall by distance: nats of targets that end a 4-gram which is rare in training, but occurred before in the context.

    context   ... the old grey | heron ...  (d tokens)  ... the old grey | heron
                                 ^ seen d tokens back                      ^ the target

Only the context tells how such a 4-gram ends, so a model that has forgotten it has high nats on these targets. Mean
nats hardly show it, because they are a few per cent of all targets.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_linear_attention._common.logs import progress
from hf_linear_attention.training.data.packing import IGNORED, Examples
from hf_linear_attention.training.evaluation.retention import SMALLEST_GAP


ORDER = 4
# A 4-gram that occurs more often in the training text can be known without the context.
MOST_IN_TRAINING = 20
# With fewer targets, the share of the gap would be noise.
FEWEST_TARGETS = 100
FIRST_DISTANCE = 56

Gram = tuple[int, ...]


def repeats(examples: Examples) -> list[tuple[Gram, int]]:
    """For every target, in the order of `nats_of`: its 4-gram, and the distance to the last occurrence in the context.

    The 4-gram is the one that the target ends. The distance is in tokens, and 0 if the context does not have it.
    """
    found: list[tuple[Gram, int]] = []
    for index in progress(range(len(examples)), "measuring"):
        example = examples[index]
        tokens, labels = (list(map(int, example[name])) for name in ("input_ids", "labels"))
        last: dict[Gram, int] = {}
        for place in range(1, len(tokens)):
            gram = tuple(tokens[max(0, place - ORDER + 1) : place + 1])
            if labels[place] != IGNORED:
                found.append((gram, place - last[gram] if gram in last else 0))
            if len(gram) == ORDER:
                last[gram] = place
    return found


def grams_in(documents: Iterable[Iterable[int]], wanted: set[Gram]) -> Counter[Gram]:
    """The number of occurrences of each of the `wanted` 4-grams in documents of token ids."""
    counts: Counter[Gram] = Counter()
    for document in progress(documents, "counting"):
        tokens = list(map(int, document))
        shifted = (tokens[start:] for start in range(ORDER))
        counts.update(gram for gram in zip(*shifted) if gram in wanted)
    return counts


def recall_distances(found: list[tuple[Gram, int]], training: Iterable[Iterable[int]]) -> Tensor:
    """The distances `[targets]` of `repeats`, with 0 for 4-grams that are not rare in the training documents."""
    counts = grams_in(training, {gram for gram, distance in found if distance})
    return torch.tensor([distance if counts[gram] <= MOST_IN_TRAINING else 0 for gram, distance in found])


def distance_edges(length: int) -> list[int]:
    """The edges of the buckets of distances: 56, 128 and its doubles, and the length of the windows."""
    if length <= FIRST_DISTANCE:
        return []
    return [FIRST_DISTANCE, *(2**power for power in range(7, length.bit_length()) if 2**power < length), length]


def recall_buckets(
    distance: Tensor, nats: Mapping[str, Tensor], edges: list[int], control: str
) -> list[dict[str, Any]]:
    """The means of `nats`, `[targets]` by model, over targets whose `distance` `[targets]` is between the edges.

    `closed` is the share of the gap between `control` and teacher that the student has closed; it is None if there are
    few targets or no gap.
    """
    buckets = []
    for first, end in itertools.pairwise(edges):
        chosen = (distance >= first) & (distance < end)
        count = int(chosen.sum())
        bucket: dict[str, Any] = {"from": first, "to": end, "targets": count}
        bucket |= {name: values[chosen].mean().item() if count else math.nan for name, values in nats.items()}
        if control in nats:
            gap = bucket[control] - bucket["teacher"]
            is_known = count >= FEWEST_TARGETS and gap > SMALLEST_GAP
            bucket["closed"] = (bucket[control] - bucket["student"]) / gap if is_known else None
        buckets.append(bucket)
    return buckets
