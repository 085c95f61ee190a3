"""Recall by distance: targets that end a 4-gram which is rare in the training text and stood in the context before.

    context   ... the old grey | heron ...  (d tokens)  ... the old grey | heron
                                 ^ seen d tokens back                      ^ the target

Nothing but the context tells how such a 4-gram goes on, and a model that has forgotten it pays for that. Mean nats
hardly see it: these are a few per cent of all targets.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hf_linear_attention.training.data.packing import IGNORED, Examples
from hf_linear_attention.training.evaluation.retention import SMALLEST_GAP


ORDER = 4
# A 4-gram that the training text has more often is known without the context.
MOST_IN_TRAINING = 20
# With fewer targets a share of the gap would be noise.
FEWEST_TARGETS = 100
FIRST_DISTANCE = 56

Gram = tuple[int, ...]


def repeats(examples: Examples) -> list[tuple[Gram, int]]:
    """Of every target, in the order of `nats_of`, the 4-gram that it ends, and how many tokens back its context has the
    same one last; 0 where it has not."""
    found: list[tuple[Gram, int]] = []
    for index in range(len(examples)):
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
    """How often the documents of token ids have each of the `wanted` 4-grams."""
    counts: Counter[Gram] = Counter()
    for document in documents:
        tokens = list(map(int, document))
        shifted = (tokens[start:] for start in range(ORDER))
        counts.update(gram for gram in zip(*shifted) if gram in wanted)
    return counts


def recall_distances(found: list[tuple[Gram, int]], training: Iterable[Iterable[int]]) -> Tensor:
    """`[targets]`: the distance of `repeats` where the 4-gram is rare in the training documents, else 0."""
    counts = grams_in(training, {gram for gram, distance in found if distance})
    return torch.tensor([distance if counts[gram] <= MOST_IN_TRAINING else 0 for gram, distance in found])


def distance_edges(length: int) -> list[int]:
    """56, 128, then doubling up to the length of the windows, where a distance ends at the latest."""
    if length <= FIRST_DISTANCE:
        return []
    return [FIRST_DISTANCE, *(2**power for power in range(7, length.bit_length()) if 2**power < length), length]


def recall_buckets(
    distance: Tensor, nats: Mapping[str, Tensor], edges: list[int], control: str
) -> list[dict[str, Any]]:
    """Means of `nats` `[targets]` by model between the edges, and `closed`: the student's share of the way from the
    `control` to the teacher, None where it means nothing (few targets, or no gap)."""
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
