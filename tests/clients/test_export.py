"""torch.export and `export --to onnx` in onnxruntime: any batch and length, prompts and the steps after them."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys

import pytest
import torch
from caches import past
from checkpoints import save_twin, tiny_tokenizer
from matrix import build_mechanism, hidden_states_of, qkv, stock_model
from torch import nn
from torch.export import Dim, export
from transformers import StaticCache

from hf_linear_attention import convert
from hf_linear_attention._common.errors import ConversionError, UsageError
from hf_linear_attention.conversion.export import onnx as onnx_export
from hf_linear_attention.conversion.export.command import ExportRequest
from hf_linear_attention.conversion.export.onnx import checked, graph_of, session_of, write, write_graph
from hf_linear_attention.kernels import cpu as kernels_cpu


pytestmark = pytest.mark.clients

ENCODERS = {
    "linear": {"mechanism": "linear", "num_features": 16},
    "performer": {"mechanism": "performer", "num_features": 16},
    "linformer": {"mechanism": "linformer", "projection_size": 8},
    "linformer-stretched": {"mechanism": "linformer", "projection_size": 8, "projection": "stretched"},
    "nystrom": {"mechanism": "nystrom", "num_landmarks": 8},
    "hybrid": {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 16},
}
IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
PROMPT = 6


class Logits(nn.Module):
    """What is exported of an encoder."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def encoder(name):
    return Logits(convert(stock_model("bert", num_hidden_layers=1), **ENCODERS[name])).eval()  # layers are alike


def padded(batch, length):
    ids = torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return ids, mask


EXAMPLE, OTHERS = (2, 13), [(2, 13), (3, 41), (1, 3)]
# AUTO would accept one length where the graph depends on it; DYNAMIC fails then.
FREE = {0: Dim.AUTO, 1: Dim.DYNAMIC}
FREE_INPUTS = {"input_ids": FREE, "attention_mask": {0: Dim.AUTO, 1: Dim.AUTO}}


@pytest.fixture(autouse=True)
def _torch(monkeypatch):
    """A graph is of torch's operations, so what it is compared with is computed by torch, not by the C kernels."""
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_of_any_batch_and_length(name, tmp_path):
    model = encoder(name)
    program = export(model, padded(*EXAMPLE), dynamic_shapes=FREE_INPUTS, strict=False)
    exported, session = program.module(), onnx_session(program, (), tmp_path / "encoder.onnx")
    for shape in OTHERS:
        inputs = padded(*shape)
        expected = model(*inputs)
        # mostly the same operations in the same order
        torch.testing.assert_close(exported(*inputs), expected, rtol=1e-4, atol=2e-5)
        assert (session(*inputs)[0] - expected).abs().max() <= 1e-4


class StaticStep(nn.Module):
    """The next token from a static cache, whose tensors become buffers that the exported program changes in place."""

    def __init__(self, model, cache):
        super().__init__()
        self.model, self.cache = model, cache
        for number, layer in enumerate(cache.layers):
            for place, tensor in enumerate((layer.cumulative_length, *layer.state)):
                self.register_buffer(f"layer_{number}_{place}", tensor)

    def forward(self, input_ids):
        return self.model(input_ids, **past(self.cache)).logits


