"""torch.compile and torch.export: one node a kernel, no break, no new graph for the same shapes, eager numbers."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from matrix import build_mechanism, call_mechanism, rows, stock_model, supports
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    StaticCache,
)

from hf_linear_attention import convert
from hf_linear_attention.configuration_linear_attention import LinearAttentionSettings
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.mechanisms.base import LayerShape
from hf_linear_attention.mechanisms.registry import MECHANISMS


pytestmark = pytest.mark.usefixtures("fresh_compiler")

LAYERS = {
    "exp": {"mechanism": "linear", "feature_map": "exp", "num_features": 64},
    "hybrid": {"mechanism": "hybrid", "window_size": 64, "num_sinks": 4, "num_features": 64},
}
MOST_NODES = 60
LENGTH = 4096


class Nodes:
    """A backend that counts the nodes of each graph and computes it as it is."""

    def __init__(self):
        self.dynamo, self.forward, self.backward = [], [], []
        self.compile = aot_autograd(fw_compiler=self._keep(self.forward), bw_compiler=self._keep(self.backward))

    @staticmethod
    def _keep(graphs):
        def compiler(module, example):
            graphs.append(module.graph)
            return make_boxed_func(module.forward)

        return compiler

    def __call__(self, module, example):
        self.dynamo.append(module.graph)
        return self.compile(module, example)


def kernels_in(graph) -> list[str]:
    """The names of our operators."""
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return sorted(target.split(".")[1] for target in targets if target.startswith("hf_linear_attention."))


def build(settings, max_length=LENGTH):
    shape = LayerShape(4, 2, 32, 0, max_length, None)
    mechanism = MECHANISMS[settings["mechanism"]](LinearAttentionSettings(settings, max_length=max_length), shape)
    mechanism.reset_parameters()
    return mechanism


def sample(batch=1, length=LENGTH, dim=32, heads=4, kv_heads=2):
    shapes = [(batch, n, length, dim) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def attention(mechanism, is_causal=True, mask=None):
    def attend(query, key, value):
        options = {"scaling": query.shape[-1] ** -0.5, "is_causal": is_causal, "state": None}
        return call_mechanism(mechanism, query, key, value, attention_mask=mask, **options)[0]

    return attend


def with_gradients(function, mechanism, inputs, weight):
    """The output, and the gradients of inputs and parameters."""
    output = function(*inputs)
    wanted = [*inputs, *mechanism.parameters()]
    grads = torch.autograd.grad((output * weight).sum(), wanted, allow_unused=True)
    return [output, *(grad for grad in grads if grad is not None)]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", LAYERS)
def test_a_compiled_layer_is_a_small_graph(name):
    mechanism, inputs = build(LAYERS[name]), sample()
    nodes, attend, weight = Nodes(), attention(mechanism), torch.randn(1, LENGTH, 4, 32)
    compiled = torch.compile(attend, fullgraph=True, backend=nodes)
    actual = with_gradients(compiled, mechanism, inputs, weight)
    for graphs in (nodes.dynamo, nodes.forward):
        assert len(graphs) == 1
        assert len(graphs[0].nodes) <= MOST_NODES
    assert len(nodes.backward[0].nodes) <= 2 * MOST_NODES
    in_parts = kernels_cpu.library() is None
    kernels = ["attention", "window_attention"] if in_parts else ["joint_attention"]
    kernels = kernels if name == "hybrid" else ["attention"]
    assert kernels_in(nodes.forward[0]) == kernels
    assert kernels_in(nodes.backward[0]) == [f"{kernel}_backward" for kernel in kernels]
    with_gradients(compiled, mechanism, inputs, weight)
    assert len(nodes.dynamo) == 1  # the same shapes again
    torch.testing.assert_close(actual, with_gradients(attend, mechanism, inputs, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_marked", [False, True])
def test_other_lengths_need_few_graphs(is_marked):
    """Two, or one where the length is marked as dynamic."""
    mechanism, counter = build(LAYERS["hybrid"]), CompileCounter()
    attend = attention(mechanism)
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for length in (130, 257, 300):
        inputs = sample(length=length)
        for x in inputs if is_marked else ():
            torch._dynamo.mark_dynamic(x, 2)
        torch.testing.assert_close(compiled(*inputs), attend(*inputs), rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2 - is_marked


def test_inductor_computes_the_same():
    mechanism, inputs = build(LAYERS["hybrid"]), sample(length=150)  # which has both operators
    attend, weight = attention(mechanism), torch.randn(1, 150, 4, 32)
    compiled = torch.compile(attend, fullgraph=True)
    actual, expected = (with_gradients(function, mechanism, inputs, weight) for function in (compiled, attend))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


# One row of each kind of state and of features: a compilation takes long.
COMPILED = (
    *("aft-local", "aft-full", "linear-taylor", "linear-decay", "linear-gated", "performer", "hybrid"),
    *("gated_delta-channel", "window", "linformer-stretched", "latent", "nystrom-conv"),
)


@pytest.mark.parametrize("row", COMPILED)
def test_a_mechanism_compiles_without_a_break(row):
    mechanism, is_causal = build_mechanism(row), not supports(row, "bidirectional")
    inputs, mask = sample(2, 29, 8), torch.ones(2, 29, dtype=torch.bool)
    mask[0, 20:] = mask[1, 5] = False
    weight = torch.randn(2, 29, 4, 8)
    attend = attention(mechanism, is_causal, mask)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    actual, expected = (with_gradients(function, mechanism, inputs, weight) for function in (compiled, attend))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


PACKED = [row for row in rows(causal=True) if not row.startswith(("aft-local", "aft-conv"))]


def packed_numbers() -> torch.Tensor:
    """Sequences of 3, 1, 20 and 16 tokens, and of 9, 12 and 10 with padding before, between, inside and after them."""
    first = [1] * 3 + [2] + [3] * 20 + [4] * 16
    second = [0] * 2 + [1] * 9 + [0] * 3 + [2] * 5 + [0] + [2] * 7 + [3] * 10 + [0] * 3
    return torch.tensor([first, second])


def each_apart(mechanism, inputs, numbers, weight):
    """Every packed sequence in its own call, without its padding."""
    output = torch.zeros(*numbers.shape, 4, inputs[2].shape[-1])
    for row, line in enumerate(numbers):
        for number in line.unique():
            if number:
                places = (line == number).nonzero()[:, 0]
                own = [x[row : row + 1, :, places] for x in inputs]
                output = output.index_put((torch.tensor(row), places), attention(mechanism)(*own)[0])
    wanted = [*inputs, *mechanism.parameters()]
    grads = torch.autograd.grad((output * weight).sum(), wanted, allow_unused=True)
    return [output, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("row", PACKED)
def test_numbered_sequences_are_those_of_each_apart(row):
    """What a graph gets, where nothing tells whether sequences are packed."""
    mechanism, inputs, numbers = build_mechanism(row), sample(2, 40, 8), packed_numbers()
    is_real, weight = (numbers > 0)[..., None, None], torch.randn(2, 40, 4, 8)
    expected = each_apart(mechanism, inputs, numbers, weight)

    def attend(*inputs):
        return attention(mechanism, mask=numbers)(*inputs) * is_real

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for function in (attend, compiled) if row in ("linear-gated", "hybrid", "gated_delta-channel") else (attend,):
        actual = with_gradients(function, mechanism, inputs, weight)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("row", PACKED)
def test_what_follows_numbered_sequences_follows_the_last(row):
    mechanism, numbers = build_mechanism(row), packed_numbers()[:1]
    query, key, value = sample(1, 41, 8)
    options = {"scaling": 8**-0.5, "is_causal": True}
    packed = [x[:, :, :40] for x in (query, key, value)]
    _, state = call_mechanism(mechanism, *packed, attention_mask=numbers, state=None, **options)
    following = [x[:, :, 40:] for x in (query, key, value)]
    actual, _ = call_mechanism(mechanism, *following, attention_mask=None, state=state, **options)
    last = [x[:, :, 24:] for x in (query, key, value)]
    expected, _ = call_mechanism(mechanism, *last, attention_mask=None, state=None, **options)
    torch.testing.assert_close(actual, expected[:, -1:], rtol=1e-4, atol=1e-5)


def test_numbered_sequences_are_not_unrolled_in_a_compiled_graph():
    mechanism, sizes = build(LAYERS["hybrid"]), []
    for length in (512, 1024):
        nodes, numbers = Nodes(), torch.arange(length)[None] // 100 + 1
        torch.compile(attention(mechanism, mask=numbers), fullgraph=True, backend=nodes, dynamic=False)(
            *sample(1, length)
        )
        assert "attention" in kernels_in(nodes.forward[0])
        sizes.append(len(nodes.forward[0].nodes))
    assert sizes[0] == sizes[1] < 350


def test_numbers_are_refused_where_they_have_no_form():
    mechanism, inputs, numbers = build_mechanism("hybrid"), sample(1, 4, 8), torch.tensor([[1, 1, 2, 2]])
    for each in (mechanism, build_mechanism("linear-exp")):
        with pytest.raises(ValueError, match="own row of the batch"):
            attention(each, is_causal=False, mask=numbers)(*inputs)
    options = {"scaling": 1.0, "is_causal": True}
    _, state = call_mechanism(mechanism, *inputs, attention_mask=None, state=None, **options)
    with pytest.raises(ValueError, match="after cached tokens"):
        call_mechanism(mechanism, *inputs, attention_mask=numbers, state=state, **options)


HYBRID = {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 16}


@torch.no_grad()
def test_decoding_needs_few_graphs():
    """As many as the stock model: one with a static cache, a second with a dynamic one, whose length is a number."""
    model, ids = convert(stock_model("llama"), **HYBRID), torch.randint(3, 64, (2, 13))
    expected = model(ids, use_cache=False).logits[:, 5:]
    for cache_class, options, most in ((StaticCache, {"max_cache_len": 32}, 1), (DynamicCache, {}, 2)):
        cache, counter = cache_class(config=model.config, **options), CompileCounter()
        model(ids[:, :5], past_key_values=cache)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        logits = [compiled(ids[:, n : n + 1], past_key_values=cache).logits for n in range(5, 13)]
        assert counter.frame_count <= most
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_encoder_decoder_is_decoded_in_one_graph():
    sizes = {f"{part}_layers": 2 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")} | {"d_model": 32, "vocab_size": 64}
    stock = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("bart", **sizes)).eval()
    model, counter, ids = convert(stock, mechanism="linear"), CompileCounter(), torch.randint(3, 64, (2, 13))
    config = model.config.get_text_config(decoder=True)
    cache = EncoderDecoderCache(*(StaticCache(config=config, max_cache_len=length) for length in (32, 9)))
    given = {"encoder_outputs": model.get_encoder()(torch.randint(3, 64, (2, 9)))}
    model(decoder_input_ids=ids[:, :5], **given, past_key_values=cache)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    steps = ({"decoder_input_ids": ids[:, n : n + 1], "past_key_values": cache} for n in range(5, 13))
    logits = torch.cat([compiled(**step, **given).logits for step in steps], dim=1)
    assert counter.frame_count == 1
    expected = model(decoder_input_ids=ids, **given, use_cache=False).logits[:, 5:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_decoder_without_a_cache_exports(monkeypatch):
    """In a graph nothing tells whether position_ids restart, so it honours that they may."""
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    model, ids = convert(stock_model("llama"), **HYBRID), torch.randint(3, 64, (2, 20))
    together = torch.arange(20).expand(2, -1)
    packed = torch.cat((torch.arange(7), torch.arange(13))).expand(2, -1)
    exported = torch.export.export(Logits(model), (ids, together), strict=False).module()
    for positions in (together, packed):
        actual = exported(ids, positions)
        torch.testing.assert_close(actual, Logits(model)(ids, positions), rtol=1e-4, atol=1e-4)
    parts = [Logits(model)(part, torch.arange(part.shape[1])[None]) for part in ids.split([7, 13], dim=1)]
    torch.testing.assert_close(actual, torch.cat(parts, dim=1), rtol=1e-4, atol=1e-4)


class Logits(torch.nn.Module):
    """What is exported of a decoder: a forward without a cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, position_ids):
        return self.model(input_ids, position_ids=position_ids, use_cache=False).logits
