# SPDX-License-Identifier: Apache-2.0
"""`hybrid` on CUDA by Triton kernels: which calls they take, and what the operators run.

A decoding step is three launches (triton_step.py), reading many tokens at most thirteen (triton_prefill.py), the scores
of keys one (triton_scores.py), and the gradients of whole sequences eleven and some of torch (triton_backward.py).
Gradients through a state and the feature map of Hedgehog stay with torch and fla-core. Triton is imported by the first
call that it takes, and launches on the current device, which is not that of the tensors where a model is on several.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..mechanisms.hybrid_step import StepArguments
from ..torch_kernels.blocks import EXP, needs_plain
from . import fla
from .checks import check_shape
from .hybrid_arguments import HybridArguments
from .operators import Operator, or_nothing, register


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Those of the largest blocks for which the kernels were compiled.
MOST_COLUMNS, MOST_FEATURES, MOST_WEIGHTS, MOST_GROUPS, MOST_SINKS, MOST_SCORES = 256, 128, 8192, 32, 64, 64
# The second axis of a grid on CUDA has 65,535 programs: a query head of a sequence each, or at least 32 tokens of those
# that are read and of the exact keys before them.
MOST_HEADS, MOST_TOKENS = 65_535, 1 << 20
# Bytes of shared memory of the largest program, by those of the largest row, with as many features as may be.
SHARED = {128: 65_536, 256: 99_328, 512: 98_304, 1024: 168_448}
# The same after exact keys, where these are loaded ahead, and in training, where rows of more than 128 bytes are.
AFTER_KEYS = {128: 99_368, 256: 132_376, 512: 131_456, 1024: 262_528}
ROOM = 114_688


@functools.cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a program on a GPU may have; 0 without a Triton to compile it with."""
    if importlib.util.find_spec("triton") is None:
        return 0
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


@torch.compiler.assume_constant_result
def _has_shared_memory(device: torch.device, least: int) -> bool:
    return shared_memory(device) >= least


def _by_row(bytes_by_row: dict[int, int], *rows: Tensor) -> int:
    """The number for the largest row of these tensors; a block in a kernel has a power of 2 of columns."""
    row = max((1 << max(4, (x.shape[3] - 1).bit_length())) * x.element_size() for x in rows)
    return next(found for size, found in bytes_by_row.items() if size >= row)


