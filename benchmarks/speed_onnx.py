"""Graphs for onnxruntime: its operator `LinearAttention` against plain operators and against torch (one thread).

    python -m benchmarks.speed_onnx

The attention of one layer alone, and a Llama with 16 million random weights, each with 1,024 tokens at once and with
one more token. The forms take turns in every round. Medians of CPU time, and medians of the rounds' ratios. `torch` is
this package with its C kernels. Needs the extra `onnx`. About a quarter of an hour, most of it for the exports.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import median_ratio, medians, parse, save, table, times_in_turns, write
from benchmarks.speed_vllm import SIZES, VOCABULARY
from hf_linear_attention import convert
from hf_linear_attention.conversion.export.onnx import (
    BATCH,
    LENGTH,
    PAST,
    TOTAL,
    Port,
    graph_of,
    session_of,
    write_graph,
)
from hf_linear_attention.mechanisms.base import AttentionMechanism, MechanismInputs
from hf_linear_attention.modeling_linear_attention import converted_modules


SETTINGS: dict[str, dict[str, Any]] = {
    "linear, elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "linear, exp": {"mechanism": "linear", "feature_map": "exp"},
    "gated_delta": {"mechanism": "gated_delta"},
    "hybrid": {"mechanism": "hybrid"},
}
OPERATOR, PLAIN, TORCH = "LinearAttention", "plain", "torch"


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

    def random(self, length: int) -> list[Tensor]:
        """Inputs of one sequence without padding, and an empty state."""
        generator, tensors, shape = torch.Generator().manual_seed(length), [], self.mechanism.shape
        for port in self.inputs:
            x = port.zeros(**{BATCH: 1, LENGTH: length})
            if port.name in ("queries", "keys", "values"):
                x = torch.randn(x.shape, generator=generator)
            elif port.name == "gates" and x.numel():
                x = self.mechanism.gates(torch.randn(1, length, shape.hidden_size or 0, generator=generator))
            elif port.name == "attention_mask":
                x = torch.ones_like(x)
            elif port.name == "positions":
                x = torch.arange(length, dtype=x.dtype).unsqueeze(0)
            tensors.append(x)
        return tensors


def llama(settings: dict[str, Any], layers: int) -> Any:
    """A converted Llama with random weights."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": layers, "intermediate_size": 1024, "head_dim": 64}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=32768, **sizes)
    return convert(LlamaForCausalLM(config), **settings).eval()


def in_session(session: Any, given: dict[str, Any]) -> Callable[[], Any]:
    """What runs a graph on those of these inputs that it uses."""
    used = {x.name: given[x.name] for x in session.get_inputs()}
    return lambda: session.run(None, used)


def measure(what: str, graph: Any, inputs: dict[int, list[Tensor]], rounds: int) -> list[list[Any]]:
    """A row for each length: milliseconds of each form, and how many times as fast the operator is."""
    rows = []
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        sessions = {}
        for form in (OPERATOR, PLAIN):
            path = Path(name) / f"{form}.onnx"
            write_graph(graph, path, plain=form == PLAIN)
            sessions[form] = session_of(path)
        for length, tensors in inputs.items():
            given = {port.name: x.numpy() for port, x in zip(graph.inputs, tensors)}
            functions = {form: in_session(session, given) for form, session in sessions.items()}
            functions[TORCH] = functools.partial(graph, *tensors)
            times = times_in_turns(functions, rounds if length > 1 else 10 * rounds)
            ratios = [median_ratio(times[form], times[OPERATOR]) for form in (PLAIN, TORCH)]
            rows.append([what, length, *medians(times, 1e-3).values(), *ratios])
            write(f"  {rows[-1]}")
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measure all settings."""
    arguments = parse(__doc__, argv, {"rounds": 1, "tokens": 70}, rounds=9, tokens=1024)
    alone, whole = [], []
    for name, settings in list(SETTINGS.items())[: 1 if arguments.quick else None]:
        attention = Attention(converted_modules(llama(settings, 1))[0].linear_attention)
        inputs = {length: attention.random(length) for length in (arguments.tokens, 1)}
        alone += measure(name, attention, inputs, arguments.rounds)
        model = graph_of(llama(settings, 1 if arguments.quick else SIZES["num_hidden_layers"]))
        inputs = {}
        for length in (arguments.tokens, 1):
            inputs[length] = [port.zeros(**{BATCH: 1, LENGTH: length, TOTAL: length, PAST: 0}) for port in model.inputs]
            inputs[length][0] = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
            inputs[length][1] = torch.ones(1, length, dtype=torch.long)
        whole += measure(name, model, inputs, arguments.rounds)
    header = ["tokens", f"{OPERATOR}, ms", f"{PLAIN}, ms", f"{TORCH}, ms", PLAIN, TORCH]
    header[4:] = [f"{form} / {OPERATOR}" for form in header[4:]]
    save(arguments, "speed_onnx", [table(["attention alone", *header], alone), table(["model", *header], whole)])


if __name__ == "__main__":
    main()
