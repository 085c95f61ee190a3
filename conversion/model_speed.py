"""Times of a whole model beside its original, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention._common.logs import progress
from hf_linear_attention.attention.transformers_internals import cache_among, cache_argument
from hf_linear_attention.configuration_linear_attention import max_length_of


# A step of decoding takes little time, so that more rounds are needed for a shortest one.
ROUNDS, STEPS = 3, 16
# Models are timed at lengths from the first on, up to that of the model, but to the second at least, the third at most.
SHORTEST, LONGEST, MOST = 128, 4096, 16_384
# A longer call ends a measurement: lengths double, so that the next one would take four times as long.
LONGEST_CALL = 1.0


@torch.no_grad()
def model_speed(
    student: PreTrainedModel, teacher: PreTrainedModel, positions: int | None, writes: bool
) -> dict[str, Any]:
    """`model`: the curves `reading`, of one sequence without a cache, and `writing`, of one token after so many, with
    caches; and with what they were measured.

    Args:
        positions: the most that the teacher reads; None if it has no limit.
        writes: whether these are models that write.
    """
    generator = torch.Generator().manual_seed(0)
    longest = min(max(max_length_of(student.config) or 0, LONGEST), MOST, positions or MOST)
    lengths = [SHORTEST << power for power in range(20) if SHORTEST << power <= longest]
    curves: dict[str, list[dict[str, Any]]] = {"reading": [], "writing": []}
    for length in progress(lengths, "timing"):
        ids = torch.randint(student.config.vocab_size, (1, length), generator=generator)
        options = {"use_cache": False} if writes else {}  # few encoders know it
        readers = [partial(_read, model, ids, **options) for model in (student, teacher)]
        try:
            curves["reading"].append(_point(length, readers))
        except ValueError:  # of a mechanism that has a longest input
            break
        if writes and (positions is None or length + STEPS < positions):
            caches = [
                cache_among(model.base_model(input_ids=ids, use_cache=True).values()) for model in (student, teacher)
            ]
            steps = zip((student, teacher), caches, strict=True)
            writers = [partial(_write, model, ids[:, :1], cache) for model, cache in steps]
            curves["writing"].append(_point(length, writers, STEPS))
        if max(curves["reading"][-1]["seconds"], curves["reading"][-1]["softmax_seconds"]) > LONGEST_CALL:
            break
    dtype = str(student.dtype).removeprefix("torch.")
    return {"model": curves, "dtype": dtype, "threads": torch.get_num_threads()}


def _read(model: PreTrainedModel, ids: Tensor, **options: bool) -> Any:
    return model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), **options)


def _write(model: PreTrainedModel, ids: Tensor, cache: Any) -> Any:
    return model(input_ids=ids, use_cache=True, **cache_argument(model, cache))


def _point(length: int, calls: Sequence[Callable[[], Any]], rounds: int | None = None) -> dict[str, Any]:
    """The shortest time of each of two calls, which take turns; the first round is not counted."""
    best = [float("inf")] * 2
    for number in range((rounds or ROUNDS) + 1):
        for place, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if number:
                best[place] = min(best[place], time.perf_counter() - start)
    return {"length": length, "seconds": best[0], "softmax_seconds": best[1]}


def first_faster(curve: Sequence[Mapping[str, Any]]) -> int | None:
    """The first length from which softmax is slower at every longer one too; None if at the longest it is not."""
    is_faster = [point["seconds"] <= point["softmax_seconds"] for point in curve]
    return next((point["length"] for place, point in enumerate(curve) if all(is_faster[place:])), None)
