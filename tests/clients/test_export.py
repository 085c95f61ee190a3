"""torch.export of converted decoders: any batch and length, packed sequences, and the step of a static cache."""

from __future__ import annotations

import pytest
import torch
from caches import past
from matrix import stock_model
from torch import nn
from torch.export import Dim, export
from transformers import StaticCache

from hf_linear_attention import convert
from hf_linear_attention.kernels import cpu as kernels_cpu


pytestmark = pytest.mark.clients

IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
PROMPT = 6
# AUTO would accept one length where the graph depends on it; DYNAMIC fails then.
FREE = {0: Dim.AUTO, 1: Dim.DYNAMIC}
# What a decoder gets by default: a learned decay, partial rotary positions, sinks no farther than `trained_length`.
DECODERS = {
    "default": {"window_size": 4, "num_sinks": 2, "num_features": 16, "trained_length": 16},
    "gated": {"mechanism": "linear", "decay": "gated"},
}


@pytest.fixture(autouse=True)
def _torch(monkeypatch):
    """A graph is of torch's operations, so what it is compared with is computed by torch, not by the C kernels."""
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)


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
    model = convert(stock_model("llama", num_hidden_layers=2), window_size=4, num_sinks=2, num_features=16)
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


@torch.no_grad()
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_of_any_batch_and_length(name):
    """Nothing in the graph of the default says which tokens begin a sequence: that is in `position_ids`."""
    model = CausalLogits(convert(stock_model("llama", num_hidden_layers=1), **DECODERS[name])).eval()
    inputs, shapes = (IDS,), {"input_ids": FREE}
    if name == "default":
        inputs, shapes = (IDS, torch.arange(12).expand(2, -1)), shapes | {"position_ids": {0: Dim.AUTO, 1: Dim.AUTO}}
    exported = export(model, inputs, dynamic_shapes=shapes, strict=False).module()
    for batch, *lengths in ((2, 13), (1, 3), (3, 41), (2, 5, 36), (2, 20, 1, 20)):
        ids = torch.randint(3, 64, (batch, sum(lengths)), generator=torch.Generator().manual_seed(1))
        positions = torch.cat([torch.arange(length) for length in lengths]).expand(batch, -1)
        given = (ids, positions)[: len(inputs)]
        torch.testing.assert_close(exported(*given), model(*given), rtol=1e-4, atol=2e-5)  # other blocks
