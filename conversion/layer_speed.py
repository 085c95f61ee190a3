"""Times in this process: a layer beside torch's softmax attention, and a whole model beside its original."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention._common.logs import progress
from hf_linear_attention.attention.transformers_internals import cache_among, cache_argument
from hf_linear_attention.configuration_linear_attention import max_length_of
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


ROUNDS = 3
# A step of decoding takes little time, so that more rounds are needed for a shortest one.
STEPS = 16
# A layer is timed at lengths from the first on, up to that of the model, but to the second at least, the third at most.
SHORTEST, LONGEST, MOST = 128, 4096, 16_384
# A longer call ends a measurement: lengths double, so that the next one would take four times as long.
LONGEST_CALL, LONGEST_OF_MODEL = 0.5, 1.0


def attention_inputs(module: Any, length: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
    """Random queries `[1, H, N, D]`, keys and values `[1, Hkv, N, D]`, and the gates of a layer that needs them.

    The heads of a token lie side by side in memory, as in models.
    """
    shape, generator = module.linear_attention.shape, torch.Generator().manual_seed(0)
    heads = (shape.num_heads, shape.num_key_value_heads, shape.num_key_value_heads)
    tensors = [torch.randn(1, length, n, shape.head_dim, generator=generator).to(dtype).transpose(1, 2) for n in heads]
    if not module.linear_attention.needs_gates:
        return tensors, None
    hidden = torch.randn(1, length, shape.hidden_size, generator=generator).to(dtype)
    return tensors, module.linear_attention.gates(hidden)


def seconds(functions: Sequence[Callable[[], Any]], rounds: int = ROUNDS) -> list[float]:
    """The shortest time of each function, which take turns; the first round is not counted."""
    best = [float("inf")] * len(functions)
    for number in range(rounds + 1):
        for place, function in enumerate(functions):
            start = time.perf_counter()
            function()
            if number:
                best[place] = min(best[place], time.perf_counter() - start)
    return best


@torch.no_grad()
def layer_times(module: Any, length: int, dtype: torch.dtype, rounds: int = ROUNDS) -> tuple[float, float]:
    """Seconds of the mechanism of a converted layer and of softmax attention, between their projections.

    Raises:
        ValueError: if the mechanism is for shorter inputs.
    """
    (query, key, value), gates = attention_inputs(module, length, dtype)
    is_causal = bool(module.linear_attention_is_causal)
    is_grouped = query.shape[1] != key.shape[1]

    def linear() -> Tensor:
        return module._attend(module.mechanism_inputs(query, key, value, None, gates=gates), None)

    def softmax() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=is_grouped)

    linear_time, softmax_time = seconds((linear, softmax), rounds)
    return linear_time, softmax_time


def speed_curve(module: Any, lengths: Sequence[int], dtype: torch.dtype, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """`length`, `seconds` and `softmax_seconds` of one layer at rising lengths, up to the first slow call."""
    found: list[dict[str, Any]] = []
    for length in progress(lengths, "timing"):
        try:
            times = layer_times(module, length, dtype, rounds)
        except ValueError:  # of a mechanism that has a longest input, such as `linformer` with learned projections
            break
        found.append({"length": length, "seconds": times[0], "softmax_seconds": times[1]})
        if max(times) > LONGEST_CALL:
            break
    return found


@torch.no_grad()
def whole_model_speed(
    student: PreTrainedModel, teacher: PreTrainedModel, positions: int | None, writes: bool
) -> dict[str, list[dict[str, Any]]]:
    """The curves `reading`, of one sequence without a cache, and `writing`, of one token after so many, with caches.

    Args:
        positions: the most that the teacher reads; None if it has no limit.
        writes: whether these are models that write.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [length for length in _lengths(student) if positions is None or length <= positions]
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
        if max(curves["reading"][-1]["seconds"], curves["reading"][-1]["softmax_seconds"]) > LONGEST_OF_MODEL:
            break
    return curves


def _read(model: PreTrainedModel, ids: Tensor, **options: bool) -> Any:
    return model.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), **options)


def _write(model: PreTrainedModel, ids: Tensor, cache: Any) -> Any:
    return model(input_ids=ids, use_cache=True, **cache_argument(model, cache))


def _point(length: int, calls: Sequence[Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, Any]:
    linear, softmax = seconds(calls, rounds)
    return {"length": length, "seconds": linear, "softmax_seconds": softmax}


def _lengths(model: PreTrainedModel) -> list[int]:
    longest = min(max(max_length_of(model.config) or 0, LONGEST), MOST)
    return [length for power in range(20) if (length := SHORTEST << power) <= longest]


def first_faster(curve: Sequence[Mapping[str, Any]]) -> int | None:
    """The first length from which softmax is slower at every longer one too; None if at the longest it is not."""
    is_faster = [point["seconds"] <= point["softmax_seconds"] for point in curve]
    return next((point["length"] for place, point in enumerate(curve) if all(is_faster[place:])), None)


def model_speed(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Any]:
    """The `curve` of the first converted layer of a model on the CPU, and with what it was measured.

    The layer is cast to `dtype` for it. `faster_from` is None if it is not faster at the longest length that was timed.
    """
    modules = list(linear_attention_modules(model).values())
    lengths = _lengths(model)
    curve = speed_curve(modules[0].to(dtype), lengths, dtype, ROUNDS) if modules else []
    return {
        "curve": curve,
        "faster_from": first_faster(curve),
        "dtype": str(dtype).removeprefix("torch."),
        "heads": modules[0].linear_attention.shape.num_heads if modules else None,
        "head_dim": modules[0].linear_attention.shape.head_dim if modules else None,
        "threads": torch.get_num_threads(),
    }
