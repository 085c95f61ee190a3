"""A mechanism as a module that ONNX can hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_linear_attention.conversion.export.onnx import BATCH, LENGTH, Port
from hf_linear_attention.mechanisms.base import AttentionMechanism, MechanismInputs


class Attention(nn.Module):
    """A mechanism as a function of what it gets from its layer and of its state."""

    def __init__(self, mechanism: AttentionMechanism) -> None:
        super().__init__()
        self.mechanism, shape = mechanism, mechanism.shape
        heads = {"queries": shape.num_heads, "keys": shape.num_key_value_heads, "values": shape.num_key_value_heads}
        self.inputs = [Port(name, (BATCH, count, LENGTH, shape.head_dim)) for name, count in heads.items()]
        self.inputs.append(Port("attention_mask", (BATCH, LENGTH), torch.bool))
        self.inputs.append(Port("positions", (BATCH, LENGTH), torch.int32))
        size = 0
        if mechanism.needs_gates:
            size = mechanism.gates(torch.zeros(1, 1, shape.hidden_size or 0, device="cpu")).shape[2]
        self.inputs.append(Port("gates", (BATCH, LENGTH, size)))
        states = [((BATCH, *size[1:]), dtype) for size, dtype in mechanism.state_layout(torch.float32)]
        self.inputs += [Port(f"past_{number}", *state) for number, state in enumerate(states)]
        self.outputs = [Port("output", (BATCH, LENGTH, shape.num_heads, shape.head_dim))]
        self.outputs += [Port(f"present_{number}", *state) for number, state in enumerate(states)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The `outputs` for `inputs`."""
        query, key, value, attention_mask, positions, gates, *state = tensors
        mechanism = self.mechanism
        inputs = MechanismInputs(query, key, value, attention_mask, query.shape[-1] ** -0.5, True)
        inputs = inputs._replace(gates=gates if mechanism.needs_gates else None)
        if mechanism.needs_positions:
            inputs = mechanism.prepare(inputs._replace(positions=positions))
        output, new = mechanism(inputs, tuple(state) or None)
        return output, *(new or ())
