# SPDX-License-Identifier: Apache-2.0
"""Attention masks of linear size: which keys are padding, and to which packed sequence each key belongs.

transformers builds masks with a function that is registered under the name of the attention implementation. Ours
returns `[B, 1, 1, S]`: bool (False at padding), or integers that number packed sequences from 1 (0 at padding). Layers
that stay softmax need N x N masks; in a model with such layers, our masks are read from their diagonals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mechanisms.base import MechanismInputs
from ..torch_kernels.blocks import is_tracing
from .transformers_internals import mask_functions


# What transformers hands over for a plainly causal mask, and for one that hides nothing.
CAUSAL, BIDIRECTIONAL = mask_functions()
# Stock models that call a method of the mask, and so cannot take None for "all visible".
NEED_A_MASK = ("mpt",)


def linear_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = CAUSAL,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask function of the attention implementation `linear_attention` (arguments as for `sdpa_mask`).

    Raises:
        ValueError: for a custom overlay (`or_mask_function`, `and_mask_function`, block-wise bidirectional parts),
        which linear attention cannot honour and must not ignore. Also for a mask of another batch size, or with neither
        one column per token nor one column per new token: softmax decoders treat missing columns as padding at the end,
        which hides the newest tokens.
    """
    if use_vmap:
        raise ValueError(
            "Linear attention honours causality, padding and packed sequences, but not a custom mask overlay; "
            "keep these layers softmax (setting `layers`), or call the model without the overlay."
        )
    is_needed = getattr(kwargs.get("config"), "stock_model_type", None) in NEED_A_MASK
    if is_needed and attention_mask is None:
        attention_mask = torch.ones(batch_size, q_length, dtype=torch.bool, device=device)
    segments = None
    if mask_function not in (CAUSAL, BIDIRECTIONAL):
        # Only transformers' functions for bidirectional masks pass this argument.
        looks_ahead = "allow_is_bidirectional_skip" in kwargs
        segments = _packed_segments(mask_function, batch_size, q_length, q_offset, device, looks_ahead)
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            raise ValueError(
                f"Got an attention mask of shape {tuple(attention_mask.shape)}; its shape must be (rows, columns) or "
                "(rows, 1, queries, columns)."
            )
        # With a cache the older keys are in the state; without one, cross-attention may have any number of keys. A
        # static cache has room for more.
        is_cached = isinstance(q_offset, Tensor) or q_offset + q_length == kv_length
        is_cached |= "allow_is_bidirectional_skip" not in kwargs and attention_mask.shape[1] != kv_length
        length, q_offset = (q_length, _known(q_offset)) if is_cached else (kv_length, 0)
        _refuse_sizes(attention_mask, batch_size, length, q_offset, has_room=False)
        attention_mask = _new_columns(attention_mask.bool(), length, q_offset)
        # A GPU is waited for here, once in a forward of the model, as by transformers' masks of softmax.
        if not is_needed and not is_tracing() and attention_mask.all():
            attention_mask = None
    if segments is None:
        return None if attention_mask is None else attention_mask[:, None, None]
    if attention_mask is not None:
        segments = segments * attention_mask
    return segments[:, None, None]


def _known(seen: int | Tensor) -> int | Tensor:
    """The length of a static cache as a number, if reading it costs nothing."""
    is_free = isinstance(seen, Tensor) and seen.device.type == "cpu" and not is_tracing()
    return int(seen) if is_free else seen


def _refuse_sizes(mask: Tensor, batch_size: int | None, length: int, seen: int | Tensor, has_room: bool) -> None:
    """Refuse (ValueError) a mask `[rows, ..., columns]` that is not of `length` new tokens after `seen` cached ones.

    Without `batch_size`, any number of rows will do. With `has_room`, a static cache has columns for future tokens.
    """
    rows, columns = mask.shape[0], mask.shape[-1]
    is_short = columns < length if isinstance(seen, Tensor) else columns != length and columns < seen + length
    is_long = not has_room and isinstance(seen, int) and columns not in (length, seen + length)
    if batch_size in (None, rows) and not is_short and not is_long:
        return
    before, wanted = "a static cache of", "old and new"
    if isinstance(seen, int):
        before, wanted = str(seen), f"{seen + length}, or {length} for the new ones alone"
    raise ValueError(
        f"Got an attention mask of {rows} rows and {columns} columns for {rows if batch_size is None else batch_size} "
        f"rows of {length} new tokens after {before} cached ones. It must have one row per input row and one column "
        f"per token: {wanted}."
    )


