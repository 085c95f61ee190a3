"""Falcon-H1: attention and a Mamba-2 block in every layer, for heads that kept softmax and for linear ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import FalconH1Config, FalconH1ForCausalLM, PreTrainedModel

from hf_linear_attention.conversion.export import decoders, mamba


SOURCES = ("llama", "mistral", "qwen2")
ENGINES = (
    "transformers 5.19 computes the steps of a batch wrongly, and 5.23 rightly. Sums over many tokens need float32: "
    "`vllm serve` has `--mamba-ssm-cache-dtype float32`."
)


def obstacles(config: Any) -> list[str]:
    """Why the architecture cannot hold this converted model, each with what to do."""
    return mamba.obstacles(config, SOURCES)


def rewritten(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The `FalconH1ForCausalLM` that computes what the converted model computes, in float32.

    The heads of a softmax layer are softmax heads. A layer with fewer heads of a kind than others have gets heads of 0.
    """
    layers, heads = model.model.layers, range(model.config.num_attention_heads)
    linear = mamba.linear_attentions(layers)
    softmax = [
        getattr(linear[i].linear_attention, "softmax_heads", ()) if i in linear else heads for i in range(len(layers))
    ]
    others = [[head for head in heads if head not in kept] for kept in softmax]
    sizes = mamba.Sizes(max(map(len, others)) or 1, mamba.UNIT, mamba.number_of_features(linear))
    while not sizes.hold(layers[0].self_attn.head_dim):
        sizes = replace(sizes, channels=sizes.channels + mamba.UNIT)
    stock: Any = mamba.begun(FalconH1ForCausalLM, _config(model, sizes, max(map(len, softmax)) or 1), model)
    mamba.copy_(stock.model.final_layernorm, model.model.norm)
    for number, (new, old) in enumerate(zip(stock.model.layers, layers, strict=True)):
        mamba.copy_(new.input_layernorm, old.input_layernorm)
        mamba.copy_(new.pre_ff_layernorm, old.post_attention_layernorm)
        for name in ("gate_proj", "up_proj", "down_proj"):
            mamba.copy_(getattr(new.feed_forward, name), getattr(old.mlp, name))
        _fill_softmax(new.self_attn, old.self_attn, softmax[number])
        mamba.fill(new.mamba, old.self_attn, old.input_layernorm.weight, others[number])
    return stock


def _config(model: PreTrainedModel, sizes: mamba.Sizes, softmax_heads: int) -> FalconH1Config:
    attention = model.model.layers[0].self_attn
    fields: dict[str, Any] = {
        **decoders.same_fields(model.config),
        **sizes.fields(),
        "num_attention_heads": softmax_heads,
        "num_key_value_heads": softmax_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.q_proj.bias is not None,
        "mlp_bias": bool(getattr(model.config, "mlp_bias", False)),
        "mamba_d_ssm": sizes.heads * sizes.channels,
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": True,
        "projectors_bias": True,
    }
    return FalconH1Config(**fields)


@torch.no_grad()
def _fill_softmax(new: Any, old: Any, heads: Sequence[int]) -> None:
    """Write query heads of a layer, each with its keys and values, into softmax attention; its other heads become 0."""
    size, groups = old.head_dim, old.num_key_value_groups
    for parameter in new.parameters():
        parameter.zero_()
    for place, head in enumerate(heads):
        rows = slice(place * size, (place + 1) * size)
        for name, number in (("q_proj", head), ("k_proj", head // groups), ("v_proj", head // groups)):
            given = slice(number * size, (number + 1) * size)
            target, source = getattr(new, name), getattr(old, name)
            target.weight[rows] = source.weight[given]
            if source.bias is not None:
                target.bias[rows] = source.bias[given]
        new.o_proj.weight[:, rows] = old.o_proj.weight[:, head * size : (head + 1) * size]
