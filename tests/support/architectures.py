"""Tiny random twins of any model type: the stock configuration with every size replaced by a small one."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


# Names of configuration fields, and what they become. A wide initialisation: at the usual 0.02 the attention of an
# untrained model is uniform and proves nothing.
SIZES: dict[str, Any] = {
    r"hidden_size|d_model|n_embd|dim|embed_dim|hidden_dim|embedding_size|word_embed_proj_dim|projection_dim|d_head_model"
    r"|num_features|conv_dim_last|output_size|embedding_dim|width|hidden_channels|encoder_hidden_size": 32,
    r"num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads|(en|de)coder_num_(attention_)?heads"
    r"|num_(en|de)coder_attention_heads|num_swa_attention_heads|swa_num_attention_heads": 4,
    r"num_hidden_layers|n_layers?|(en|de)coder_layers|num_(en|de)?coder_?layers|num_layers"
    r"|(en|de)coder_num_hidden_layers": 3,
    r"intermediate_size|ffn_dim|(en|de)coder_ffn_dim|ffn_hidden_size|d_ff|inner_dim|n_inner|ff_dim"
    r"|(en|de)coder_intermediate_size|dense_intermediate_size": 48,
    r"(moe|shared_expert|moe_shared_expert)_intermediate_size|expert_ffn_(hidden_)?size|shared_intermediate_size": 24,
    r"head_dim|d_kv|attention_head_dim|head_size|global_head_dim|attention_head_size|kv_channels"
    r"|v_head_dim|swa_head_dim|swa_v_head_dim|qk_(rope|nope)_head_dim": 8,
    r"(decoder_)?vocab_size|vocab_size_per_layer_input|n_vocab": 64,
    r"max_position_embeddings|n_positions|max_(source|target)_positions|max_seq(uence)?_len(gth)?|n_ctx": 64,
    r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|n_experts": 4,
    r"num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts|experts_per_token|moe_top_k": 2,
    r"n_group|topk_group": 1,
    r"image_size": 12,
    r"patch_size": 2,
    r"type_vocab_size": 2,
    r"q_lora_rank|kv_lora_rank": 16,
    r"num_mel_bins": 16,
    r"num_conv_pos_embeddings": 16,
    r"num_conv_pos_embedding_groups": 2,
    r"initializer_range|init_std": 0.3,
    r"initializer_factor": 2.0,
    r"pad_token_id": 0,
    r"bos_token_id": 1,
    r"eos_token_id": 2,
    r"decoder_start_token_id": 1,
    r".*(dropout|drop_prob|_pdrop|layerdrop|drop_rate|dropout_rate|drop_path_rate|dropout_prob)": 0.0,
}
# Left out: the configuration class derives them from the others.
DERIVED = re.compile(
    r"layer_types|mlp_layer_types|out_(features|indices)|stage_names|id2label|label2id|architectures|dtype|_.*|model_type"
    r"|transformers_version|sliding_window_pattern|no_rope_layers"
)
FILLED = ("head_dim", "pad_token_id", "bos_token_id", "eos_token_id")  # also where the default is None

# What the rules do not reach: further fields of a model type.
TWEAKS: dict[str, dict[str, Any]] = {
    "esm": {"vocab_size": 64, "mask_token_id": 4},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8}
    | {"moe_shared_expert_intermediate_size": 24},
    "speech_to_text": {"input_feat_per_channel": 16, "conv_channels": 32},
    "xlnet": {"d_head": 8},
    "xmod": {"default_language": "en_XX"},
}


def shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration with small sizes, those of nested configurations too."""
    small = {name: _shrunk_field(name, value, fields) for name, value in fields.items() if not DERIVED.fullmatch(name)}
    rope = small.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        small["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
    return small


def _shrunk_field(name: str, value: Any, fields: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return shrunk(value) if "model_type" in value or name.endswith("_config") else value
    if isinstance(value, bool) or (value is None and name not in FILLED):
        return value
    if name in ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"):
        return {1: 1, fields.get("num_attention_heads"): 4}.get(value, 2)
    size = next((size for pattern, size in SIZES.items() if re.fullmatch(pattern, name)), None)
    if size is None or (size == 0.0 and value == 0):
        return value
    return [size] * len(value) if isinstance(value, (list, tuple)) and not name.startswith("eos") else size


def tiny_config(model_type: str, **changes: Any):
    """The stock configuration of a model type in tiny."""
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**{**shrunk(config_class().to_dict()), **TWEAKS.get(model_type, {}), **changes})


def tiny_model(model_type: str, auto_class: str, **changes: Any):
    """A random stock twin in evaluation mode."""
    torch.manual_seed(0)
    return getattr(transformers, auto_class).from_config(tiny_config(model_type, **changes)).eval()


def inputs_of(model: Any, batch: int = 2, length: int = 13) -> dict[str, torch.Tensor]:
    """Random inputs that the forward of this model takes, by the name of its main one."""
    generator = torch.Generator().manual_seed(1)
    config, parameters = model.config, inspect.signature(model.forward).parameters
    main = model.main_input_name
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        inputs = {main: torch.randn(batch, getattr(vision, "num_channels", 3), size, size, generator=generator)}
    elif main == "input_values":
        inputs = {main: torch.randn(batch, 1600, generator=generator)}
    elif main == "input_features":
        is_time_first = hasattr(config, "input_feat_per_channel")
        inputs = {main: torch.randn(batch, *((128, 16) if is_time_first else (16, 128)), generator=generator)}
    else:
        inputs = {"input_ids": torch.randint(5, 64, (batch, length), generator=generator)}
    if main != "input_ids" and "input_ids" in parameters and hasattr(config, "text_config"):
        inputs["input_ids"] = torch.randint(5, 64, (batch, length), generator=generator)
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(5, 64, (batch, 7), generator=generator)
    return inputs
