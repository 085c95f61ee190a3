"""The size of the decoding state, and `--state_bytes`: a budget divided between window, sinks and features."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from hf_linear_attention._common.errors import UsageError
from hf_linear_attention.attention.layer import LinearizedCrossAttention
from hf_linear_attention.conversion.options import SIZES
from hf_linear_attention.conversion_api import convert_config
from hf_linear_attention.mechanisms.base import AttentionMechanism, MechanismInputs
from hf_linear_attention.mechanisms.registry import MECHANISMS
from hf_linear_attention.modeling_linear_attention import linear_attention_modules, linear_model_class


# The share of the linear part (benchmarks/results/conversion.md, "the default preset"). Between a sixth and a
# third of the bytes stories260k learns equally well; with two thirds (version 2 of the preset) it has .016 nats more.
LINEAR_SHARE = 1 / 6
# The number of features is a multiple of this, the number of float32 values in the widest vector registers.
VECTOR = 16
NUM_SINKS = 4
# The value in a preset that stands for the bytes of its own sizes.
AS_SIZED = "as_sized"
LARGE_HEAD = 64
# The smallest value of each size; features of `hedgehog` come in pairs.
LEAST = dict(zip(SIZES, (1, 0, 2)))
_MEASURED: dict[tuple[Any, ...], tuple[int, int] | None] = {}


def split_budget(
    num_bytes: int, settings: Mapping[str, Any], bytes_of: Callable[[Mapping[str, Any]], int]
) -> dict[str, Any]:
    """The settings with the sizes for a state of `num_bytes` in all layers together; given sizes do not change.

    The linear part gets a sixth of the bytes, as a multiple of 16 features and at least 16. There are 4 sinks, and the
    window gets the rest. The mechanism `window` has no linear part.

    Args:
        settings: the `linear_attention` settings, with `mechanism`.
        bytes_of: the size in bytes of the decoding state of all converted layers, for given settings. It must be linear
            in the window size, the number of sinks and the number of features.

    Raises:
        UsageError: if the mechanism has no window, or the budget is too small for one.
    """
    mechanism = settings["mechanism"]
    if mechanism not in ("hybrid", "window"):
        raise UsageError(
            f"`--state_bytes` divides bytes between a window and a linear part, but `{mechanism}` has no window; use "
            "`--attention hybrid`, or give `--num_features`"
        )
    sizes = [name for name in LEAST if name != "num_features" or mechanism == "hybrid"]
    least = {**settings, **{name: settings.get(name) or LEAST[name] for name in sizes}}
    base = bytes_of(least)
    step = {name: bytes_of({**least, name: least[name] + 2}) - base for name in sizes}
    chosen = dict(least)
    if mechanism == "hybrid" and settings.get("num_features") is None:
        vectors = round(num_bytes * LINEAR_SHARE / (step["num_features"] / 2 * VECTOR))
        chosen["num_features"] = VECTOR * max(1, vectors)
    if settings.get("num_sinks") is None:
        chosen["num_sinks"] = NUM_SINKS
    if settings.get("window_size") is None:
        left = num_bytes - bytes_of(chosen)
        chosen["window_size"] = 1 + int(left // (step["window_size"] / 2))
    smallest = bytes_of({**chosen, "window_size": settings.get("window_size") or 1})
    if smallest > num_bytes:
        features = f", {chosen['num_features']} features" if "num_features" in chosen else ""
        raise UsageError(
            f"`--state_bytes {num_bytes}` is less than the {smallest:,} bytes that {chosen['num_sinks']} sinks"
            f"{features} and a window of {settings.get('window_size') or 1} take; give more bytes or smaller sizes"
        )
    return chosen


def with_budget(settings: Mapping[str, Any], stock_class: type, stock: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The settings with sizes in place of `state_bytes`.

    `as_sized` in a preset stands for the bytes of its own sizes. These are divided anew if head_dim is below 64, where
    a feature takes at least as many bytes as a key. Larger heads were not measured, and their sizes do not change.

    Raises:
        UsageError: as `split_budget` does.
        ValueError: if the model cannot be converted with these settings.
    """
    settings = dict(settings)
    budget = settings.pop("state_bytes", None)
    if budget is None:
        return settings
    config = convert_config(stock, **settings)
    with torch.device("meta"):
        modules = list(linear_attention_modules(linear_model_class(stock_class)(config)).values())

    def bytes_of(sized: Mapping[str, Any]) -> int:
        sizes = {name: sized[name] for name in LEAST if name in sized}
        return sum(state_bytes(_resized(module, sizes), dtype) or 0 for module in modules)

    if budget == AS_SIZED:
        heads = [module.linear_attention.shape.head_dim for module in modules]
        if not heads or max(heads) >= LARGE_HEAD:
            return settings
        budget = bytes_of(settings)
        settings = {name: value for name, value in settings.items() if name not in LEAST}
    return split_budget(budget, settings, bytes_of)


