# SPDX-License-Identifier: Apache-2.0
"""The classes that replace softmax in a converted attention module; each is mixed in before the stock class.

`LinearizedAttention` is for self-attention. `LinearizedCrossAttention` is for queries of a decoder to the state of the
encoder's keys, which is computed once per generation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from ..mechanisms.base import MechanismInputs
from ..torch_kernels.blocks import is_tracing
from .cache import LinearAttentionStateLayer, Tokens, refuse_linear_layer, refuse_other_softmax_rows, state_layer
from .masks import attend_packed, linear_attention_mask, read_mask
from .transformers_internals import (
    FEATURE_ARGUMENTS,
    attention_implementation,
    cache_among,
    foreign_cache,
    wants_attentions,
    weights_at_hand,
)


IMPLEMENTATION = "linear_attention"


def linear_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention function registered as `linear_attention`; it calls `module.attend` (else ValueError).

    It serves all copies of this code in the process (the package, checkpoints), because the module does the work.
    """
    if not hasattr(module, "attend"):
        raise ValueError(
            f"`attn_implementation` = `{IMPLEMENTATION}` reached {type(module).__name__}, which was not converted. "
            "Choose `sdpa` for this model; its converted layers stay linear."
        )
    output, weights = module.attend(query, key, value, attention_mask, **kwargs)
    return output.contiguous(), weights  # some stock layers call `view` on the output


