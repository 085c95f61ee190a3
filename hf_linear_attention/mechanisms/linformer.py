# SPDX-License-Identifier: Apache-2.0
"""`linformer`: keys and values are compressed along the length by E and F (Wang 2020, equation 7).

softmax(scaling q (E K)^T) (F V)        E, F: [k, n]        K, V: [n, D] per head

          n positions                        slot s starts as the mean of its segment of
E =  [ k/n k/n  0   0   0   0  ]   k slots   positions; random E is unusable on pretrained
     [  0   0  k/n k/n  0   0  ]             weights (relative error 3.5 and more)
     [  0   0   0   0  k/n k/n ]

The option `projection` chooses E and F (section 4 of the paper, "general projections"):

    learned     any matrix, started as the means
    stretched   the means over the row's own length plus a learned matrix stretched to that length, started as 0
    mean-pool   the means over the row's own length, nothing to learn: the best of the four without training
    conv        one learned kernel of ceil(n / k) positions that moves by its own width, started as the mean
    random      fixed Gaussian of variance 1 / k, as in the paper's proof (theorem 2): to study, not to use
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from ..torch_kernels.blocks import accumulated, accumulation_dtype, needs_plain
from ..torch_kernels.window import slot_attention
from .base import (
    AttentionMechanism,
    LayerShape,
    MechanismInputs,
    State,
    gather_tokens,
    real_first,
    segment_mean_weights,
    segment_means,
    weigh_tokens,
    without_padding,
)
from .settings import LinformerOptions


class LinformerAttention(LinformerOptions, AttentionMechanism):
    """Softmax attention to `projection_size` compressed keys. Encoders only: every slot mixes all positions.

    Inputs shorter than `max_length` use the first columns of E and F. A slot of a learned projection is rescaled by the
    share of its absolute weight that falls on real tokens, so a partly filled segment remains a mean. A slot takes no
    part in the softmax if its weight on real tokens is less than half of one token's share of E. Padding is moved to
    the end first, so it may be anywhere.

    With `projection` = `mean-pool` or `stretched`, E and F fit the length of each row instead: a row of at most
    `projection_size` tokens is not compressed, and its attention is exact.
    """

    def __init__(self, settings: Mapping[str, Any], shape: LayerShape):
        super().__init__(settings, shape)
        self.num_slots = self.layer_setting("projection_size")
        self.max_length = settings["max_length"] or shape.max_length or 0  # 0 only for mean-pool
        size, shares_values = None, settings["projection_sharing"] in ("key-value", "layerwise")
        if self.projection is not None:
            matrices = shape.num_key_value_heads if settings["projection_sharing"] == "none" else 1
            size = (matrices, *self.projection.size(self.num_slots, self.max_length))
        self._add_projection("key_projection", size)
        self._add_projection("value_projection", None if shares_values else size)

    @property
    def projection(self) -> Projection | None:
        """The kind of projection; a property, because its functions cannot be pickled. None for mean-pool."""
        return PROJECTIONS[self.projection_kind(self.settings)]

    def _add_projection(self, name: str, size: tuple[int, ...] | None) -> None:
        if self.projection is not None and not self.projection.is_learned:  # persistent: it is part of the function
            self.register_buffer(name, None if size is None else torch.empty(size))
        else:
            self.register_parameter(name, None if size is None else nn.Parameter(torch.empty(size)))

    def share_with(self, first: AttentionMechanism) -> None:
        """Use E and F of the first layer if `projection_sharing` = `layerwise`."""
        if self.settings["projection_sharing"] == "layerwise":
            del self.key_projection
            # A registered module would register its parameters twice, and such a model cannot be saved.
            object.__setattr__(self, "_first", first)

    @property
    def _projections(self) -> tuple[Tensor, Tensor]:
        owner = self.__dict__.get("_first", self)
        key, value = owner.key_projection, owner.value_projection
        return key, key if value is None else value

    def reset_parameters(self) -> None:
        """Start the projections as their kind defines."""
        if self.projection is None:
            return
        generator = self.generator()
        for tensor in (*self.parameters(recurse=False), *self.buffers(recurse=False)):
            init.copy_(tensor, self.projection.initial(tensor.shape, self.num_slots, generator))

    def forward(self, inputs: MechanismInputs, state: State | None = None) -> tuple[Tensor, State | None]:
        """Compress keys and values, at most as many as E has columns (ValueError), and attend to the result."""
        key, value, hidden = self._compress(inputs.key, inputs.value, inputs.attention_mask)
        return slot_attention(inputs.query, key, value, ~hidden, inputs.scaling).transpose(1, 2), None

    def _compress(self, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """E K and F V, `[B, Hkv, k, D]` each, and which slots are empty, `[B or 1, 1 or Hkv, k]`."""
        if self.projection is None:
            return mean_pool(key, value, mask, self.num_slots)
        self._check_length(key)
        key_projection, value_projection = self._projections
        key, empty = self.projection.compress(without_padding(key, mask), key_projection, mask)
        return key, self.projection.compress(without_padding(value, mask), value_projection, mask)[0], empty

    def _check_length(self, key: Tensor) -> None:
        """Raise ValueError for more positions than E has columns."""
        if key.shape[2] > self.max_length:
            raise ValueError(
                f"Got {key.shape[2]} positions, but this Linformer was built for at most `max_length` = "
                f"{self.max_length}; shorten the input or convert again with a larger `--max_length`."
            )


def mean_pool_matrix(slots: int, length: int) -> Tensor:
    """The matrix `[slots, length]` whose row s averages the positions p with floor(p slots / length) = s."""
    owner = (torch.arange(length, dtype=torch.long, device="cpu") * slots) // length
    pool = F.one_hot(owner, slots).T.float()
    return pool / pool.sum(dim=1, keepdim=True).clamp(min=1)


def mean_pool(key: Tensor, value: Tensor, mask: Tensor | None, slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """Means over `slots` segments of each row's real tokens; a shorter row keeps its tokens unchanged."""
    weights = None
    empty = (torch.arange(slots, dtype=torch.long, device=key.device) >= key.shape[2])[None, None]
    if mask is not None:
        key, value = without_padding(key, mask), without_padding(value, mask)
        weights = segment_mean_weights(mask, slots, accumulation_dtype(key)).unsqueeze(1)
        empty = weights.sum(dim=3) == 0
    key, value = (segment_means(accumulated(x), slots, weights).to(x.dtype) for x in (key, value))
    return key, value, empty