def _new_columns(mask: Tensor, length: int, offset: int | Tensor) -> Tensor:
    """The columns of the `length` newest keys in a mask `[B, columns]`, of which the first `offset` are older.

    A mask of the new keys alone (columns == length) is returned unchanged.
    """
    if mask.shape[1] == length:
        return mask
    if isinstance(offset, int):
        start = min(offset, mask.shape[1] - length)
        return mask[:, start : start + length]
    first = offset.clamp(max=mask.shape[1] - length)
    return mask.index_select(1, first + torch.arange(length, dtype=torch.long, device=mask.device))


def _packed_segments(
    mask_function: Callable[..., Any],
    batch_size: int,
    length: int,
    offset: int | Tensor,
    device: torch.device | str,
    may_look_ahead: bool,
) -> Tensor | None:
    """Number the packed sequences `[B, N]` from 1, by O(N) calls of the mask function; None if there is only one."""
    if length <= 1:
        return None
    rows = torch.arange(batch_size, dtype=torch.long, device=device)[:, None]
    later = torch.arange(1, length, dtype=torch.long, device=device)[None, :] + offset
    head = torch.zeros((), dtype=torch.long, device=device)
    looks_ahead = torch.as_tensor(mask_function(rows, head, later - 1, later), dtype=torch.bool, device=device)
    if not may_look_ahead and not is_tracing() and looks_ahead.any():
        raise ValueError(
            "Linear attention got a mask that lets tokens of a causal model look ahead (a bidirectional prefix or "
            "block), which it cannot honour. Keep these layers softmax (setting `layers`)."
        )
    connected = torch.as_tensor(mask_function(rows, head, later, later - 1), dtype=torch.bool, device=device)
    connected = connected.expand(batch_size, length - 1)
    if not is_tracing() and connected.all():
        return None
    first = torch.ones(batch_size, 1, dtype=torch.long, device=device)
    return torch.cat((first, (~connected).long()), dim=1).cumsum(dim=1)


