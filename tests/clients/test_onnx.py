"""`export --to onnx` in onnxruntime: any batch and length, prompts and the steps after them."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch
from checkpoints import save_twin, tiny_tokenizer
from matrix import build_mechanism, hidden_states_of, qkv, stock_model
from torch import nn

from hf_linear_attention import convert
from hf_linear_attention._common.errors import ConversionError, UsageError
from hf_linear_attention.conversion.export import onnx as onnx_export
from hf_linear_attention.conversion.export.command import ExportRequest
from hf_linear_attention.conversion.export.onnx import (
    BATCH,
    LENGTH,
    Port,
    checked,
    graph_of,
    session_of,
    write,
    write_graph,
)
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.mechanisms.base import MechanismInputs


for library in ("onnx", "onnxruntime", "onnxscript"):
    pytest.importorskip(library, reason="needs the extra `clients`")
pytestmark = pytest.mark.clients

ENCODERS = {
    "linear": {"mechanism": "linear", "num_features": 16},
    "linformer": {"mechanism": "linformer", "projection_size": 8},
    "linformer-stretched": {"mechanism": "linformer", "projection_size": 8, "projection": "stretched"},
    "nystrom": {"mechanism": "nystrom", "num_landmarks": 8},
    "hybrid": {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 16},
}
IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _torch(monkeypatch):
    """A graph is of torch's operations, so what it is compared with is computed by torch, not by the C kernels."""
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_of_any_batch_and_length(name, tmp_path):
    """By the command's own check, which has several of them, and finds that another model is another."""
    model = convert(stock_model("bert", num_hidden_layers=1), **ENCODERS[name]).eval()  # layers are alike
    write_graph(graph_of(model), tmp_path / "graph.onnx", plain=False)
    assert bool(nodes_of(tmp_path / "graph.onnx")) == (name == "hybrid")  # whose far keys are causal on either side
    assert checked(model, tmp_path / "graph.onnx") < 1e-4
    with torch.no_grad():
        model.bert.encoder.layer[0].attention.self.value.weight.neg_()
    with pytest.raises(ConversionError, match="the graph does not compute what the model computes"):
        checked(model, tmp_path / "graph.onnx")


ROWS = (
    *("linear-elu1", "linear-hedgehog", "linear-decay", "linear-decay-elu1", "linear-gated", "performer"),
    *("gated_delta-channel", "gated_delta-no-erasing", "gated_delta-conv", "hybrid"),
)
PLAIN = ("linear-elu1", "gated_delta")
# Tokens of the parts of a text.
PARTS = (5, 1, 1, 67, 1)
LOG_FEATURES = ("exp", "hedgehog", "gated", "input-gate", "linear-decay", "performer", "hybrid")


class Attention(nn.Module):
    """A mechanism as a function of what it gets from its layer and of its state, which ONNX can hold."""

    def __init__(self, mechanism):
        super().__init__()
        self.mechanism, shape = mechanism, mechanism.shape
        heads = {"queries": shape.num_heads, "keys": shape.num_key_value_heads, "values": shape.num_key_value_heads}
        self.inputs = [Port(name, (BATCH, count, LENGTH, shape.head_dim)) for name, count in heads.items()]
        self.inputs.append(Port("attention_mask", (BATCH, LENGTH), torch.bool))
        self.inputs.append(Port("positions", (BATCH, LENGTH), torch.int32))
        size = mechanism.gates(torch.zeros(1, 1, shape.hidden_size or 0)).shape[2] if mechanism.needs_gates else 0
        self.inputs.append(Port("gates", (BATCH, LENGTH, size)))
        states = [((BATCH, *size[1:]), dtype) for size, dtype in mechanism.state_layout(torch.float32)]
        self.inputs += [Port(f"past_{number}", *state) for number, state in enumerate(states)]
        self.outputs = [Port("output", (BATCH, LENGTH, shape.num_heads, shape.head_dim))]
        self.outputs += [Port(f"present_{number}", *state) for number, state in enumerate(states)]

    def forward(self, *tensors):
        query, key, value, attention_mask, positions, gates, *state = tensors
        mechanism = self.mechanism
        inputs = MechanismInputs(query, key, value, attention_mask, query.shape[-1] ** -0.5, True)
        inputs = inputs._replace(gates=gates if mechanism.needs_gates else None)
        if mechanism.needs_positions:
            inputs = mechanism.prepare(inputs._replace(positions=positions))
        output, new = mechanism(inputs, tuple(state) or None)
        return output, *(new or ())


def inputs_of(attention, batch, std, dtype=torch.float32):
    """Tensors by name, of all tokens."""
    query, key, value = qkv(sum(PARTS), batch=batch, std=std)
    mask = torch.ones(batch, sum(PARTS), dtype=torch.bool)
    if batch > 1:  # padding at the start, and where there is a state
        mask[0, :2] = mask[0, 20:30] = False
    hidden = hidden_states_of(key)
    gates = attention.mechanism.gates(hidden) if attention.mechanism.needs_gates else hidden[..., :0]
    positions = (mask.cumsum(1) - 1).clamp(min=0).int()
    names = ("queries", "keys", "values", "attention_mask", "positions", "gates")
    return dict(zip(names, (query, key, value, mask, positions, gates)))


