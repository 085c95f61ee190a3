"""Data order: a function of the seed, whatever the number of processes."""

from __future__ import annotations

import numpy as np

from hf_linear_attention.training.data.batches import (
    EvaluationBatches,
    Masking,
    Stream,
    pad,
    steps_for_tokens,
    train_batches,
)
from hf_linear_attention.training.data.packing import Documents


def documents(count: int) -> Documents:
    return Documents([np.full(1 + number % 4, number) for number in range(count)], "tokens")


def positions_of_steps(batch_size: int, accumulation: int, world_size: int, start: int, stop: int) -> list[list[int]]:
    ranks = [list(train_batches(start, stop, batch_size, accumulation, r, world_size)) for r in range(world_size)]
    steps = []
    for step in range(stop - start):
        window = slice(step * accumulation, (step + 1) * accumulation)
        steps.append(sorted(p for rank in ranks for batch in rank[window] for p in batch))
    return steps


def test_a_step_sees_the_same_examples_however_it_is_split():
    expected = [list(range(8 * step, 8 * step + 8)) for step in range(2, 5)]
    for batch_size, accumulation, world_size in [(8, 1, 1), (1, 8, 1), (2, 4, 1), (4, 1, 2), (1, 4, 2), (2, 1, 4)]:
        assert positions_of_steps(batch_size, accumulation, world_size, 2, 5) == expected


def test_an_epoch_is_a_permutation_and_the_next_is_another():
    stream = Stream(documents(50), seed=3, shuffle=True)
    first, second = stream.indices(0, 50), stream.indices(50, 100)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first.tolist() != second.tolist()
    again = Stream(documents(50), seed=3, shuffle=True)
    assert again.indices(70, 90).tolist() == second[20:40].tolist()  # without having passed the first epoch
    assert Stream(documents(50), seed=4, shuffle=True).indices(0, 50).tolist() != first.tolist()


def test_steps_of_similar_lengths():
    lengths = np.random.default_rng(0).integers(1, 100, 600)
    texts = Documents([np.full(length, number) for number, length in enumerate(lengths)])
    plain, grouped = Stream(texts, 3, shuffle=True), Stream(texts, 3, shuffle=True, step_size=8)
    first, second = grouped.indices(0, 600), grouped.indices(600, 1200)
    assert sorted(first) == sorted(second) == list(range(600))
    assert first.tolist() != second.tolist()
    steps, random = lengths[first].reshape(-1, 8), lengths[plain.indices(0, 600)].reshape(-1, 8)
    assert (steps.max(1) * 8).sum() < 1.1 * steps.sum()  # 10 % are padding
    assert (random.max(1) * 8).sum() > 1.5 * random.sum()
    again = Stream(texts, 3, shuffle=True, step_size=8)
    assert again.indices(700, 710).tolist() == second[100:110].tolist()  # without having passed what is before


def test_evaluation_sees_every_example_once():
    for count in (1, 2, 7, 8):
        ranks = [list(EvaluationBatches(count, 2, rank, 3)) for rank in range(3)]
        assert len({len(batches) for batches in ranks}) == 1
        seen = [i for batches in ranks for batch in batches for i in batch]
        assert set(seen) == set(range(count))
        # a process that is done repeats example 0, which the evaluator counts once
        assert sorted(seen) == sorted([*range(count), *[0] * (len(seen) - count)])


def test_padding():
    batch = pad([{**documents(4)[index], "index": index} for index in (1, 3)], pad_token_id=9)
    assert batch["input_ids"].tolist() == [[1, 1, 9, 9], [3, 3, 3, 3]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[1, 1, -100, -100], [3, 3, 3, 3]]


def test_masking_is_a_function_of_seed_and_position(tokenizer):
    masking, mask = Masking(tokenizer, 0.15), tokenizer.mask_token_id
    example = {"input_ids": np.array([1, 2, *range(10, 68)] * 100)}
    first, again, other = masking(example, 0, 5), masking(example, 0, 5), masking(example, 0, 6)
    assert (first["input_ids"] == again["input_ids"]).all()
    assert (first["input_ids"] != other["input_ids"]).any()
    chosen = first["labels"] != -100
    assert (first["labels"][chosen] == example["input_ids"][chosen]).all()
    assert (first["input_ids"][~chosen] == example["input_ids"][~chosen]).all()
    assert not chosen[example["input_ids"] < 3].any()
    assert abs(chosen.mean() - 0.15) < 0.02
    masked = first["input_ids"][chosen] == mask
    kept = first["input_ids"][chosen] == example["input_ids"][chosen]
    assert abs(masked.mean() - 0.8) < 0.05
    assert abs(kept.mean() - 0.1) < 0.04


def test_steps_until_a_number_of_tokens():
    stream = Stream(documents(8), seed=0, shuffle=True)  # 20 tokens an epoch
    steps = steps_for_tokens(stream, 2, 45, most=100)
    passed = [stream.examples.lengths[stream.indices(0, 2 * n)].sum() for n in (steps - 1, steps)]
    assert passed[0] < 45 <= passed[1]
    assert steps_for_tokens(stream, 2, 45, most=3) == 3
