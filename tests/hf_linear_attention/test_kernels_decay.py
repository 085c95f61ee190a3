"""The decay of a learned rate against float64: where blocks end with one token, in single steps, in long inputs."""

from __future__ import annotations

import pytest
import reference
import torch
import torch.nn.functional as F

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.torch_kernels.attention import kernel_attention, map_attention
from hf_linear_attention.torch_kernels.blocks import ELU_PLUS_ONE, KernelMap


@pytest.fixture(params=["C", "torch"])
def backend(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    elif kernels_cpu.library() is None:
        pytest.skip(kernels_cpu.kernel_backend().reason)


def sample(length: int, log_features: bool, batch: int = 1):
    query, key = torch.randn(batch, 4, length, 8), torch.randn(batch, 2, length, 8)
    if not log_features:
        query, key = query.exp(), key.exp()
    return query, key, torch.randn(batch, 2, length, 6)


def gradients(tensors, rate, log_features, direction, pieces=None, mask=None):
    """Of inputs and of the rate, whose decay is -exp(rate)."""
    leaves = [x.detach().clone().requires_grad_() for x in (*tensors, rate)]
    options = {"log_features": log_features, "is_causal": True, "log_decay": -leaves[3].exp()}
    if pieces is None:
        output, _ = kernel_attention(*leaves[:3], key_mask=mask, **options)
    else:
        outputs, state = [], None
        for part in zip(*(x.split(pieces, dim=2) for x in leaves[:3])):
            output, state = kernel_attention(*part, state=state, **options)
            outputs.append(output)
        output = torch.cat(outputs, dim=2)
    return [output, *torch.autograd.grad((output * direction).sum(), leaves)]


def oracle(tensors, rate, log_features, direction, mask=None):
    leaves = [x.detach().double().requires_grad_() for x in (*tensors, rate)]
    decay = (-leaves[3].exp()).repeat_interleave(2)
    output = reference.kernel_attention(
        *leaves[:3], log_features=log_features, is_causal=True, log_decay=decay, key_mask=mask
    )
    return [output, *torch.autograd.grad((output * direction.double()).sum(), leaves)]


def agree(actual, exact, tolerance):
    for a, e in zip(actual, exact):
        assert torch.isfinite(a).all()
        assert (a - e).norm() <= tolerance * e.norm()


@pytest.mark.parametrize("log_features", [True, False], ids=["exponents", "features"])
@pytest.mark.parametrize("length", [33, 65, 97])
def test_a_last_block_of_one_token(length, log_features, backend):
    tensors, rate = sample(length, log_features), torch.tensor([-3.0, 0.5])
    direction = torch.randn(1, 4, length, 6)
    # sums of a hundred terms of both signs
    agree(gradients(tensors, rate, log_features, direction), oracle(tensors, rate, log_features, direction), 2e-5)


@pytest.mark.parametrize("log_features", [True, False], ids=["exponents", "features"])
def test_steps_of_single_tokens(log_features, backend):
    tensors, rate = sample(12, log_features), torch.tensor([-3.0, 0.5])
    direction = torch.randn(1, 4, 12, 6)
    exact = oracle(tensors, rate, log_features, direction)
    agree(gradients(tensors, rate, log_features, direction, pieces=1), exact, 1e-5)
    agree(gradients(tensors, rate, log_features, direction, pieces=[1, 10, 1]), exact, 1e-5)


@pytest.mark.parametrize("log_features", [True, False], ids=["exponents", "features"])
def test_the_gradient_of_the_rate_keeps_its_digits_in_long_inputs(log_features, backend):
    tensors, rate = sample(4096, log_features), torch.tensor([-7.0, -3.0])
    direction = torch.randn(1, 4, 4096, 6)
    actual = gradients(tensors, rate, log_features, direction)[-1]
    exact = gradients([x.double() for x in tensors], rate.double(), log_features, direction.double())[-1]
    assert (actual - exact).norm() <= 5e-6 * exact.norm()


@pytest.mark.parametrize("log_features", [True, False], ids=["exponents", "features"])
@pytest.mark.parametrize("hidden", [[32], [32, 33, 34], [64], [0, 1, 32, 64, 65]], ids=str)
def test_hidden_tokens_at_the_start_of_a_block_with_a_rate_of_89(hidden, log_features, backend):
    tensors, rate = sample(70, log_features), torch.tensor([89.0, 0.5]).log()
    mask = torch.ones(1, 70, dtype=torch.bool)
    mask[:, hidden] = False
    direction = torch.randn(1, 4, 70, 6)
    exact = oracle(tensors, rate, log_features, direction, mask)
    actual = gradients(tensors, rate, log_features, direction, mask=mask)
    agree(actual[:1], exact[:1], 1e-5)
    for a, e in zip(actual[1:], exact[1:]):
        assert torch.isfinite(a).all()
        assert (a - e).norm() <= 2e-5 * e.norm() + 1e-5  # that of a rate of 89 is about exp(-89)


@pytest.mark.parametrize(("decay", "padding"), [(-30.0, 96), (-5.0, 640), (-59.0, 67)])
@pytest.mark.parametrize("dim", [5, 16])
def test_padding_of_many_blocks_on_the_left_changes_no_gradient(dim, decay, padding, backend):
    tensors = [torch.randn(1, heads, 40, width) for heads, width in ((4, dim), (2, dim), (2, 6))]
    directions = torch.randn(1, 40, 4, 6), torch.randn(1, 2, 2, 40, 1)
    found = []
    for count in (padding, 0):
        leaves = [x.clone().requires_grad_() for x in (*tensors, torch.tensor([decay, -0.3]))]
        padded = [F.pad(x, (0, 0, count, 0)) for x in leaves[:3]]
        options = {"is_causal": True, "key_mask": torch.arange(40 + count)[None] >= count, "log_decay": leaves[3]}
        output, denominator, *_ = map_attention(KernelMap(ELU_PLUS_ONE), *padded, **options)
        seen = output[:, count:], denominator[..., count:, :]
        loss = sum((x * direction).sum() for x, direction in zip(seen, directions))
        found.append([*seen, *torch.autograd.grad(loss, leaves)])
    agree(*found, 1e-5)


@pytest.mark.parametrize("value", [89.0, 40.0])
def test_queries_before_the_first_key_of_a_block_see_what_was_carried(value, backend):
    """With exponents: one maximum serves a block, and the first key of this one is far above what was carried."""
    query, key, tokens = sample(20, True)
    key[:, :, 16] += value
    mask = torch.arange(20)[None] >= 16
    state = torch.cat((torch.randn(1, 2, 8, 6), torch.rand(1, 2, 8, 1) + 0.5, torch.randn(1, 2, 8, 1)), dim=-1)
    options = {"log_features": True, "is_causal": True, "key_mask": mask}
    actual, _ = kernel_attention(query, key, tokens, state=state, **options)
    exact, _ = kernel_attention(query.double(), key.double(), tokens.double(), state=state.double(), **options)
    agree([actual], [exact], 1e-5)
