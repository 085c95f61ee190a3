# SPDX-License-Identifier: Apache-2.0
"""`hybrid` on CUDA: the tensors of the mechanism as they are, because to convert each would be a launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..features.maps import ExpFeatureMap
from ..mechanisms.base import MechanismInputs, State
from ..mechanisms.hybrid import SLOPE_TOKENS, HybridAttention
from ..mechanisms.window import Line, WindowState
from ..torch_kernels.blocks import EXP, HEDGEHOG, with_dtype
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
    count, (_, first, is_interleaved, trained_length) = mechanism.num_exact_keys, mechanism.turns
    old, kept = (sums[0], sums[1:]) if count and sums is not None else (sums, ())
    given: Any = (
        *(inputs.query, line.key, line.value, line.kind, *sinks, seen, line.score, inputs.positions, line.position),
        *(*_parameters_of(mechanism), old, kept, mechanism.mix.far_log_scale, mechanism.mix.query_norm_weight),
        _frequencies_of(mechanism, inputs.query),
    )
    output, new_sums, new_kept = triton_hybrid.prefill(
        *given,
        window=mechanism.window_size,
        count=count,
        first_turned=first,
        is_interleaved=is_interleaved,
        trained_length=trained_length,
        scaling=inputs.scaling,
        is_rate=True,
    )
    return output.transpose(1, 2), (new_sums, *new_kept) if count else new_sums


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
