# SPDX-License-Identifier: Apache-2.0
"""The cache layer of linear attention, which stores a state of constant size in place of keys and values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionLayer, StaticLayer

from ..mechanisms.base import MechanismInputs, State
from ..torch_kernels.blocks import is_tracing


# The attributes in which LinearAttentionLayer keeps Mamba or convolution states, for layers that also have attention.
RECURRENT_STATES = (
    "conv_states",
    "recurrent_states",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "has_previous_state",
    "conv_kernel_size",
)


class Tokens(NamedTuple):
    """Tokens that a state may have to take in again."""

    key: Tensor  # [B, Hkv, S, D]
    value: Tensor  # [B, Hkv, S, D]
    attention_mask: Tensor | None = None  # bool [B, S]
    positions: Tensor | None = None  # integers [B, S], where the mechanism needs them
    gates: Tensor | None = None  # float32 [B, S, C], where the mechanism needs them
    query: Tensor | None = None  # [B, H, S, D], where the state depends on them


class LinearAttentionStateLayer(LinearAttentionLayer, CacheLayerMixin):
    """Holds the state of one attention layer, a tuple of float32 tensors whose first axis is the batch.

    The first base class makes transformers size masks by the remaining softmax layers; the second gives this layer a
    length. If `static` is true, the state tensors keep their addresses and the length is a tensor, as `torch.compile`
    requires. `keys` and `values`, which some stock modules read, have length 0, because the state holds everything.

    A converted attention layer first calls `claim` with the signature of its mechanism. Stock code then calls `update`,
    and finally `extend` stores the new state and counts the tokens, so a call that is refused earlier changes nothing.
    Softmax attention does not call `claim`, and `update` therefore refuses it.

    Rollback (assisted decoding) is exact. While recording, the layer keeps the keys and values since the last `crop`
    and the state of that moment. `crop` returns to that state and leaves the remaining keys as `pending`, which the
    mechanism absorbs before the next tokens.
    """

    supports_early_init = False
    # Read instead of isinstance, because a checkpoint may load its own copy of this class into the same process.
    holds_linear_state = True

    def __init__(self, max_cache_len: int = -1, static: bool = False, number_of_states: int = 1):
        CacheLayerMixin.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states)
        self.max_cache_len, self.static = max_cache_len, static
        self.cumulative_length: int | Tensor = torch.tensor(0, dtype=torch.long, device="cpu") if static else 0
        self.siblings: list[Any] = []  # all layers of the cache
        self.state: State | None = None
        self.owns_state = False  # whether one more token may be written over it, because no other tensor has its memory
        self.signature: str | None = None  # identifies the mechanism that made the state
        self.layout: tuple[Any, ...] | None = None  # heads, sizes and dtypes of the keys and values in the state
        self.is_claimed = False
        self.state_at_crop: State | None = None
        self.recorded: list[Tokens] = []
        self.pending: Tokens | None = None

    @classmethod
    def replacing(cls, layer: Any) -> LinearAttentionStateLayer:
        """A new layer that replaces a softmax layer; ValueError if that holds keys and values, which make no state."""
        length = layer.get_seq_length()
        if not isinstance(length, Tensor) and length > 0:
            raise ValueError(
                f"Got a cache that already holds {length} tokens of softmax keys and values, but a linear attention "
                "layer needs its state from the first token on. Pass an empty cache, or none."
            )
        if type(layer).__module__ != DynamicLayer.__module__:
            raise ValueError(
                f"Got a cache with a {type(layer).__name__}, which holds more than keys and values; keep the attention "
                "layers that use it softmax (setting `layers`)."
            )
        static = isinstance(layer, StaticLayer)
        new = cls(layer.max_cache_len if static else -1, static, getattr(layer, "number_of_states", 1))
        new.record_past = getattr(layer, "record_past", False)
        if isinstance(layer, LinearAttentionLayer):  # the stock model may have updated its own states already
            vars(new).update({name: vars(layer)[name] for name in RECURRENT_STATES})
        return new

    def lazy_initialization(
        self, key_states: Tensor | None = None, value_states: Tensor | None = None, **recurrent: Any
    ) -> None:
        """Adopt the device and dtype of the first keys, or initialise a recurrent state of the stock model."""
        if recurrent:
            LinearAttentionLayer.lazy_initialization(self, **recurrent)
            return
        self.device, self.dtype, self.is_initialized = key_states.device, key_states.dtype, True
        if self.static:
            self.cumulative_length = self.cumulative_length.to(key_states.device)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.cumulative_length)

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile steps with this layer: unless it records, tensors keep their addresses."""
        return self.static and not self.record_past

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can roll this layer back, which assisted decoding asks for since 5.24."""
        return self.record_past and not self.has_other_states

    @property
    def num_rows(self) -> int | None:
        """B of the stored tokens, or None before the first token."""
        held = self.state if self.pending is None else self.pending
        return held[0].shape[0] if held else None

    def claim(self, signature: str) -> None:
        """Announce an `update` by a converted layer with this signature; ValueError if the state has another one."""
        if self.signature not in (None, signature) and self.num_rows is not None:
            raise ValueError(
                f"Got a cache with the state of {self.signature} in a layer of {signature}. Only the mechanism that "
                "made a state can continue it, with the same options; let this model read the tokens into a new cache."
            )
        self.signature, self.is_claimed = signature, True

    def leave_inference_mode(self) -> None:
        """Copy tensors that were made under `torch.inference_mode`, if it has ended: autograd refuses to save them, and
        torch to write over them."""
        held = (*(self.state or ()), *(self.pending or ()), *(x for tokens in self.recorded for x in tokens))
        if torch.is_inference_mode_enabled() or not any(map(torch.is_inference, filter(torch.is_tensor, held))):
            return
        if self.static:
            self.cumulative_length = self.cumulative_length.clone()
        state, self.state = self.state, None
        self._map_batch(torch.clone)
        if state is not None:
            self.store(tuple(x.clone() for x in state))

    def refuse_other_rows(self, num_rows: int) -> None:
        """Raise ValueError if the stored state has another batch size."""
        if (cached := self.num_rows) not in (None, num_rows):
            raise ValueError(other_rows(cached, num_rows))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return only the new keys and values, which the mechanism adds to the state.

        ValueError if softmax attention calls it, or they do not match the earlier ones; nothing has changed then.
        """
        is_claimed, self.is_claimed = self.is_claimed, False
        if not is_claimed:
            refuse_linear_layer(self)
        self.refuse_other_rows(key_states.shape[0])
        layout = (key_states.shape[1], key_states.shape[3], value_states.shape[3], key_states.dtype, value_states.dtype)
        if self.num_rows is not None and self.layout not in (None, layout):
            raise ValueError(
                f"Got a cache made of keys and values with {_describe(self.layout)}, and new ones with "
                f"{_describe(layout)}. Use the model, dtype and autocast setting with which the cache was made."
            )
        self.layout = layout
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.keys is None or self.keys.shape[0] != key_states.shape[0]:
            # A view would keep the memory of all keys and values alive.
            self.keys, self.values = key_states[:, :, :0].clone(), value_states[:, :, :0].clone()
        return key_states, value_states

    def extend(self, state: State, inputs: MechanismInputs, needs_queries: bool) -> None:
        """Store the state after the tokens of `inputs`, and while recording these tokens for a rollback."""
        key, query = inputs.key, inputs.query if needs_queries else None
        if self.record_past:
            tokens = Tokens(key, inputs.value, inputs.attention_mask, inputs.positions, inputs.gates, query)
            self.recorded.append(tokens)
        # Where gradients are enabled, a graph may need it as it is. Compiled steps must not depend on who owns a state.
        may_own = key.shape[2] == 1 and not is_tracing() and not torch.is_grad_enabled()
        owned = may_own and self.owns_state and all(map(operator.is_, state, self.state or ()))
        self.store(state, key.shape[2])
        if may_own:
            self.owns_state = owned or all(x is not None and has_own_memory(x) for x in state)

    def store(self, state: State, num_tokens: int = 0) -> None:
        """Replace the stored state by one of `num_tokens` more tokens."""
        if not self.static:
            self.cumulative_length += num_tokens
        elif num_tokens:
            self.cumulative_length.add_(num_tokens)
        self.batch_size, self.owns_state = state[0].shape[0], False
        if self.static and self.state is not None and self.state[0].shape == state[0].shape:
            for old, new in zip(self.state, state):
                if new is not old:  # written in place
                    old.copy_(new)
        else:
            self.state = tuple(x.clone(memory_format=torch.contiguous_format) for x in state) if self.static else state
            if self.static and not torch.compiler.is_compiling():
                for tensor in self.state:
                    torch._dynamo.mark_static_address(tensor)

    def restore(self, state: State, num_tokens: int) -> None:
        """Restore the saved state of so many tokens."""
        self.lazy_initialization(state[0], None)
        self.cumulative_length = num_tokens
        self.store(state)
        self.state_at_crop = self.state

    @property
    def has_other_states(self) -> bool:
        """Whether the layer also holds recurrent states of the stock model (Mamba, short convolutions)."""
        return any((*self.is_conv_states_initialized.values(), *self.is_recurrent_states_initialized.values()))

    def activate_past_recording(self) -> None:
        """Record keys and values from now on, so that `crop` can remove them."""
        if not self.record_past:
            self.state_at_crop = self.state
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; `crop(0)` only clears the record.

        Raises:
            RuntimeError: if nothing was recorded, or the stock model keeps recurrent states in this layer.
            ValueError: for a positive number, or for more tokens than were recorded.
        """
        if not self.record_past:
            raise RuntimeError(
                "Call `activate_past_recording()` on the cache before the tokens that `crop` may remove."
            )
        if tokens_to_remove > 0:
            raise ValueError(
                f"Got `crop({tokens_to_remove})`; pass the number of tokens to remove as a negative number."
            )
        if self.has_other_states:
            raise RuntimeError("This layer also holds recurrent states of the stock model, which cannot roll back.")
        if self.pending is not None:
            self.recorded.insert(0, self.pending)
        available = sum(tokens.key.shape[2] for tokens in self.recorded)
        if -tokens_to_remove > available:
            raise ValueError(
                f"Got `crop({tokens_to_remove})`, but only {available} tokens were recorded since the last one."
            )
        if tokens_to_remove < 0:
            self.state = self.state_at_crop
            self.pending = _concatenate(self.recorded, available + tokens_to_remove)
            self.cumulative_length += tokens_to_remove
        elif self.pending is None:
            self.state_at_crop = self.state
        self.recorded = []

    def absorbed(self, state: State | None) -> None:
        """Store the `state` that now includes `pending`; the next rollback starts from it."""
        self.state = self.state_at_crop = state
        self.pending, self.owns_state = None, False

    def get_seq_length(self) -> int | Tensor:
        """The number of tokens seen; a tensor if `static`."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask sizes of the first softmax layer, if any: transformers before 5.23 asks layer 0 for all layers."""
        for layer in self.siblings:
            # A recurrent layer of the stock model (Mamba, short convolutions) has no mask sizes.
            is_softmax = hasattr(layer, "get_mask_sizes") and not getattr(layer, "holds_linear_state", False)
            if is_softmax and not getattr(layer, "is_sliding", False):
                return layer.get_mask_sizes(query_length)
        # In a graph the shape of a tensor must not depend on the value of another tensor.
        return (self.max_cache_len if self.static else self.get_seq_length() + query_length), 0

    def get_max_length(self) -> int:
        """The length of a static cache, or -1 without a limit."""
        return self.max_cache_len

    def state_bytes(self) -> int:
        """The size of the state in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.state or () if tensor is not None)

    def reset(self) -> None:
        """Forget all tokens."""
        LinearAttentionLayer.reset(self)
        self.state = self.state_at_crop = self.pending = self.keys = self.values = None
        self.signature = self.layout = None
        self.is_claimed = self.owns_state = False
        self.recorded = []
        if self.static:
            self.cumulative_length.zero_()
        else:
            self.cumulative_length = 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the rows for beam search."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        self._map_batch(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._map_batch(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices`."""
        self._map_batch(lambda tensor: tensor[indices])

    def _map_batch(self, function: Callable[[Tensor], Tensor]) -> None:
        def over(tensors: tuple[Any, ...] | None) -> Any:
            return None if tensors is None else tuple(None if t is None else function(t) for t in tensors)

        def over_tokens(tokens: Tokens | None) -> Any:
            return None if tokens is None else Tokens(*over(tokens))

        if self.state is not None:
            self.store(over(self.state))
        if self.keys is not None:
            self.keys, self.values = function(self.keys), function(self.values)
        self.state_at_crop, self.pending = over(self.state_at_crop), over_tokens(self.pending)
        self.recorded = [over_tokens(tokens) for tokens in self.recorded]

    def offload(self) -> None:
        """Do nothing: the state is small and does not grow."""

    prefetch = offload


