"""Kernel attention: phi(q)·S / phi(q)·Z with S = sum phi(k) v^T and Z = sum phi(k), state in, state out.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N queries, S keys, D head dimension of the values,
F features, C tokens in a block. All sums run in float32 (float64 for float64 inputs) whatever the dtype of the input:
bfloat16 sums of Z stop growing at 256.

The state is one tensor per layer, S and Z side by side (and, for log features, the running maximum m):

              D columns      1    1 (log features only)
           +-------------+-----+-----+
    F rows |      S      |  Z  |  m  |        [B, Hkv, F, D + 1 or D + 2]
           +-------------+-----+-----+

Log features: exponential maps hand over exponents. S and Z are then stored divided by exp(m), where m is the running
maximum per feature of the key exponents, and a query uses exp(u + m - max(u + m)): no epsilon, no overflow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .backends import gpu_kernel
from .backends import is_tracing
from .backends import native_library
from .backends import run_log_step
from .backends import run_step
from .causal_kernel import CausalAttention
from .causal_kernel import ElementwiseMap
from .native_attention import EXP
from .native_attention import PLAIN
from .native_attention import NativeMap
from .native_attention import native_attention
from .native_attention import takes_native


# The running maximum of an empty state. Finite, because -inf - -inf is nan, and far below any real exponent.
EMPTY_MAXIMUM = -1e30
# Tokens that log features and decay may share a reference point for, largest first: the first that cannot underflow.
BLOCK_SIZES = (4096, 1024, 256, 64, 16, 4, 1)
# Tokens per block inside a graph, where nothing may branch on data.
TRACED_BLOCK_SIZE, TRACED_LOG_BLOCK_SIZE = 64, 16


def accumulation_dtype(tensor: torch.Tensor) -> torch.dtype:
    """float64 stays float64 (for gradient checks), everything else accumulates in float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def with_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor.to(dtype)` without the cost of a call where nothing is to be done."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def accumulated(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in its accumulation dtype."""
    return with_dtype(tensor, accumulation_dtype(tensor))


def kernel_attention(
    query_features: torch.Tensor,
    key_features: torch.Tensor,
    value: torch.Tensor,
    *,
    log_features: bool,
    is_causal: bool,
    key_mask: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    log_decay: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights phi(q_i)·phi(k_j) / sum_j phi(q_i)·phi(k_j) (Katharopoulos 2020, equations 5, 9 and 18-20).

    Args:
        query_features: `[B, H, N, F]`, non-negative features, or their logarithms when `log_features`.
        key_features: `[B, Hkv, S, F]`, likewise. In the causal form S = N and the state lies before the first token.
        value: `[B, Hkv, S, D]`.
        key_mask: bool `[B, S]`, False where a key takes no part. A query that sees no key at all returns 0. Integers
            number packed sequences from 1 (0 at padding): a query then sees the keys of its own sequence alone.
        state: the state after the tokens before these, or None at the start.
        log_decay: `[Hkv]`, at most 0: the weight of a key is multiplied by exp(log_decay) for every real token between
            it and the query (ALiBi with slope -log_decay). Causal form only.

    Returns:
        The output `[B, H, N, D]` in the accumulation dtype, and the state after these tokens.
    """
    if state is not None and key_mask is None and query_features.shape[2] == key_features.shape[2] == 1:
        return _step(query_features, key_features, value, state, log_features, log_decay)
    query, key = accumulated(query_features), accumulated(key_features)
    if takes_native(query, key, value, key_mask):
        output, _, _, state = _native(query, key, value, log_features, is_causal, key_mask, state, log_decay)
        return output.transpose(1, 2), state
    if is_causal and not _is_in_graph(key_mask):
        output, _, _, state = _causal(query_features, key_features, value, log_features, key_mask, state, log_decay)
        return output.flatten(1, 2), state
    sums, _, state = kernel_sums(
        query_features,
        key_features,
        value,
        log_features=log_features,
        is_causal=is_causal,
        key_mask=key_mask,
        state=state,
        log_decay=log_decay,
    )
    return normalize(sums).flatten(1, 2), state


def elementwise_attention(
    feature_map: ElementwiseMap,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernel_attention` in its causal form from queries and keys whose features are made block by block, not kept."""
    mask = None if key_mask is None else key_mask[:, None, :, None]
    query = query.unflatten(1, (key.shape[1], -1))
    output, _, state = CausalAttention.apply(query, key, value, state, mask, feature_map)
    return output.flatten(1, 2), state


def kernel_sums(
    query_features: torch.Tensor,
    key_features: torch.Tensor,
    value: torch.Tensor,
    *,
    log_features: bool,
    is_causal: bool,
    key_mask: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    log_decay: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`kernel_attention` before its division (arguments as there), to share a denominator with other keys.

    Returns:
        `(sums, log_scale, state)`: numerator and denominator `[B, Hkv, G, N, D + 1]`, which are exp(log_scale) times
        larger than they stand there (`[B, Hkv, G, N, 1]`, a constant without gradient; None for plain features).
    """
    query, key = accumulated(query_features), accumulated(key_features)
    if takes_native(query, key, value, key_mask):
        output, denominator, scale, state = _native(
            query, key, value, log_features, is_causal, key_mask, state, log_decay
        )
        output = output.transpose(1, 2).unflatten(1, denominator.shape[1:3])
        return torch.cat((output * denominator, denominator), dim=-1), scale, state
    if is_causal and not _is_in_graph(key_mask):
        output, denominator, scale, state = _causal(
            query_features, key_features, value, log_features, key_mask, state, log_decay
        )
        return torch.cat((output * denominator, denominator), dim=-1), scale, state
    dtype = accumulation_dtype(value)
    query_features = with_dtype(query_features, dtype).unflatten(1, (key_features.shape[1], -1))
    key_features, values = with_dtype(key_features, dtype), with_ones(value, dtype)
    segments = None
    if key_mask is not None and key_mask.dtype != torch.bool:
        segments, key_mask = key_mask, key_mask > 0
    if key_mask is not None:
        key_mask = key_mask[:, None, :, None]
    sums, maximum = unpack_state(state, log_features)
    if is_causal:
        return _traced_causal(query_features, key_features, values, key_mask, segments, state, log_features, log_decay)
    output, scale, sums, maximum = _block(
        query_features, key_features, values, key_mask, sums, maximum, log_features, False
    )
    return output, scale, pack_state(sums, maximum)