@torch.no_grad()
def test_the_decode_step_of_a_static_cache_exports():
    model = convert(stock_model("llama"), **ENCODERS["hybrid"])
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(IDS[:, :PROMPT], **past(cache))
    exported = export(StaticStep(model, cache), (IDS[:, PROMPT : PROMPT + 1],), strict=True).module()
    logits = torch.cat([exported(IDS[:, step : step + 1]) for step in range(PROMPT, IDS.shape[1])], dim=1)
    expected = model(IDS, use_cache=False).logits[:, PROMPT:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


class CausalLogits(nn.Module):
    """A forward without a cache: `position_ids` may restart, and nothing in a graph tells whether they do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids=None):
        return self.model(input_ids, position_ids=position_ids, use_cache=False).logits


# What a decoder gets by default: a learned decay, partial rotary positions, sinks no farther than `trained_length`.
FREE_DECODERS = {
    "default": ("llama", {"window_size": 4, "num_sinks": 2, "num_features": 16, "trained_length": 16}),
    "gated_delta": ("llama", {"mechanism": "gated_delta", "decay": "channel"}),
    "gated": ("llama", {"mechanism": "linear", "decay": "gated"}),
}


@torch.no_grad()
def test_packed_sequences_of_any_length():
    """Nothing in the graph says which tokens begin a sequence: that is in `position_ids`."""
    family, settings = FREE_DECODERS["default"]
    model = CausalLogits(convert(stock_model(family, num_hidden_layers=1), **settings)).eval()
    shapes = {"input_ids": FREE, "position_ids": {0: Dim.AUTO, 1: Dim.AUTO}}
    program = export(model, (IDS, torch.arange(12).expand(2, -1)), dynamic_shapes=shapes, strict=False)
    exported = program.module()
    ids, _ = padded(2, 41)
    for lengths in ((41,), (5, 36), (20, 1, 20)):
        positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
        expected = model(ids, positions)
        torch.testing.assert_close(exported(ids, positions), expected, rtol=1e-4, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", FREE_DECODERS)
def test_a_decoder_of_any_batch_and_length(name):
    family, settings = FREE_DECODERS[name]
    model = CausalLogits(convert(stock_model(family, num_hidden_layers=1), **settings)).eval()
    program = export(model, (IDS,), dynamic_shapes={"input_ids": FREE}, strict=False)
    exported = program.module()
    for shape in OTHERS:
        ids, _ = padded(*shape)
        torch.testing.assert_close(exported(ids), model(ids), rtol=1e-4, atol=2e-5)  # other blocks


# ONNX: what `export OUT --to onnx` writes.

ROWS = (
    *("linear-elu1", "linear-hedgehog", "linear-decay", "linear-decay-elu1", "linear-gated", "performer"),
    *("gated_delta-channel", "gated_delta-no-erasing", "gated_delta-conv", "hybrid"),
)
# Tokens of the parts of a text.
PARTS = (5, 1, 1, 67, 1)
LOG_FEATURES = ("exp", "hedgehog", "gated", "input-gate", "linear-decay", "performer", "hybrid")


@pytest.fixture
def attention_of():
    """A mechanism as a function of its inputs and its state."""
    for library in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(library, reason="needs the extra `clients`")
    return importlib.import_module("exported_attention").Attention


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
    onnx = pytest.importorskip("onnx", reason="needs the extra `clients`")
    return [node for node in onnx.load(path).graph.node if node.op_type == "LinearAttention"]


@torch.no_grad()
@pytest.mark.parametrize("row", ROWS)
def test_the_attention_of_a_graph(row, attention_of, tmp_path):
    """In prompts, parts and steps, from an empty state and from one of torch: what the same mechanism is in float64."""
    torch.manual_seed(0)
    attention = attention_of(build_mechanism(row).eval())
    write_graph(attention, tmp_path / "graph.onnx", plain=False)
    assert [node.domain for node in nodes_of(tmp_path / "graph.onnx")] == ["com.microsoft"]
    session = session_of(tmp_path / "graph.onnx")
    exact = copy.deepcopy(attention).double()
    for batch, std in ((2, 1.0), (1, 8.0 if any(word in row for word in LOG_FEATURES) else 1.0)):
        tensors = inputs_of(attention, batch, std)
        wide = [x.double() if x.is_floating_point() else x for x in tensors.values()]
        expected, *_ = exact(*wide)
        empty = [port.zeros(batch_size=batch) for port in attention.inputs if port.name.startswith("past_")]
        found = run_in_parts(session, tensors, empty, PARTS)
        real = tensors["attention_mask"]
        # Exponents of q, k with std 8 are near 100, which float32 rounds by 4e-6; and products of many tokens.
        assert (found - expected)[real].abs().max() <= (3e-5 if std > 1 else 1e-5) * expected.abs().max()
        prompt = [x[:, :, : PARTS[0]] if x.ndim == 4 else x[:, : PARTS[0]] for x in tensors.values()]
        _, *state = attention(*prompt)
        found = run_in_parts(session, tensors, state, PARTS[1:])
        expected, real = expected[:, PARTS[0] :], real[:, PARTS[0] :]
        assert (found - expected)[real].abs().max() <= (3e-5 if std > 1 else 1e-5) * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("row", ["linear-elu1", "gated_delta"])
def test_plain_operators_of_any_length(row, attention_of, tmp_path):
    torch.manual_seed(0)
    attention = attention_of(build_mechanism(row).eval())
    write_graph(attention, tmp_path / "graph.onnx", plain=True)
    assert not nodes_of(tmp_path / "graph.onnx")
    tensors = inputs_of(attention, 2, 1.0)
    empty = [port.zeros(batch_size=2) for port in attention.inputs if port.name.startswith("past_")]
    found = run_in_parts(session_of(tmp_path / "graph.onnx"), tensors, empty, PARTS)
    expected, *_ = copy.deepcopy(attention).double()(
        *(x.double() if x.is_floating_point() else x for x in tensors.values())
    )
    assert (found - expected)[tensors["attention_mask"]].abs().max() <= 1e-5 * expected.abs().max()


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


def test_a_graph_of_another_model_is_refused(tmp_path):
    """And an encoder's is of plain operators, with or without the operator."""
    pytest.importorskip("onnxscript", reason="needs the extra `clients`")
    model = convert(stock_model("bert", num_hidden_layers=1), **ENCODERS["linear"]).eval()
    write_graph(graph_of(model), tmp_path / "graph.onnx", plain=False)
    assert not nodes_of(tmp_path / "graph.onnx")
    assert checked(model, tmp_path / "graph.onnx") < 1e-4
    with torch.no_grad():
        model.bert.encoder.layer[0].attention.self.value.weight.neg_()
    with pytest.raises(ConversionError, match="the graph does not compute what the model computes"):
        checked(model, tmp_path / "graph.onnx")


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


def onnx_session(model, example, path, **options):
    """Export, and give what calls onnxruntime with torch tensors."""
    pytest.importorskip("onnxscript", reason="needs the extra `clients`")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra `clients`")
    # Its optimiser drops the reshapes around a product whenever the shapes happen to broadcast (onnxscript 0.7.2,
    # `_broadcast_to_matmul.py`), which is wrong where batch, key/value heads and their groups are equal, as here.
    torch.onnx.export(model, example, path, dynamo=True, optimize=False, external_data=False, verbose=False, **options)
    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, session_options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def call(*tensors):
        feed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
        return [torch.from_numpy(output) for output in session.run(None, feed)]

    return call
