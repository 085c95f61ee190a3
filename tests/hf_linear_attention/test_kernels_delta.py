"""The gated delta rule: torch, C and the float64 oracle agree, whatever is masked, packed, split or shared by heads."""

from __future__ import annotations

import pytest
import reference
import torch
from delta_calls import NAMES, VALUES, assert_close, sample, values_and_gradients

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.torch_kernels.delta import gated_delta


@pytest.fixture(params=["C", "torch"])
def kernel(request, monkeypatch):
    """Both, where there is a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    elif kernels_cpu.library() is None:
        pytest.skip("no C compiler")


@pytest.mark.parametrize("erases", [True, False])
@pytest.mark.parametrize("per_feature", [False, True])
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 97, 130])
def test_values_and_gradients_agree_with_the_oracle(length, per_feature, erases, kernel):
    tensors = sample(length, per_feature)
    actual = values_and_gradients(gated_delta, tensors, erases=erases)
    assert_close(actual, values_and_gradients(reference.gated_delta, tensors, erases=erases))


@pytest.mark.parametrize("per_feature", [False, True])
@pytest.mark.parametrize("decay", [0.0, 50.0])
def test_strong_decays_are_exact(decay, per_feature, kernel):
    """Decays of 50 nats beside others near 0: a difference of their sums would have lost the small ones."""
    tensors = sample(150, per_feature, decay, dim=16, width=16)
    is_strong = torch.rand(tensors["log_decay"].shape) < 0.3
    tensors["log_decay"] = torch.where(is_strong, -decay, tensors["log_decay"] * 1e-3)
    actual = values_and_gradients(gated_delta, tensors)
    assert_close(actual, values_and_gradients(reference.gated_delta, tensors))


def masks(length: int):
    """Left, right and interior padding, and packed sequences with padding between."""
    left, interior = torch.arange(length) >= torch.tensor([[5], [0]]), torch.rand(2, length) > 0.3
    numbers = torch.arange(length) // torch.tensor([[7], [40]]) + 1
    return {"left": left, "right": left.flip(1), "interior": interior, "none": torch.zeros_like(left),
            "packed": numbers, "packed and padded": numbers * interior,
            "only read": numbers * (2 * interior - 1) * left}  # fmt: skip


@pytest.mark.parametrize("per_feature", [False, True])
@pytest.mark.parametrize("name", masks(8))
def test_masks(name, per_feature, kernel):
    tensors, mask = sample(100, per_feature), masks(100)[name]
    exact = values_and_gradients(reference.gated_delta, tensors, key_mask=mask)
    for name in ("query", "key", "value", "log_decay", "beta"):  # padding may hold anything
        hidden = (mask == 0 if name == "query" else mask <= 0)[:, None]
        hidden = hidden.unsqueeze(3) if tensors[name].ndim == 4 else hidden
        tensors[name] = tensors[name].masked_fill(hidden, float("nan"))
    assert_close(values_and_gradients(gated_delta, tensors, key_mask=mask), exact)


@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (6, 6), (6, 3)])
def test_query_heads_share_the_state_of_their_key_head(heads, kernel):
    for per_feature in (False, True):
        tensors = sample(40, per_feature, heads=heads, dim=5, width=33)
        actual = values_and_gradients(gated_delta, tensors)
        assert_close(actual, values_and_gradients(reference.gated_delta, tensors))


@pytest.mark.parametrize("per_feature", [False, True])
@pytest.mark.parametrize("cuts", [(1,), (33, 34), (64,), tuple(range(1, 75))])
def test_any_split_gives_the_whole(cuts, per_feature, kernel):
    tensors = sample(75, per_feature)
    exact = reference.gated_delta(**tensors)
    state, outputs = tensors.pop("state"), []
    with torch.no_grad():
        for start, stop in zip((0, *cuts), (*cuts, 75)):
            before, copy = state, state.clone()
            output, state = gated_delta(**{name: x[:, :, start:stop] for name, x in tensors.items()}, state=state)
            assert torch.equal(before, copy)  # never changed in place
            outputs.append(output)
    assert_close([torch.cat(outputs, dim=2), state], exact)


@pytest.mark.parametrize("per_feature", [False, True])
def test_without_a_state_and_without_tokens(per_feature, kernel):
    tensors = sample(50, per_feature)
    del tensors["state"]
    actual = values_and_gradients(gated_delta, tensors)
    assert_close(actual, values_and_gradients(reference.gated_delta, tensors))
    output, state = gated_delta(**{name: x[:, :, :0] for name, x in tensors.items()})
    assert output.shape == (2, 4, 0, 20)
    assert torch.equal(state, torch.zeros(2, 2, 12, 20))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],  # of inputs rounded alike: the gradients
)
def test_dtypes(dtype, tolerance, kernel):
    for per_feature in (False, True):
        tensors = sample(70, per_feature, dtype=dtype)
        if dtype == torch.float64:
            tensors["state"] = tensors["state"].double()
        actual = values_and_gradients(gated_delta, tensors)
        assert actual[0].dtype == actual[1].dtype == (dtype if dtype == torch.float64 else torch.float32)
        assert [x.dtype for x in actual[2:]] == [x.dtype for x in tensors.values()]
        exact = values_and_gradients(reference.gated_delta, tensors)
        assert_close(actual, exact, [min(tolerance, VALUES)] * 2 + [tolerance] * 6)


def test_equal_keys_are_solved_exactly(kernel):
    """The hardest system: with one key and beta 1 every token erases the one before it completely."""
    tensors = sample(128, False, decay=0.0)
    tensors["key"], tensors["beta"] = tensors["key"][:, :, :1].expand(-1, -1, 128, -1), torch.ones(2, 2, 128)
    assert_close(gated_delta(**tensors), reference.gated_delta(**tensors))


def test_what_does_not_fit_is_refused(kernel):
    tensors = sample(6, False)
    wrong = {
        "query": tensors["query"][..., :5],
        "key": tensors["key"][:, :, :5],
        "value": tensors["value"][:1],
        "log_decay": tensors["log_decay"][:, :1],
        "beta": tensors["beta"].long(),
        "state": tensors["state"].double(),
    }
    for name, tensor in wrong.items():
        with pytest.raises(ValueError, match="`value`" if name == "key" else f"`{name}`"):  # keys set the length
            gated_delta(**{**tensors, name: tensor})
    with pytest.raises(ValueError, match="log_decay"):
        gated_delta(**{**tensors, "log_decay": torch.zeros(2, 2, 6, 5)})
    with pytest.raises(ValueError, match="key_mask"):
        gated_delta(**tensors, key_mask=torch.ones(2, 6))


def test_gradients_are_those_of_finite_differences_and_can_be_differentiated(kernel):
    for per_feature in (False, True):
        tensors = sample(5, per_feature, dim=3, width=2, heads=(2, 1), dtype=torch.float64)
        leaves = [x.double().requires_grad_() for x in tensors.values()]

        def run(*leaves):
            return gated_delta(**dict(zip(NAMES, leaves)))

        assert torch.autograd.gradcheck(run, leaves)
        assert torch.autograd.gradgradcheck(run, leaves)
