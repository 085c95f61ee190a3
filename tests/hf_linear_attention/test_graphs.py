"""torch.compile and torch.export: one node a kernel, no break, no new graph for the same shapes, eager numbers."""

from __future__ import annotations

import pytest
import torch
from architectures import tiny_model
from caches import past
from matrix import PATHS, add_gates, attend, build_mechanism, mechanism_of, qkv, stock_model, supports
from torch._dynamo.testing import AotEagerAndRecordGraphs, CompileCounter
from torch._inductor.utils import run_and_get_code
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from hf_linear_attention import convert
from hf_linear_attention.attention.cache import LinearAttentionStateLayer
from hf_linear_attention.kernels import cpu as kernels_cpu


pytestmark = pytest.mark.usefixtures("fresh_compiler")

LAYERS = {
    "exp": {"mechanism": "linear", "feature_map": "exp", "num_features": 64},
    "hybrid": {"mechanism": "hybrid", "window_size": 64, "num_sinks": 4, "num_features": 64},
    "gated_delta": {"mechanism": "gated_delta"},
}
# Forward graphs as torch records them, whose partition of `hybrid` has one node more than the default one (60).
MOST_NODES = {"exp": 60, "hybrid": 61, "gated_delta": 80}


def kernels_in(graph) -> list[str]:
    """The names of our operators."""
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return sorted(target.split(".")[1] for target in targets if target.startswith("hf_linear_attention."))


def sample(length: int, dim: int = 8, batch: int = 2):
    return [x.requires_grad_() for x in qkv(length, dim=dim, batch=batch)]


def output_of(mechanism, mask=None, is_causal=True):
    return lambda *inputs: attend(mechanism, *inputs, mask, is_causal=is_causal)[0]