def _resized(module: Any, sizes: Mapping[str, Any]) -> Any:
    """The same layer, whose mechanism is replaced by one of these sizes."""
    before = module.linear_attention
    with torch.device("meta"):
        mechanism = MECHANISMS[before.settings["mechanism"]]({**before.settings, **sizes}, before.shape)
    module.linear_attention = mechanism
    return module


def state_bytes(module: nn.Module, dtype: torch.dtype = torch.float32) -> int | None:
    """The size in bytes of the state of a converted layer per sequence, which does not depend on the length.

    Keys and values have this `dtype`. The size is None for an encoder, or a mechanism without a state.
    """
    sizes = _sizes(module, dtype)
    return None if sizes is None else sizes[0]


def growing_bytes(module: nn.Module, dtype: torch.dtype = torch.float32) -> int:
    """The number of bytes per token and sequence that the heads with softmax attention (`softmax_heads`) keep."""
    return (_sizes(module, dtype) or (0, 0))[1]


def _sizes(module: nn.Module, dtype: torch.dtype) -> tuple[int, int] | None:
    """The bytes of a state that do not grow, and those that grow; measured once for layers that are alike."""
    mechanism = cast(AttentionMechanism, module.linear_attention)
    settings, shape, growing = mechanism.settings, mechanism.shape, mechanism.num_growing
    own = [value for name, value in settings.items() if name not in ("layers", "drop") and isinstance(value, list)]
    shape = shape if any(own) else replace(shape, layer=0)  # without lists, no setting depends on the layer
    directions = module.linear_attention_is_causal, isinstance(module, LinearizedCrossAttention)
    key = (type(mechanism), json.dumps(settings, sort_keys=True, default=str), shape, growing, dtype, *directions)
    if key not in _MEASURED:
        state = _state_of_one_token(module, dtype)
        constant = None if state is None else len(state) - growing
        _MEASURED[key] = None if state is None else (_size(state[:constant]), _size(state[constant:]))
    return _MEASURED[key]


def _size(tensors: Sequence[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def _state_of_one_token(module: nn.Module, dtype: torch.dtype) -> tuple[Any, ...] | None:
    mechanism = cast(AttentionMechanism, module.linear_attention)
    is_encoder = not module.linear_attention_is_causal and not isinstance(module, LinearizedCrossAttention)
    if is_encoder or not mechanism.supports("state", mechanism.settings):
        return None
    shape = mechanism.shape
    device = next((tensor.device for tensor in mechanism.state_dict().values()), torch.device("meta"))
    query = torch.zeros(1, shape.num_heads, 1, shape.head_dim, device=device, dtype=dtype)
    key = torch.zeros(1, shape.num_key_value_heads, 1, shape.head_dim, device=device, dtype=dtype)
    value, is_causal = key, bool(module.linear_attention_is_causal)
    inputs = MechanismInputs(query, key, value, None, 1.0, is_causal)
    with torch.no_grad():
        if mechanism.needs_positions:
            start = torch.zeros(1, 1, dtype=torch.int32, device=device)
            inputs = mechanism.prepare(inputs._replace(positions=start))
        if mechanism.needs_gates:
            hidden = torch.zeros(1, 1, shape.hidden_size or 0, device=device, dtype=dtype)
            inputs = inputs._replace(gates=mechanism.gates(hidden))
        _, state = mechanism(inputs, None)
    return state or ()
