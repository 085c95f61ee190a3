# SPDX-License-Identifier: Apache-2.0
"""The architectures that every test of `tests/architectures` converts, and some that cannot be converted.

docs/architectures.md has them as a table. Other model types can be converted as well if their
attention goes through transformers' attention interface: conversion does not depend on this list.
"""

from __future__ import annotations


ARCHITECTURES: dict[str, tuple[str, ...]] = {
    "decoders": (
        "afmoe", "apertus", "arcee", "aria_text", "axk1", "biogpt", "bitnet", "bloom", "cohere", "cohere2", "ctrl",
        "cwm", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon_h1", "flex_olmo", "gemma",
        "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox",
        "gpt_oss", "granite", "granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hy_v3", "jais2",
        "jetmoe", "lfm2", "lfm3", "llama", "llama4_text", "minicpm3", "minimax_m2", "ministral", "ministral3",
        "mistral", "mixtral", "modernbert-decoder", "mpt", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2",
        "olmo3", "olmo_hybrid", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
        "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma",
    ),
    "encoders": (
        "albert", "bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "esm", "esmc", "eurobert",
        "gte", "jina_embeddings_v3", "layoutlm", "markuplm", "mobilebert", "modernbert", "nomic_bert", "roberta",
        "roberta-prelayernorm", "roc_bert", "splinter", "xlm-roberta", "xlm-roberta-xl", "xmod",
    ),
    "vision": (
        "aimv2_vision_model", "beit", "chinese_clip_vision_model", "clip_vision_model", "deit", "dinov2",
        "dinov2_with_registers", "dinov3_vit", "ijepa", "internvl_vision", "mlcd_vision_model", "radio",
        "siglip_vision_model", "vit", "vit_msn", "yolos",
    ),
    "audio": ("data2vec-audio", "hubert", "sew", "unispeech", "unispeech-sat", "wav2vec2", "wav2vec2-conformer"),
    "encoder-decoders": (
        "bart", "blenderbot", "blenderbot-small", "longt5", "m2m_100", "marian", "mbart", "moonshine", "mt5", "pegasus",
        "plbart", "speech_to_text", "switch_transformers", "t5", "t5gemma", "umt5", "whisper",
    ),
}  # fmt: skip

# Features of the usual checkpoints of a model type that linear attention lacks: refused unless `drop` names them.
NEED_DROP: dict[str, tuple[str, ...]] = {
    "attention_sinks": ("gpt_oss",),
    "position_bias": ("beit", "longt5", "mt5", "switch_transformers", "t5", "umt5", "wav2vec2-conformer"),
    "sliding_window": (
        "afmoe", "cohere2", "cwm", "exaone4", "exaone_moe", "gemma2", "gemma3_text", "gpt_oss", "ministral", "mistral",
        "modernbert", "modernbert-decoder", "olmo3", "t5gemma", "vaultgemma",
    ),
    "softcap": ("gemma2", "t5gemma", "vaultgemma"),
}  # fmt: skip

# Examples of model types that are refused with any settings, by the reason; conversion detects them by itself.
REFUSED: dict[str, tuple[str, ...]] = {
    "computes its own softmax": (
        "big_bird", "convbert", "deberta", "deberta-v2", "falcon", "funnel", "git", "ibert", "led",
        "longformer", "megatron-bert", "mpnet", "nystromformer", "rembert", "roformer", "squeezebert", "trocr", "wavlm",
        "xglm", "xlnet",
    ),
    "attends twice, to different values": ("diffllama",),
    "adds a mask of its own": ("doge",),
    "shares a cache with lightning attention": ("minimax",),
    "selection of the keys": ("deepseek_v32", "glm_moe_dsa"),
    "its own tokens and the encoder's in one softmax": ("t5gemma2",),
    "has no attention": ("mamba", "resnet"),
}  # fmt: skip


def supported_model_types() -> list[str]:
    """The stock model types whose conversion is tested, such as `llama` (converted: `linear_llama`)."""
    return sorted(model_type for model_types in ARCHITECTURES.values() for model_type in model_types)
