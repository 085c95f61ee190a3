"""torch.compile and torch.export: one node a kernel, no break, no new graph for the same shapes, the numbers of eager;
and what graphs are made of elsewhere: meta tensors, empty batches and empty sequences."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from matrix import MECHANISM_ROWS, build_mechanism, rows, stock_model, supports
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
from hf_linear_attention.features.maps import _EluPlusOne
from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.mechanisms.base import LayerShape
from hf_linear_attention.mechanisms.registry import MECHANISMS
from hf_linear_attention.mechanisms.window_keys import _TwoRanges
from hf_linear_attention.torch_kernels.causal import CausalAttention


pytestmark = pytest.mark.usefixtures("fresh_compiler")

LAYERS = {
    "exp": {"mechanism": "linear", "feature_map": "exp", "num_features": 64},
    "elu1": {"mechanism": "linear", "feature_map": "elu1"},
    "hedgehog": {"mechanism": "linear", "feature_map": "hedgehog"},
    "relu": {"mechanism": "linear", "feature_map": "relu"},
    "decay": {"mechanism": "linear", "feature_map": "exp", "num_features": 64, "decay": "learned"},
    "performer": {"mechanism": "performer", "num_features": 64},
    "hybrid": {"mechanism": "hybrid", "window_size": 64, "num_sinks": 4, "num_features": 64},
}
MOST_NODES = 65
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
        return mechanism.attend(query, key, value, attention_mask=mask, **options)[0]

    return attend


def with_gradients(function, mechanism, inputs, weight):
    """The output, and the gradients of inputs and parameters."""
    output = function(*inputs)
    wanted = [*inputs, *mechanism.parameters()]
    grads = torch.autograd.grad((output * weight).sum(), wanted, allow_unused=True)
    return [output, *(grad for grad in grads if grad is not None)]


@pytest.fixture(params=["c", "torch"])
def backend(request, monkeypatch):
    """Both, where there are C kernels: the operators' own code is never traced."""
    if request.param == "torch":
        monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    elif kernels_cpu.library() is None:
        pytest.skip("no C kernels")


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


@pytest.mark.parametrize("name", ["exp", "relu", "hybrid"])
def test_other_lengths_need_few_graphs(name):
    mechanism, counter = build(LAYERS[name]), CompileCounter()
    attend = attention(mechanism)
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for length in (130, 257, 300, 411, 512):
        inputs = sample(length=length)
        torch.testing.assert_close(compiled(*inputs), attend(*inputs), rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["exp", "hybrid"])
