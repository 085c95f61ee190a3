"""Calls of `hybrid` whose CPU tensors the Triton kernels take for tensors on CUDA, beside the mechanism in float64."""

from __future__ import annotations

import torch
from matrix import hidden_states_of, mechanism_of, move, qkv

from hf_linear_attention.kernels import fla, triton_backward, triton_hybrid, triton_prefill, triton_step
from hf_linear_attention.mechanisms import hybrid, window
from hf_linear_attention.mechanisms.base import MechanismInputs, Rotary


# An output relative to its norm: float32 sums in another order, and 16-bit weights and outputs, rounded.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# Relative to the norm of a gradient: float32 in another order, and numbers that are rounded to bfloat16 (4e-3) before
# and after each product, or to float16 (5e-4). That of a decay is one number of which nearly all cancels; C has an
# error of 1e-5, too.
OF_GRADIENTS = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
OF_DECAY = {torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
EXACT = {"window_size": 8, "num_sinks": 3, "num_exact_keys": 5, "num_features": 16}
ROTARY = {"rope": "partial", "rope_frequencies": 1}


def on_cuda(monkeypatch, shared: int = 232_448) -> list[str]:
    """CPU tensors are taken for tensors on CUDA, of a GPU with so much shared memory; the list gets the name of the
    module of each kernel that runs.
    """
    ran: list[str] = []
    for module in (fla, hybrid, window):
        monkeypatch.setattr(module, "is_on_cuda", lambda tensor: True)
    monkeypatch.setattr(triton_hybrid, "shared_memory", lambda device: shared)
    for module in (triton_prefill, triton_backward, triton_step):

        def run(*given, module=module, launch=module.run, **others):
            ran.append(module.__name__.split(".")[-1])
            return launch(*given, **others)

        monkeypatch.setattr(module, "run", run)
    return ran


def mechanisms(settings, dtype, heads=(2, 1), dim=16, pairs=None, is_interleaved=False):
    """A mechanism with parameters of a dtype, and the same one in float64."""
    pairs, found = dim // 2 if pairs is None else pairs, []
    rotary = Rotary(tuple(10.0 ** (-4 * i / max(1, pairs)) for i in range(pairs)), is_interleaved) if pairs else None
    for _ in range(2):
        mechanism = mechanism_of(
            {"mechanism": "hybrid", "decay": "learned", **settings},
            **{"heads": heads, "head_dim": dim, "rotary": rotary, "is_causal": True, "max_length": 4096},
        )
        found.append(move(mechanism, 0.2))
    found[1].load_state_dict(found[0].to(dtype).state_dict())
    return found[0], found[1].double()


def tokens(mechanism, start: int, stop: int, dtype, heads=(2, 1), dim=16) -> MechanismInputs:
    """Some tokens of two sequences, of which the second is three tokens ahead; the same ones in every call."""
    query, key, value = (x[:, :, start:stop] for x in qkv(MOST_TOKENS, heads=heads, dim=dim, dtype=dtype))
    inputs = MechanismInputs(query, key, value, None, dim**-0.5, True)
    if mechanism.needs_positions:
        positions = torch.arange(start, stop, dtype=torch.int32) + torch.tensor([[0], [3]])
        inputs = inputs._replace(positions=positions.int())
    if mechanism.needs_gates:
        inputs = inputs._replace(gates=mechanism.gates(hidden_states_of(key)))
    return inputs


MOST_TOKENS = 400


def gradients(attend, mechanism, inputs, direction):
    """`attend(mechanism, inputs)`, and the gradients of queries, keys, values and parameters by name."""
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    parameters = {name: x for name, x in mechanism.named_parameters() if x.requires_grad}
    output = attend(mechanism, type(inputs)(*leaves, *inputs[3:]))
    grads = torch.autograd.grad((output * direction.to(output.dtype)).sum(), [*leaves, *parameters.values()])
    return dict(zip(("output", "query", "key", "value", *parameters), (output.detach(), *grads), strict=True))


def widened(given):
    """The numbers of a tuple in float64."""
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in given]


def relative(actual, expected) -> float:
    """The norm of the difference relative to that of what is expected."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
