"""How C multiplies for models in bfloat16: chosen by the processor's features, and right whatever is chosen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from matrix import mechanism_of, move

from hf_linear_attention.kernels import cpu as kernels_cpu
from hf_linear_attention.kernels.cpu import AMX, AVX512_BF16, BFLOAT16_PRODUCTS, INTEL, bfloat16_products
from hf_linear_attention.mechanisms.base import MechanismInputs
from hf_linear_attention.torch_kernels.attention import map_attention
from hf_linear_attention.torch_kernels.blocks import EXP, KernelMap, plain_attention


LENGTH = 77
SETTINGS = {
    "hybrid": {"window_size": 5, "num_sinks": 2, "num_exact_keys": 19, "num_features": 8},
    "window": {"window_size": 16, "num_sinks": 1},
    "linear": {"feature_map": "exp", "num_features": 8},
}


@pytest.mark.parametrize(
    ("features", "chosen"),
    [
        (0, "float32"),
        (INTEL, "float32"),
        (AVX512_BF16, "avx512_bf16"),  # AMD Zen 4
        (INTEL | AVX512_BF16, "float32"),  # Intel Cooper Lake: half the rate of float32
        (INTEL | AVX512_BF16 | AMX, "amx"),  # Intel Sapphire Rapids
    ],
)
def test_the_choice_follows_from_features_alone(features, chosen, monkeypatch):
    set_to = []
    library = SimpleNamespace(bfloat16_features=lambda: features, set_bfloat16=set_to.append)
    monkeypatch.delenv(kernels_cpu.BFLOAT16_VARIABLE, raising=False)
    assert [kernels_cpu.choose_bfloat16(library) for _ in range(3)] == [chosen] * 3
    assert set_to == [BFLOAT16_PRODUCTS.index(chosen)] * 3
    usable = [kernels_cpu.usable_products(bits) for bits in (features, features | AMX)]
    for name in usable[0]:
        monkeypatch.setenv(kernels_cpu.BFLOAT16_VARIABLE, name)
        assert kernels_cpu.choose_bfloat16(library) == name
    assert "amx" in usable[1]


def test_what_a_processor_lacks_is_refused_by_name():
    with pytest.raises(ValueError, match="'amx' is not one of auto, float32, avx512_bf16, which this processor"):
        bfloat16_products(AVX512_BF16, "amx")
    with pytest.raises(ValueError, match="_BFLOAT16` = '' is not one of auto, float32, which"):
        bfloat16_products(INTEL, "")


@pytest.fixture(params=BFLOAT16_PRODUCTS)
def products(request):
    """Each way to multiply that this processor has."""
    library = kernels_cpu.library()
    if library is None or request.param not in kernels_cpu.usable_products(library.bfloat16_features()):
        pytest.skip(f"no {request.param} here")
    library.set_bfloat16(BFLOAT16_PRODUCTS.index(request.param))
    yield request.param
    library.set_bfloat16(BFLOAT16_PRODUCTS.index(kernels_cpu.kernel_backend().bfloat16))


def attend(name: str, dtype: torch.dtype, length: int = LENGTH, grad: bool = False):
    """The output of a mechanism for bfloat16 numbers in this dtype, and the gradients of queries, keys and values."""
    torch.manual_seed(3)
    is_causal = name != "window"
    mechanism = move(mechanism_of({"mechanism": name} | SETTINGS[name], head_dim=20, is_causal=is_causal)).to(dtype)
    x = [torch.randn(2, LENGTH, heads, 20).bfloat16().to(dtype).transpose(1, 2) for heads in (4, 2, 2)]
    given = [part[:, :, :length].detach().requires_grad_(grad) for part in x]
    inputs = MechanismInputs(*given, None, 20**-0.5, is_causal)
    if mechanism.needs_gates:
        inputs = inputs._replace(gates=torch.linspace(-1, 1, length).sin().repeat(2, 2, 1).mT.float())
    with torch.set_grad_enabled(grad):
        output = mechanism(inputs)[0]
    if not grad:
        return [output]
    direction = torch.linspace(-1, 1, output.numel()).view(output.shape).bfloat16().to(dtype)
    return [output, *torch.autograd.grad(output, given, direction)]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_values_and_gradients_agree_with_float64(name, grad, products):
    exact = attend(name, torch.float64, grad=grad)
    for found, expected in zip(attend(name, torch.bfloat16, grad=grad), exact, strict=True):
        # Inputs are equal; parameters, weights and outputs are rounded at 2^-9 each.
        error = (found.double() - expected).norm() / expected.norm()
        assert error < 6e-3


def test_sums_stay_float32(products):
    """A state goes on for thousands of tokens, so that rounding would add up."""
    query, key, value = (torch.randn(1, 2, 300, 16).bfloat16() for _ in range(3))
    *_, state = map_attention(KernelMap(EXP), query, key, value, is_causal=True)
    exact = plain_attention(*(x.double() for x in (query, key, value)), log_features=True, is_causal=True)[-1]
    torch.testing.assert_close(
        state[..., :-1] * (state[..., -1:] - exact[..., -1:].float()).exp(),
        exact[..., :-1].float(),
        rtol=1e-4,
        atol=1e-4,
    )
