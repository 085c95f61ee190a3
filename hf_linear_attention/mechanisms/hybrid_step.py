# SPDX-License-Identifier: Apache-2.0
"""One decoding step of `hybrid` in torch: what a checkpoint computes by itself, and the operator where no kernel does.

No operation waits for the device, so a CUDA graph can hold a step, and there are few of them, because for one token
each costs more than its arithmetic. The features of a query count as further keys: feature f, of which the sums are
S_f and Z_f with the maximum m_f, has the logit c + u_f + m_f, the values S_f and the denominator Z_f.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, w tokens of a window, M exact keys, s sinks, D head_dim,
F features, W head dimension of the values, R rotary frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..positions.rotary import RotaryShift
from ..torch_kernels.blocks import EMPTY_MAXIMUM, Affine, KernelMap, accumulated, with_dtype
from ..torch_kernels.exact_keys import NEVER, Kept, is_beyond
from .base import Rotary
from .window import ORDINARY, SINK


class StepArguments(NamedTuple):
    """The arguments of a step and of the operator `hybrid_step`: one new real token, and the state that it changes.

    The oldest token of the window moves to the exact keys or to the far sums. With exact keys the score of token n
    (counted from 1) is `score` + n `slope` `slope_scale`. Rotary embedding has turned the pairs of columns of queries
    and keys by `frequencies` and their positions. The feature map does not see the turns from pair `first_turned` on.
    From `trained_length` on (0: never) sinks and exact keys are compared as far away as at most there. A far key weighs
    exp(log_scale - norm_weight scaling |q|^2 / 2) phi(q)·phi(k), all others exp(scaling q·k). The map phi is one for
    inputs scaled by sqrt(scaling).

    Parameters, scores and positions may have any dtype of their kind.
    """

    query: Tensor  # [B, H, 1, D]
    key: Tensor  # [B, Hkv, 1, D]
    value: Tensor  # [B, Hkv, 1, W]
    score: Tensor | None  # [B, 1, Hkv]
    slope: Tensor | None  # [Hkv]
    position: Tensor | None  # [B, 1]
    key_weight: Tensor  # [Hkv, D, columns], see `torch_kernels.blocks.KernelMap`
    key_bias: Tensor | None
    key_norm: Tensor | None
    query_weight: Tensor
    log_decay: Tensor | None  # [Hkv]; with `is_rate` it is -softplus of this
    state: Sequence[Tensor]  # see `WindowState.stored`
    log_scale: Tensor  # [H]
    norm_weight: Tensor  # [H]
    frequencies: Tensor | None  # [R] float32
    first_turned: int
    is_interleaved: bool
    trained_length: int
    function: int
    scaling: float
    slope_scale: float = 1.0
    is_rate: bool = False


def logarithm_of(decay: Tensor | None, is_rate: bool) -> Tensor | None:
    """The logarithm of the decay per token, `[Hkv]`, of which `decay` may be the rate; see `LearnedDecay`."""
    return -F.softplus(accumulated(decay)) if decay is not None and is_rate else decay


def shifts_of(
    frequencies: Tensor | None, first_turned: int, is_interleaved: bool, trained_length: int
) -> tuple[RotaryShift | None, RotaryShift | None]:
    """What takes back the turns that the map does not see, and what moves to within the trained length."""
    if frequencies is None or not len(frequencies):
        return None, None
    rotary = Rotary(cast(Any, frequencies), is_interleaved)
    hidden = RotaryShift(rotary, first_turned) if first_turned < len(frequencies) else None
    return hidden, RotaryShift(rotary) if trained_length else None


def hybrid_step(given: StepArguments) -> tuple[Tensor, list[Tensor]]:
    """The output `[B, 1, H, W]` in the accumulation dtype, and the tensors of the new state; without gradients."""
    has_places = len(given.state) in (8, 14)
    count = 0 if given.score is None else 4 + has_places
    (sums, *exact), window = given.state[: 1 + count], given.state[1 + count :]
    key, value, kind, sink_key, sink_value, num_seen, *others = window
    kv_heads, place = key.shape[1], torch.arange(sink_key.shape[2], dtype=torch.long, device=num_seen.device)
    here = (place == num_seen)[:, None, :, None]
    sink_key, sink_value = torch.where(here, given.key, sink_key), torch.where(here, given.value, sink_value)
    new = [given.key, given.value, torch.where(num_seen < len(place), SINK, ORDINARY)]
    new += [cast(Tensor, given.position)] * has_places
    num_seen = num_seen + 1
    if given.score is not None and given.slope is not None:
        score, slope = (x.to(others[-1].dtype) for x in (given.score, given.slope))
        new.append(score.mT.unsqueeze(3) + slope[:, None, None] * (num_seen * given.slope_scale)[:, None, None])
    moved = [_moved(*pair) for pair in zip((key, value, kind, *others), new)]
    (key, value, kind, *others), (old_key, old_value, old_kind, *old) = zip(*moved)
    age = (old_kind == ORDINARY)[:, :, None, None].expand(-1, kv_heads, -1, -1).int()
    position = old[0][:, None, :, None].expand_as(age) if has_places else None
    kept, gone = None, Kept(old_key, old_value, old[-1] if exact else age, age, position)
    if exact:
        kept, gone = _displaced(Kept(*exact), gone)
    shifts = shifts_of(given.frequencies, given.first_turned, given.is_interleaved, given.trained_length)
    sums = _with_key(given, gone, sums, shifts[0])
    seen = [x[:, None].expand(-1, kv_heads, -1) for x in (kind == ORDINARY, place < num_seen)]
    parts = [(key, value, seen[0]), (sink_key, sink_value, seen[1])]
    state = [sums, *(x for x in kept or () if x is not None), key, value, kind, sink_key, sink_value, num_seen, *others]
    return _read(given, parts, kept, sums, *shifts), state


def _moved(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The slots of a window without the first one and with a new one, and the first one."""
    axis = 2 if old.ndim == 4 else 1
    first, others = old.split_with_sizes((1, old.shape[axis] - 1), dim=axis)
    return torch.cat((others, with_dtype(new, old.dtype)), dim=axis), first