def compress(x: Tensor, projection: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The slots `[B, Hkv, k, D]` of `x [B, Hkv, n, D]`, and which of them are empty `[B or 1, 1 or Hkv, k]`.

    x is 0 at the padding of `mask`; `projection` is `[1 or Hkv, k, max_length]`.
    """
    slots, max_length = projection.shape[1:]
    if mask is None and not needs_plain(x) and x.shape[2] == max_length:  # an exported graph accepts any length
        return project(x, projection, mask)
    columns = _columns(projection, mask, x.shape[2])
    total, mass = (weights.abs().to(accumulation_dtype(x)).sum(dim=-1) for weights in (projection, columns))
    scale, empty = _share(total, mass, slots / max_length)
    return weigh_tokens(columns.to(x.dtype), x) * scale.to(x.dtype).unsqueeze(-1), empty


def project(x: Tensor, projection: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """`compress` without rescaling: fewer columns of a Gaussian matrix are still Gaussian, and no slot is empty."""
    empty = torch.zeros(1, 1, projection.shape[1], dtype=torch.bool, device=x.device)
    return weigh_tokens(_columns(projection, mask, x.shape[2]).to(x.dtype), x), empty


def _columns(projection: Tensor, mask: Tensor | None, length: int) -> Tensor:
    """The column of E for each token, `[1 or B, 1 or Hkv, k, n]`; columns count real tokens, and padding gets 0."""
    if mask is None:
        return projection[None, ..., :length]
    rank = (mask.cumsum(dim=1) - 1).clamp(min=0)
    columns = projection.index_select(2, rank.flatten()).unflatten(2, rank.shape).movedim(2, 0)
    return columns * mask[:, None, None, :]


def stretch(x: Tensor, projection: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """`compress` by the means of segments of each row plus `projection`, stretched to the row's number of tokens.

    A row of at most k tokens has one token per slot, and `projection` is not used.
    """
    slots, length = projection.shape[1], x.shape[2]
    if mask is None:
        mask = torch.ones(1, length, dtype=torch.bool, device=x.device)
    means = segment_mean_weights(mask, slots, accumulation_dtype(x)).unsqueeze(1)  # [1 or B, 1, k, n]
    weights = means + stretched(projection.to(means.dtype), mask)
    return weigh_tokens(weights.to(x.dtype), x), means.sum(dim=3) == 0


def stretched(projection: Tensor, mask: Tensor) -> Tensor:
    """The columns of `projection [1 or Hkv, k, n]`, shared out among the tokens of each row, `[B, 1 or Hkv, k, N]`.

    With c tokens in the row, token r gets the columns from r n / c to (r + 1) n / c; a column that two tokens share is
    divided in proportion, so the sum of each slot's weights is the same for every c. A row of at most k tokens gets 0.
    """
    slots, columns = projection.shape[1:]
    count = mask.sum(dim=1, keepdim=True).clamp(min=1)
    rank = (mask.cumsum(dim=1) - 1).clamp(min=0)
    sums = F.pad(projection.cumsum(dim=2), (1, 1))  # the column added at the end is only multiplied by 0

    def sum_before(token: Tensor) -> Tensor:
        whole = (token * columns).div(count, rounding_mode="floor")
        part = (token * columns - whole * count).to(projection.dtype) / count
        below, above = (
            sums.index_select(2, index.flatten()).unflatten(2, index.shape).movedim(2, 0)
            for index in (whole, whole + 1)
        )
        return below.lerp(above, part[:, None, None, :])

    change = sum_before(rank + 1) - sum_before(rank)
    return torch.where((mask & (count > slots))[:, None, None, :], change, 0.0)


def convolve(x: Tensor, kernel: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """`compress` by the E whose row s holds `kernel [1 or Hkv, w]` at the positions s w .. (s + 1) w - 1."""
    width, length = kernel.shape[1], x.shape[2]
    if mask is not None:
        places = real_first(mask)
        x, mask = gather_tokens(x, places), mask.gather(1, places)
    slots = -(-length // width)
    end = slots * width - length
    segments = F.pad(x, (0, 0, 0, end)).unflatten(2, (slots, width))  # [B, Hkv, k, w, D]
    weights = kernel.abs().to(accumulation_dtype(x))
    real = torch.ones(1, length, dtype=torch.bool, device=x.device) if mask is None else mask
    real = F.pad(real.to(weights.dtype), (0, end)).unflatten(1, (slots, width))
    scale, empty = _share(weights.sum(dim=1, keepdim=True), torch.einsum("bkw,hw->bhk", real, weights), 1 / width)
    compressed = (segments * kernel.to(x.dtype)[:, None, :, None]).sum(dim=3)
    return compressed * scale.to(x.dtype).unsqueeze(-1), empty


def _share(total: Tensor, mass: Tensor, density: float) -> tuple[Tensor, Tensor]:
    """The factor that makes up for a slot's weight on missing tokens, and which slots are empty."""
    least = total * (0.5 * density)
    return total / torch.maximum(mass, least), mass <= least


class Projection(NamedTuple):
    """A kind of E and F: its size, its start and its application."""

    is_learned: bool
    # Returns the size of one matrix or kernel from (k, n).
    size: Callable[[int, int], tuple[int, ...]]
    # Returns the initial value from (size with a leading axis of heads, k, generator).
    initial: Callable[[torch.Size, int, torch.Generator], Tensor]
    # Takes and returns the same as the function `compress`.
    compress: Callable[..., tuple[Tensor, Tensor]]


PROJECTIONS: dict[str, Projection | None] = {
    "learned": Projection(
        True,
        lambda slots, length: (slots, length),
        lambda size, slots, generator: mean_pool_matrix(*size[1:]).expand(size),
        compress,
    ),
    "stretched": Projection(
        True,
        lambda slots, length: (slots, length),
        lambda size, slots, generator: torch.zeros(size, dtype=torch.float32, device="cpu"),
        stretch,
    ),
    "mean-pool": None,
    "conv": Projection(
        True,
        lambda slots, length: (math.ceil(length / slots),),
        lambda size, slots, generator: torch.full(size, 1 / size[1], dtype=torch.float32, device="cpu"),
        convolve,
    ),
    "random": Projection(
        False,
        lambda slots, length: (slots, length),
        lambda size, slots, generator: (
            torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") / math.sqrt(slots)
        ),
        project,
    ),
}
