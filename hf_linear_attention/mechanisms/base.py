# SPDX-License-Identifier: Apache-2.0
"""The contract of an attention mechanism and of its options.

A mechanism replaces softmax(q k^T) v inside one attention layer. It has a module, its options in `options.py`
and a line in `registry.py`. Its class attributes say what it can do, and a configuration that asks for more is refused
with the name of what is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ..torch_kernels.implementations import load_implementations
from .options import MechanismOptions


State = tuple[torch.Tensor, ...]


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
    `hidden_size` is E, the size of the hidden states that the layer projects to queries, keys and values.
    """

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    layer: int
    max_length: int | None = None
    alibi_slopes: tuple[float, ...] | None = None
    rotary: Rotary | None = None
    hidden_size: int | None = None


class AttentionMechanism(MechanismOptions, nn.Module):
    """Base class of all mechanisms; `settings` holds a valid value for every name in `options` (see its options)."""

    # The number of tensors at the end of the state that grow with the length.
    num_growing: ClassVar[int] = 0
    # Whether `prepare` has to know where queries and keys stand.
    needs_positions = False
    # Whether `forward` takes what `gates` computes from the hidden states of the layer.
    needs_gates = False
    # Whether the state depends on the queries, so that `absorb` takes them.
    absorbs_queries = False
    # Whether `forward` takes `in_place`, which allows it to write the state after one more token over `state`.
    can_step_in_place = False

    def __init__(self, settings: Mapping[str, Any], shape: LayerShape):
        super().__init__()
        load_implementations()
        self.settings, self.shape = dict(settings), shape
        # Only a mechanism with the same signature may continue a state.
        options = ", ".join(f"{name}={settings.get(name)!r}" for name in self.options)
        self.signature = f"{type(self).__name__}({options})"

    def layer_setting(self, name: str) -> Any:
        """The value of an option for this layer; an option with `is_per_layer` may be a list of values.

        Raises:
            ValueError: if the list has no value for this layer.
        """
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

    def calibrate(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **per_token: torch.Tensor,
    ) -> None:
        """Fit constants (persistent buffers) to real queries and keys, once; most mechanisms have none.

        The shapes are those of `forward`; `attention_mask` is bool `[B, S]` or None; `per_token` has the `gates`, if
        the mechanism needs them.
        """

    def prepare(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Queries, keys and positions for `forward`, from those after rotary embedding.

        Where it returns positions, `forward` takes them as a further argument of that name.

        `positions` `[B, N]` (int32) are the `position_ids` of the tokens, or None unless `needs_positions`.
        """
        return query, key, None

    def gates(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Numbers for each token that depend on the hidden state from which the layer makes queries, keys and values.

        Only called if `needs_gates`. `forward`, `absorb` and `attention_weights` then take the result as an argument
        of that name, with the tokens of the keys; it is part of what a rollback has to keep.

        Args:
            hidden_states: `[B, N, E]`, in the dtype of the model.

        Returns:
            `[B, N, C]`, any C, in float32 (float64 for float64 inputs).
        """
        raise NotImplementedError

    def generator(self, draw: int = 0) -> torch.Generator:
        """A CPU generator seeded by `seed`, the layer and the draw, so every process draws the same projections."""
        number = self.settings.get("seed", 0) * 100_003 + self.shape.layer + draw * 2_654_435_761
        return torch.Generator().manual_seed(number % 2**32)  # the generator uses only 32 bits

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None,
        scaling: float,
        is_causal: bool,
        state: State | None,
    ) -> tuple[torch.Tensor, State | None]:
        """Compute the attention output and the new state.

        Args:
            query: `[B, H, N, D]`, after rotary embedding and normalisation.
            key: `[B, Hkv, S, D]`; with a state, only the keys after it.
            value: `[B, Hkv, S, D]`, those of the keys.
            attention_mask: bool `[B, S]`, False at padded keys, or None. Inside a traced graph a causal mechanism may
                get integers instead: the number of each key's packed sequence from 1, and 0 at padding.
            scaling: the factor of the layer's q·k.
            is_causal: whether a query sees only its own and earlier keys.
            state: the result of an earlier call, or None at the start; only changed in place with `in_place`.

        Returns:
            The output `[B, N, H, D]` in the dtype of `query`, which is 0 for a query that sees no key; and the new
            state, or None if the mechanism has no state.
        """
        raise NotImplementedError

    def absorb(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None,
        scaling: float,
        state: State | None,
        query: torch.Tensor | None = None,
        **per_token: torch.Tensor,
    ) -> State | None:
        """The state after these keys, without an output.

        Args:
            query: given if `absorbs_queries`.
            per_token: the `positions` and `gates` of the keys, as in `forward`.
        """
        if query is None:
            query = key.new_zeros(key.shape[0], self.shape.num_heads, *key.shape[2:])
        _, state = self(
            query, key, value, attention_mask=attention_mask, scaling=scaling, is_causal=True, state=state, **per_token
        )
        return state

    def attention_weights(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None,
        scaling: float,
        is_causal: bool,
        **per_token: torch.Tensor,
    ) -> torch.Tensor:
        """The matrix `[B, H, N, S]`, which the mechanism never forms itself, for inspection.

        It is the output for v = identity (Performer 2020, appendix C.4), because every mechanism here is linear in v,
        and costs O(N S) memory.
        """
        batch, num_kv_heads, length, _ = key.shape
        identity = torch.eye(length, dtype=query.dtype, device=key.device).expand(batch, num_kv_heads, -1, -1)
        options: dict[str, Any] = {"attention_mask": attention_mask, "scaling": scaling, "is_causal": is_causal}
        output, _ = self(query, key, identity, state=None, **options, **per_token)
        return output.transpose(1, 2)


class OutputParts:
    """Outputs `[B, C, H, W]` of chunks of tokens, which become one tensor in the dtype of the queries.

    Without gradients, a chunk is written into that tensor at once, so that no second copy of all of them ever exists.

    Args:
        query: `[B, H, N, D]`, of whose tokens the output has one each.
        order: `[B, N]`, the place of each token in the output; None if they come in order.
    """

    def __init__(self, query: torch.Tensor, order: torch.Tensor | None = None) -> None:
        self.dtype, self.count, self.order = query.dtype, query.shape[2], order
        self.parts: list[torch.Tensor] = []
        self.whole: torch.Tensor | None = None
        self.written = 0

    def append(self, part: torch.Tensor) -> None:
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

    def joined(self) -> torch.Tensor:
        """All chunks, `[B, N, H, W]`."""
        if self.whole is not None:
            return self.whole
        whole = torch.cat(self.parts, dim=1) if len(self.parts) > 1 else self.parts[0]
        if self.order is not None:
            whole = torch.empty_like(whole).scatter(1, self.order[:, :, None, None].expand_as(whole), whole)
        return whole.to(self.dtype)


def mask_chunks(mask: torch.Tensor | None, size: int, key: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """The mask `[B, S]` in chunks of `size` tokens, as `key [B, heads, S, D]` is split; without one, None for each."""
    return [None] * max(1, -(-key.shape[2] // size)) if mask is None else mask.split(size, dim=1)