def _displaced(kept: Kept, leaving: Kept) -> tuple[Kept, Kept]:
    """What is kept after a key has left the window, and the key that it displaces, which may be itself.

    The age of `leaving` is 1, or 0 if there is no such key; then it displaces itself.
    """
    count = kept.key.shape[2]
    both = kept._replace(age=(kept.age + leaving.age) * (kept.age > 0)).followed_by(leaving)
    score = both.score.masked_fill(both.age == 0, NEVER)
    last = count - score.flip(2).argmin(dim=2)  # of equal scores, that of the later key is the smaller one
    places = torch.arange(count, dtype=torch.long, device=score.device)
    return both.at(places + (places >= last)), both.at(last)


def _with_key(given: StepArguments, gone: Kept, sums: Tensor, hidden: RotaryShift | None) -> Tensor:
    """The far sums with a key that is far from now on, unless its age is 0."""
    key, position = accumulated(gone.key), gone.position
    if hidden is not None:
        key = hidden(key, -cast(Tensor, position).squeeze(-1))
    exponent = _exponents(given, key, Affine(given.key_weight, given.key_bias, given.key_norm))
    decay, maximum, is_none = logarithm_of(given.log_decay, given.is_rate), sums[..., -1:], gone.age == 0
    if decay is not None:
        decay = decay.to(sums.dtype)[:, None, None]
        exponent, maximum = exponent + decay * (gone.age - 1), maximum + decay * ~is_none
    exponent = exponent.masked_fill(is_none, 2 * EMPTY_MAXIMUM).mT  # even beside no keys, it adds 0
    largest = torch.maximum(maximum, exponent)
    values = torch.constant_pad_nd(with_dtype(gone.value, sums.dtype).masked_fill(is_none, 0.0), (0, 1), 1.0)
    new = (maximum - largest).exp() * sums[..., :-1] + (exponent - largest).exp() * values
    return torch.cat((new, largest), dim=-1)


def _exponents(given: StepArguments, x: Tensor, affine: Affine) -> Tensor:
    """The logarithms of the features of one key or query of each head, `[B, heads, 1, F]`."""
    return KernelMap(given.function).features(x * given.scaling**0.5, affine)


def _read(
    given: StepArguments, parts: Sequence[tuple[Tensor, Tensor, Tensor]], kept: Kept | None, sums: Tensor,
    hidden: RotaryShift | None, to_last: RotaryShift | None,
) -> Tensor:  # fmt: skip
    """The output; `parts` are keys and values of window and sinks, and which the query sees, `[B, Hkv, n]`."""
    dtype, kv_heads, query, position = sums.dtype, sums.shape[1], accumulated(given.query), given.position
    (window, sinks), exact = parts, () if kept is None else ((kept.key, kept.value, (kept.age > 0).squeeze(-1)),)
    keys, values, seen = (torch.cat(each, dim=2) for each in zip(window, *exact, sinks))

    def by_group(x: Tensor) -> Tensor:
        return x.unflatten(1, (kv_heads, -1)).squeeze(3)  # [B, Hkv, G, ...]

    logits = by_group(query) * given.scaling @ with_dtype(keys, dtype).mT
    if to_last is not None and position is not None and is_beyond(position, given.trained_length):
        moved = by_group(to_last(query, (given.trained_length - 1 - position).clamp(max=0))) * given.scaling
        of_window, others = logits.tensor_split([window[0].shape[2]], dim=-1)
        logits = torch.cat((of_window, *_clamped(given, others, moved, kept, sinks[0], to_last)), dim=-1)
    half = query.square().sum(dim=-1, keepdim=True) * (given.scaling / 2)
    log_scale, norm_weight = (x.to(dtype)[:, None, None] for x in (given.log_scale, given.norm_weight))
    query = query if hidden is None else hidden(query, -cast(Tensor, position))
    far = by_group(_exponents(given, query, Affine(given.query_weight)) + (log_scale - norm_weight * half))
    logits = logits.masked_fill(~seen.unsqueeze(2), EMPTY_MAXIMUM)
    logits = torch.cat((logits, far + sums[..., -1].unsqueeze(2)), dim=-1)
    values = with_dtype(values, dtype).masked_fill(~seen.unsqueeze(-1), 0.0)
    table = torch.cat((torch.constant_pad_nd(values, (0, 1), 1.0), sums[..., :-1]), dim=2)
    read = (logits - logits.amax(dim=-1, keepdim=True)).exp() @ table
    return (read[..., :-1] / read[..., -1:]).flatten(1, 2).unsqueeze(1)


def _clamped(
    given: StepArguments, logits: Tensor, moved: Tensor, kept: Kept | None, sink_key: Tensor, to_last: RotaryShift
) -> list[Tensor]:
    """The logits `[B, Hkv, G, n]` of kept keys, at most as far away as the trained length, and those of sinks.

    `moved` are the queries at the last trained position, if they are beyond it.
    """
    of_sinks = moved @ with_dtype(sink_key, moved.dtype).mT
    if kept is None:
        return [of_sinks]
    place, farthest = cast(Tensor, kept.position), cast(Tensor, given.position) - given.trained_length
    keys = to_last(accumulated(kept.key), -place.squeeze(-1))
    is_far = place.mT <= farthest[:, None, None]
    return [torch.where(is_far, moved @ keys.mT, logits[..., : place.shape[2]]), of_sinks]