def read_mask(
    mask: Tensor | None,
    length: int,
    seen: int | Tensor,
    is_causal: bool,
    *,
    batch_size: int | None = None,
    is_windowed: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Convert any mask that reaches an attention layer to `(key mask bool [B, S], segments [B, S])`, each or None.

    Args:
        mask: None; `[B, columns]`, as for flash attention; `[B, 1, 1, columns]`, from `linear_attention_mask`; or
            `[B, 1, N, columns]`, bool or additive, as for softmax attention.
        length: S, the number of new keys.
        seen: the number of earlier keys, which are in the state.
        is_causal: whether the layer is causal.
        batch_size: B, which is checked; a mask of four axes may also have one row for all.
        is_windowed: whether the mask may come from a sliding-window layer and lack the columns of older keys.

    Raises:
        ValueError: if linear attention cannot honour the mask, or its size does not match the tokens.
    """
    if mask is None:
        return None, None
    if mask.ndim not in (2, 4) or (mask.ndim == 4 and mask.shape[1] != 1):
        raise ValueError(
            f"Got an attention mask of shape {tuple(mask.shape)}; linear attention takes one mask for all heads, of "
            "shape (rows, columns) or (rows, 1, queries, columns)."
        )
    is_shared = mask.ndim == 4 and mask.shape[0] == 1
    # The mask of a window lacks the columns of older keys; the last columns are those of the newest keys.
    before = 0 if is_windowed and mask.ndim == 4 else _known(seen)
    has_room = mask.ndim == 4 and (is_windowed or isinstance(seen, Tensor))
    _refuse_sizes(mask, None if is_shared else batch_size, length, before, has_room)
    if mask.ndim == 4 and mask.shape[2] not in (1, length):
        raise ValueError(
            f"Got an attention mask of shape {tuple(mask.shape)} for {length} new tokens; its third axis must have 1 "
            f"or {length} entries."
        )
    if length == 0:
        return None, None
    key_mask, segments = _read_columns(mask, length, seen, is_causal)
    if is_shared and batch_size is not None:
        key_mask, segments = (x if x is None else x.expand(batch_size, -1).contiguous() for x in (key_mask, segments))
    return key_mask, segments


def _read_columns(
    mask: Tensor, length: int, seen: int | Tensor, is_causal: bool
) -> tuple[Tensor | None, Tensor | None]:
    if mask.is_floating_point():
        mask = mask > -1.0  # an additive mask is 0 where a key is visible, and a large negative number elsewhere
    if mask.ndim == 4 and mask.shape[2] > 1:
        return _read_square_mask(mask[:, 0], length, seen, is_causal)
    columns = _new_columns(mask if mask.ndim == 2 else mask[:, 0, 0], length, seen)
    is_packed = mask.ndim == 4 and columns.dtype != torch.bool
    return columns > 0, columns if is_packed else None


def _read_square_mask(
    mask: Tensor, length: int, seen: int | Tensor, is_causal: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Read `mask [B, N, columns]`: its diagonal shows padding, and the entry before it whether a sequence continues."""
    start = min(seen, mask.shape[2] - length) if isinstance(seen, int) else seen
    position = torch.arange(length, dtype=torch.long, device=mask.device)
    square = mask.index_select(2, start + position)
    valid = square.diagonal(dim1=1, dim2=2)
    if not is_causal:
        # A padded query may see no key, so a key counts as real if any query sees it.
        valid = square.any(dim=1)
    if is_tracing():
        return valid, None
    # `previous` is the newest real token before each one; a sequence starts where a real token does not see it.
    previous = torch.where(valid, position, -1).cummax(dim=1).values.roll(1, dims=1)
    previous[:, 0] = -1
    together = square.gather(2, previous.clamp(min=0).unsqueeze(2)).squeeze(2) | (previous < 0) | ~valid
    segments = ((~together).long().cumsum(dim=1) + 1) * valid
    _check_square_mask(square, segments, is_causal)
    return (None if valid.all() else valid), (segments if (segments > 1).any() else None)


def _check_square_mask(square: Tensor, segments: Tensor, is_causal: bool) -> None:
    """Refuse a mask that is not explained by padding, causality, packing and a band (sliding window)."""
    expected = (segments.unsqueeze(2) == segments.unsqueeze(1)) & (segments > 0).unsqueeze(1)
    if is_causal:
        expected = expected.tril()
    visible = square & (segments > 0).unsqueeze(2)
    if (visible & ~expected).any():
        raise ValueError(
            "Linear attention got a mask that lets tokens see more than causality, padding and packed sequences allow "
            "(a bidirectional prefix or block), which it cannot honour. Keep these layers softmax (setting `layers`)."
        )
    missing = expected & ~visible & (segments > 0).unsqueeze(2)
    if not is_causal and missing.triu(1).any() and not missing.tril(-1).any():
        raise ValueError(
            "Linear attention got a causal mask in a layer that was taken to be bidirectional; keep it softmax "
            "(setting `layers`)."
        )
    # A band (sliding window) hides keys only outside the visible range; a hidden key within that range is a hole.
    counted = visible.long().cumsum(dim=2)
    if (missing & (counted > 0) & (counted < counted[..., -1:])).any():
        raise ValueError(
            "Linear attention got a mask with holes, but it honours only causality, padding and packed sequences. "
            "Keep these layers softmax (setting `layers`)."
        )


def attend_packed(attend: Callable[[MechanismInputs], Tensor], inputs: MechanismInputs) -> Tensor:
    """Attend within each packed sequence, by calling `attend` for a padded batch of them.

    Sequences are grouped by length, rounded up to a power of two, so padding at most doubles the work. This is exact
    for any mechanism, and no mechanism needs to know about packing.

    Args:
        attend: returns `[b, n, H, D]` for a batch of sequences with a bool mask.
        inputs: a mask `[B, N]` of runs of equal numbers, 0 at padding.

    Returns:
        `[B, N, H, D]`, 0 at padding.
    """
    query, segments = inputs.query, cast(Tensor, inputs.attention_mask)
    batch, heads, length, _ = query.shape
    # Each row starts a new run, even if its first number equals the last one of the row before.
    change = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
    starts = change.flatten().nonzero().squeeze(1)
    lengths = torch.diff(starts, append=starts.new_tensor([batch * length]))
    real = segments.flatten()[starts] > 0
    starts, lengths = starts[real], lengths[real]
    output = query.new_zeros(batch * length, heads, inputs.value.shape[-1])
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in inputs[:3]]
    further = [None if tensor is None else tensor.flatten(0, 1) for tensor in (inputs.positions, inputs.gates)]
    sizes = [1 << max(0, math.ceil(math.log2(n))) for n in lengths.tolist()]
    for size in sorted(set(sizes)):
        chosen = [index for index, other in enumerate(sizes) if other == size]
        position = torch.arange(size, dtype=torch.long, device=query.device)
        inside = position < lengths[chosen, None]
        index = (starts[chosen, None] + position).clamp(max=batch * length - 1)
        query, key, value = (tensor[index].transpose(1, 2) for tensor in flat)
        positions, gates = (None if tensor is None else tensor[index] for tensor in further)
        result = attend(MechanismInputs(query, key, value, inside, inputs.scaling, inputs.is_causal, positions, gates))
        output = output.index_put((index[inside],), result[inside].to(output.dtype))
    return output.unflatten(0, (batch, length))
