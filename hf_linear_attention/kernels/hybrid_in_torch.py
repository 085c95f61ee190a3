# SPDX-License-Identifier: Apache-2.0
"""The operator `hybrid` in plain torch operations, where no kernel takes its tensors and for second derivatives.

Axes: B batch, H query heads, N queries, W head dimension of the values.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..positions.rotary import RotaryShift
from ..torch_kernels.attention import in_torch
from ..torch_kernels.blocks import EXP, Affine, KernelMap, accumulated, zero_where_masked
from ..torch_kernels.exact_keys import Leaving, attend_to_kept
from ..torch_kernels.window import Part, join, log_size, plain_window
from .hybrid_arguments import HybridArguments


def hybrid_in_torch(given: HybridArguments) -> list[Tensor]:
    """What the operator computes, in plain torch operations that torch can differentiate twice.

    Returns:
        The output `[B, N, H, W]` in the accumulation dtype; the state after the keys that have left the window of the
        last query; with exact keys, the tensors of `Kept` then. Of packed sequences, the output alone.
    """
    if given.spans is not None:
        return [_packed(given)]
    given = given.scaled()
    query, length, kv_heads = accumulated(given.query), given.query.shape[2], given.key.shape[1]
    (hidden, to_last), missing = given.shifts, given.window - given.before
    visible = F.pad(given.visible, (missing, 0))  # key t leaves the window before query t
    key, value = (F.pad(accumulated(x), (0, 0, missing, 0)) for x in (given.key, given.value))
    key, value = (zero_where_masked(x, visible) for x in (key, value))
    near = _near_part(given, query, key, value, visible, to_last)
    far_query, (key, value, visible) = query, (key[:, :, :length], value[:, :, :length], visible[:, :length])
    place = None if given.key_position is None else F.pad(given.key_position, (missing, 0))[:, :length]
    if hidden is not None:
        far_query = hidden(query, -cast(Tensor, given.position))
    age, kept = None, cast("tuple[Tensor | None, ...]", ())
    if given.score is not None:
        score = F.pad(given.score.detach(), (0, 0, missing, 0))[:, :, :length]
        tokens = Leaving(query, key, value, score, visible, given.position, place)
        how: Any = (given.num_exact_keys, given.scaling, hidden, to_last, given.trained_length)
        part, gone, last = attend_to_kept(tokens, given.kept, *how)
        near, (key, value, age, visible) = join(near, part), gone
        kept = last._replace(key=last.key.to(given.key.dtype), value=last.value.to(given.value.dtype))
    elif hidden is not None:
        key = hidden(key, -cast(Tensor, place))
    maps = Affine(given.query_weight), Affine(given.key_weight, given.key_bias, given.key_norm)
    feature_map = KernelMap(given.function, *maps)
    exponents = [feature_map.features(*pair) for pair in zip((far_query, key), maps)]
    if age is not None and given.log_decay is not None:
        exponents[1] = exponents[1] + given.log_decay.to(key.dtype)[:, None, None] * age
    scale: Any  # not None, because the features are given as logarithms
    sums: Any = (visible, given.log_decay, given.state, None, None, None, None, EXP, True)
    far, total, scale, state = in_torch(exponents[0], exponents[1], value, *sums, plain=True)
    half = query.square().sum(dim=-1, keepdim=True) * (given.scaling / 2)
    log_scale, norm = (x.to(query.dtype)[:, None, None] for x in (given.log_scale, given.norm_weight))
    far_size = log_size(total, scale) + (log_scale - norm * half).unflatten(1, (kv_heads, -1))
    output = join(near, (far, far_size))[0].flatten(1, 2).transpose(1, 2)
    return [output, state, *(x for x in kept if x is not None)]


def _packed(given: HybridArguments) -> Tensor:
    """The output of one sequence after the other."""
    rows, (starts, ends) = [], cast(Tensor, given.spans).tolist()
    for number, row in enumerate(zip(starts, ends)):
        row_of, found = slice(number, number + 1), []
        for start, end in sorted(set(zip(*row))):
            tokens = slice(start, end)
            by_head = {name: getattr(given, name)[row_of, :, tokens] for name in ("query", "key", "value", "score")}
            names = ("visible", "seen", "position", "key_position")
            others = {name: x[row_of, tokens] for name in names if (x := getattr(given, name)) is not None}
            sinks = {name: getattr(given, name)[row_of] for name in ("sink_key", "sink_value")}
            found.append(hybrid_in_torch(given._replace(spans=None, **by_head, **others, **sinks))[0])
        rows.append(torch.cat(found, dim=1))
    return torch.cat(rows)


def _near_part(
    given: HybridArguments, query: Tensor, key: Tensor, value: Tensor, visible: Tensor, to_last: RotaryShift | None
) -> Part:
    """The part of window and sinks."""
    to_sinks = None
    if to_last is not None and given.position is not None:
        to_sinks = to_last(query, given.position.clamp(max=given.trained_length - 1) - given.position)
    sinks = given.sink_key, given.sink_value, given.seen, to_sinks
    output, size, _ = plain_window(query, key[:, :, 1:], value[:, :, 1:], visible[:, 1:], *sinks, given.scaling)
    return output, size
