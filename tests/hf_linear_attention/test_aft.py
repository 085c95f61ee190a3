"""The Attention-Free Transformer: extreme keys and biases, and what is refused."""

from __future__ import annotations

import pytest
import torch
from matrix import attend, mechanism_of, padding, qkv, sample_inputs, stock_config, stock_model
from oracles import aft

from hf_linear_attention import LinearAttentionSettings, convert, convert_config


VARIANTS = {"simple": {}, "local": {"window_size": 3}, "conv": {"window_size": 3}, "full": {"position_rank": 0}}


def build(variant: str):
    return mechanism_of({"mechanism": "aft", "variant": variant, **VARIANTS[variant]}, max_length=40)


@pytest.mark.parametrize(
    ("variant", "is_causal"), [*((name, causal) for name in VARIANTS for causal in (False, True))][:-1]
)
@pytest.mark.parametrize("case", ["a bias hides the near keys", "biases and keys spread far"])
@torch.no_grad()
def test_extreme_keys_and_biases_are_exact(variant, is_causal, case):
    """Global sums plus a convolution with exp(w) - 1 would cancel where the dominant key is near, with w = -120.

    Queries that see near keys alone must not be scaled by the far ones: exp(-120) is 0 in float32. And the product of
    exp(w) and exp(k) would underflow where both spread far; aft-pytorch overflows instead.
    """
    mechanism, (query, key, value), mask = build(variant), qkv(40), padding(40, "interior")
    if case == "a bias hides the near keys":
        key[:, :, 9] = 25.0
        for parameter in mechanism.parameters():
            parameter.fill_(-120.0)
    else:
        key *= 100.0
        for parameter in mechanism.parameters():
            parameter.normal_(std=60.0)
    actual, _ = attend(mechanism, query, key, value, mask, is_causal=is_causal)
    expected = aft(mechanism, query.double(), key.double(), value.double(), mask, is_causal, 1.0).transpose(1, 2)
    # float32 rounds exponents of 400 to 2e-5
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


def test_more_positions_than_were_learned_are_refused_also_while_decoding():
    _, state = attend(build("local"), *qkv(39))
    _, state = attend(build("local"), *qkv(1), state=state)
    for refused in (lambda: attend(build("local"), *qkv(1), state=state), lambda: attend(build("full"), *qkv(41))):
        with pytest.raises(ValueError, match=r"Got 41 positions.*`max_length` = 40"):
            refused()
    attend(build("conv"), *qkv(90))


def test_what_is_impossible_is_refused_by_name():
    with pytest.raises(ValueError, match=r"`variant` = `full`.* has no causal form, which `llama` needs"):
        convert_config(stock_config("llama"), mechanism="aft", variant="full")
    with pytest.raises(ValueError, match="`max_length` is required"):
        LinearAttentionSettings({"mechanism": "aft", "variant": "local"})
    model = convert(stock_model("bert"), mechanism="aft")
    with pytest.raises(ValueError, match="no matrix of weights per head"):
        model(**sample_inputs("bert"), output_attentions=True)
