# SPDX-License-Identifier: Apache-2.0
"""`hybrid` on CUDA: the tensors of the mechanism as they are, because to convert each would be a launch."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..features.maps import ExpFeatureMap
from ..mechanisms.base import AttentionMechanism, MechanismInputs, State
from ..mechanisms.hybrid import SLOPE_TOKENS, HybridAttention
from ..mechanisms.window import Line, WindowAttention, WindowState
from ..torch_kernels.blocks import EMPTY_MAXIMUM, EXP, HEDGEHOG, is_tracing, with_dtype
from . import fla, triton_hybrid


def hybrid_on_cuda(
    mechanism: HybridAttention, inputs: MechanismInputs, line: Line, sinks: tuple[Tensor, ...], seen: Tensor, sums: Any
) -> tuple[Tensor, Any] | None:
    """The output `[B, H, N, W]` and the new sums, if Triton takes these tensors."""
    query = inputs.query
    if not fla.is_on_cuda(query) or not triton_hybrid.takes(query, line.key, line.value, sinks[0], *_map_of(mechanism)):
        return None
    if torch.is_grad_enabled() and (sums is not None or line.key.shape[2] != query.shape[2]):
        return None
    output, new_sums, new_kept = _prefill(mechanism, inputs, line, sinks, seen, sums, mechanism.num_exact_keys)
    return output.transpose(1, 2), (new_sums, *new_kept) if mechanism.num_exact_keys else new_sums


def packed_hybrid_on_cuda(mechanism: HybridAttention, inputs: MechanismInputs) -> Tensor | None:
    """The output `[B, N, H, W]` of packed sequences as they stand in a row, if Triton takes these tensors.

    In its sequence, a sink is an exact key with the largest score, which no other key displaces. Beyond the trained
    length, queries see exact keys at the last trained distance and sinks from the last trained position: the same, if
    sinks stand at position 0.
    """
    query, key, value, numbers, *_ = inputs
    sinks, (_, _, _, trained_length) = mechanism.num_sinks, mechanism.turns
    count, no_sinks = mechanism.num_exact_keys + sinks, (key[:, :, :0], value[:, :, :0])
    if numbers is None or not fla.is_on_cuda(query) or not count or 0 < trained_length < mechanism.window_size + sinks:
        return None
    if not triton_hybrid.takes(query, key, value, no_sinks[0], *_map_of(mechanism)):
        return None
    place = torch.arange(numbers.shape[1], dtype=torch.int32, device=numbers.device)
    changes = numbers[:, 1:] != numbers[:, :-1]
    starts = torch.where(F.pad(changes, (1, 0), value=True), place, 0).cummax(dim=1).values
    ends = torch.where(F.pad(changes, (0, 1), value=True), place + 1, len(place))
    ends = ends.flip(1).cummin(dim=1).values.flip(1)
    position = place - starts
    is_sink = position < sinks
    score = mechanism.scores(inputs, position + 1)
    if score is None:
        score = key.new_zeros(*key.shape[:3], 1, dtype=torch.float32)
    score = score.masked_fill(is_sink[:, None, :, None], torch.finfo(torch.float32).max)
    key_position = None
    if inputs.positions is not None:
        inputs = inputs._replace(positions=with_dtype(inputs.positions, torch.int32))
        key_position = cast(Tensor, inputs.positions).masked_fill(is_sink, 0)
    line = Line(key, value, numbers > 0, key_position, score)
    seen, spans = is_sink.new_empty(*numbers.shape, 0), torch.stack((starts, ends))
    return _prefill(mechanism, inputs, line, no_sinks, seen, None, count, spans)[0]


def window_on_cuda(
    mechanism: WindowAttention, inputs: MechanismInputs, line: Line, sinks: tuple[Tensor, ...], seen: Tensor
) -> Tensor | None:
    """The output `[B, H, N, D]` of a causal window and its sinks, if Triton takes these tensors: that of `hybrid` with
    far keys of one feature, which weigh nothing.
    """
    query, key = inputs.query, line.key
    if not fla.is_on_cuda(query) or mechanism.alibi is not None or is_tracing():
        return None
    weight = query.new_zeros(query.shape[1], query.shape[3], 1, dtype=torch.float32)
    of_keys, nothing = weight[: key.shape[1]], weight[:, 0, 0]
    if not triton_hybrid.takes(query, key, line.value, sinks[0], of_keys, EXP):
        return None
    if torch.is_grad_enabled() and key.shape[2] != query.shape[2]:
        return None
    turns = None if mechanism.to_sinks is None else mechanism.to_sinks.frequencies(query)
    given: Any = (
        *(query, key, line.value, line.kind, *sinks, seen, None, inputs.positions, None, of_keys, None, None, weight),
        *(None, None, (), nothing + EMPTY_MAXIMUM, nothing, turns),
    )
    output, _, _ = triton_hybrid.prefill(
        *given,
        window=mechanism.window_size,
        count=0,
        first_turned=0 if turns is None else len(turns),
        is_interleaved=mechanism.to_sinks is not None and mechanism.to_sinks.rotary.is_interleaved,
        trained_length=mechanism.trained_length or 0,
        scaling=inputs.scaling,
        is_rate=True,
    )
    return output.transpose(1, 2)


def _prefill(
    mechanism: HybridAttention, inputs: MechanismInputs, line: Line, sinks: tuple[Tensor, ...], seen: Tensor, sums: Any,
    count: int, spans: Tensor | None = None,
) -> tuple[Tensor, Tensor, Any]:  # fmt: skip
    _, first, is_interleaved, trained_length = mechanism.turns
    old, *kept = sums if isinstance(sums, tuple) else (sums,)
    given: Any = (
        *(inputs.query, line.key, line.value, line.kind, *sinks, seen, line.score, inputs.positions, line.position),
        *(*_parameters_of(mechanism), old, kept, mechanism.mix.far_log_scale, mechanism.mix.query_norm_weight),
        _frequencies_of(mechanism, inputs.query),
    )
    return triton_hybrid.prefill(
        *given,
        window=mechanism.window_size,
        count=count,
        first_turned=first,
        is_interleaved=is_interleaved,
        trained_length=trained_length,
        scaling=inputs.scaling,
        is_rate=True,
        spans=spans,
    )


def takes_long_inputs(mechanism: AttentionMechanism, dtype: torch.dtype) -> bool:
    """Whether Triton computes what a mechanism reads in this dtype on CUDA."""
    if not isinstance(mechanism, HybridAttention) or mechanism.alibi is not None or not mechanism.joins_at_once:
        return False
    shape, (weight, function) = mechanism.shape, _map_of(mechanism)
    query, key, sinks = (
        weight.new_empty(1, heads, number, shape.head_dim, dtype=dtype)
        for heads, number in (
            (shape.num_heads, 1),
            (shape.num_key_value_heads, 1),
            (shape.num_key_value_heads, mechanism.num_sinks),
        )
    )
    return mechanism.uses_far and triton_hybrid.takes(query, key, key, sinks, weight, function)


def hybrid_step_on_cuda(
    mechanism: HybridAttention, inputs: MechanismInputs, old: WindowState
) -> tuple[Tensor, State] | None:
    """The output `[B, 1, H, W]` of one token and the new state, if Triton takes these tensors."""
    if not fla.is_on_cuda(inputs.query):
        return None
    query, key, value, gates = inputs.query, inputs.key, inputs.value, inputs.gates
    if not triton_hybrid.takes(query, key, value, old.sink_key, *_map_of(mechanism)):
        return None
    _, first, is_interleaved, trained_length = mechanism.turns
    given: Any = (
        *(query, with_dtype(key, old.key.dtype), with_dtype(value, old.value.dtype)),
        *(gates if mechanism.score_slope is not None else None, mechanism.score_slope, inputs.positions),
        *(*_parameters_of(mechanism), old.stored, mechanism.mix.far_log_scale, mechanism.mix.query_norm_weight),
        *(_frequencies_of(mechanism, query), inputs.rows),
    )
    output, new = triton_hybrid.step(
        *given,
        first_turned=first,
        is_interleaved=is_interleaved,
        trained_length=trained_length,
        scaling=inputs.scaling,
        slope_scale=1 / SLOPE_TOKENS,
        is_rate=True,
        in_place=inputs.in_place,
    )
    return output, tuple(new)


def _map_of(mechanism: HybridAttention) -> tuple[Tensor, int]:
    maps = mechanism.feature_map
    return maps.key_projection, EXP if isinstance(maps, ExpFeatureMap) else HEDGEHOG


def _parameters_of(mechanism: HybridAttention) -> tuple[Tensor | None, ...]:
    maps, decay = mechanism.feature_map, None if mechanism.decay is None else mechanism.decay.rate
    return maps.key_projection, maps.key_bias, maps.key_norm_weight, maps.query_projection, decay


def _frequencies_of(mechanism: HybridAttention, like: Tensor) -> Tensor | None:
    if mechanism.rotation is None or not mechanism.needs_positions:
        return None
    return mechanism.rotation.frequencies(like)
