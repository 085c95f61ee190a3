"""What config.json says in published checkpoints of real families, and what a conversion makes of it.

`shrunk` is the one rule that makes them small: fewer layers, narrower heads and a vocabulary of 64 tokens. What a
family is known by stays as published: the kinds of special tokens (a list, -1, none), rope scalings, tied embeddings,
which heads share keys, heads that are wider than their share of the hidden size, windows, types of layers, dtypes, and
fields that transformers has renamed since.

Rows marked (mlc) are those of `python/mlc_llm/model/model_preset.py` in mlc-ai/mlc-llm, which has copies of the files
on the hub; (here) those that someone else's code or documentation quotes, named in the line; the others were written
from memory of the files, and checked by loading them with transformers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class HubConfig:
    """One checkpoint.

    Args:
        fields: those of its config.json that a model depends on.
        drop: what `--drop` names in the conversion.
        options: further words of the command line of the conversion.
        refused: what the refusal says: of every conversion, or, where `drop` or `options` allow one, without them.
    """

    fields: dict[str, Any]
    drop: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    refused: str = ""


LLAMA_3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA_7B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3_8B = {
    **LLAMA_7B,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN_2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN_3 = {
    **QWEN_2,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
GEMMA = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA_2 = {
    **{name: value for name, value in GEMMA.items() if name != "rope_scaling"},
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "model_type": "gemma2",
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA_3 = {
    **GEMMA,
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
PHI_2 = {
    "architectures": ["PhiForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 50256,
    "embd_pdrop": 0.0,
    "eos_token_id": 50256,
    "hidden_act": "gelu_new",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 10240,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "phi",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.4,
    "qk_layernorm": False,
    "resid_pdrop": 0.1,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 51200,
}
PHI_3 = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32064,
}
MISTRAL = {
    **LLAMA_7B,
    "architectures": ["MistralForCausalLM"],
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
OPT = {
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
BERT = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}
WHISPER = {
    "activation_dropout": 0.0,
    "activation_function": "gelu",
    "architectures": ["WhisperForConditionalGeneration"],
    "attention_dropout": 0.0,
    "begin_suppress_tokens": [220, 50257],
    "bos_token_id": 50257,
    "d_model": 384,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1536,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 4,
    "decoder_start_token_id": 50258,
    "dropout": 0.0,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 4,
    "eos_token_id": 50257,
    "forced_decoder_ids": [[1, 50259], [2, 50359], [3, 50363]],
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_length": 448,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "model_type": "whisper",
    "num_hidden_layers": 4,
    "num_mel_bins": 80,
    "pad_token_id": 50257,
    "scale_embedding": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 51865,
}
CLIP_VISION = {
    "attention_dropout": 0.0,
    "dropout": 0.0,
    "hidden_act": "quick_gelu",
    "hidden_size": 768,
    "image_size": 224,
    "initializer_factor": 1.0,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "model_type": "clip_vision_model",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "patch_size": 32,
    "projection_dim": 512,
}
# Every 8th of the factors of (mlc), as many as there are pairs of channels in a head of the shrunk model.
PHI_3_5_ROPE = {
    "long_factor": [1.08, 3.23, 24.46, 57.55, 62.71, 64.06],
    "short_factor": [1.0, 1.05, 1.34, 1.99, 2.02, 2.03],
    "type": "longrope",
}

HUB_CONFIGS: dict[str, HubConfig] = {
    # (here) levanter's tests quote this file; exports of LLaMA 1 say -1 too.
    "HuggingFaceM4/tiny-random-LlamaForCausalLM": HubConfig(
        {
            **{name: value for name, value in LLAMA_7B.items() if name not in ("rope_scaling", "num_key_value_heads")},
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": -1,
            "rms_norm_eps": 1e-06,
            "torch_dtype": "float32",
        }
    ),
    # (here) the tests of vLLM name it as the checkpoint of this class, which transformers no longer has.
    "decapoda-research/llama-7b-hf": HubConfig(
        {
            **{name: value for name, value in LLAMA_7B.items() if name not in ("rope_scaling", "num_key_value_heads")},
            "architectures": ["LLaMAForCausalLM"],
            "max_sequence_length": 2048,
            "pad_token_id": -1,
            "rms_norm_eps": 1e-06,
        }
    ),
    # (mlc)
    "meta-llama/Llama-2-7b-hf": HubConfig({**LLAMA_7B, "pad_token_id": 0, "pretraining_tp": 1}),
    # (mlc)
    "meta-llama/Meta-Llama-3-8B": HubConfig(LLAMA_3_8B),
    # (mlc)
    "meta-llama/Llama-3.1-8B-Instruct": HubConfig(
        {
            **LLAMA_3_8B,
            "eos_token_id": [128001, 128008, 128009],
            "max_position_embeddings": 131072,
            "rope_scaling": LLAMA_3_ROPE,
        },
        options=("--softmax_heads", "auto:2"),
    ),
    # (mlc)
    "meta-llama/Llama-3.2-1B-Instruct": HubConfig(
        {
            **LLAMA_3_8B,
            "eos_token_id": [128001, 128008, 128009],
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_hidden_layers": 16,
            "rope_scaling": {**LLAMA_3_ROPE, "factor": 32.0},
            "tie_word_embeddings": True,
        }
    ),
    # (mlc)
    "Qwen/Qwen2-7B-Instruct": HubConfig(QWEN_2),
    # (mlc), with the hidden size and heads of 0.5B
    "Qwen/Qwen2.5-0.5B-Instruct": HubConfig(
        {
            **QWEN_2,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_window_layers": 21,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        }
    ),
    # (mlc)
    "Qwen/Qwen3-0.6B": HubConfig(QWEN_3),
    # The same as transformers has saved it since 4.53: types of layers, and the dtype under its new name.
    "Qwen/Qwen3-0.6B, saved again": HubConfig(
        {
            **{
                name: value
                for name, value in QWEN_3.items()
                if name not in ("torch_dtype", "rope_theta", "rope_scaling")
            },
            "dtype": "bfloat16",
            "layer_types": ["full_attention"] * 28,
            "pad_token_id": 151643,
            "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        }
    ),
    # (mlc)
    "google/gemma-2b": HubConfig(GEMMA),
    "google/gemma-7b": HubConfig(
        {
            **GEMMA,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 16,
        }
    ),
    # (mlc)
    "google/gemma-2-2b-it": HubConfig(
        GEMMA_2,
        drop=("sliding_window", "softcap"),
        refused="Gemma2Attention caps its logits at 50.0, in layers 0, 1; Gemma2Attention sees the nearest 8 tokens "
        "only, in layers 0; keep these layers softmax (`layers`); or convert them without it: give `--drop "
        "softcap,sliding_window`",
    ),
    # (mlc)
    "google/gemma-3-1b-it": HubConfig(
        GEMMA_3,
        drop=("sliding_window",),
        refused="Gemma3Attention sees the nearest 8 tokens only, in layers 0, 1, 2, 3, 4; keep these layers softmax: "
        "give `--layers full_attention`; or convert them without it: give `--drop sliding_window`",
    ),
    "microsoft/phi-1": HubConfig(
        {
            **PHI_2,
            "bos_token_id": None,
            "eos_token_id": None,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_key_value_heads": None,
            "partial_rotary_factor": 0.5,
            "resid_pdrop": 0.0,
            "torch_dtype": "float32",
        }
    ),
    "microsoft/phi-2": HubConfig(PHI_2),
    # (mlc)
    "microsoft/Phi-3-mini-4k-instruct": HubConfig(
        PHI_3,
        drop=("sliding_window",),
        refused="Phi3Attention sees the nearest 8 tokens only, in layers 0, 1; keep these layers softmax (`layers`); "
        "or convert them without it: give `--drop sliding_window`",
    ),
    # (mlc); its window is longer than its context
    "microsoft/Phi-3.5-mini-instruct": HubConfig(
        {
            **PHI_3,
            "attention_bias": False,
            "max_position_embeddings": 131072,
            "rope_scaling": PHI_3_5_ROPE,
            "sliding_window": 262144,
        }
    ),
    # (mlc), with the heads of 128 channels of which three quarters are rotated
    "microsoft/Phi-4-mini-instruct": HubConfig(
        {
            **PHI_3,
            "attention_bias": False,
            "auto_map": {**PHI_3["auto_map"], "AutoTokenizer": "Xenova/gpt-4o"},
            "bos_token_id": 199999,
            "eos_token_id": 199999,
            "max_position_embeddings": 131072,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "pad_token_id": 199999,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "long_factor": [1, 2.43, 5.98, 14.64, 32.1, 32.71],
                "short_factor": [1.0] * 6,
                "type": "longrope",
            },
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "vocab_size": 200064,
        }
    ),
    # (mlc)
    "openai-community/gpt2": HubConfig(
        {
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
            "embd_pdrop": 0.1,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gpt2",
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_type": "cls_index",
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        }
    ),
    "EleutherAI/pythia-70m": HubConfig(
        {
            "architectures": ["GPTNeoXForCausalLM"],
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_act": "gelu",
            "hidden_size": 512,
            "initializer_range": 0.02,
            "intermediate_size": 2048,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048,
            "model_type": "gpt_neox",
            "num_attention_heads": 8,
            "num_hidden_layers": 6,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "use_cache": True,
            "use_parallel_residual": True,
            "vocab_size": 50304,
        }
    ),
    "facebook/opt-125m": HubConfig(OPT),
    "facebook/opt-350m": HubConfig(
        {
            **OPT,
            "do_layer_norm_before": False,
            "ffn_dim": 4096,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "word_embed_proj_dim": 512,
        }
    ),
    "bigscience/bloom-560m": HubConfig(
        {
            "architectures": ["BloomForCausalLM"],
            "apply_residual_connection_post_layernorm": False,
            "attention_dropout": 0.0,
            "attention_softmax_in_fp32": True,
            "bias_dropout_fusion": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_dropout": 0.0,
            "hidden_size": 1024,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "bloom",
            "n_head": 16,
            "n_inner": None,
            "n_layer": 24,
            "offset_alibi": 100,
            "pad_token_id": 3,
            "pretraining_tp": 1,
            "seq_length": 2048,
            "slow_but_exact": False,
            "unk_token_id": 0,
            "use_cache": True,
            "vocab_size": 250880,
        }
    ),
    # Its class is that of its own code; transformers' class is MptForCausalLM.
    "mosaicml/mpt-7b": HubConfig(
        {
            "architectures": ["MPTForCausalLM"],
            "attn_config": {
                "alibi": True,
                "alibi_bias_max": 8,
                "attn_impl": "torch",
                "attn_pdrop": 0,
                "attn_type": "multihead_attention",
                "attn_uses_sequence_id": False,
                "clip_qkv": None,
                "prefix_lm": False,
                "qk_ln": False,
                "softmax_scale": None,
            },
            "auto_map": {
                "AutoConfig": "configuration_mpt.MPTConfig",
                "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM",
            },
            "d_model": 4096,
            "emb_pdrop": 0,
            "embedding_fraction": 1.0,
            "expansion_ratio": 4,
            "init_device": "cpu",
            "learned_pos_emb": True,
            "logit_scale": None,
            "max_seq_len": 2048,
            "model_type": "mpt",
            "n_heads": 32,
            "n_layers": 32,
            "no_bias": True,
            "norm_type": "low_precision_layernorm",
            "resid_pdrop": 0,
            "tokenizer_name": "EleutherAI/gpt-neox-20b",
            "torch_dtype": "bfloat16",
            "use_cache": False,
            "verbose": 0,
            "vocab_size": 50432,
        }
    ),
    "mistralai/Mistral-7B-v0.1": HubConfig(
        MISTRAL,
        drop=("sliding_window",),
        refused="MistralAttention sees the nearest 8 tokens only, in layers 0, 1; keep these layers softmax "
        "(`layers`); or convert them without it: give `--drop sliding_window`",
    ),
    # (mlc); the same `--drop` serves every checkpoint of the family
    "mistralai/Mistral-7B-v0.3": HubConfig(
        {
            **MISTRAL,
            "attention_dropout": 0.0,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "vocab_size": 32768,
        },
        drop=("sliding_window",),
    ),
    "google-bert/bert-base-uncased": HubConfig(BERT),
    "FacebookAI/roberta-base": HubConfig(
        {
            **BERT,
            "architectures": ["RobertaForMaskedLM"],
            "bos_token_id": 0,
            "eos_token_id": 2,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 514,
            "model_type": "roberta",
            "pad_token_id": 1,
            "type_vocab_size": 1,
            "vocab_size": 50265,
        }
    ),
    "answerdotai/ModernBERT-base": HubConfig(
        {
            "architectures": ["ModernBertForMaskedLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 50281,
            "classifier_activation": "gelu",
            "classifier_pooling": "mean",
            "cls_token_id": 50281,
            "decoder_bias": True,
            "deterministic_flash_attn": False,
            "embedding_dropout": 0.0,
            "eos_token_id": 50282,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "hidden_activation": "gelu",
            "hidden_size": 768,
            "initializer_cutoff_factor": 2.0,
            "initializer_range": 0.02,
            "intermediate_size": 1152,
            "layer_norm_eps": 1e-05,
            "local_attention": 128,
            "local_rope_theta": 10000.0,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "mlp_dropout": 0.0,
            "model_type": "modernbert",
            "norm_bias": False,
            "norm_eps": 1e-05,
            "num_attention_heads": 12,
            "num_hidden_layers": 22,
            "pad_token_id": 50283,
            "position_embedding_type": "absolute",
            "sep_token_id": 50282,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "vocab_size": 50368,
        },
        drop=("sliding_window",),
        refused="ModernBertAttention sees the nearest 5 tokens only, in layers 1, 2; keep these layers softmax: give "
        "`--layers full_attention`; or convert them without it: give `--drop sliding_window`",
    ),
    "google/flan-t5-small": HubConfig(
        {
            "architectures": ["T5ForConditionalGeneration"],
            "d_ff": 1024,
            "d_kv": 64,
            "d_model": 512,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.1,
            "eos_token_id": 1,
            "feed_forward_proj": "gated-gelu",
            "initializer_factor": 1.0,
            "is_encoder_decoder": True,
            "layer_norm_epsilon": 1e-06,
            "model_type": "t5",
            "n_positions": 512,
            "num_decoder_layers": 8,
            "num_heads": 6,
            "num_layers": 8,
            "output_past": True,
            "pad_token_id": 0,
            "relative_attention_max_distance": 128,
            "relative_attention_num_buckets": 32,
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": 32128,
        },
        drop=("position_bias",),
        refused="T5Attention adds a learned position bias to its logits, in layers 0, 1, 2, 3; keep these layers "
        "softmax (`layers`); or convert them without it: give `--drop position_bias`",
    ),
    "openai/whisper-tiny": HubConfig(WHISPER),
    "google/vit-base-patch16-224": HubConfig(
        {
            "architectures": ["ViTForImageClassification"],
            "attention_probs_dropout_prob": 0.0,
            "encoder_stride": 16,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "hidden_size": 768,
            "id2label": {"0": "tench, Tinca tinca", "1": "goldfish, Carassius auratus", "2": "great white shark"},
            "image_size": 224,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "label2id": {"tench, Tinca tinca": 0, "goldfish, Carassius auratus": 1, "great white shark": 2},
            "layer_norm_eps": 1e-12,
            "model_type": "vit",
            "num_attention_heads": 12,
            "num_channels": 3,
            "num_hidden_layers": 12,
            "patch_size": 16,
            "qkv_bias": True,
        }
    ),
    "openai/clip-vit-base-patch32, the image model": HubConfig(
        {**CLIP_VISION, "architectures": ["CLIPVisionModel"], "torch_dtype": "float32"}
    ),
    "openai/clip-vit-base-patch32": HubConfig(
        {
            "architectures": ["CLIPModel"],
            "initializer_factor": 1.0,
            "logit_scale_init_value": 2.6592,
            "model_type": "clip",
            "projection_dim": 512,
            "text_config": {
                "bos_token_id": 0,
                "dropout": 0.0,
                "eos_token_id": 2,
                "hidden_act": "quick_gelu",
                "hidden_size": 512,
                "intermediate_size": 2048,
                "max_position_embeddings": 77,
                "model_type": "clip_text_model",
                "num_attention_heads": 8,
                "num_hidden_layers": 12,
                "pad_token_id": 1,
                "projection_dim": 512,
                "vocab_size": 49408,
            },
            "torch_dtype": "float32",
            "vision_config": CLIP_VISION,
        },
        refused="`clip` takes more than text, and there are no built-in inputs on which to compare the result with "
        "its source; give `--no_verify`, and compare it yourself",
        options=("--no_verify",),
    ),
    "openai/gpt-oss-20b": HubConfig(
        {
            **GPT_OSS,
            "quantization_config": {
                "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
                "quant_method": "mxfp4",
            },
        },
        refused="the model is quantized (mxfp4); convert the full-precision original and quantize the result",
    ),
    "unsloth/gpt-oss-20b-BF16": HubConfig(
        {**GPT_OSS, "torch_dtype": "bfloat16"},
        drop=("attention_sinks", "sliding_window"),
        refused="GptOssAttention has learned attention sinks, in layers 0, 1; GptOssAttention sees the nearest 8 "
        "tokens only, in layers 0; keep these layers softmax (`layers`); or convert them without it: give "
        "`--drop attention_sinks,sliding_window`",
    ),
    # (mlc)
    "EleutherAI/gpt-j-6b": HubConfig(
        {
            "activation_function": "gelu_new",
            "architectures": ["GPTJForCausalLM"],
            "bos_token_id": 50256,
            "eos_token_id": 50256,
            "layer_norm_epsilon": 1e-05,
            "model_type": "gptj",
            "n_embd": 4096,
            "n_head": 16,
            "n_inner": None,
            "n_layer": 28,
            "n_positions": 2048,
            "rotary": True,
            "rotary_dim": 64,
            "tie_word_embeddings": False,
            "vocab_size": 50400,
        },
        refused="no self-attention that goes through transformers' attention interface (GPTJAttention computes its "
        "own softmax), so nothing can be converted",
    ),
    "tiiuae/falcon-7b": HubConfig(
        {
            "alibi": False,
            "architectures": ["FalconForCausalLM"],
            "bias": False,
            "bos_token_id": 11,
            "eos_token_id": 11,
            "hidden_size": 4544,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "model_type": "falcon",
            "multi_query": True,
            "new_decoder_architecture": False,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
            "parallel_attn": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 65024,
        },
        refused="no self-attention that goes through transformers' attention interface (FalconAttention computes its "
        "own softmax), so nothing can be converted",
    ),
    # No class in the file, and the dropout under an old name.
    "microsoft/deberta-v3-base": HubConfig(
        {
            "attention_probs_dropout_prob": 0.1,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-07,
            "max_position_embeddings": 512,
            "max_relative_positions": -1,
            "model_type": "deberta-v2",
            "norm_rel_ebd": "layer_norm",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "pad_token_id": 0,
            "pos_att_type": "p2c|c2p",
            "position_biased_input": False,
            "position_buckets": 256,
            "relative_attention": True,
            "share_att_key": True,
            "type_vocab_size": 0,
            "vocab_size": 128100,
        },
        refused="no self-attention that goes through transformers' attention interface (DebertaV2Attention, "
        "DisentangledSelfAttention computes its own softmax), so nothing can be converted",
    ),
    "state-spaces/mamba-130m-hf": HubConfig(
        {
            "architectures": ["MambaForCausalLM"],
            "bos_token_id": 0,
            "eos_token_id": 0,
            "hidden_size": 768,
            "intermediate_size": 1536,
            "model_type": "mamba",
            "n_layer": 24,
            "num_hidden_layers": 24,
            "pad_token_id": 0,
            "state_size": 16,
            "torch_dtype": "float32",
            "vocab_size": 50280,
        },
        refused="no self-attention that goes through transformers' attention interface (it has no attention), so "
        "nothing can be converted",
    ),
}

NARROWER = 8  # times, every head and what is measured by it
HIDDEN = r"hidden_size|n_embd|d_model|word_embed_proj_dim|projection_dim"
HEADS = r"num_attention_heads|n_heads?|num_heads|(en|de)coder_attention_heads"
LAYERS = r"num_hidden_layers|n_layers?|num_layers|num_decoder_layers|(en|de)coder_layers|max_window_layers"
INNER = r"intermediate_size|ffn_dim|(en|de)coder_ffn_dim|d_ff"
HEAD_SIZES = r"head_dim|d_kv|query_pre_attn_scalar|rotary_dim"
WINDOWS = r"sliding_window|local_attention"
VOCABULARY = 64


def _first(fields: dict[str, Any], pattern: str) -> Any:
    return next((value for name, value in fields.items() if re.fullmatch(pattern, name) and value), None)


def shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """The same model in small; see the top of this file."""
    heads, hidden = _first(fields, HEADS), _first(fields, HIDDEN)
    key_heads = fields.get("num_key_value_heads") or heads
    few_key_heads = min(2, key_heads or 2)
    few_heads = few_key_heads * heads // key_heads if heads else 1
    narrow = few_heads / (heads or hidden or 1) / NARROWER
    period = fields.get("sliding_window_pattern") or fields.get("global_attn_every_n_layers") or 2
    tokens = sorted({number for number in _token_ids(fields) if number >= VOCABULARY - 8})
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict) and "hidden_size" in value:
            small[name] = shrunk(value)
        elif name == "layer_types":
            small[name] = value[:period]
        elif re.fullmatch(r"\w+_token_id|begin_suppress_tokens|forced_decoder_ids", name):
            small[name] = _mapped(value, {number: VOCABULARY - 8 + place for place, number in enumerate(tokens)})
        elif type(value) is not int and not (isinstance(value, float) and re.fullmatch("init.*", name)):
            small[name] = value
        elif re.fullmatch(HIDDEN, name):
            small[name] = -(-round(value * narrow) // 8) * 8 if heads else 16  # experts need rows of 16 bytes
        elif re.fullmatch(HEADS, name):
            small[name] = few_heads
        elif re.fullmatch(LAYERS, name):
            small[name] = min(value, period)
        elif re.fullmatch(INNER, name):
            small[name] = 32
        elif re.fullmatch(HEAD_SIZES, name):
            small[name] = value // NARROWER
        elif re.fullmatch(WINDOWS, name):
            small[name] = 8 if value < fields.get("max_position_embeddings", value) else value
        else:
            small[name] = {
                "num_key_value_heads": few_key_heads,
                "vocab_size": VOCABULARY,
                "image_size": 3 * fields.get("patch_size", 0),
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "experts_per_token": 2,
                "max_source_positions": 20,
                # At 0.02 the attention of an untrained model is uniform and proves nothing.
                "initializer_range": 0.3,
                "init_std": 0.3,
                "initializer_factor": 2.0,
            }.get(name, value)
    return small


def _token_ids(fields: dict[str, Any]) -> list[int]:
    found: list[int] = []
    for name, value in fields.items():
        if re.fullmatch(r"\w+_token_id|begin_suppress_tokens", name) and value is not None:
            found += value if isinstance(value, list) else [value]
        elif name == "forced_decoder_ids":
            found += [number for _, number in value]
    return found


def _mapped(value: Any, numbers: dict[int, int]) -> Any:
    if isinstance(value, list):
        return [_mapped(entry, numbers) for entry in value]
    return value if value is None else numbers.get(value, value)
