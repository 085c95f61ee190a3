"""Every mechanism where something around it is unusual: the default dtype and device, fake tensors, autocast, vmap,
second derivatives. It computes what it always computes, or refuses clearly."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from matrix import (
    KINDS,
    MECHANISM_ROWS,
    attend,
    build_mechanism,
    default_dtype,
    forms,
    padding,
    qkv,
    relative_error,
    stock_model,
    supports,
)
from oracles import exact
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForMaskedLM

from hf_linear_attention import convert
from hf_linear_attention.mechanisms.base import AttentionMechanism
from hf_linear_attention.mechanisms.registry import refuse_shape
from hf_linear_attention.modeling_linear_attention import linear_attention_modules


MASK = padding(21)


def everything(row: str, mechanism, inputs) -> list[torch.Tensor]:
    """Outputs, gradients, the state, and what one more token makes of it, in each form with and without padding."""
    found = []
    for is_causal in forms(row):
        for mask in (None, MASK):
            output, state = attend(mechanism, *inputs, mask, is_causal=is_causal)
            wanted = [*inputs, *(p for p in mechanism.parameters() if p.requires_grad)]
            grads = torch.autograd.grad(output.square().sum(), wanted, allow_unused=True)
            found += [output, *(grad for grad in grads if grad is not None)]
        if is_causal and supports(row, "state"):
            with torch.no_grad():
                token, following = attend(mechanism, *(x[:, :, :1] for x in inputs), None, state)
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
    mechanism, inputs = build_mechanism(row), [x.requires_grad_() for x in qkv(21)]
    with torch.device("meta"):
        copy.deepcopy(mechanism).reset_parameters()  # draws its numbers on the CPU
    expected = everything(row, mechanism, inputs)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        given = map(mode.from_tensor, (*inputs, MASK))
        output, _ = attend(mechanism, *given, is_causal=forms(row)[0])
    assert (output.shape, output.dtype, output.device) == (expected[0].shape, torch.float32, expected[0].device)
    for name, context in AROUND.items():
        with context():
            actual = everything(row, mechanism, inputs)
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


@pytest.mark.parametrize("row", ["linear-decay", "hybrid", "gated_delta-channel"])
def test_autocast_does_not_reach_the_mechanism(row):
    stock = stock_model("llama", num_hidden_layers=1)
    model, seen = convert(stock, settings=MECHANISM_ROWS[row]), []
    (module,) = linear_attention_modules(model).values()
    module.linear_attention.register_forward_hook(
        lambda _, args, kwargs, output: seen.append((args, kwargs, output[0])), with_kwargs=True
    )
    ids = torch.randint(3, 64, (2, 19))
    with torch.no_grad():
        expected = model(ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            actual = model(ids).logits
            model.generate(ids, max_new_tokens=3, do_sample=False)
        args, kwargs, output = seen[1]
        assert torch.equal(module.linear_attention(*args, **kwargs)[0], output)
    assert relative_error(actual, expected) < 0.05  # bfloat16 has 8 bits, and the feed-forward is in it


def test_alibi_is_refused_in_encoders():
    mechanism = build_mechanism("hybrid-alibi")
    with pytest.raises((ValueError, NotImplementedError), match=r"causal attention only|no bidirectional form"):
        attend(mechanism, *qkv(21), is_causal=False)
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
    several = (qkv(21, std=std * factor, seed=seed) for seed, factor in enumerate((1.0, 2.0, 0.5)))
    inputs = [torch.stack(x) for x in zip(*several)]
    for is_causal in forms(row):
        for mask in (None, MASK):
            run = lambda *given: attend(mechanism, *given, mask, is_causal=is_causal)[0]  # noqa: B023, E731
            for part, given in zip(torch.vmap(run)(*inputs), zip(*inputs)):
                # as in test_mechanisms.py
                assert relative_error(part, exact(row, mechanism, *given, mask, is_causal)) < 1e-5


@pytest.mark.parametrize("row", ["linear-elu1", "linear-hedgehog", "hybrid-exact-keys"])
def test_functional_derivatives(row):
    mechanism, inputs = build_mechanism(row), qkv(9)
    wide, tangents = tuple(x.double() for x in inputs), tuple(qkv(9, seed=1))
    run = lambda *given: attend(mechanism, *given)[0]  # noqa: E731
    oracle = lambda *given: exact(row, mechanism, *given)  # noqa: E731
    _, expected = torch.autograd.functional.jvp(oracle, wide, tuple(x.double() for x in tangents))
    assert relative_error(torch.func.jvp(run, tuple(inputs), tangents)[1], expected) < 1e-4
    jacobians = torch.func.jacrev(lambda *given: run(*given).sum(dim=(0, 2, 3)), argnums=(0, 1, 2))(*inputs)
    expected = torch.autograd.functional.jacobian(lambda *given: oracle(*given).sum(dim=(0, 2, 3)), wide)
    for actual, wanted in zip(jacobians, expected):
        assert relative_error(actual, wanted) < 1e-4


# Softmax with few keys or queries uses torch's fused kernel, which has no second derivatives and says so.
FUSED = tuple(row for row in KINDS if row.startswith(("linformer-", "latent", "nystrom")))


@pytest.mark.parametrize("row", [*KINDS, "linear-hedgehog", "linear-exp", "hybrid-exact-keys"])
def test_second_derivatives(row):
    mechanism, std = build_mechanism(row), 0.5 if row == "performer-trig" else 2.0
    mask = MASK.flip(1)  # every query sees a key, without which the oracles themselves have no derivatives
    inputs, weight = [x.requires_grad_() for x in qkv(21, std=std)], torch.randn(2, 21, 4, 8, dtype=torch.float64)
    wide = [x.detach().double().requires_grad_() for x in inputs]

    def derivatives(given, output):
        first = torch.autograd.grad((output * weight).sum(), given, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), given, allow_unused=True)
        return [*first, *(x for x in second if x is not None)]

    for is_causal in forms(row):
        if row in FUSED:
            with pytest.raises(RuntimeError, match="derivative for aten::_scaled_dot_product"):
                derivatives(inputs, attend(mechanism, *inputs, mask, is_causal=is_causal)[0])
        with sdpa_kernel(SDPBackend.MATH):
            found = derivatives(inputs, attend(mechanism, *inputs, mask, is_causal=is_causal)[0])
        expected = derivatives(wide, exact(row, mechanism, *wide, mask, is_causal))
        for a, e in zip(found, expected, strict=True):
            assert torch.isfinite(a).all()
            known = torch.isfinite(e)  # the softmax over no keys of an oracle has none
            assert known.any()
            assert relative_error(a[known], e[known]) < 1e-4  # float32, after two derivatives