def run_in_parts(session, tensors, state, parts):
    """The outputs of the graph for parts that begin at a multiple of them, from this state on."""
    outputs, begin, names = [], tensors["values"].shape[2] - sum(parts), [x.name for x in session.get_inputs()]
    for length in parts:
        part = {
            name: (x[:, :, begin : begin + length] if x.ndim == 4 else x[:, begin : begin + length]).contiguous()
            for name, x in tensors.items()
        }
        given = part | {f"past_{place}": x for place, x in enumerate(state)}
        output, *state = map(torch.from_numpy, session.run(None, {name: given[name].numpy() for name in names}))
        outputs.append(output)
        begin += length
    return torch.cat(outputs, dim=1)


def nodes_of(path):
    import onnx

    return [node for node in onnx.load(path).graph.node if node.op_type == "LinearAttention"]


@torch.no_grad()
@pytest.mark.parametrize(("row", "plain"), [*((row, False) for row in ROWS), *((row, True) for row in PLAIN)])
def test_the_attention_of_a_graph(row, plain, tmp_path):
    """In prompts, parts and steps, from an empty state and from one of torch: what the same mechanism is in float64."""
    torch.manual_seed(0)
    attention = Attention(build_mechanism(row).eval())
    write_graph(attention, tmp_path / "graph.onnx", plain=plain)
    assert [node.domain for node in nodes_of(tmp_path / "graph.onnx")] == ["com.microsoft"] * (not plain)
    session = session_of(tmp_path / "graph.onnx")
    exact = copy.deepcopy(attention).double()
    for batch, std in ((2, 1.0), (1, 8.0 if any(word in row for word in LOG_FEATURES) else 1.0)):
        tensors = inputs_of(attention, batch, std)
        expected, *_ = exact(*(x.double() if x.is_floating_point() else x for x in tensors.values()))
        empty = [port.zeros(batch_size=batch) for port in attention.inputs if port.name.startswith("past_")]
        _, *state = attention(*(x[:, :, : PARTS[0]] if x.ndim == 4 else x[:, : PARTS[0]] for x in tensors.values()))
        for past, parts in ((empty, PARTS), (state, PARTS[1:])):
            found = run_in_parts(session, tensors, past, parts)
            wanted, real = (x[:, -sum(parts) :] for x in (expected, tensors["attention_mask"]))
            # Exponents of q, k with std 8 are near 100, which float32 rounds by 4e-6; and products of many tokens.
            assert (found - wanted)[real].abs().max() <= (3e-5 if std > 1 else 1e-5) * wanted.abs().max()


# Greedy text by onnxruntime alone; the past is whatever the graph names.
GENERATE = """
import sys, json, numpy as np, onnxruntime
sys.modules["hf_linear_attention"] = sys.modules["torch"] = None
session = onnxruntime.InferenceSession(sys.argv[1] + "/model.onnx", providers=["CPUExecutionProvider"])
ids, mask = (np.array(x, dtype=np.int64) for x in json.loads(sys.argv[2]))
types = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}
sizes = {"batch_size": len(ids), "past_sequence_length": 0}
past = {
    x.name: np.zeros([sizes.get(size, size) for size in x.shape], types[x.type])
    for x in session.get_inputs() if x.name.startswith("past")
}
tokens = ids
for _ in range(int(sys.argv[3])):
    logits, *present = session.run(None, {"input_ids": tokens, "attention_mask": mask, **past})
    past = dict(zip(past, present))
    tokens = logits[:, -1:].argmax(-1)
    ids, mask = np.concatenate([ids, tokens], 1), np.concatenate([mask, np.ones_like(tokens)], 1)
print(json.dumps(ids.tolist()))
"""


@torch.no_grad()
def test_the_command_writes_what_onnxruntime_generates_with(tmp_path):
    """Two layers are linear, and one is softmax."""
    source, out, graph = tmp_path / "source", tmp_path / "out", tmp_path / "graph"
    save_twin(source, "llama")
    settings = {"mechanism": "linear", "feature_map": "elu1", "layers": [0, 1]}
    model = convert(str(source), **settings)
    model.save_pretrained(out)
    tiny_tokenizer().save_pretrained(out)
    words = [sys.executable, "-m", "hf_linear_attention", "export", out, "--to", "onnx", "--output_dir", graph]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "onnxruntime 1.30 or later" in done.stdout
    assert (graph / "tokenizer.json").is_file()
    assert len(nodes_of(graph / "model.onnx")) == 2
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    given = json.dumps([IDS.tolist(), mask.tolist()])
    found = subprocess.run([sys.executable, "-c", GENERATE, str(graph), given, "20"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.eval().generate(IDS, attention_mask=mask, **options)
    assert json.loads(found.stdout) == expected.tolist()


def test_what_has_no_graph_is_refused(monkeypatch, tmp_path):
    save_twin(tmp_path / "llama", "llama")
    request = ExportRequest(tmp_path / "llama", "onnx", tmp_path / "graph")
    with monkeypatch.context() as patch:
        patch.setattr(onnx_export, "NEEDED", {"onnx": "99", "no-such-library": "1"})
        with pytest.raises(UsageError, match='run `pip install "onnx>=99" "no-such-library>=1"`'):
            write(request)
    with pytest.raises(UsageError, match="takes a converted model, and this one is none; convert it first"):
        write(request)
    with pytest.raises(UsageError, match="decoders and encoders of text; LinearViTModel reads pixel_values"):
        graph_of(convert(stock_model("vit"), mechanism="linear"))
    assert not (tmp_path / "graph").exists()
