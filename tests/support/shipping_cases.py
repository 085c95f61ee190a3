"""The checkpoints that the shipping tests convert and load elsewhere."""

from __future__ import annotations


LINFORMER = ("--attention", "linformer", "--projection_size", 8, "--projection_sharing", "layerwise")
# What is loaded as from a hub, too, and without its head.
ON_THE_HUB = ("bert", "gpt2")
# name: family, head of the checkpoint, options of the conversion
CONVERTED = {
    "bert": ("bert", "AutoModelForMaskedLM", ("--num_features", 16)),
    "linformer": ("distilbert", "AutoModelForSequenceClassification", LINFORMER),
    "llama": ("llama", "AutoModelForCausalLM", ("--attention", "performer", "--layers", "0,2")),
    "gpt2": ("gpt2", "AutoModelForCausalLM", ("--attention", "linear", "--feature_map", "hedgehog")),
    "gpt_neox": ("gpt_neox", "AutoModelForCausalLM", ("--attention", "linear", "--feature_map", "elu1")),
    "hybrid": ("llama", "AutoModelForCausalLM", ("--attention", "hybrid", "--window_size", 4, "--num_sinks", 2)),
    "aft": ("llama", "AutoModelForCausalLM", ("--attention", "aft", "--variant", "local", "--window_size", 4)),
    "gated_delta": ("llama", "AutoModelForCausalLM", ("--attention", "gated_delta", "--conv_size", 3)),
    "nystrom": ("bert", "AutoModelForMaskedLM", ("--attention", "nystrom", "--num_landmarks", 4)),
    "latent": ("bert", "AutoModelForMaskedLM", ("--attention", "latent", "--num_latents", 4)),
    "linformer_linear": ("bert", "AutoModelForMaskedLM", ("--attention", "linformer_linear", "--projection_size", 8)),
    "by layer": (
        "llama",
        "AutoModelForCausalLM",
        ("--attention", "0:hybrid,1:linear,2:performer", "--window_size", 4, "--num_features", 8),
    ),
    "softmax heads": ("llama", "AutoModelForCausalLM", ("--attention", "linear", "--softmax_heads", "0.3,2.0,2.1")),
    "vit": ("vit", "AutoModelForImageClassification", ("--attention", "linformer", "--projection_size", 8)),
}
