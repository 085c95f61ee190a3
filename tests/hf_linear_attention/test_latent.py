"""Latent bottleneck: convex combinations of the values, cross-attention, and a start that suits pretrained keys."""

from __future__ import annotations

import pytest
import torch
from matrix import stock_config, stock_model

from hf_linear_attention import convert, convert_config


def test_layers_and_seeds_start_from_different_latents():
    model = convert(stock_model("bert"), mechanism="latent", num_latents=5)
    latents = [value for name, value in model.state_dict().items() if name.endswith(".latents")]
    assert len(latents) == 3
    assert not torch.equal(latents[0], latents[1])
    other = convert(stock_model("bert"), mechanism="latent", num_latents=5, seed=1).state_dict()
    assert not torch.equal(next(v for n, v in other.items() if n.endswith(".latents")), latents[0])


def test_causal_models_are_refused():
    with pytest.raises(ValueError, match="`latent` has no causal form, which `llama` needs"):
        convert_config(stock_config("llama"), mechanism="latent")
