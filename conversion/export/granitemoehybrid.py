"""GraniteMoeHybrid: the layers of Llama, with a Mamba-2 block in place of attention where it is linear (`mamba.py`)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, PreTrainedModel
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated

from hf_linear_attention.configuration_linear_attention import entries_of
from hf_linear_attention.conversion.export import decoders, mamba


# Decoders like Llama, and Granite, whose factors the architecture has too.
SOURCES = ("llama", "mistral", "qwen2", "granite")
# Until then, one norm went over all heads together. vLLM always had one for each.
IS_GROUPED = "group_size" in inspect.signature(GraniteMoeHybridRMSNormGated).parameters
ENGINES = (
    "It needs transformers 5.23 or later, whose norm is that of vLLM: earlier ones load it and compute something else. "
    "Sums over many tokens need float32: `vllm serve` has `--mamba-ssm-cache-dtype float32`."
)
FACTORS = ("embedding_multiplier", "logits_scaling", "residual_multiplier")


def obstacles(config: Any) -> list[str]:
    """Why the architecture cannot hold this converted model, each with what to do."""
    problems = mamba.obstacles(config, SOURCES)
    if config.stock_model_type not in SOURCES:
        return problems
    if any(entry["softmax_heads"] for entry in entries_of(config.linear_attention)):
        problems.append("`softmax_heads` is not possible, because a layer is linear or softmax; take `--to falcon_h1`")
    if len(decoders.linear_layers(config)) == config.num_hidden_layers:
        problems.append(
            "no softmax layer is left, and transformers generates nothing with such a model; take `--to falcon_h1`, or "
            "convert with `--softmax_layers`"
        )
    if not IS_GROUPED:
        problems.append("this needs transformers 5.23 or later; install it, or take `--to falcon_h1`")
    if getattr(config, "mlp_bias", False):
        problems.append("`mlp_bias` is true, and the architecture has no biases there; take `--to falcon_h1`")
    return problems


def rewritten(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The `GraniteMoeHybridForCausalLM` that computes what the converted model computes, in float32."""
    layers = model.model.layers
    linear = mamba.linear_attentions(layers)
    stock: Any = mamba.begun(GraniteMoeHybridForCausalLM, _config(model, linear), model)
    mamba.copy_(stock.model.norm, model.model.norm)
    for number, (new, old) in enumerate(zip(stock.model.layers, layers, strict=True)):
        mamba.copy_(new.input_layernorm, old.input_layernorm)
        mamba.copy_(new.post_attention_layernorm, old.post_attention_layernorm)
        mamba.copy_(new.shared_mlp.input_linear, old.mlp.gate_proj, old.mlp.up_proj)
        mamba.copy_(new.shared_mlp.output_linear, old.mlp.down_proj)
        if number in linear:
            heads = range(model.config.num_attention_heads)
            mamba.fill(new.mamba, old.self_attn, old.input_layernorm.weight, heads)
            continue
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            mamba.copy_(getattr(new.self_attn, name), getattr(old.self_attn, name))
    return stock


def _config(model: PreTrainedModel, linear: dict[int, Any]) -> GraniteMoeHybridConfig:
    config, attention = model.config, model.model.layers[0].self_attn
    heads, width = config.num_attention_heads, config.hidden_size
    features, expand = mamba.number_of_features(linear), 1
    while expand * width % heads or not mamba.Sizes(heads, expand * width // heads, features).hold(attention.head_dim):
        expand += 1
    fields: dict[str, Any] = {
        **decoders.same_fields(config),
        **mamba.Sizes(heads, expand * width // heads, features).fields(),
        **{name: getattr(config, name) for name in FACTORS if hasattr(config, name)},
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": attention.head_dim,
        "attention_multiplier": attention.scaling,
        "attention_bias": any(layer.self_attn.q_proj.bias is not None for layer in model.model.layers),
        "shared_intermediate_size": config.intermediate_size,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "layer_types": [
            "linear_attention" if i in linear else "full_attention" for i in range(len(model.model.layers))
        ],
        "mamba_expand": expand,
    }
    return GraniteMoeHybridConfig(**fields)