def has_own_memory(tensor: Tensor) -> bool:
    """Whether a tensor is dense and fills its memory, as a part of another one does not."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _describe(layout: tuple) -> str:
    num_heads, key_size, value_size, key_dtype, value_dtype = layout
    return f"{num_heads} heads of {key_size} and {value_size} numbers in {key_dtype} and {value_dtype}"


def refuse_linear_layer(layer: Any) -> None:
    """Raise ValueError if this layer of a cache, which softmax attention is about to use, holds a linear state."""
    if getattr(layer, "holds_linear_state", False):
        raise ValueError(
            "Got a cache of linear attention in a layer that computes softmax attention, which would find no earlier "
            "tokens in it. Pass a new cache, or none."
        )


def other_rows(cached: int, given: int) -> str:
    """The error message for continuing a cache with another batch size."""
    if cached == 1:
        advice = (
            f"Call `cache.batch_repeat_interleave({given})` first, on a copy (`copy.deepcopy`) if you need the single "
            "row again."
        )
    else:
        advice = "Each row of the input continues one row of the cache, in the same order."
    return f"Got a cache of {cached} row{'s' * (cached != 1)} and an input of {given}. {advice}"


def refuse_other_softmax_rows(cache: Any, layer_idx: int, num_rows: int) -> None:
    """Raise ValueError for a softmax layer of `cache` with another batch size, whose stock code would fail half-way."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    keys = getattr(layers[layer_idx], "keys", None) if layer_idx < len(layers) else None
    if isinstance(keys, Tensor) and keys.ndim == 4 and keys.numel() and keys.shape[0] != num_rows:
        raise ValueError(other_rows(keys.shape[0], num_rows))


