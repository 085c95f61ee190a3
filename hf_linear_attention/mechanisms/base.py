# SPDX-License-Identifier: Apache-2.0
"""The contract of an attention mechanism and of its options.

A mechanism replaces softmax(q k^T) v inside one attention layer. It has a module, its options in `settings.py`
and a line in `registry.py`. Its class attributes say what it can do, and a configuration that asks for more is refused
with the name of what is missing.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..torch_kernels.blocks import accumulated, is_tracing
from ..torch_kernels.implementations import load_implementations
from .settings import MechanismOptions


State = tuple[Tensor, ...]
MOST_COMPUTED = 2**24  # numbers, 64 MiB in float32, for a state that is only measured


@dataclass(frozen=True)
class Rotary:
    """How a layer rotates the first channels of its queries and keys.

    `inverse_frequencies` are in radians per token, one per pair of channels, the fastest first. Pair i is made of the
    channels (2 i, 2 i + 1) where `is_interleaved`, else of (i, i + their number).
    """

    inverse_frequencies: tuple[float, ...]
    is_interleaved: bool = False


@dataclass(frozen=True)
class LayerShape:
    """The properties of an attention layer that its mechanism needs.

    `layer` counts the attention layers of the model from 0. `max_length` is the longest input of the model in tokens or
    patches, or None if the architecture sets no limit. `alibi_slopes` has one slope per key/value head, or is None
    without ALiBi. `rotary` says how the layer rotates queries and keys, or is None where that is not known.
    `hidden_size` is E, the size of the hidden states that the layer projects to queries, keys and values, and
    `norm_epsilon` what the model's norms add to the mean of squares.
    """

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    layer: int
    max_length: int | None = None
    alibi_slopes: tuple[float, ...] | None = None
    rotary: Rotary | None = None
    hidden_size: int | None = None
    norm_epsilon: float = 1e-6


class MechanismInputs(NamedTuple):
    """What a mechanism gets in one call of its layer."""

    query: Tensor  # [B, H, N, D], after rotary embedding and normalisation
    key: Tensor  # [B, Hkv, S, D]; with a state, only the keys after it
    value: Tensor  # [B, Hkv, S, W], those of the keys
    # bool [B, S], False at padding, or None; or integers: the number of each key's packed sequence from 1, and 0 at
    # padding, which `forward` of a causal mechanism may get inside a traced graph.
    attention_mask: Tensor | None
    scaling: float  # the factor of the layer's q·k
    is_causal: bool  # whether a query sees only its own and earlier keys
    positions: Tensor | None = None  # integers [B, N], if the mechanism `needs_positions`
    gates: Tensor | None = None  # float32 [B, S, C], if it `needs_gates`
    in_place: bool = False  # whether `forward` may write the state after one more token over the old one
    rows: Tensor | None = None  # int64 [B]: the blocks of the state of a step, see `step_in_rows`

    @property
    def is_packed(self) -> bool:
        """Whether the mask numbers packed sequences."""
        return self.attention_mask is not None and self.attention_mask.dtype != torch.bool

    @property
    def key_mask(self) -> Tensor | None:
        """The mask as bool, False at padding."""
        return self.attention_mask > 0 if self.attention_mask is not None and self.is_packed else self.attention_mask


class AttentionMechanism(MechanismOptions, nn.Module):
    """Base class of all mechanisms; `settings` holds a valid value for every name in `options` (see its options)."""

    # Whether `prepare` has to know where queries and keys stand.
    needs_positions = False
    # Whether the inputs have what `gates` computes from the hidden states of the layer.
    needs_gates = False
    # The stock projections that only softmax attention reads, so that training must not count on their gradients.
    replaced_projections: tuple[str, ...] = ()
    # Whether the state depends on the queries, so that `absorb` needs them.
    absorbs_queries = False

    def __init__(self, settings: Mapping[str, Any], shape: LayerShape):
        super().__init__()
        load_implementations()
        self.shape = shape
        self.set_settings(settings)

    def set_settings(self, settings: Mapping[str, Any]) -> None:
        """Replace the settings, where no parameter or attribute depends on what changes."""
        self.settings = dict(settings)
        # Only a mechanism with the same signature may continue a state.
        options = ", ".join(f"{name}={settings.get(name)!r}" for name in self.options)
        self.signature = f"{type(self).__name__}({options})"

    def layer_setting(self, name: str) -> Any:
        """The value of an option for this layer, of its list if it has one (ValueError if that is too short)."""
        value = self.settings[name]
        if not isinstance(value, (list, tuple)):
            return value
        if self.shape.layer >= len(value):
            raise ValueError(
                f"`{name}` = {list(value)} has no value for layer {self.shape.layer}; give one value per layer."
            )
        return value[self.shape.layer]

    def share_with(self, first: AttentionMechanism) -> None:
        """Share parameters with the mechanism of the first layer; called for every other layer."""

    def reset_parameters(self) -> None:
        """Initialise the parameters and buffers that no checkpoint has filled; equal seeds give equal values."""

    def start_from(self, attention: nn.Module) -> None:
        """Initialise what starts from the weights of the layer, which are there now."""

    def calibrate(self, inputs: MechanismInputs) -> None:
        """Fit constants (persistent buffers) to real queries and keys, once; most mechanisms have none."""

    def prepare(self, inputs: MechanismInputs) -> MechanismInputs:
        """The inputs of `forward`, from those after rotary embedding; called if the mechanism `needs_positions`.

        The positions are the `position_ids` of the tokens.
        """
        return inputs

    def gates(self, hidden_states: Tensor) -> Tensor:
        """Numbers `[B, N, C]`, any C, from the `hidden_states [B, N, E]` that also give queries, keys and values.

        They are in float32 (float64 for float64 inputs), part of the inputs and of what a rollback has to keep. Only
        called if `needs_gates`.
        """
        raise NotImplementedError

    def generator(self, draw: int = 0) -> torch.Generator:
        """A CPU generator seeded by `seed`, the layer and the draw, so every process draws the same projections."""
        number = self.settings.get("seed", 0) * 100_003 + self.shape.layer + draw * 2_654_435_761
        return torch.Generator().manual_seed(number % 2**32)  # the generator uses only 32 bits

    def forward(self, inputs: MechanismInputs, state: State | None = None) -> tuple[Tensor, State | None]:
        """Compute the attention output and the new state.

        Args:
            state: the result of an earlier call, or None at the start; only changed with `inputs.in_place`.

        Returns:
            The output `[B, N, H, W]` in the dtype of the queries, which is 0 for a query that sees no key; and the new
            state, or None if the mechanism has no state.
        """
        raise NotImplementedError

    def attend_packed(self, inputs: MechanismInputs) -> Tensor | None:
        """The output `[B, N, H, W]` of packed sequences as they stand in their rows, 0 at padding; None if no kernel
        takes them so. The mask numbers them; a run of equal numbers is a sequence.
        """
        return None

    def reads_at_once(self, dtype: torch.dtype) -> bool:
        """Whether one kernel on CUDA reads long inputs of this dtype, with no memory for each token but its results."""
        return False

    def absorb(self, inputs: MechanismInputs, state: State | None = None) -> State | None:
        """The state after these keys, without an output; the queries are 0 unless `absorbs_queries`."""
        return self(inputs, state)[1]

    def step_in_rows(self, inputs: MechanismInputs, states: State, rows: Tensor) -> Tensor:
        """One more real token of each of B sequences, whose states stand in a cache: the output `[B, 1, H, W]`.

        No branch depends on data, and no device is waited for.

        Args:
            states: the tensors of the state, `[blocks, ...]`; each block is dense, and blocks may be apart. That of
                sequence b is `x[rows[b]]` of every tensor x, and is overwritten there; no other number changes.
            rows: int64 `[B]`, all different; a block that is named twice, and what is read there, are undefined.

        Raises:
            ValueError: if there are several tokens or a mask, or the shapes, dtypes or devices do not match.
            IndexError: on a CPU, if one of the rows is no block; then no state has changed.
        """
        batch, _, length, _ = inputs.query.shape
        if length != 1 or inputs.key.shape[2] != 1 or inputs.attention_mask is not None:
            raise ValueError("A step in rows has one token per sequence and no mask; use `forward`.")
        if rows.dtype != torch.int64 or rows.shape != (batch,):
            raise ValueError(f"`rows` is {rows.dtype} {list(rows.shape)}; it must be int64 [{batch}].")
        output = self._step_in_rows(inputs._replace(in_place=True, rows=rows), states)
        if output is None:
            output, new = self(inputs._replace(in_place=True), tuple(x.index_select(0, rows) for x in states))
            for x, y in zip(states, new or ()):
                x.index_copy_(0, rows, y.to(x.dtype))
        return output

    def _step_in_rows(self, inputs: MechanismInputs, states: State) -> Tensor | None:
        """`step_in_rows` where the mechanism can do without copies of the states, else None."""
        return None

    def state_layout(self, dtype: torch.dtype, is_causal: bool = True) -> list[tuple[torch.Size, torch.dtype]]:
        """The shape `[1, ...]` and dtype of each tensor of the state after one token of one sequence, and after more.

        The mechanism runs on zeros, on the CPU if it is small and else on the meta device, wherever its parameters are.
        `dtype` is that of queries, keys and values. The state of cross-attention (`is_causal` false) is made of all
        keys at once.
        """
        shape = self.shape
        sizes = [value for name, value in self.settings.items() if name not in ("trained_length", "seed")]
        tokens = sum(x for value in sizes for x in (value if isinstance(value, list) else [value]) if type(x) is int)
        size = shape.num_heads * shape.head_dim * tokens + sum(x.numel() for x in (*self.parameters(), *self.buffers()))
        # The meta device takes a fifth of a second for what a CPU computes in four thousandths.
        device = torch.device("cpu" if size <= MOST_COMPUTED else "meta")
        zeros = copy.deepcopy(self).to("meta").to_empty(device=device)
        with device, torch.no_grad():
            for x in (*zeros.parameters(), *zeros.buffers()):
                x.zero_()
            query = torch.zeros(1, shape.num_heads, 1, shape.head_dim, dtype=dtype, device=device)
            key = torch.zeros(1, shape.num_key_value_heads, 1, shape.head_dim, dtype=dtype, device=device)
            inputs = MechanismInputs(query, key, key, None, 1.0, is_causal)
            if zeros.needs_positions:
                inputs = zeros.prepare(inputs._replace(positions=key.new_zeros(1, 1, dtype=torch.int32)))
            if zeros.needs_gates:
                hidden = key.new_zeros(1, 1, shape.hidden_size or 0)
                inputs = inputs._replace(gates=zeros.gates(hidden))
            state = zeros(inputs)[1]
        return [(tensor.shape, tensor.dtype) for tensor in state or ()]


def scaled(hidden_states: Tensor) -> Tensor:
    """Hidden states divided by sqrt(E) in the accumulation dtype, so that one learning rate suits every width."""
    return accumulated(hidden_states) * hidden_states.shape[-1] ** -0.5


def hidden_size_of(shape: LayerShape) -> int:
    """E of a layer whose mechanism has gates; ValueError if it is unknown."""
    if shape.hidden_size is None:
        raise ValueError("Gates are computed from hidden states; give the layer's `hidden_size`.")
    return shape.hidden_size


class OutputParts:
    """Outputs `[B, C, H, W]` of chunks of tokens, which become one tensor in the dtype of the queries `[B, H, N, D]`.

    Without gradients, a chunk is written into that tensor at once, so that no second copy of all of them ever exists.
    `order [B, N]` is the place of each token in the output, if they do not come in order.
    """

    def __init__(self, query: Tensor, order: Tensor | None = None) -> None:
        self.dtype, self.count, self.order = query.dtype, query.shape[2], order
        self.parts: list[Tensor] = []
        self.whole: Tensor | None = None
        self.written = 0

    def append(self, part: Tensor) -> None:
        """Add the next chunk."""
        tokens = part.shape[1]
        if tokens == self.count or part.requires_grad:
            self.parts.append(part)
            return
        if self.whole is None:
            batch, _, heads, width = part.shape
            self.whole = part.new_empty(batch, self.count, heads, width, dtype=self.dtype)
        places = slice(self.written, self.written + tokens)
        if self.order is None:
            self.whole[:, places] = part
        else:
            part = part.to(self.dtype)
            self.whole.scatter_(1, self.order[:, places, None, None].expand_as(part), part)
        self.written += tokens

    def joined(self) -> Tensor:
        """All chunks, `[B, N, H, W]`."""
        if self.whole is not None:
            return self.whole
        whole = torch.cat(self.parts, dim=1) if len(self.parts) > 1 else self.parts[0]
        if self.order is not None:
            whole = torch.empty_like(whole).scatter(1, self.order[:, :, None, None].expand_as(whole), whole)
        return whole.to(self.dtype)


def mask_chunks(mask: Tensor | None, size: int, key: Tensor) -> Sequence[Tensor | None]:
    """The mask `[B, S]` in chunks of `size` tokens, as `key [B, heads, S, D]` is split; without one, None for each."""
    return [None] * max(1, -(-key.shape[2] // size)) if mask is None else mask.split(size, dim=1)


# Means of consecutive segments of each row's real tokens, and reordering that moves padding, which may be anywhere:
#
#     tokens   a b - c d e - f g     - is padding; a row of 7 real tokens in 3 segments: token r is in floor(3 r / 7)
#     segment  0 0   0 1 1   2 2


def segment_mean_weights(mask: Tensor, segments: int, dtype: torch.dtype) -> Tensor:
    """The matrix `[B, M, N]` that averages the real tokens (mask bool `[B, N]`) of each of M `segments` of a row.

    Each row of the batch is divided by its own number of tokens, so padding and other rows do not affect it. A row of
    at most M real tokens has one token per segment, followed by empty segments, whose weights are 0.
    """
    rank = mask.cumsum(dim=1) - 1
    count = (rank[:, -1:] + 1).clamp(min=segments)
    owner = (rank * segments).div(count, rounding_mode="floor").masked_fill(~mask, -1)
    weights = (owner.unsqueeze(1) == torch.arange(segments, dtype=torch.long, device=mask.device)[:, None]).to(dtype)
    return weights / weights.sum(dim=2, keepdim=True).clamp(min=1)


def segment_means(x: Tensor, segments: int, weights: Tensor | None = None) -> Tensor:
    """Means `[B, heads, M, D]` of `x [B, heads, N, D]`, of all tokens or by the `weights` of `segment_mean_weights`."""
    length = x.shape[2]
    if weights is None and length >= segments and not is_tracing():
        if length % segments == 0:
            return x.unflatten(2, (segments, -1)).mean(dim=3)
        if x.device.type == "cpu":  # a product with a matrix of mostly zeros costs more
            bounds = [-(-segment * length // segments) for segment in range(segments + 1)]
            sizes = [end - start for start, end in itertools.pairwise(bounds)]
            return torch.stack([part.mean(dim=2) for part in x.split(sizes, dim=2)], dim=2)
    if weights is None:
        mask = torch.ones(1, length, dtype=torch.bool, device=x.device)
        weights = segment_mean_weights(mask, segments, x.dtype).unsqueeze(1)
    return weigh_tokens(weights, x)


def weigh_tokens(weights: Tensor, x: Tensor) -> Tensor:
    """The product of `weights [1 or B, 1 or heads, M, N]` and `x [B, heads, N, D]`."""
    rows = x.transpose(1, 2)
    if weights.shape[1] == 1 and rows.is_contiguous():  # the layout in models allows one product without a copy
        product = torch.bmm(weights.squeeze(1).expand(x.shape[0], -1, -1), rows.flatten(2))
        return product.unflatten(2, rows.shape[2:]).transpose(1, 2)
    return weights @ x


def without_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x [B, heads, N, D]` with 0 at padding, where x may hold any value, even one whose product with 0 is NaN."""
    return x if mask is None else torch.where(mask[:, None, :, None], x, 0.0)  # `where` keeps the memory layout


def real_first(mask: Tensor) -> Tensor:
    """The places `[B, N]` of each row's real tokens, in order, followed by those of its padding.

    This does not sort, because ONNX has no stable sort.
    """
    real, padding = mask.cumsum(dim=1), (~mask).cumsum(dim=1)
    return inverse_order(torch.where(mask, real, real[:, -1:] + padding) - 1)


def inverse_order(places: Tensor) -> Tensor:
    """The inverse of the permutation `places [B, N]`."""
    numbers = torch.arange(places.shape[1], dtype=torch.long, device=places.device).expand_as(places)
    return torch.empty_like(places).scatter(1, places, numbers)


def gather_tokens(x: Tensor, places: Tensor) -> Tensor:
    """`x [B, heads, N, D]` with its tokens in the order `places [B, N]`."""
    # `take_along_dim` would tie `torch.export` to the batch size and length of the example.
    return x.gather(2, places[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
