# SPDX-License-Identifier: Apache-2.0
"""The part of a mechanism that one of several processes with some heads each computes (tensor parallelism)."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..mechanisms.base import AttentionMechanism


def shard(
    mechanism: AttentionMechanism, rank: int, size: int, made: dict[int, Tensor], device: Any
) -> AttentionMechanism:
    """The same mechanism for the query heads of process `rank` of `size` (else ValueError), and their key/value heads.

    Its parameters and buffers are empty. Each of them has a function `weight_loader(tensor, loaded)`, which vLLM calls
    with the tensor of the checkpoint, and which copies the part that belongs to these heads: along the one axis on
    which both differ, because every such axis is ordered by heads. The mechanism of all heads may be on the meta
    device. Tensors that layers share are in `made`, by the `id` of those of all heads; this call adds its own.
    """
    shape = mechanism.shape
    heads, kv_heads = shape.num_heads, shape.num_key_value_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ValueError(
            f"Got `tensor_parallel_size` = {size} for {heads} heads and {kv_heads} key/value heads; {size} must divide "
            f"{heads}, and divide {kv_heads} or be divisible by it."
        )
    kept = max(1, kv_heads // size)
    slopes = shape.alibi_slopes and shape.alibi_slopes[_first(kv_heads, kept, rank, size) :][:kept]
    own = dataclasses.replace(shape, num_heads=heads // size, num_key_value_heads=kept, alibi_slopes=slopes)
    with torch.device("meta"):
        part = type(mechanism)(mechanism.settings, own)
    modules = dict(part.named_modules())
    for name, whole in [*mechanism.named_parameters(), *mechanism.named_buffers()]:
        owner, _, attribute = name.rpartition(".")
        if id(whole) not in made:
            made[id(whole)] = _empty_part(whole, getattr(modules[owner], attribute), rank, size, device)
        setattr(modules[owner], attribute, made[id(whole)])
    return part


def _empty_part(whole: Tensor, part: Tensor, rank: int, size: int, device: Any) -> Tensor:
    axes = [axis for axis in range(whole.ndim) if whole.shape[axis] != part.shape[axis]]
    new = torch.empty(part.shape, dtype=whole.dtype, device=device)
    if isinstance(whole, nn.Parameter):
        new = nn.Parameter(new, requires_grad=False)
    new.weight_loader = partial(_copy_part, axes=axes, rank=rank, size=size)  # type: ignore[attr-defined]
    return new


def _copy_part(part: Tensor, loaded: Tensor, axes: list[int], rank: int, size: int) -> None:
    for axis in axes:
        kept = part.shape[axis]
        loaded = loaded.narrow(axis, _first(loaded.shape[axis], kept, rank, size), kept)
    part.data.copy_(loaded)


def _first(total: int, kept: int, rank: int, size: int) -> int:
    """Where the part of a process begins; several processes have the same where there are fewer heads than they."""
    return rank * total // size // kept * kept
