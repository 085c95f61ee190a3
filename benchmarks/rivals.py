"""Attention by itself as a call that can be timed: ours, and what users would take instead."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.mechanisms.base import LayerShape, MechanismInputs, Rotary
from hf_linear_attention.mechanisms.registry import MECHANISMS
from hf_linear_attention.torch_kernels.delta import gated_delta


HEADS, DIM = 12, 64
DELTA_HEADS, DELTA_DIM = 16, 128
# What `partial` keeps of 32 frequencies where a model was trained on 2,048 tokens.
PARTIAL = {"trained_length": 2048, "rope_frequencies": 21}
Call = Callable[..., Any]


def mechanism_call(is_causal: bool = True, max_length: int | None = None, **settings: Any) -> Call:
    """A fresh mechanism as `(query, key, value) -> [B, H, N, D]`; gates are computed from the keys."""
    if "rope" in settings:
        settings |= PARTIAL
    checked = LinearAttentionSettings(settings, is_causal=is_causal, model_type="benchmark", max_length=max_length)
    rotary = Rotary(tuple(10000 ** (-2 * i / DIM) for i in range(DIM // 2))) if "rope" in settings else None
    shape = LayerShape(HEADS, HEADS, DIM, 0, max_length, hidden_size=HEADS * DIM, rotary=rotary)
    mechanism = MECHANISMS[settings["mechanism"]](checked, shape).eval()
    mechanism.reset_parameters()

    def call(query, key, value):
        inputs = MechanismInputs(query, key, value, None, DIM**-0.5, is_causal)
        if mechanism.needs_gates:
            inputs = inputs._replace(gates=mechanism.gates(key.transpose(1, 2).flatten(2)))
        if mechanism.needs_positions:
            inputs = inputs._replace(positions=torch.arange(query.shape[2], dtype=torch.int32)[None])
        return mechanism(inputs)[0].transpose(1, 2)

    return call


def in_torch(call: Call) -> Call:
    """`call` as where the package has no C kernels."""

    def run(*inputs, **more):
        with mock.patch.object(kernels_cpu, "library", return_value=None):
            return call(*inputs, **more)

    return run


def sdpa(query, key, value, is_causal=True):
    """torch's fused softmax."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def performer_pytorch() -> dict[str, Call]:
    """The causal kernel of performer-pytorch for CPUs, with elu1; nothing where the package is not installed."""
    if not importlib.util.find_spec("performer_pytorch"):
        return {}
    from performer_pytorch.performer_pytorch import causal_linear_attention_noncuda

    return {
        "performer-pytorch": lambda query, key, value: causal_linear_attention_noncuda(
            F.elu(query) + 1, F.elu(key) + 1, value
        )
    }


def attention_inputs(length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Queries, keys and values as models hand them over: heads beside each other in memory."""
    torch.manual_seed(0)
    return [torch.randn(1, length, HEADS, DIM).to(dtype).transpose(1, 2) for _ in range(3)]


def attend(call: Call, tensors: list[torch.Tensor], gradient: torch.Tensor | None = None) -> None:
    """One call, with the gradients of the inputs if that of the output is given."""
    if gradient is not None:
        call(*(tensor.detach().requires_grad_() for tensor in tensors)).backward(gradient)
    else:
        with torch.no_grad():
            call(*tensors)


def delta_inputs(length: int) -> list[torch.Tensor]:
    """Query, key, value, log decay and beta of the gated delta rule; tokens before heads, as models hold them."""
    torch.manual_seed(0)
    query, key = (F.normalize(torch.randn(1, length, DELTA_HEADS, DELTA_DIM), dim=-1) for _ in range(2))
    gates = -torch.rand(1, length, DELTA_HEADS) / 10, torch.rand(1, length, DELTA_HEADS)
    return [query, key, torch.randn(1, length, DELTA_HEADS, DELTA_DIM), *gates]


def our_delta(query, key, value, log_decay, beta, state=None):
    """Outputs and new state of our gated delta rule."""
    query, key, value, log_decay, beta = (x.transpose(1, 2) for x in (query, key, value, log_decay, beta))
    output, new_state = gated_delta(query * DELTA_DIM**-0.5, key, value, log_decay, beta, state=state)
    return output.transpose(1, 2), new_state


@contextlib.contextmanager
def torch_code(modeling: ModuleType) -> Iterator[None]:
    """Leave out flash-linear-attention, which transformers takes where it is installed, and which needs a GPU."""
    functions = {name: value for name, value in vars(modeling).items() if inspect.isfunction(value)}
    own = {name: function for name, function in functions.items() if function.__module__ == modeling.__name__}
    with mock.patch.multiple(modeling, **{name: inspect.unwrap(function) for name, function in own.items()}):
        yield


def transformers_delta(name: str) -> Call:
    """transformers' torch code of Qwen3-Next's rule of this name."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    with torch_code(modeling_qwen3_next):
        rule = getattr(modeling_qwen3_next, name)
    return lambda *tensors, state=None: rule(*tensors, initial_state=state, output_final_state=True)
