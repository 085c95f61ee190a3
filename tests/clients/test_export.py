"""torch.export, and ONNX in onnxruntime: any batch and length, and the decode step of decoders."""

from __future__ import annotations

import pytest
import torch
from matrix import stock_model
from torch import nn
from torch.export import Dim, export
from transformers import DynamicCache, StaticCache

from hf_linear_attention import convert
from hf_linear_attention.attention.cache import state_layer
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
DECODERS = {
    "linear": ("gpt2", ENCODERS["linear"]),
    "hybrid": ("llama", ENCODERS["hybrid"]),
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
        return self.model(input_ids, past_key_values=self.cache).logits


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_the_decode_step_of_a_static_cache_exports(name):
    family, settings = DECODERS[name]
    model = convert(stock_model(family), **settings)
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(IDS[:, :PROMPT], past_key_values=cache)
    exported = export(StaticStep(model, cache), (IDS[:, PROMPT : PROMPT + 1],), strict=True).module()
    logits = torch.cat([exported(IDS[:, step : step + 1]) for step in range(PROMPT, IDS.shape[1])], dim=1)
    expected = model(IDS, use_cache=False).logits[:, PROMPT:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


class StateStep(nn.Module):
    """The next token as a function: state in, state out. Nothing in it grows with the length."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids, *states):
        layers = self.model.config.num_hidden_layers
        cache = DynamicCache(config=self.model.config)
        for number in range(layers):
            state = states[number * len(states) // layers : (number + 1) * len(states) // layers]
            state_layer(cache, number).restore(state, (), 1)
        logits = self.model(input_ids, position_ids=position_ids, past_key_values=cache).logits
        return logits, *(tensor for layer in cache.layers for tensor in layer.state)


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_the_decode_step_in_onnxruntime(name, tmp_path):
    family, settings = DECODERS[name]
    model = convert(stock_model(family), **settings)
    prompt = model(IDS[:, :PROMPT], use_cache=True).past_key_values
    states = [tensor for layer in prompt.layers for tensor in layer.state]
    expected = model(IDS, use_cache=False).logits
    session = None
    for step in range(PROMPT, IDS.shape[1]):
        inputs = (IDS[:, step : step + 1], torch.full((2, 1), step), *states)
        session = session or onnx_session(StateStep(model), inputs, tmp_path / "step.onnx")
        logits, *states = session(*inputs)
        assert (logits - expected[:, step : step + 1]).abs().max() <= 1e-4


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
    "linear": ("gpt2", {"mechanism": "linear", "feature_map": "elu1"}),
}


@torch.no_grad()
def test_packed_sequences_of_any_length(tmp_path):
    """Nothing in the graph says which tokens begin a sequence: that is in `position_ids`."""
    family, settings = FREE_DECODERS["default"]
    model = CausalLogits(convert(stock_model(family, num_hidden_layers=1), **settings)).eval()
    shapes = {"input_ids": FREE, "position_ids": {0: Dim.AUTO, 1: Dim.AUTO}}
    program = export(model, (IDS, torch.arange(12).expand(2, -1)), dynamic_shapes=shapes, strict=False)
    exported, session = program.module(), onnx_session(program, (), tmp_path / "packed.onnx")
    ids, _ = padded(2, 41)
    for lengths in ((41,), (5, 36), (20, 1, 20)):
        positions = torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
        expected = model(ids, positions)
        torch.testing.assert_close(exported(ids, positions), expected, rtol=1e-4, atol=2e-5)
        assert (session(ids, positions)[0] - expected).abs().max() <= 1e-4


@torch.no_grad()
@pytest.mark.parametrize("name", FREE_DECODERS)
def test_a_decoder_of_any_batch_and_length(name, tmp_path):
    family, settings = FREE_DECODERS[name]
    model = CausalLogits(convert(stock_model(family, num_hidden_layers=1), **settings)).eval()
    program = export(model, (IDS,), dynamic_shapes={"input_ids": FREE}, strict=False)
    exported, session = program.module(), onnx_session(program, (), tmp_path / "decoder.onnx")
    for shape in OTHERS:
        ids, _ = padded(*shape)
        expected = model(ids)
        torch.testing.assert_close(exported(ids), expected, rtol=1e-4, atol=2e-5)  # other blocks
        assert (session(ids)[0] - expected).abs().max() <= 1e-4


@torch.no_grad()
def test_a_mechanism_without_a_loop_asks_for_one_length():
    model = CausalLogits(convert(stock_model("llama", num_hidden_layers=1), mechanism="gated_delta")).eval()
    with pytest.raises(NotImplementedError, match="give a fixed length"):
        export(model, (IDS,), dynamic_shapes={"input_ids": FREE}, strict=False)


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