def with_gradients(function, mechanism, inputs):
    """The output, and the gradients of inputs and parameters."""
    output = function(*inputs)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    wanted = [*inputs, *(x for x in mechanism.parameters() if x.requires_grad)]
    grads = torch.autograd.grad((output * weight).sum(), wanted, allow_unused=True)
    return [output, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize(("name", "in_parts"), [*((name, False) for name in LAYERS), ("hybrid", True)])
def test_a_compiled_layer_is_a_small_graph(name, in_parts, monkeypatch):
    if in_parts:
        monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    elif kernels_cpu.library() is None:
        pytest.skip("no C kernels")
    mechanism, inputs = mechanism_of(LAYERS[name], head_dim=32), sample(1024, 32, batch=1)
    if mechanism.needs_gates:
        mechanism.register_forward_pre_hook(add_gates)
    recorded, run = AotEagerAndRecordGraphs(), output_of(mechanism)
    compiled = torch.compile(run, fullgraph=True, backend=recorded)
    actual = with_gradients(compiled, mechanism, inputs)
    for graphs, most in ((recorded.graphs, 1), (recorded.fw_graphs, 1), (recorded.bw_graphs, 2)):
        assert len(graphs) == 1
        assert len(graphs[0].graph.nodes) <= most * MOST_NODES[name]
    kernels = ["attention", "window_attention"] if in_parts else ["hybrid"]
    kernels = kernels if name == "hybrid" else ["gated_delta" if name == "gated_delta" else "attention"]
    assert kernels_in(recorded.fw_graphs[0]) == kernels
    assert kernels_in(recorded.bw_graphs[0]) == [f"{kernel}_backward" for kernel in kernels]
    with_gradients(compiled, mechanism, inputs)
    assert len(recorded.graphs) == 1  # the same shapes again
    torch.testing.assert_close(actual, with_gradients(run, mechanism, inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_marked", [False, True])
def test_other_lengths_need_few_graphs(is_marked):
    """Two, or one where the length is marked as dynamic."""
    mechanism, counter = mechanism_of(LAYERS["hybrid"]), CompileCounter()
    compiled = torch.compile(output_of(mechanism), fullgraph=True, backend=counter)
    for length in (130, 257, 300):
        inputs = sample(length)
        for x in inputs if is_marked else ():
            torch._dynamo.mark_dynamic(x, 2)
        torch.testing.assert_close(compiled(*inputs), output_of(mechanism)(*inputs), rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2 - is_marked


# What is not compiled above or below: a compilation takes long.
COMPILED = ("aft-local", "linear-gated", "linformer-stretched", "nystrom-conv")


@pytest.mark.long
@pytest.mark.parametrize(("row", "compiler"), [*((row, "aot_eager") for row in COMPILED), ("linear-elu1", "inductor")])
def test_a_mechanism_compiles_without_a_break(row, compiler):
    mechanism, inputs, mask = build_mechanism(row), sample(29), torch.ones(2, 29, dtype=torch.bool)
    mask[0, 20:] = mask[1, 5] = False
    run = output_of(mechanism, mask, is_causal=not supports(row, "bidirectional"))
    compiled = torch.compile(run, fullgraph=True, backend=compiler)
    actual, expected = (with_gradients(function, mechanism, inputs) for function in (compiled, run))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


# Sequences of 3, 1, 20 and 16 tokens, and of 9, 12 and 10 with padding before, between, inside and after them.
NUMBERS = torch.tensor(
    [[1] * 3 + [2] + [3] * 20 + [4] * 16, [0] * 2 + [1] * 9 + [0] * 3 + [2] * 5 + [0] + [2] * 7 + [3] * 10 + [0] * 3]
)


def each_apart(mechanism):
    """Every packed sequence in its own call, without its padding."""

    def run(*inputs):
        output = torch.zeros(*NUMBERS.shape, 4, inputs[2].shape[-1])
        for row, line in enumerate(NUMBERS):
            for number in line[line > 0].unique():
                places = (line == number).nonzero()[:, 0]
                own = [x[row : row + 1, :, places] for x in inputs]
                output = output.index_put((torch.tensor(row), places), attend(mechanism, *own)[0][0])
        return output

    return run


@pytest.mark.parametrize("row", [row for row in PATHS if row != "aft-local" and supports(row, "causal")])
def test_numbered_sequences_are_those_of_each_apart(row):
    """What a graph gets, where nothing tells whether sequences are packed; and what follows them follows the last."""
    mechanism, inputs, token = build_mechanism(row), sample(40), qkv(1, batch=1, seed=3)

    def run(*inputs):
        return attend(mechanism, *inputs, NUMBERS)[0] * (NUMBERS > 0)[..., None, None]

    expected = with_gradients(each_apart(mechanism), mechanism, inputs)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for function in (run, compiled) if row == "hybrid" else (run,):
        torch.testing.assert_close(with_gradients(function, mechanism, inputs), expected, rtol=1e-4, atol=2e-5)
    _, state = attend(mechanism, *(x[:1] for x in inputs), NUMBERS[:1])
    last = (torch.cat((x[:1, :, 24:], new), dim=2) for x, new in zip(inputs, token))
    actual, expected = attend(mechanism, *token, None, state)[0], attend(mechanism, *last)[0][:, -1:]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@torch.no_grad()
def test_numbered_sequences_are_not_unrolled_in_a_compiled_graph():
    mechanism, recorded, numbers = mechanism_of(LAYERS["hybrid"]), AotEagerAndRecordGraphs(), torch.arange(512) // 100
    run = output_of(mechanism, numbers.expand(2, -1) + 1)
    torch.compile(run, fullgraph=True, backend=recorded)(*qkv(512))
    assert "attention" in kernels_in(recorded.fw_graphs[0])
    assert len(recorded.fw_graphs[0].graph.nodes) < 350  # 287 for any number of tokens and sequences


def test_numbers_are_refused_where_they_have_no_form():
    mechanism, inputs, numbers = build_mechanism("hybrid"), qkv(4, batch=1), torch.tensor([[1, 1, 2, 2]])
    for each in (mechanism, build_mechanism("linear-exp")):
        with pytest.raises(ValueError, match="own row of the batch"):
            attend(each, *inputs, numbers, is_causal=False)
    with pytest.raises(ValueError, match="after cached tokens"):
        attend(mechanism, *inputs, numbers, attend(mechanism, *inputs)[1])


HYBRID = {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 16}


@pytest.mark.long
@torch.no_grad()
def test_decoding_needs_few_graphs():
    """As many as the stock model: one with a static cache, a second with a dynamic one, whose length is a number."""
    model, ids = convert(stock_model("llama", num_hidden_layers=1), **HYBRID), torch.randint(3, 64, (2, 13))
    expected = model(ids, use_cache=False).logits[:, 5:]
    for cache_class, options, most in ((StaticCache, {"max_cache_len": 32}, 1), (DynamicCache, {}, 2)):
        cache, counter = cache_class(config=model.config, **options), CompileCounter()
        model(ids[:, :4], **past(cache))
        model(ids[:, 4:5], **past(cache))  # whose state is the layer's own, unlike those that follow
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        logits = [compiled(ids[:, n : n + 1], **past(cache)).logits for n in range(5, 13)]
        assert counter.frame_count <= most
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.skipif(kernels_cpu.library() is None, reason="no C kernels")
def test_a_compiled_step_writes_a_static_cache_without_a_copy():
    mechanism, layers = mechanism_of(HYBRID), [LinearAttentionStateLayer(64, static=True) for _ in range(2)]
    inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(14)]
    _, state = attend(mechanism, *(x[:, :, :13] for x in inputs))
    assert not all(tensor.is_contiguous() for tensor in state)  # else the next lines would not show anything
    for layer in layers:
        layer.store(state)
        assert all(tensor.is_contiguous() for tensor in layer.state)

    def step(layer, *tensors):
        output, state = attend(mechanism, *(x[:, :, 13:] for x in tensors), state=layer.state, in_place=True)
        layer.store(state)
        return output

    addresses = [x.data_ptr() for x in layers[0].state]
    output, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), layers[0], *inputs)
    torch.testing.assert_close(output, step(layers[1], *inputs))
    torch.testing.assert_close(layers[0].state, layers[1].state)
    assert [x.data_ptr() for x in layers[0].state] == addresses
    assert ".hybrid_step_.default(" in code
    assert "copy__" not in code  # what the compiler calls its copies into the tensors of a cache


@pytest.mark.long
@torch.no_grad()
def test_an_encoder_decoder_is_decoded_in_one_graph():
    stock = tiny_model("bart", "AutoModelForSeq2SeqLM", encoder_layers=1, decoder_layers=1)
    model, counter, ids = convert(stock, mechanism="linear"), CompileCounter(), torch.randint(3, 64, (2, 13))
    config = model.config.get_text_config(decoder=True)
    cache = EncoderDecoderCache(*(StaticCache(config=config, max_cache_len=length) for length in (32, 9)))
    given = {"encoder_outputs": model.get_encoder()(torch.randint(3, 64, (2, 9)))}
    model(decoder_input_ids=ids[:, :5], **given, **past(cache))
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    steps = ({"decoder_input_ids": ids[:, n : n + 1], **past(cache)} for n in range(5, 13))
    logits = torch.cat([compiled(**step, **given).logits for step in steps], dim=1)
    assert counter.frame_count == 1
    expected = model(decoder_input_ids=ids, **given, use_cache=False).logits[:, 5:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