def linear_attention_mask_of_config(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask function registered as `linear_attention`: that of the code which the config of the model belongs to."""
    return getattr(kwargs.get("config"), "linear_attention_mask", linear_attention_mask)(*args, **kwargs)


# Another copy may have registered its own, which do the same; compiled graphs depend on the registries.
if IMPLEMENTATION not in AttentionInterface().valid_keys():
    AttentionInterface.register(IMPLEMENTATION, linear_attention_forward)
if IMPLEMENTATION not in AttentionMaskInterface().valid_keys():
    AttentionMaskInterface.register(IMPLEMENTATION, linear_attention_mask_of_config)


def is_autocast(tensor: Tensor) -> bool:
    """Whether autocast is enabled on the device of this tensor."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)  # torch knows none for `meta`


def check_softmax_cache(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check, before a softmax layer beside converted layers runs, that its cache has the batch size of the input."""
    cache = cache_among((*args, *kwargs.values()))
    hidden = args[0] if args else kwargs.get("hidden_states")
    if cache is not None and isinstance(hidden, Tensor) and hidden.ndim == 3 and not is_tracing():
        refuse_other_softmax_rows(cache, module.layer_idx, hidden.shape[0])


class LinearizedAttention:
    """Mixed in before a stock attention class; finds the cache of this layer and attends with the mechanism."""

    # The attribute of an encoder-decoder cache that holds the layers of this attention.
    cache_name = "self_attention_cache"
    attends_across = False  # whether keys come from another sequence
    # `observe_attention` sets this function, which gets the mechanism's inputs while the layer computes softmax.
    linear_attention_observer: Callable[..., None] | None = None
    # An engine that keeps the states of its requests itself, as vLLM does, sets this function. It gets the mechanism's
    # inputs before `prepare`, without positions, and returns the output `[B, N, H, D]`.
    linear_attention_backend: Callable[[MechanismInputs], Tensor] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the stock forward with two more arguments for the attention function, which it passes on.

        They are the state layer of the cache, and the gates of a mechanism that computes them from the hidden states.

        Raises:
            NotImplementedError: for a cache of another type, as continuous batching passes.
            ValueError: if the layer computes softmax and the cache holds a linear state.
        """
        parts = self.linear_attention_parts
        if any("_hf_hook" in vars(part) for part in parts):
            with weights_at_hand(parts):
                return self._forward(*args, **kwargs)
        return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = cache_among((*args, *kwargs.values()))
        is_observed = self.linear_attention_observer is not None
        if self.linear_attention.needs_gates and (self.linear_attention_enabled or is_observed):
            kwargs["gates"] = self._gates(args[0] if args else kwargs.get("hidden_states"), is_observed)
        if not self.linear_attention_enabled:
            self._refuse_linear_cache(cache)
            return super().forward(*args, **kwargs)
        if cache is not None:
            layer = kwargs["state_layer"] = self.find_state_layer(cache)
            if layer is not None:
                layer.claim(self.linear_attention.signature)
        elif (foreign := foreign_cache(kwargs)) is not None:
            raise NotImplementedError(
                f"Got a {type(foreign).__name__}, but linear attention keeps its state in a `Cache` of transformers. "
                "Continuous batching does not support a recurrent state; use `generate`."
            )
        if self.linear_attention_skips_bias:
            hidden = args[0] if args else kwargs["hidden_states"]
            kwargs["position_bias"] = hidden.new_zeros(1, 1, 1, 1)  # otherwise T5 would make one of size N x N
        return super().forward(*args, **kwargs)

    def _gates(self, hidden_states: Any, is_observed: bool) -> Tensor:
        """The gates of the mechanism, outside of autocast; observed ones have gradients, as observed outputs do."""
        size = self.linear_attention.shape.hidden_size
        if not isinstance(hidden_states, Tensor) or hidden_states.ndim != 3 or hidden_states.shape[2] != size:
            found = tuple(hidden_states.shape) if isinstance(hidden_states, Tensor) else hidden_states
            raise ValueError(
                f"{type(self).__name__} got `hidden_states` of shape {found}; {type(self.linear_attention).__name__} "
                f"computes gates from hidden states of shape (rows, tokens, {size})."
            )
        is_mixed = is_autocast(hidden_states)
        with (
            torch.autocast(hidden_states.device.type, enabled=False) if is_mixed else nullcontext(),
            torch.enable_grad() if is_observed else nullcontext(),
        ):
            return self.linear_attention.gates(hidden_states)

    def find_state_layer(self, cache: Any) -> LinearAttentionStateLayer | None:
        """The state layer of `cache` for this attention layer."""
        return state_layer(cache, self.layer_idx)

    def _refuse_linear_cache(self, cache: Any) -> None:
        """Refuse a linear state before softmax attention reads it; cross-attention reads before it calls `update`."""
        layers, place = getattr(getattr(cache, self.cache_name, cache), "layers", ()), getattr(self, "layer_idx", None)
        if place is not None and place < len(layers):
            refuse_linear_layer(layers[place])

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        state_layer: LinearAttentionStateLayer | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Linear attention in place of the attention function, for `query [B, H, N, D]` and `key [B, Hkv, S, D]`.

        Dropout of attention weights is left out, because there is no N x N matrix to apply it to. The results are the
        output `[B, N, H, D]`, and the weights `[B, H, N, S]` if they were requested, else None.

        Raises:
            ValueError: for a mask or an argument of softmax attention that linear attention cannot honour, or for a
                cache of another batch size.
        """
        seen: int | Tensor = 0
        if state_layer is not None:
            if state_layer.is_claimed:  # `update` was not called, as in cross-attention after the first step
                state_layer.refuse_other_rows(query.shape[0])
                state_layer.is_claimed = False
            seen = state_layer.get_seq_length()
        inputs = self.mechanism_inputs(query, key, value, attention_mask, seen=seen, **kwargs)
        if self.linear_attention_backend is not None:
            return self.linear_attention_backend(inputs), None
        # Autocast is disabled, because the sums must stay float32; entering its context costs as much as a layer norm.
        with torch.autocast(query.device.type, enabled=False) if is_autocast(query) else nullcontext():
            if wants_attentions(kwargs, self.model_config):
                return self._attend_with_weights(inputs, state_layer)
            output = self._attend(inputs, state_layer)
            return self._with_parameters(output) if self.training and torch.is_grad_enabled() else output, None

    def _with_parameters(self, output: Tensor) -> Tensor:
        """The output, on which every trainable parameter of the mechanism depends, if only with a gradient of 0.

        A short input may need no far keys, and distributed training waits for the gradient of each parameter.
        """
        trained = [x for x in self.linear_attention.parameters() if x.requires_grad]
        return output + sum(x.flatten()[:0].sum() for x in trained).to(output.dtype) if trained else output

    def mechanism_inputs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        seen: int | Tensor = 0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_ids: Tensor | None = None,
        gates: Tensor | None = None,
        **kwargs: Any,
    ) -> MechanismInputs:
        """Convert the arguments of a stock attention function to the inputs of the mechanism.

        `seen` keys are already in the state.
        """
        self._refuse_arguments(kwargs, attention_mask)
        scaling = self.linear_attention.shape.head_dim**-0.5 if scaling is None else scaling
        if scaling != self.linear_attention_scaling:  # OPT and similar models scale the query themselves
            query, scaling = query * (scaling / self.linear_attention_scaling), self.linear_attention_scaling
        if is_causal is None or attention_mask is not None or query.shape[2] == 1:
            # Moonshine passes False if a mask hides the future, or if there is no future to hide.
            is_causal = self.linear_attention_is_causal
        mask = None if attention_mask is None else self._read_mask(attention_mask, key, seen, is_causal)
        inputs = MechanismInputs(query, key, value, mask, scaling, is_causal, gates=gates)
        if self.linear_attention.needs_positions and self.linear_attention_backend is None:
            if position_ids is None:  # which some stock models keep from their layers: the numbers of the tokens
                numbers = torch.arange(query.shape[2], dtype=torch.long, device=query.device)
                position_ids = (seen + numbers).unsqueeze(0)
            inputs = inputs._replace(positions=position_ids.expand(query.shape[0], -1))
            inputs = self.linear_attention.prepare(inputs)
        return inputs

    def _refuse_arguments(self, kwargs: Mapping[str, Any], mask: Any) -> None:
        """Refuse arguments at run time; `refuse_features` has looked for the same features in the stock class.

        Refused are also the masks of attention functions that have their own, or none where there is padding.
        """
        for argument, feature in FEATURE_ARGUMENTS.items():
            if kwargs.get(argument) is not None and feature not in self.linear_attention.settings["drop"]:
                raise ValueError(
                    f"{type(self).__name__} passes `{argument}`, which linear attention cannot honour. Keep these "
                    f"layers softmax (setting `layers`), or convert without it (add `{feature}` to the setting `drop`)."
                )
        name = attention_implementation(self.model_config) or ""
        if name.startswith("paged|"):
            raise ValueError(
                f"Got `attn_implementation` = `{name}`, with which transformers makes no mask for linear attention, so "
                "that padding would count. Choose `sdpa` or `eager`."
            )
        if mask is not None and not isinstance(mask, Tensor):
            raise ValueError(
                f"Got an attention mask of type {type(mask).__name__}, as `attn_implementation` = `{name}` makes it; "
                "linear attention reads masks that are tensors. Choose `sdpa` or `eager`."
            )

    def _read_mask(self, mask: Tensor, key: Tensor, seen: int | Tensor, is_causal: bool) -> Tensor | None:
        """The mask of the keys, bool `[B, S]`, or the numbers of packed sequences; None if all keys are visible."""
        drop = self.linear_attention.settings["drop"]
        if mask.is_floating_point() and "position_bias" in drop:
            # BEiT adds its bias to the mask, in which only the lowest number hides a key.
            mask = (mask > torch.finfo(mask.dtype).min / 2).any(dim=1, keepdim=True)
        is_windowed = getattr(self.config, "sliding_window", None) is not None or "sliding_window" in drop
        size = key.shape[0]
        key_mask, segments = read_mask(mask, key.shape[2], seen, is_causal, batch_size=size, is_windowed=is_windowed)
        return key_mask if segments is None else segments

    def _attend(self, inputs: MechanismInputs, state_layer: LinearAttentionStateLayer | None) -> Tensor:
        query = inputs.query
        if query.shape[1] != self.linear_attention.shape.num_heads:
            self._refuse_some_heads(query.shape[1])
        if not is_tracing() and query.numel() == 0 and (state_layer is None or query.shape[2] == 0):
            batch, heads, length, _ = query.shape
            return query.new_zeros(batch, length, heads, inputs.value.shape[3])
        is_packed = inputs.is_packed
        if is_packed and not is_tracing():
            output = self.linear_attention.attend_packed(inputs)
            if output is None:
                output = attend_packed(lambda part: self.linear_attention(part, None)[0], inputs)
            if state_layer is not None:
                self._keep_last_sequence(inputs, state_layer)
            return output
        if is_packed and not inputs.is_causal:
            raise NotImplementedError(
                f"{type(self.linear_attention).__name__} in an encoder does not support packed sequences inside a "
                "graph (torch.compile, torch.export); put each sequence into its own row of the batch."
            )
        if state_layer is None:
            return self.linear_attention(inputs, None)[0]
        if not is_tracing():
            state_layer.leave_inference_mode()
        in_place = (state_layer.static or (state_layer.owns_state and not is_tracing())) and not state_layer.record_past
        if state_layer.pending is not None:
            self.absorb_pending(state_layer)
        mechanism_inputs = inputs._replace(in_place=True) if in_place else inputs
        output, state = self.linear_attention(mechanism_inputs, state_layer.state)
        state_layer.extend(state, inputs, self.linear_attention.absorbs_queries)
        return output

    def _keep_last_sequence(self, inputs: MechanismInputs, state_layer: LinearAttentionStateLayer) -> None:
        """Store the state of the last packed sequence of each row, because later tokens continue that sequence."""
        if state_layer.state is not None or state_layer.pending is not None:
            raise ValueError(
                "Got packed sequences after cached tokens; linear attention accepts them only with an empty cache."
            )
        numbers: Any = inputs.attention_mask
        inputs = inputs._replace(attention_mask=numbers == numbers.amax(dim=1, keepdim=True))
        state_layer.extend(self.linear_attention.absorb(inputs, None), inputs, self.linear_attention.absorbs_queries)

    def absorb_pending(self, state_layer: LinearAttentionStateLayer) -> None:
        """Bring the state up to date after a rollback."""
        key, value, mask, positions, gates, query = cast(Tokens, state_layer.pending)
        if query is None:
            query = key.new_zeros(key.shape[0], self.linear_attention.shape.num_heads, *key.shape[2:])
        inputs = MechanismInputs(query, key, value, mask, self.linear_attention_scaling, True, positions, gates)
        state_layer.absorbed(self.linear_attention.absorb(inputs, state_layer.state_at_crop))

    def _refuse_some_heads(self, num_heads: int) -> None:
        """Refuse a share of the heads: tensor parallel plans split heads, but not parameters that are per head."""
        total = self.linear_attention.shape.num_heads
        is_per_head = any(parameter.shape[:1] == (total,) for parameter in self.linear_attention.parameters())
        if is_per_head:
            raise NotImplementedError(
                f"{type(self.linear_attention).__name__} has parameters for {total} heads and got {num_heads} heads. "
                "Tensor parallelism (`tp_plan`) works only for mechanisms without parameters per head (`performer` "
                "with `geometry` = `fixed`, `linear` with `feature_map` = `elu1` or `relu`). Shard this model by layer "
                "instead (FSDP2)."
            )

    def _attend_with_weights(
        self, inputs: MechanismInputs, state_layer: LinearAttentionStateLayer | None
    ) -> tuple[Tensor, Tensor]:
        """The output, and the weights `[B, H, N, S]` over the keys of this call; a state has no weights to show.

        They are the output for v = identity (Performer 2020, appendix C.4), as every mechanism here is linear in v.
        """
        if not self.linear_attention.supports("weights", self.linear_attention.settings):
            raise ValueError(
                f"{type(self.linear_attention).__name__} has no matrix of weights per head; leave out "
                "`output_attentions`."
            )
        is_all = state_layer is None or (state_layer.state is None and state_layer.pending is None)
        output, key, value = self._attend(inputs, state_layer), inputs.key, inputs.value
        identity = torch.eye(key.shape[2], dtype=value.dtype, device=value.device).expand(*key.shape[:3], -1)
        weights = self._attend(inputs._replace(value=identity), None).transpose(1, 2)
        if is_all:  # computed from the weights, so that these get gradients
            groups = weights.shape[1] // value.shape[1]
            output = (weights @ value.repeat_interleave(groups, dim=1)).transpose(1, 2)
        return output, weights


class LinearizedCrossAttention(LinearizedAttention):
    """Mixed in before a stock attention class whose keys come from another sequence."""

    cache_name = "cross_attention_cache"
    attends_across = True

    def find_state_layer(self, cache: Any) -> LinearAttentionStateLayer | None:
        """The cross-attention state layer of `cache` for this layer, or None for a cache without cross-attention."""
        cache = getattr(cache, "cross_attention_cache", None)
        return None if cache is None else state_layer(cache, self.layer_idx)

    def _refuse_arguments(self, kwargs: Mapping[str, Any], mask: Any) -> None:
        # T5 passes a bias of zeros to its cross-attention.
        super()._refuse_arguments({name: value for name, value in kwargs.items() if name != "position_bias"}, mask)

    def _read_mask(self, mask: Tensor, key: Tensor, seen: int | Tensor, is_causal: bool) -> Tensor | None:
        """Read the mask of the keys, equal for all queries; after the first step the keys are in the state."""
        if key.shape[2] == 0:
            return None
        is_shared = mask.ndim == 4 and mask.shape[0] == 1
        if mask.shape[-1] != key.shape[2] or not (is_shared or mask.shape[0] == key.shape[0]):
            raise ValueError(
                f"Got an attention mask of {mask.shape[0]} rows and {mask.shape[-1]} columns for {key.shape[0]} rows "
                f"of {key.shape[2]} encoder tokens; it must have one row per input row and one column per token."
            )
        visible = mask > -1.0 if mask.is_floating_point() else mask.bool()
        if visible.ndim == 4:
            rows = visible.flatten(1, 2)  # [B, heads and queries, S]
            if not is_tracing() and (rows != rows[:, :1]).any():
                raise ValueError(
                    "Converted cross-attention got a mask that differs between queries or heads, which it cannot "
                    "honour; keep it softmax (setting `cross_attention`)."
                )
            visible = rows[:, 0].expand(key.shape[0], -1).contiguous()
        return visible

    def _attend(self, inputs: MechanismInputs, state_layer: LinearAttentionStateLayer | None) -> Tensor:
        """Attend; new keys, if any, are the whole other sequence, from which the state is made anew."""
        key, num_keys = inputs.key, inputs.key.shape[2]
        state = None if num_keys or state_layer is None else state_layer.state
        if num_keys == 0:  # some mechanisms accept no empty sequence, so one hidden key is added
            padded = {"key": F.pad(key, (0, 0, 0, 1)), "value": F.pad(inputs.value, (0, 0, 0, 1))}
            hidden = torch.zeros(key.shape[0], 1, dtype=torch.bool, device=key.device)
            inputs = inputs._replace(attention_mask=hidden, **padded)
        output, new_state = self.linear_attention(inputs._replace(is_causal=False), state)
        if state_layer is not None and state is None:
            state_layer.store(new_state, num_keys)
        return output