def test_a_length_marked_dynamic(name):
    mechanism, counter = build(LAYERS[name]), CompileCounter()
    attend = attention(mechanism)
    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for length in (200, 333):
        inputs = sample(length=length)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 2)
        torch.testing.assert_close(compiled(*inputs), attend(*inputs), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1


def test_inductor_computes_the_same():
    mechanism, inputs = build(LAYERS["hybrid"]), sample(length=150)  # which has both operators
    attend, weight = attention(mechanism), torch.randn(1, 150, 4, 32)
    compiled = torch.compile(attend, fullgraph=True)
    actual, expected = (with_gradients(function, mechanism, inputs, weight) for function in (compiled, attend))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def in_turn(names: list[str]) -> list[tuple[str, bool]]:
    """Each row with True or False in turn, and the first row of each mechanism with both: a compilation takes long."""
    first = {MECHANISM_ROWS[row]["mechanism"]: row for row in reversed(names)}.values()
    return [(row, each) for n, row in enumerate(names) for each in (False, True) if each == n % 2 or row in first]


@pytest.mark.parametrize(("row", "is_masked"), in_turn([*MECHANISM_ROWS]))
def test_every_mechanism_compiles_without_a_break(row, is_masked):
    mechanism, is_causal = build_mechanism(row), not supports(row, "bidirectional")
    inputs, mask = sample(2, 29, 8), None
    if is_masked:
        mask = torch.ones(2, 29, dtype=torch.bool)
        mask[0, 20:] = mask[1, 5] = False
    weight = torch.randn(2, 29, 4, 8)
    attend = attention(mechanism, is_causal, mask)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    actual, expected = (with_gradients(function, mechanism, inputs, weight) for function in (compiled, attend))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


PACKED = [row for row in rows(causal=True) if not row.startswith(("aft-local", "aft-conv"))]


def packed_numbers(is_padded: bool) -> torch.Tensor:
    """Sequences of 3, 1, 20 and 16 tokens, or of 9, 12 and 10 with padding before, between, inside and after them."""
    first = [1] * 3 + [2] + [3] * 20 + [4] * 16
    second = [0] * 2 + [1] * 9 + [0] * 3 + [2] * 5 + [0] + [2] * 7 + [3] * 10 + [0] * 3
    return torch.tensor([first, second if is_padded else sorted(5 - n for n in first)])


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


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("row", PACKED)
def test_numbered_sequences_are_those_of_each_apart(row, is_padded):
    """What a graph gets, where nothing tells whether sequences are packed."""
    mechanism, inputs, numbers = build_mechanism(row), sample(2, 40, 8), packed_numbers(is_padded)
    is_real, weight = (numbers > 0)[..., None, None], torch.randn(2, 40, 4, 8)
    expected = each_apart(mechanism, inputs, numbers, weight)

    def attend(*inputs):
        return attention(mechanism, mask=numbers)(*inputs) * is_real

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for function in (attend, compiled) if (row, is_padded) in in_turn(PACKED) else (attend,):
        actual = with_gradients(function, mechanism, inputs, weight)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("row", PACKED)
def test_what_follows_numbered_sequences_follows_the_last(row):
    mechanism, numbers = build_mechanism(row), packed_numbers(False)[:1]
    query, key, value = sample(1, 41, 8)
    options = {"scaling": 8**-0.5, "is_causal": True}
    packed = [x[:, :, :40] for x in (query, key, value)]
    _, state = mechanism.attend(*packed, attention_mask=numbers, state=None, **options)
    following = [x[:, :, 40:] for x in (query, key, value)]
    actual, _ = mechanism.attend(*following, attention_mask=None, state=state, **options)
    last = [x[:, :, 24:] for x in (query, key, value)]
    expected, _ = mechanism.attend(*last, attention_mask=None, state=None, **options)
    torch.testing.assert_close(actual, expected[:, -1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["exp", "hybrid"])
def test_numbered_sequences_are_not_unrolled_in_a_compiled_graph(name):
    mechanism, sizes = build(LAYERS[name]), []
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
    _, state = mechanism.attend(*inputs, attention_mask=None, state=None, **options)
    with pytest.raises(ValueError, match="after cached tokens"):
        mechanism.attend(*inputs, attention_mask=numbers, state=state, **options)


@pytest.mark.parametrize("row", MECHANISM_ROWS)
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_forward_of_meta_tensors_has_the_right_shapes(row, is_masked):
    mechanism = build_mechanism(row).to("meta")
    query, key, value = (x.detach().to("meta") for x in sample(2, 19, 8))
    mask = torch.ones(2, 19, dtype=torch.bool, device="meta") if is_masked else None
    for is_causal in causalities(row):
        options = {"attention_mask": mask, "scaling": 0.3, "is_causal": is_causal}
        output, state = mechanism.attend(query, key, value, state=None, **options)
        assert output.shape == (2, 19, 4, 8)
        if is_causal and supports(row, "state"):
            token, options = [x[:, :, :1] for x in (query, key, value)], {**options, "attention_mask": None}
            output, following = mechanism.attend(*token, state=state, **options)
            assert output.shape == (2, 1, 4, 8)
            assert [(x.shape, x.dtype) for x in following] == [(x.shape, x.dtype) for x in state]


def causalities(row) -> list[bool]:
    return [is_causal for is_causal, name in ((True, "causal"), (False, "bidirectional")) if supports(row, name)]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("size", [(0, 7), (2, 0), (0, 0), (0, 1)])
@pytest.mark.parametrize("row", MECHANISM_ROWS)
def test_nothing_comes_out_of_an_empty_batch_or_sequence(row, size):
    mechanism = build_mechanism(row)
    for is_causal in causalities(row):
        for mask in (None, torch.ones(size, dtype=torch.bool)):
            inputs = sample(*size, 8)
            output = attention(mechanism, is_causal, mask)(*inputs)
            assert output.shape == (*size, 4, 8)
            wanted = [*inputs, *mechanism.parameters()]
            for x, grad in zip(wanted, torch.autograd.grad(output.sum(), wanted, allow_unused=True)):
                assert grad is None or (grad.shape == x.shape and not grad.any())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("row", rows(state=True))
def test_no_tokens_change_no_state(row):
    mechanism, inputs = build_mechanism(row), [x.detach() for x in sample(2, 21, 8)]
    options = {"attention_mask": None, "scaling": 0.3, "is_causal": True}
    with torch.no_grad():
        _, state = mechanism.attend(*inputs, state=None, **options)
        none = [x[:, :, :0] for x in inputs]
        for start in (state, None):
            output, same = mechanism.attend(*none, state=start, **options)
            assert output.shape == (2, 0, 4, 8)
            if start is not None:
                torch.testing.assert_close(same, state, rtol=0, atol=0)
            else:
                whole, _ = mechanism.attend(*inputs, state=same, **options)
                expected, _ = mechanism.attend(*inputs, state=None, **options)
                torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)


SEQUENCE_TO_SEQUENCE = {
    "t5": {"num_layers": 2, "num_heads": 4, "d_model": 32, "d_kv": 8, "d_ff": 48, "decoder_start_token_id": 0},
    "bart": {
        "d_model": 32,
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
        "max_position_embeddings": 64,
    },
}
DECODERS = {
    "linear": {"mechanism": "linear", "num_features": 16},
    "hybrid": {"mechanism": "hybrid", "window_size": 4, "num_sinks": 2, "num_features": 16},
}


def decoder(family: str, mechanism: str):
    """A converted tiny model, and what it needs besides the decoder's tokens."""
    if family == "llama":
        return convert(stock_model("llama"), **DECODERS[mechanism]), {}, "input_ids"
    config = AutoConfig.for_model(family, vocab_size=64, **SEQUENCE_TO_SEQUENCE[family])
    stock = AutoModelForSeq2SeqLM.from_config(config).eval()
    drop = {"drop": ["position_bias"]} if family == "t5" else {}
    model = convert(stock, **DECODERS[mechanism], **drop)
    encoded = model.get_encoder()(torch.randint(3, 64, (2, 9)))
    return model, {"encoder_outputs": encoded}, "decoder_input_ids"


def empty_cache(model, is_static: bool):
    config = model.config.get_text_config(decoder=True)

    def one(length):
        return StaticCache(config=config, max_cache_len=length) if is_static else DynamicCache(config=config)

    return EncoderDecoderCache(one(32), one(9)) if model.config.is_encoder_decoder else one(32)


# Every family and every mechanism with both kinds of cache, but not every family with every mechanism and kind.
DECODED = [(f, m, (a + b) % 2 == 0) for a, f in enumerate(("llama", "t5", "bart")) for b, m in enumerate(DECODERS)]


@torch.no_grad()
@pytest.mark.parametrize(("family", "mechanism", "is_static"), DECODED)
def test_decoding_needs_few_graphs(family, mechanism, is_static):
    """As many as the stock model: one with a static cache, a second with a dynamic one, whose length is a number."""
    model, given, name = decoder(family, mechanism)
    cache, counter, ids = empty_cache(model, is_static), CompileCounter(), torch.randint(3, 64, (2, 13))
    model(**{name: ids[:, :5]}, **given, past_key_values=cache)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    logits = [compiled(**{name: ids[:, n : n + 1]}, **given, past_key_values=cache).logits for n in range(5, 13)]
    assert counter.frame_count <= (1 if is_static else 2)
    expected = model(**{name: ids}, **given, use_cache=False).logits[:, 5:]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("mechanism", DECODERS)
def test_a_decoder_without_a_cache_exports(family, mechanism, monkeypatch):
    """In a graph nothing tells whether position_ids restart, so it honours that they may."""
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    model, ids = convert(stock_model(family), **DECODERS[mechanism]), torch.randint(3, 64, (2, 20))
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


@pytest.mark.parametrize("mechanism", DECODERS)
def test_compiled_training_of_packed_sequences(mechanism):
    model, ids = convert(stock_model("llama"), **DECODERS[mechanism]), torch.randint(3, 64, (2, 20))
    positions = torch.cat((torch.arange(7), torch.arange(13))).expand(2, -1)
    options = {"position_ids": positions, "use_cache": False, "labels": ids}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, model):
        model.zero_grad()
        loss = function(ids, **options).loss
        loss.backward()
        results.append([loss.detach(), *(x.grad.clone() for x in model.parameters() if x.grad is not None)])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("row", MECHANISM_ROWS)
