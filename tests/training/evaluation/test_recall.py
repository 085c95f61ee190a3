"""The slice of repeated rare 4-grams against loops that look everywhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_linear_attention.training.data.packing import StreamWindows
from hf_linear_attention.training.evaluation import recall
from hf_linear_attention.training.evaluation.recall import (
    distance_edges,
    grams_in,
    recall_buckets,
    recall_distances,
    repeats,
)


RANDOM = np.random.default_rng(0)
# Few tokens, so that 4-grams come again.
HELD_OUT = RANDOM.integers(3, 6, 300)
TRAINING = [RANDOM.integers(3, 6, length) for length in (700, 3, 0, 900)]


def test_distances_are_those_of_a_naive_search() -> None:
    examples = StreamWindows(HELD_OUT, 64, 1)
    found = recall_distances(repeats(examples), TRAINING)
    expected = []
    for index in range(len(examples)):
        ids, labels = (examples[index][name].tolist() for name in ("input_ids", "labels"))
        for end in range(1, len(ids)):
            if labels[end] == -100:
                continue
            gram = ids[max(0, end - 3) : end + 1]
            before = [other for other in range(3, end) if ids[other - 3 : other + 1] == gram]
            count = sum(document[start : start + 4].tolist() == gram for document in TRAINING for start in range(900))
            is_rare_repeat = len(gram) == 4 and before and count <= 20
            expected.append(end - before[-1] if is_rare_repeat else 0)
    assert found.tolist() == expected
    assert len(expected) == len(HELD_OUT)
    assert 20 < sum(distance > 0 for distance in expected) < 250  # some repeats are not rare, some targets none


def test_documents_are_counted_apart() -> None:
    gram = (3, 4, 5, 3)
    assert grams_in([[3, 4, 5, 3, 4, 5, 3], [3, 4], [5, 3]], {gram}) == {gram: 2}


def test_the_share_of_the_gap_needs_targets_and_a_gap(monkeypatch) -> None:
    distance = torch.tensor([0, 60, 60, 130, 127, 130])
    nats = {
        "teacher": torch.tensor([9.0, 1.0, 1.0, 2.0, 1.0, 2.0]),
        "student": torch.tensor([9.0, 1.5, 2.5, 2.5, 2.0, 2.5]),
        "same_bytes": torch.tensor([9.0, 3.0, 3.0, 2.0, 3.0, 2.0]),
    }
    first, second = recall_buckets(distance, nats, [56, 128, 256], "same_bytes")
    assert (first["targets"], second["targets"]) == (3, 2)
    assert first["student"] == pytest.approx(2.0)
    assert first["closed"] is second["closed"] is None  # few targets
    monkeypatch.setattr(recall, "FEWEST_TARGETS", 2)
    first, second = recall_buckets(distance, nats, [56, 128, 256], "same_bytes")
    assert first["closed"] == pytest.approx(0.5)
    assert second["closed"] is None  # no gap
    (empty,) = recall_buckets(distance, nats, [256, 512], "same_bytes")
    assert empty["targets"] == 0
    assert math.isnan(empty["student"])
    (alone,) = recall_buckets(distance, {"teacher": nats["teacher"]}, [56, 128], "same_bytes")
    assert "closed" not in alone


def test_edges_go_up_to_the_length() -> None:
    assert distance_edges(512) == [56, 128, 256, 512]
    assert distance_edges(300) == [56, 128, 256, 300]
    assert distance_edges(48) == []