def _concatenate(entries: Sequence[Tokens], length: int) -> Tokens | None:
    """The first `length` recorded tokens as one entry, or None if there are none; with positions it has a mask."""
    if length == 0:
        return None
    keys, values, masks, positions, gates, queries = zip(*entries)
    if any(entry is not None for entry in (*masks, *positions)):
        masks = tuple(
            torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device) if entry is None else entry
            for key, entry in zip(keys, masks)
        )

    def joined(parts: Sequence[Any], dim: int) -> Any:
        return None if parts[0] is None else torch.cat(parts, dim=dim).narrow(dim, 0, length)

    key, value, query = (joined(parts, 2) for parts in (keys, values, queries))
    mask, place, gate = (joined(parts, 1) for parts in (masks, positions, gates))
    return Tokens(key, value, mask, place, gate, query)


def state_layer(cache: Any, layer_idx: int) -> LinearAttentionStateLayer:
    """The state layer of `cache` at `layer_idx`; it replaces a softmax layer there, or raises ValueError."""
    cache = getattr(cache, "self_attention_cache", cache)
    while len(cache.layers) <= layer_idx:
        if cache.layer_class_to_replicate is None:
            raise ValueError(f"Got a cache of {len(cache.layers)} layers, but layer {layer_idx} needs one.")
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[layer_idx]
    if not getattr(layer, "holds_linear_state", False):
        layer = cache.layers[layer_idx] = LinearAttentionStateLayer.replacing(layer)
        layer.siblings = cache.layers
        if getattr(cache, "offloading", False) and all(getattr(x, "holds_linear_state", False) for x in cache.layers):
            cache.offloading = False  # transformers would look in vain for a softmax layer to prefetch
    return layer