def test_functions_without_a_setup_context_never_run_under_functorch(row, monkeypatch):
    def refuse(*_):
        raise AssertionError("an autograd.Function of the old style ran under torch.func")

    mechanism, inputs = build_mechanism(row), [x.detach() for x in sample(2, 21, 8)]
    for is_causal in causalities(row):
        attend = attention(mechanism, is_causal)
        expected = torch.cat([attend(*(x[n : n + 1] for x in inputs)) for n in range(2)]).detach()
        for function in (_EluPlusOne, _TwoRanges, CausalAttention):
            monkeypatch.setattr(function, "apply", refuse)

        def total(query, key, value):
            return attend(query, key, value).square().sum()  # noqa: B023 used in this round alone

        assert all(grad.isfinite().all() for grad in torch.func.grad(total, argnums=(0, 1, 2))(*inputs))
        alone = [x.unsqueeze(1) for x in inputs]
        torch.testing.assert_close(torch.vmap(attend)(*alone).squeeze(1), expected, rtol=1e-4, atol=1e-4)
        _, tangent = torch.func.jvp(attend, tuple(inputs), tuple(inputs))
        assert tangent.isfinite().all()
        monkeypatch.undo()


@torch.no_grad()
@pytest.mark.parametrize("row", MECHANISM_ROWS)
def test_float16_computes_in_torch_with_sums_in_float32(row):
    mechanism = build_mechanism(row)
    inputs = [x.half() for x in sample(2, 40, 8)]
    for is_causal in causalities(row):
        options = {"attention_mask": None, "scaling": 8**-0.5, "is_causal": is_causal, "state": None}
        output, state = mechanism.attend(*inputs, **options)
        expected, _ = mechanism.attend(*(x.float() for x in inputs), **options)
        assert output.dtype == torch.float16
        torch.testing.assert_close(output.float(), expected, rtol=5e-3, atol=5e-3)
        if is_causal and supports(row, "state"):
            sums = torch.float16 if row.startswith("window") else torch.float32  # which keeps keys, and no sums
            assert state[0].dtype == sums
            token = [x[:, :, :1] for x in inputs]
            output, state = mechanism.attend(*token, **{**options, "state": state})
            assert output.dtype == torch.float16
            assert state[0].dtype == sums