def _native(query, key, value, log_features, is_causal, key_mask, state, log_decay):
    function = NativeMap(EXP if log_features else PLAIN)
    return native_attention(
        function, query, key, value, is_causal=is_causal, key_mask=key_mask, state=state, log_decay=log_decay
    )


def _is_in_graph(key_mask: torch.Tensor | None) -> bool:
    """Whether plain operations are needed: while tracing, and for packed sequences by number, which come then alone."""
    is_packed = key_mask is not None and key_mask.dtype != torch.bool
    return is_packed or is_tracing()


def _causal(query, key, value, log_features, key_mask, state, log_decay):
    """-> output `[B, Hkv, G, N, D]`, denominator and log scale `[B, Hkv, G, N, 1]` (None for plain features), state."""
    dtype = accumulation_dtype(value)
    query, key = with_dtype(query, dtype).unflatten(1, (key.shape[1], -1)), with_dtype(key, dtype)
    mask = None if key_mask is None else key_mask[:, None, :, None]
    sums, maximum = unpack_state(state, log_features)
    on_gpu = gpu_kernel(value, query.shape[3])
    if on_gpu is not None and not log_features:  # it takes a decay of any steepness as it is
        faded = None if log_decay is None else log_decay[None, :, None].expand(key.shape[:3])
        if mask is not None:
            key, faded = key * mask, None if faded is None else faded * mask[..., 0]
        output, denominator, sums = on_gpu(query, key, value, sums, faded)
        return output, denominator, None, sums
    attend = CausalAttention.apply if on_gpu is None else on_gpu
    size = _block_size(key, mask, maximum, log_features, log_decay)
    masks = [None] * -(-key.shape[2] // size) if mask is None else mask.split(size, dim=2)
    results = []
    # `.split` and not slices: autograd through slices of one tensor costs O(N^2).
    parts = zip(query.split(size, dim=3), key.split(size, dim=2), value.split(size, dim=2), masks)
    for query, key, value, mask in parts:
        decay = None if log_decay is None else _Decay(log_decay, key, mask)
        if decay is not None:
            query, key, sums, maximum = decay.before(query, key, sums, maximum, log_features)
        scale = None
        if log_features:
            query, scale, key, sums, maximum = _exponentiate(query, key, mask, sums, maximum)
        if mask is not None:
            key = key * mask
        output, denominator, sums = attend(query, key, value, sums)
        if decay is not None:
            sums, maximum = decay.after(sums, maximum)
        results.append((output, denominator, scale))
    joined = (None if part[0] is None else part[0] if len(part) == 1 else torch.cat(part, 3) for part in zip(*results))
    return *joined, pack_state(sums, maximum)


def _traced_causal(query, key, values, key_mask, segments, state, log_features, log_decay):
    """`kernel_sums` of the causal form in plain operations."""
    sums, maximum = unpack_state(state, log_features)
    size = TRACED_LOG_BLOCK_SIZE if log_features or log_decay is not None else TRACED_BLOCK_SIZE
    parts = [query.split(size, dim=3), key.split(size, dim=2), values.split(size, dim=2)]
    count = len(parts[1])
    masks = key_mask.split(size, dim=2) if key_mask is not None else [None] * count
    together = _sequence_masks(segments, size) if segments is not None else [None] * count
    blocks = []
    for query, key, val, mask, same in zip(*parts, masks, together):
        decay = _Decay(log_decay, key, mask) if log_decay is not None else None
        if decay is not None:
            query, key, sums, maximum = decay.before(query, key, sums, maximum, log_features)
        output, scale, sums, maximum = _block(query, key, val, mask, sums, maximum, log_features, True, same)
        if decay is not None:
            sums, maximum = decay.after(sums, maximum)
        blocks.append((output, scale))
    output = torch.cat([output for output, _ in blocks], dim=3)
    scale = torch.cat([scale for _, scale in blocks], dim=3) if log_features else None
    return output, scale, pack_state(sums, maximum)


def _step(query, key, value, state, log_features, log_decay):
    """`kernel_attention` of one token after others in few operations: at this size each costs more than its sums."""
    is_alone = not (torch.is_grad_enabled() or is_tracing())
    if is_alone and (log_features or log_decay is None) and native_library(query, key, state) is not None:
        value = with_dtype(value, state.dtype)
        return run_log_step(query, key, value, state, log_decay) if log_features else run_step(query, key, value, state)
    batch, heads, _, features = query.shape
    width = value.shape[-1]
    rows = with_dtype(query, state.dtype).reshape(batch * key.shape[1], -1, features)
    key = with_dtype(key, state.dtype).transpose(-1, -2)
    decay = None if log_decay is None else log_decay.to(state.dtype)[:, None, None]
    values = torch.constant_pad_nd(with_dtype(value, state.dtype), (0, state.shape[-1] - width), 1.0)
    if log_features:
        maximum = state[..., -1:].detach() if decay is None else state[..., -1:].detach() + decay
        new_maximum = torch.maximum(maximum, key.detach())
        state = (state * (maximum - new_maximum).exp_()).addcmul_((key - new_maximum).exp_(), values)
        state[..., -1:] = new_maximum
        # Softmax divides by one more constant of the query, which cancels like the maximum.
        rows = (rows + new_maximum.view(-1, 1, features)).softmax(dim=-1)
    else:
        state = torch.addcmul(state if decay is None else state * decay.exp(), key, values)
    sizes = (width, 1, 1) if log_features else (width, 1)
    numerator, denominator, *_ = torch.bmm(rows, state.flatten(0, 1)).split_with_sizes(sizes, dim=-1)
    if not log_features:  # with log features Z holds a 1 in every feature; here both may be 0
        denominator = denominator.clamp(min=torch.finfo(state.dtype).tiny)
    return (numerator / denominator).view(batch, heads, 1, width), state


def read_state(query_features: torch.Tensor, state: torch.Tensor, log_features: bool) -> torch.Tensor:
    """Output `[B, H, N, D]` of queries `[B, H, N, F]` that all see the keys of this state and no others."""
    sums, maximum = unpack_state(state, log_features)
    query = with_dtype(query_features, state.dtype).unflatten(1, (state.shape[1], -1))
    if maximum is not None:
        query = query + maximum.detach()[:, :, None, None]
        query = query.sub_(query.detach().amax(dim=-1, keepdim=True)).exp_()
    return normalize((query.flatten(2, 3) @ sums).unflatten(2, query.shape[2:4])).flatten(1, 2)


def with_ones(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[..., S, D]` -> `[..., S, D + 1]`: the column of ones makes one product give numerator and denominator."""
    return F.pad(value.to(dtype), (0, 1), value=1.0)


def normalize(sums: torch.Tensor) -> torch.Tensor:
    """Numerator over denominator, `[..., D + 1]` -> `[..., D]`; 0 where the denominator is 0 (nothing to see)."""
    numerator, denominator = sums.split_with_sizes((sums.shape[-1] - 1, 1), dim=-1)
    return numerator / denominator.masked_fill(denominator == 0, 1.0)


def unpack_state(state: torch.Tensor | None, log_features: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The tensor of the cache -> `(S and Z [B, Hkv, F, D + 1], m [B, Hkv, F] or None)`."""
    if state is None or not log_features:
        return state, None
    return state[..., :-1], state[..., -1]


def pack_state(sums: Any, maximum: torch.Tensor | None) -> torch.Tensor:
    """The inverse of `unpack_state`."""
    return sums if maximum is None else torch.cat((sums, maximum.unsqueeze(-1)), dim=-1)


def _block(query, key, values, mask, sums, maximum, log_features, is_causal, together=None):
    """One block: `query [B, Hkv, G, C, F]`, `key [B, Hkv, C, F]`, `values [B, Hkv, C, D + 1]`, `mask [B, 1, C, 1]`."""
    scale = None
    if log_features:
        query, scale, key, sums, maximum = _exponentiate(query, key, mask, sums, maximum)
    if mask is not None:
        key = key * mask
    rows, group = query.flatten(2, 3), query.shape[2:4]
    if not is_causal:
        new_sums = _add(sums, key.transpose(-1, -2) @ values)
        return (rows @ new_sums).unflatten(2, group), scale, new_sums, maximum
    scores = (rows @ key.transpose(-1, -2)).unflatten(2, group).tril()
    carried = (rows @ sums).unflatten(2, group) if sums is not None else None
    if together is not None:
        scores = scores * together.pairs
        carried = carried * together.with_carried if carried is not None else None
        sums = sums * together.carried_stays if sums is not None else None
        key = key * together.key_stays
    output = _add(carried, (scores.flatten(2, 3) @ values).unflatten(2, group))
    return output, scale, _add(sums, key.transpose(-1, -2) @ values), maximum


class _Decay:
    """exp(log_decay) for every real token between key and query, split into a factor of the query and one of the key.

    Inside a block tokens count from its first real one (t = 0), so the factors stay within exp(block size * log_decay);
    the carried state counts from the last real token before the block.
    """

    def __init__(self, log_decay: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None):
        log_decay = log_decay.to(key.dtype)[None, :, None, None]
        if mask is None:
            count = torch.arange(1, key.shape[2] + 1, device=key.device)[None, None, :, None]
        else:
            count = mask.cumsum(dim=2)
        self.one = log_decay
        self.steps = (count - 1) * log_decay  # [B or 1, Hkv, C, 1]
        self.to_last = (count[:, :, -1:] - 1) * log_decay  # [B or 1, Hkv, 1, 1]

    def before(self, query, key, sums, maximum, log_features):
        steps = self.steps.unsqueeze(2)
        if not log_features:
            return query * steps.exp(), key * (-self.steps).exp(), _scale(sums, self.one), None
        return query + steps, key - self.steps, sums, None if maximum is None else maximum + self.one[..., 0]

    def after(self, sums, maximum):
        if maximum is None:
            return _scale(sums, self.to_last), None
        return sums, maximum + self.to_last[..., 0]


def _scale(sums: torch.Tensor | None, log_factor: torch.Tensor) -> torch.Tensor | None:
    return None if sums is None else sums * log_factor.exp()


def _add(carried: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    return new if carried is None else carried + new


class _Together(NamedTuple):
    """Which tokens of a block belong to one packed sequence; every mask broadcasts over heads."""

    pairs: torch.Tensor  # [B, 1, 1, C, C] query and key
    with_carried: torch.Tensor  # [B, 1, 1, C, 1] query and the last token before the block
    carried_stays: torch.Tensor  # [B, 1, 1, 1] the last token of the block and the last before it
    key_stays: torch.Tensor  # [B, 1, C, 1] key and the last token of the block


def _sequence_masks(segments: torch.Tensor, size: int) -> list[_Together]:
    """`segments [B, S]`, 0 at padding, in blocks of `size`: the state belongs to the sequence of the newest token."""
    segments = segments.cummax(dim=1).values  # padding goes with the sequence before it; its keys are masked anyway
    blocks, last = [], segments[:, :1]
    for block in segments.split(size, dim=1):
        before, last = last, block[:, -1:]
        blocks.append(
            _Together(
                (block[:, :, None] == block[:, None, :])[:, None, None],
                (block == before)[:, None, None, :, None],
                (last == before)[:, None, None],
                (block == last)[:, None, :, None],
            )
        )
    return blocks


def _exponentiate(query, key, mask, sums, maximum):
    """Exponents -> features in [0, 1] and the carried sums rescaled to the new running maximum.

    Every maximum is a constant that cancels between numerator and denominator, so none needs a gradient.
    """
    visible = key.detach() if mask is None else key.detach().masked_fill(~mask, EMPTY_MAXIMUM)
    new_maximum = visible.amax(dim=2)
    if maximum is not None:
        new_maximum = torch.maximum(new_maximum, maximum.detach())
        sums = sums * (maximum - new_maximum).exp().unsqueeze(-1)
    key = key - new_maximum.unsqueeze(2)
    key = key.exp_() if mask is None else _masked_exp(key, mask)
    query = query + new_maximum[:, :, None, None]
    scale = query.detach().amax(dim=-1, keepdim=True)
    return query.sub_(scale).exp_(), scale, key, sums, new_maximum


def _masked_exp(exponent: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """exp where `mask`, and exponent 0 elsewhere: a padded key may hold an exponent that would overflow."""
    return exponent.masked_fill(~mask, 0.0).exp()


def _block_size(key, mask, maximum, log_features: bool, log_decay) -> int:
    """The largest block in which the features of an early query cannot underflow.

    A block is stabilised by the maximum over all of its keys, so a query before a very large key sees its own keys
    scaled down by exp(maximum of the block - maximum so far), and a decay scales by exp(C log_decay). Up to 60 nats
    (600 in float64) of that, float32 keeps full relative precision: exp(-60) times its last digit is a normal number.
    """
    if key.shape[2] == 1 or (not log_features and log_decay is None):
        return key.shape[2]
    limit = 600.0 if key.dtype == torch.float64 else 60.0
    steepest = 0.0 if log_decay is None else -log_decay.min().item()
    key = key.detach() if mask is None else key.detach().masked_fill(~mask, EMPTY_MAXIMUM)

    def is_safe(size: int) -> bool:
        size = min(size, key.shape[2])
        drop = _largest_drop(key, maximum, size) if log_features else 0.0
        return drop + size * steepest <= limit

    return next(size for size in BLOCK_SIZES if size == 1 or is_safe(size))


def _largest_drop(key: torch.Tensor, maximum: torch.Tensor | None, size: int) -> float:
    """Upper bound over blocks and features of (maximum of the block) - (maximum at the block's first visible key)."""
    if missing := -key.shape[2] % size:  # padding by 0 would copy
        key = F.pad(key, (0, 0, 0, missing), value=EMPTY_MAXIMUM)
    blocks = key.unflatten(2, (-1, size))
    largest = blocks.amax(dim=3)
    seen = largest.cummax(dim=2).values.roll(1, dims=2)
    seen[:, :, 0] = EMPTY_MAXIMUM if maximum is None else maximum.detach()
    if maximum is not None:
        seen = torch.maximum(seen, maximum.detach().unsqueeze(2))
    first = (blocks[..., :1] > EMPTY_MAXIMUM).to(torch.uint8).argmax(dim=3, keepdim=True)
    before = torch.maximum(blocks.take_along_dim(first, dim=3).squeeze(3), seen)
    return (torch.maximum(largest, before) - before).max().item()
