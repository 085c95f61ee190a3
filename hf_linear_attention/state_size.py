# SPDX-License-Identifier: Apache-2.0
"""How large the state of a converted model is, and how `state_tokens` divides it.

`state_tokens` = B: each key/value head's state has the bytes that a softmax cache has for B tokens, on average over the
converted layers and in the dtype of the checkpoint. Window, sinks, exact keys with their scores and positions, and the
float32 sums of the far keys are all counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from .attention.layer import LinearizedCrossAttention
from .mechanisms.base import AttentionMechanism
from .mechanisms.registry import MECHANISMS


# In place of a number: `default_state_tokens`.
AUTO = "auto"
SIZES = ("window_size", "num_sinks", "num_features", "num_exact_keys")
LEAST_TOKENS, MOST_TOKENS = 96, 8192
ALWAYS_AFFORDED = 1024
UNKNOWN_LENGTH = 16384  # of models whose config has no limit
# Qwen2.5-Coder-0.5B, 512 tokens, 2,048 to 4,095 of a row, scores fitted and nothing trained: a window of 128 tokens has
# 2.099 nats with 4 sinks and 2.103 with 16, one of 64 has 2.118 (original 1.817, a window of 508 alone 2.286).
WINDOW_SHARE = 1 / 4
NUM_SINKS = 4
# The first number if it takes at most this share of the bytes. Multiples of the widest vector register's 16 floats.
FEATURES, FEATURE_SHARE = (32, 16), 1 / 4
# The smallest value of each size; features of `hedgehog` come in pairs.
LEAST = dict(zip(SIZES, (1, 0, 2, 1)))
_MEASURED: dict[tuple[Any, ...], int | None] = {}


def default_state_tokens(trained_length: int | None) -> int:
    """The default of `state_tokens` for a model that was trained on inputs of this length.

    A sixteenth of it, but at least the smaller of a quarter and 1,024, and between 96 and 8,192.
    """
    length = trained_length or UNKNOWN_LENGTH
    wanted = max(length // 16, min(length // 4, ALWAYS_AFFORDED), LEAST_TOKENS)
    return min(wanted, MOST_TOKENS, length)


def with_sizes(
    settings: Mapping[str, Any], layers_of: Callable[[Mapping[str, Any]], Sequence[Any]], dtype: torch.dtype
) -> dict[str, Any]:
    """The settings of one mechanism with sizes in place of `state_tokens`; given sizes do not change.

    Args:
        settings: with `mechanism`, and `trained_length` if it is known.
        layers_of: the converted attention modules of a model with given settings, on the meta device.
        dtype: that of keys and values.

    Raises:
        ValueError: if the mechanism has no window, or the number is impossible for this model or with the sizes given.
    """
    chosen = dict(settings)
    wanted = chosen.pop("state_tokens")
    options = MECHANISMS[chosen["mechanism"]]
    if "window_size" not in options.options:
        raise ValueError(
            f"`state_tokens` divides bytes between a window and other keys, but `{chosen['mechanism']}` has no window; "
            "use `hybrid`, or set `num_features`"
        )
    length = chosen.get("trained_length")
    tokens = default_state_tokens(length) if wanted == AUTO else wanted
    _check_tokens(wanted, length)
    unused = options.unused(options.filled(chosen))
    free = {name: LEAST[name] for name in SIZES if name in options.options and name not in unused}
    free = {name: least for name, least in free.items() if chosen.get(name) is None}
    chosen |= free
    modules = layers_of(chosen)
    budget = tokens * sum(cache_bytes_per_token(module, dtype) for module in modules)

    def bytes_of(sizes: Mapping[str, Any]) -> int:
        sizes = {name: sizes[name] for name in SIZES if name in sizes}
        return sum(state_bytes(_resized(module, sizes), dtype) or 0 for module in modules)

    if modules and not bytes_of(chosen):
        raise ValueError("`state_tokens` is for layers of decoders; the layers to convert keep no state")
    return _divided(chosen, free, tokens, budget, bytes_of, is_strict=wanted != AUTO)


def _check_tokens(wanted: Any, length: int | None) -> None:
    if wanted == AUTO:
        return
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < LEAST_TOKENS:
        raise ValueError(f"`state_tokens` = {wanted!r} must be a number of at least {LEAST_TOKENS} tokens")
    if length is not None and wanted > length:
        raise ValueError(
            f"`state_tokens` = {wanted} must be at most {length}, the longest input of this model, of which a softmax "
            "cache has no more tokens either"
        )


def _divided(
    chosen: dict[str, Any],
    free: Mapping[str, int],
    tokens: int,
    budget: int,
    bytes_of: Callable[[Mapping[str, Any]], int],
    is_strict: bool,
) -> dict[str, Any]:
    """Give the sizes in `free` their shares: a quarter of the tokens is the window, and the rest are exact keys.

    `bytes_of` is linear in each size, except for the first exact key.
    """
    smallest = bytes_of(chosen)
    step = {name: (bytes_of({**chosen, name: least + 2}) - smallest) / 2 for name, least in free.items()}
    rest = next((name for name in ("num_exact_keys", "window_size") if name in free), None)
    if "num_features" in free:
        fits = [number for number in FEATURES if number * step["num_features"] <= FEATURE_SHARE * budget]
        chosen["num_features"] = fits[0] if fits else FEATURES[-1]
    if "num_sinks" in free:
        chosen["num_sinks"] = NUM_SINKS
    if "window_size" in free and rest != "window_size":
        chosen["window_size"] = max(1, int(WINDOW_SHARE * tokens))
    left = budget - bytes_of(chosen)
    if left < 0 and is_strict:
        sized = ", ".join(f"`{name}` = {chosen[name]}" for name in SIZES if chosen.get(name))
        raise ValueError(
            f"`state_tokens` = {tokens} is {budget:,} bytes, less than the {budget - left:,} of {sized}; give more "
            "tokens or smaller sizes"
        )
    if rest is not None and step[rest]:
        chosen[rest] += max(0, int(left // step[rest]))
    return chosen


def _resized(module: Any, sizes: Mapping[str, Any]) -> Any:
    """The same layer, whose mechanism is replaced by one of these sizes."""
    before = module.linear_attention
    with torch.device("meta"):
        module.linear_attention = MECHANISMS[before.settings["mechanism"]]({**before.settings, **sizes}, before.shape)
    return module


def cache_bytes_per_token(module: Any, dtype: torch.dtype) -> int:
    """What keys and values of one token take in the softmax layer that a converted layer replaces."""
    shape = module.linear_attention.shape
    return 2 * shape.num_key_value_heads * shape.head_dim * dtype.itemsize


def state_bytes(module: nn.Module, dtype: torch.dtype = torch.float32) -> int | None:
    """The size in bytes of the state of a converted layer per sequence, which does not depend on the length.

    Keys and values have this `dtype`. The size is None for an encoder, or a mechanism without a state. It is measured
    once for layers that are alike.
    """
    mechanism = cast(AttentionMechanism, module.linear_attention)
    settings, shape, is_causal = mechanism.settings, mechanism.shape, bool(module.linear_attention_is_causal)
    is_encoder = not is_causal and not isinstance(module, LinearizedCrossAttention)
    if is_encoder or not mechanism.supports("state", settings):
        return None
    own = {  # what a list has for this layer
        name: value[shape.layer] if isinstance(value, list) and len(value) > shape.layer else value
        for name, value in settings.items()
        if name not in ("layers", "drop")
    }
    key = (type(mechanism), json.dumps(own, sort_keys=True, default=str), replace(shape, layer=0), dtype, is_causal)
    if key not in _MEASURED:
        _MEASURED[key] = sum(size.numel() * kind.itemsize for size, kind in mechanism.state_layout(dtype, is_causal))
    return _MEASURED[key]