def takes(
    query: Tensor, key: Tensor, value: Tensor, sink_key: Tensor, key_weight: Tensor, function: int
) -> bool:  # fmt: skip
    """Whether the kernels compute `hybrid` for these tensors on CUDA, which are of sizes for which they are.

    Args:
        key_weight: `[Hkv, D, F]`, of the feature map whose function is `function`.
    """
    if needs_plain(query):
        return False
    if not query.ndim == key.ndim == value.ndim == sink_key.ndim == 4 or not key.shape[1]:
        return False  # torch says what is wrong
    features, columns = key_weight.shape[2], max(query.shape[3], value.shape[3])
    return (
        function == EXP
        and all(x.dtype in DTYPES for x in (query, key, value))
        and 0 < columns <= MOST_COLUMNS
        and features <= min(MOST_FEATURES, MOST_WEIGHTS // columns)
        and query.shape[1] // key.shape[1] <= MOST_GROUPS
        and sink_key.shape[2] <= MOST_SINKS
        and 0 < query.shape[0] * query.shape[1] <= MOST_HEADS
        and query.shape[2] <= MOST_TOKENS
        and _has_shared_memory(query.device, _by_row(SHARED, query, key, value))
    )


def forward(
    given: HybridArguments, output: Tensor, size: Tensor, state: Tensor, kept: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Write the results of the operator `hybrid`; returns those that `triton_prefill.choose` makes."""
    from .triton_prefill import run

    given = _dense(given)
    kept = kept[: (4 + (given.key_position is not None)) * (given.num_exact_keys > 0)]
    old = [x.contiguous() for x in given.kept]
    of_line = *given[:7], given.score, given.position, given.key_position
    arguments = (*of_line, *_parameters(given), given.state, old, *_others(given))
    has_room = shared_memory(given.query.device) >= _by_row(AFTER_KEYS, *given[:3])
    results = {"out": output, "new_sums": state, "new_kept": kept, "size": size}
    with torch.cuda.device_of(given.query):
        chosen = cast(Any, run)(*arguments, **results, has_room=has_room)
    first, second = (size.new_empty(0, dtype=torch.int32) if x is None else x for x in chosen)
    return first, second


def gradients(
    given: HybridArguments, incoming: Sequence[Tensor | None], results: Sequence[Tensor], needed: Sequence[bool]
) -> list[Tensor]:
    """What the operator `hybrid_backward` returns, where nothing comes before and only the output has a gradient."""
    from .triton_backward import run

    given, grad_output = _dense(given), cast(Tensor, incoming[0])
    has_room = shared_memory(given.query.device) >= ROOM
    of_line = *given[:7], given.position, given.key_position
    arguments = (grad_output.contiguous(), *results, *of_line, *_parameters(given), *_others(given), has_room)
    with torch.cuda.device_of(given.query):
        found = cast(Any, run)(*arguments)
    *of_tokens, decay, log_scale, norm_weight = found
    made = (decay, None, *of_tokens[5:], log_scale, norm_weight, None, None)
    of_others = [or_nothing(x if need else None, given.query) for x, need in zip(made, needed[7:17])]
    return [*of_tokens[:5], *of_others]


def _dense(given: HybridArguments) -> HybridArguments:
    """With dense rows, and others dense, because the kernels read them without strides."""
    names = ("query", "key", "value", "sink_key", "sink_value")
    rows = {name: x if x.stride(-1) == 1 else x.contiguous() for name in names for x in (getattr(given, name),)}
    whole = "visible seen position key_position log_decay state key_weight key_bias key_norm query_weight"
    whole += " log_scale norm_weight frequencies spans"
    found = {name: x.contiguous() for name in whole.split() if (x := getattr(given, name)) is not None}
    return given._replace(**rows, **found)


def _parameters(given: HybridArguments) -> tuple[Tensor | None, ...]:
    return given.key_weight, given.key_bias, given.key_norm, given.query_weight, given.log_decay


def _others(given: HybridArguments) -> tuple[Any, ...]:
    turned = given.first_turned, given.is_interleaved, given.trained_length
    tensors = given.log_scale, given.norm_weight, given.frequencies, given.spans
    return *tensors, given.window, given.num_exact_keys, *turned, given.scaling, given.is_rate


def step(
    given: StepArguments, old: Sequence[Tensor | None], new: Sequence[Tensor | None], rows: Tensor | None
) -> Tensor:
    """The output of the operators `hybrid_step`; writes the state `new` after `old`, whose tensors are in C's order."""
    from .triton_step import run

    tokens = cast("Sequence[Tensor | None]", given[: given._fields.index("state")])
    tensors = [x if x is None or x is given.position else x.contiguous() for x in tokens]
    query, value = given.query, given.value
    out = query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])
    how = given.first_turned, given.is_interleaved, given.trained_length, given.scaling
    others = (x if x is None else x.contiguous() for x in (given.log_scale, given.norm_weight, given.frequencies))
    arguments = (*tensors, old, new, *others, *how)
    with torch.cuda.device_of(query):
        cast(Any, run)(*arguments, slope_scale=given.slope_scale, is_rate=given.is_rate, rows=rows, out=out)
    return out


def scores(hidden: Tensor, weight: Tensor) -> Tensor | None:
    """`hidden [B, N, E]` times `weight [Hkv, E]` over sqrt(E), `[B, N, Hkv]` in float32; None where torch computes it.

    ValueError if the shapes or devices do not match.
    """
    if torch.is_grad_enabled() or needs_plain(hidden) or not fla.is_on_cuda(hidden):
        return None
    if hidden.dtype not in DTYPES or weight.dtype not in DTYPES or not 0 < weight.shape[0] <= MOST_SCORES:
        return None
    if not _has_shared_memory(hidden.device, 1):
        return None
    return OPERATORS.scores_on_cuda(hidden, weight)


def _scores(hidden: Tensor, weight: Tensor) -> Tensor:
    out = _fake_scores(hidden, weight)
    if out.numel():
        from .triton_scores import run

        with torch.cuda.device_of(hidden):
            run(hidden, weight, out)
    return out


def _fake_scores(hidden: Tensor, weight: Tensor) -> Tensor:
    check_shape("weight", weight, (*weight.shape[:1], *hidden.shape[-1:]), like=hidden)
    return hidden.new_empty(*hidden.shape[:-1], weight.shape[0], dtype=torch.float32)


OPERATORS = register({"scores_on_cuda": Operator("(Tensor hidden, Tensor weight) -> Tensor", _scores, _fake_scores)})
