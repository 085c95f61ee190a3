"""What a graph for ONNX Runtime computes in place of torch's forms of causal attention.

The operator `LinearAttention` of the domain `com.microsoft` (onnxruntime 1.30 and later) reads a state token by token:

    linear        S <- S + k v^T                    o = S^T q
    gated         S <- exp(g) S + k v^T
    gated_delta   S <- exp(g) S,  S <- S + beta k (v - S^T k)^T

The denominator of kernel attention is one more channel of the values, whose value is 1. Where features are exponents,
the change of the running maximum is a decay per feature: with m_t = max(m_(t-1) + g_t, l_t), the state fades by
exp(g_t + m_(t-1) - m_t), the features of a key are exp(l_t - m_t), and a query with the exponents u takes those of
u + m_t. Every exponent is at most 0, so nothing overflows, and what is in the state is what our cache holds.

Axes: B batch, H query heads, Hkv key/value heads, G = H / Hkv, N tokens, F features, W width of the values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.scan import scan  # torch has no public name for it yet

from hf_linear_attention.mechanisms.base import MechanismInputs
from hf_linear_attention.torch_kernels.blocks import (
    EMPTY_MAXIMUM,
    EXP,
    pack_state,
    unpack_state,
)
from hf_linear_attention.torch_kernels.implementations import IMPLEMENTATIONS, load_implementations


DOMAIN, OPERATOR = "com.microsoft", "LinearAttention"
# Of values whose width is no multiple of this, the operator takes up to twice the time (onnxruntime 1.31).
LANES = 32


@contextlib.contextmanager
def operators_in_graphs() -> Iterator[None]:
    """A context in which exported graphs have the operator; what is not exported computes as before."""
    load_implementations()
    before = dict(IMPLEMENTATIONS)
    # `gated_delta_step` is asked for before anything is done for the padding.
    ours: dict[str, Callable[..., Any]] = {"attention": attention, "gated_delta_step": gated_delta}
    ours["gated_attention"] = gated_attention

    def chosen(name: str) -> Callable[..., Any]:
        def function(*given: Any) -> Any:
            found = ours[name](*given) if torch.compiler.is_exporting() else None
            return before[name](*given) if found is None and name in before else found

        return function

    IMPLEMENTATIONS.update({name: chosen(name) for name in ours})
    try:
        yield
    finally:
        IMPLEMENTATIONS.clear()
        IMPLEMENTATIONS.update(before)


def attention(*arguments: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor] | None:
    """The implementation `attention` of causal layers, for features or exponents that are computed already."""
    query, key, value, key_mask, log_decay, state, *_, function, is_causal = arguments
    if not is_causal:
        return None
    if log_decay is not None:
        log_decay = log_decay[None, :, None].expand(key.shape[:3])
    given = (query, key, value, key_mask, log_decay, state, function >= EXP)
    output, denominator, scale, state = kernel_attention(*given)
    return output.to(query.dtype), denominator, scale, state


def gated_attention(
    mechanism: Any, inputs: MechanismInputs, weight: Tensor | None, log_decay: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The implementation `gated_attention`: the output `[B, N, H, W]` and the state of a mechanism with gates."""
    query, key, value, mask, scaling, *_ = inputs
    feature_map = mechanism.feature_map
    query, key = feature_map.forward_queries(query, scaling), feature_map.forward_visible_keys(key, scaling, mask)
    key = key if weight is None else key + weight.unsqueeze(3)
    output, _, _, state = kernel_attention(query, key, value, mask, log_decay, state, feature_map.log_features)
    return output, state


def kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor | None,
    log_features: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Causal kernel attention, with a log decay `[B, Hkv, N]` of its own for every token, or None.

    Returns:
        The output `[B, N, H, W]`, the denominator and the log scale `[B, Hkv, G, N, 1]`, and the state.
    """
    visible = None if key_mask is None else (key_mask > 0)[:, :, None, None]
    query, key, value = (x.float().transpose(1, 2) for x in (query, key, value))  # [B, N, heads, ...], as in the node
    decay = None if log_decay is None else log_decay.float().transpose(1, 2).unsqueeze(3)
    if visible is not None:
        value = value.masked_fill(~visible, 0.0)
        key = key.masked_fill(~visible, EMPTY_MAXIMUM if log_features else 0.0)
        decay = None if decay is None else decay.masked_fill(~visible, 0.0)
    sums, maximum = unpack_state(state, log_features)
    (batch, _, kv_heads, features), width = key.shape, value.shape[3]
    if sums is None:
        sums = value.new_zeros(batch, kv_heads, features, width + 1)
    scale = None
    if log_features:
        empty = sums.new_full(sums.shape[:3], EMPTY_MAXIMUM)
        # In a state of zeros, too, there are no tokens: after a token, Z is at least 1 for every feature.
        maximum = empty if maximum is None else torch.where(sums[..., -1] == 0, empty, maximum)
        key, decay, largest = below_running_maximum(key, decay, maximum)
        exponents = query.unflatten(2, (kv_heads, -1)) + largest.unsqueeze(3)
        query = exponents.softmax(dim=4)
        # The constant by which the softmax divides, from the largest entry of each row: a sum would take longer.
        scale = exponents.amax(dim=4, keepdim=True) - query.amax(dim=4, keepdim=True).log()
        query, scale, maximum = query.flatten(2, 3), scale.permute(0, 2, 3, 1, 4), largest[:, -1]
    fill = -(width + 1) % LANES
    one = torch.tensor([1.0] + [0.0] * fill, dtype=torch.float32, device=value.device).expand(*value.shape[:3], -1)
    value = torch.cat((value, one if visible is None else one * visible), dim=3)
    output, sums = linear_attention(query, key, value, F.pad(sums, (0, fill)), decay)
    denominator, sums = output[..., width : width + 1], sums[..., : width + 1]
    output = output[..., :width] / torch.where(denominator == 0, torch.inf, denominator)
    denominator = denominator.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    return output, denominator, scale, pack_state(sums, maximum)


def below_running_maximum(exponents: Tensor, decay: Tensor | None, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m_t = max(m_(t-1) + g_t, l_t) from m_0 = `start [B, Hkv, F]`, for l = `exponents [B, N, Hkv, F]`.

    Args:
        decay: g, `[B, N, Hkv, 1]`, or None.

    Returns:
        The features exp(l_t - m_t), the decay g_t + m_(t-1) - m_t and m_t itself, all `[B, N, Hkv, F]`.
    """

    def step(carried: Tensor, token: list[Tensor]) -> tuple[Tensor, Tensor]:
        exponent, *faded = token
        largest = torch.maximum(carried + faded[0] if faded else carried, exponent)
        return largest, largest.clone()

    tokens = [x.transpose(0, 1) for x in (exponents, decay) if x is not None]
    start = start.clone(memory_format=torch.contiguous_format)
    largest = scan(step, start, tokens)[1]
    change = torch.cat((start.unsqueeze(0), largest[:-1])) - largest
    found = (tokens[0] - largest).exp(), change if decay is None else change + tokens[1], largest
    features, decay, largest = (x.transpose(0, 1) for x in found)
    return features, decay, largest


def gated_delta(given: tuple[Any, ...], key_mask: Tensor | None, rows: None) -> tuple[Tensor, Tensor]:
    """`torch_kernels.delta.gated_delta`; at padding the output is any number, and the state stays as it is."""
    *tensors, state, erases = given
    query, key, value, log_decay, beta = (x.float().transpose(1, 2) for x in tensors)
    if state is None:
        state = value.new_zeros(key.shape[0], *key.shape[2:], value.shape[3])
    decay, beta = log_decay if log_decay.ndim == 4 else log_decay.unsqueeze(3), beta.unsqueeze(3)
    if key_mask is not None:
        is_hidden = (key_mask <= 0)[:, :, None, None]
        key, value, decay, beta = (x.masked_fill(is_hidden, 0.0) for x in (key, value, decay, beta))
    if not erases:
        value, beta = value * beta, None
    output, state = linear_attention(query, key, value, state, decay, beta)
    return output.transpose(1, 2), state


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, state: Tensor, decay: Tensor | None, beta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The node `LinearAttention`.

    Args:
        query: `[B, N, H, F]`.
        key, value: `[B, N, Hkv, F]` and `[B, N, Hkv, W]`.
        state: `[B, Hkv, F, W]`.
        decay: its logarithm, `[B, N, Hkv, F]` or `[B, N, Hkv, 1]`.
        beta: `[B, N, Hkv, 1]`, if what the state holds at a key is erased first.

    Returns:
        The output `[B, N, H, W]`, and the state after these tokens.
    """
    (batch, length, heads, _), width = query.shape, value.shape[3]
    rule = "linear" if decay is None else "gated" if beta is None else "gated_delta"
    packed: list[Any] = [None if x is None else x.flatten(2) for x in (query, key, value, None, decay, beta)]
    packed[3] = state
    while packed[-1] is None:
        packed.pop()
    output, state = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{OPERATOR}",
        packed,
        {"q_num_heads": heads, "kv_num_heads": key.shape[2], "update_rule": rule, "scale": 1.0},
        dtypes=(torch.float32, torch.float32),
        shapes=((batch, length, heads * width), state.shape),
        version=1,
    )
    return output.unflatten(2, (heads, width)), state
