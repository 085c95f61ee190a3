"""Every mechanism where something around it is unusual: the default dtype and device, fake tensors, autocast, vmap,
torch.export, second derivatives. It computes what it always computes, or refuses clearly."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from matrix import MECHANISM_ROWS, build_mechanism, call_mechanism, default_dtype, stock_model, supports
from oracles import ORACLES
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForMaskedLM

from hf_linear_attention import convert
from hf_linear_attention.mechanisms.base import AttentionMechanism
from hf_linear_attention.mechanisms.registry import refuse_shape
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


SCALING, LENGTH = 8**-0.5, 21
# One row of each kind of state and of features.
KINDS = (
    *("aft-local", "aft-full-factorised", "linear-elu1", "linear-taylor", "linear-decay", "linear-gated", "performer"),
    *("performer-cosh", "performer-trig", "hybrid", "hybrid-delta", "gated_delta-channel", "window"),
    *("linformer-headwise", "linformer-stretched", "linformer_linear-exp", "latent", "nystrom-conv"),
)


def sample(std: float = 1.0, dtype=torch.float32):
    inputs = [torch.randn(2, heads, LENGTH, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    return [(x * scale).to(dtype).requires_grad_() for x, scale in zip(inputs, (std, std, 1.0))]


def padding() -> torch.Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :5] = False
    return mask


def forms(row: str) -> list[bool]:
    return [is_causal for is_causal, name in ((True, "causal"), (False, "bidirectional")) if supports(row, name)]


def attention(mechanism, is_causal: bool, mask=None, state=None):
    options = {"attention_mask": mask, "scaling": SCALING, "is_causal": is_causal, "state": state}
    return lambda *inputs: call_mechanism(mechanism, *inputs, **options)


def oracle(row: str, mechanism, inputs, mask, is_causal: bool) -> torch.Tensor:
    compute = ORACLES[MECHANISM_ROWS[row]["mechanism"]]
    return compute(mechanism, *(x.double() for x in inputs), mask, is_causal, SCALING).transpose(1, 2)


def agree(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert torch.isfinite(actual).all()
    assert (actual.double() - expected.double()).norm() <= bound * expected.double().norm()


def everything(row: str, mechanism, inputs, padding) -> list[torch.Tensor]:
    """Outputs, gradients, the state, and what one more token makes of it, in each form with and without padding."""
    found = []
    for is_causal in forms(row):
        for mask in (None, padding):
            output, state = attention(mechanism, is_causal, mask)(*inputs)
            wanted = [*inputs, *(p for p in mechanism.parameters() if p.requires_grad)]
            grads = torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)
            found += [output, *(grad for grad in grads if grad is not None)]
        if is_causal and supports(row, "state"):
            with torch.no_grad():
                token, following = attention(mechanism, True, None, state)(*(x[:, :, :1] for x in inputs))
            found += [*state, token, *following]
    return [x.detach() for x in found]


AROUND = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "afterwards": contextlib.nullcontext,
}


@pytest.mark.parametrize("row", KINDS)
def test_the_default_dtype_and_device_change_nothing(row):
    mechanism, inputs, mask = build_mechanism(row), sample(), padding()
    with torch.device("meta"):
        copy.deepcopy(mechanism).reset_parameters()  # draws its numbers on the CPU
    expected = everything(row, mechanism, inputs, mask)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        output, _ = attention(mechanism, forms(row)[0], mode.from_tensor(mask))(*map(mode.from_tensor, inputs))
    assert (output.shape, output.dtype, output.device) == (expected[0].shape, torch.float32, expected[0].device)
    for name, context in AROUND.items():
        with context():
            actual = everything(row, mechanism, inputs, mask)
        assert [x.dtype for x in actual] == [x.dtype for x in expected], name
        assert all(map(torch.equal, actual, expected)), name


# What a Llama gets by default, with partial rotary positions and sinks within the trained length, and a window in C.
MODELS = {
    "default": {"window_size": 4, "num_sinks": 2, "num_features": 16, "trained_length": 8},
    "window": {"mechanism": "window", "window_size": 4, "num_sinks": 2, "trained_length": 8},
    "none": {"mechanism": "linear", "rope": "none"},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_default_dtype_and_device_change_no_model(name):
    ids = torch.randint(3, 64, (2, 19))
    model = convert(stock_model("llama", num_hidden_layers=1), **MODELS[name])
    with torch.no_grad():
        expected = model(ids).logits
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert model(mode.from_tensor(ids)).logits.shape == expected.shape
        for around in AROUND.values():
            with around():
                assert torch.equal(model(ids).logits, expected)
        assert model.to("meta")(ids.to("meta")).logits.shape == expected.shape


@pytest.mark.parametrize("heads", [{}, {"softmax_heads": [[0, 1]]}], ids=["", "softmax_heads"])
@pytest.mark.parametrize("row", ["linear-decay", "performer", "hybrid", "gated_delta-channel", "window"])
def test_autocast_does_not_reach_the_mechanism(row, heads):
    stock = stock_model("llama", num_hidden_layers=1)
    model, seen = convert(stock, settings={**MECHANISM_ROWS[row], **heads}), []
    (module,) = linear_attention_modules(model).values()
    module.linear_attention.register_forward_hook(
        lambda _, args, kwargs, output: seen.append((args, kwargs, output[0])), with_kwargs=True
    )
    ids = torch.randint(3, 64, (2, 19))
    with torch.no_grad():
        exact = model(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            actual = model(ids).logits
            model.generate(ids, max_new_tokens=3, do_sample=False)
        args, kwargs, output = seen[1]
        assert torch.equal(module.linear_attention(*args, **kwargs)[0], output)
    agree(actual, exact, 0.05)  # bfloat16 has 8 bits, and the feed-forward is in it


def test_alibi_is_refused_in_encoders():
    mechanism = build_mechanism("hybrid-alibi")
    with pytest.raises((ValueError, NotImplementedError), match=r"causal attention only|no bidirectional form"):
        attention(mechanism, is_causal=False)(*sample())
    with pytest.raises(ValueError, match="XAttention is bidirectional and has ALiBi"):
        refuse_shape("XAttention", mechanism.shape, "bidirectional", mechanism.settings)


@pytest.mark.parametrize("row", ["performer", "linear-exp", "linformer-random"])
def test_loading_draws_no_random_matrix(row, tmp_path, monkeypatch):
    convert(stock_model("bert", num_hidden_layers=1), settings=MECHANISM_ROWS[row]).save_pretrained(tmp_path)
    monkeypatch.setattr(AttentionMechanism, "generator", lambda *given: pytest.fail("a random number was drawn"))
    AutoModelForMaskedLM.from_pretrained(tmp_path)
    with pytest.raises(pytest.fail.Exception):
        convert(stock_model("bert", num_hidden_layers=1), settings=MECHANISM_ROWS[row])


@pytest.mark.parametrize("row", KINDS)
def test_vmap(row):
    mechanism, std = build_mechanism(row), 0.25 if row == "performer-trig" else 4.0
    inputs = [torch.stack(x).detach() for x in zip(sample(std), sample(2 * std), sample(std / 2))]
    for is_causal in forms(row):
        for mask in (None, padding()):
            attend = attention(mechanism, is_causal, mask)
            actual = torch.vmap(lambda *given: attend(*given)[0])(*inputs)  # noqa: B023
            for part, given in zip(actual, zip(*inputs)):
                agree(part, oracle(row, mechanism, given, mask, is_causal), 1e-5)  # as in test_mechanisms.py


class Layer(torch.nn.Module):
    def __init__(self, mechanism, is_causal):
        super().__init__()
        self.mechanism, self.is_causal = mechanism, is_causal

    def forward(self, query, key, value, mask):
        return attention(self.mechanism, self.is_causal, mask)(query, key, value)[0]


@pytest.mark.parametrize("row", ["linear-gated", "hybrid", "linformer-stretched"])
@torch.no_grad()
def test_export(row):
    mechanism, std = build_mechanism(row), 4.0
    is_causal = forms(row)[0]
    program = torch.export.export(Layer(mechanism, is_causal), (*sample(), padding()), strict=False)
    inputs = sample(std)
    agree(program.module()(*inputs, padding()), oracle(row, mechanism, inputs, padding(), is_causal), 1e-5)


# Softmax with few keys or queries uses torch's fused kernel, which has no second derivatives and says so.
FUSED = tuple(row for row in KINDS if row.startswith(("linformer-", "latent", "nystrom")))


@pytest.mark.parametrize("row", KINDS)
def test_second_derivatives(row):
    mechanism, std, mask = build_mechanism(row), 0.5 if row == "performer-trig" else 2.0, padding()
    mask = mask.flip(1)  # every query sees a key, without which the oracles themselves have no derivatives
    inputs, weight = sample(std), torch.randn(2, LENGTH, 4, 8, dtype=torch.float64)
    exact = [x.detach().double().requires_grad_() for x in inputs]

    def derivatives(given, output):
        first = torch.autograd.grad((output * weight).sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), given, allow_unused=True)
        return [*first, *(x for x in second if x is not None)]

    for is_causal in forms(row):
        if row in FUSED:
            with pytest.raises(RuntimeError, match="derivative for aten::_scaled_dot_product"):
                derivatives(inputs, attention(mechanism, is_causal, mask)(*inputs)[0])
        with sdpa_kernel(SDPBackend.MATH):
            found = derivatives(inputs, attention(mechanism, is_causal, mask)(*inputs)[0])
        expected = derivatives(exact, oracle(row, mechanism, exact, mask, is_causal))
        for a, e in zip(found, expected, strict=True):
            assert torch.isfinite(a).all()
            known = torch.isfinite(e)  # the softmax over no keys of an oracle has none
            assert known.any()
            agree(a[known], e[known], 1e-4)  # float32, after two derivatives
