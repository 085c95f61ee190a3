"""A few inputs to run a model on: built-in English text through its tokenizer, or random ids, pixels or sound."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attention.configuration_linear_attention import max_length_of


TEXTS = (
    "The river had risen in the night, and by morning the lower field was a lake.",
    "Once upon a time there was a little girl who wanted to play in the park. Her mother said that it was too cold, so "
    "they stayed at home, drew pictures of birds, and waited for the rain to stop. In the evening the sky was clear.",
    "A list comprehension builds a new list by applying an expression to each item of a sequence.",
    "Prices rose by two per cent in March.",
    "Where is the nearest station? It is behind the library, about ten minutes on foot, but the gate closes at nine.",
    "Water is made of hydrogen and oxygen; it freezes at zero degrees and boils at one hundred. Salt lowers the first "
    "and raises the second, which is why the sea rarely freezes near the coast, and why cooks add salt to the pot. "
    "None of this was known to the people who first built boats, yet they learned to read the colour of the ice.",
)
MAX_TOKENS = 128
RANDOM_LENGTHS = (7, 48, 17, 64)


def samples_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[torch.Tensor]:
    """Main inputs of a model, each without padding."""
    if model.main_input_name == "input_ids":
        return text_samples(model.config, tokenizer)
    if model.main_input_name == "pixel_values":
        return pixel_samples(model.config)
    return sound_samples(model.config, model.main_input_name)


def text_samples(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> list[torch.Tensor]:
    """Token ids, one tensor `[1, N]` per text, no longer than the model allows."""
    if (samples := built_in_text(config, tokenizer)) is not None:
        return samples
    generator = torch.Generator().manual_seed(0)
    sizes = (min(size, _max_tokens(config)) for size in RANDOM_LENGTHS)
    return [torch.randint(config.vocab_size, (1, size), generator=generator) for size in sizes]


def built_in_text(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> list[torch.Tensor] | None:
    """`TEXTS` as token ids `[1, N]`; None without a tokenizer, or with one that does not belong to the model."""
    if tokenizer is None:
        return None
    length = _max_tokens(config)
    samples = [tokenizer(text, truncation=True, max_length=length, return_tensors="pt").input_ids for text in TEXTS]
    is_its_own = all(ids.numel() > 1 and int(ids.max()) < config.vocab_size for ids in samples)
    return samples if is_its_own else None


def _max_tokens(config: PreTrainedConfig) -> int:
    # Some families (RoBERTa) cannot use a few of their positions because of an offset.
    return min(MAX_TOKENS, (max_length_of(config) or MAX_TOKENS) * 3 // 4)


def sound_samples(config: PreTrainedConfig, name: str) -> list[torch.Tensor]:
    """Random sound: `input_values [1, samples]`, or `input_features` in the shape that the model's encoder reads."""
    generator = torch.Generator().manual_seed(0)
    if name == "input_values":
        return [torch.randn(1, 400 * length, generator=generator) for length in RANDOM_LENGTHS]
    if (features := getattr(config, "input_feat_per_channel", None)) is not None:
        return [torch.randn(1, 4 * length, features, generator=generator) for length in RANDOM_LENGTHS]
    shape = (1, config.num_mel_bins, 2 * config.max_source_positions)  # Whisper accepts only this length
    return [torch.randn(*shape, generator=generator) for _ in range(2)]


def pixel_samples(config: PreTrainedConfig) -> list[torch.Tensor]:
    """Random images `[1, channels, height, width]`."""
    size = config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    generator = torch.Generator().manual_seed(0)
    channels = getattr(config, "num_channels", 3)
    return [torch.randn(1, channels, height, width, generator=generator) for _ in range(4)]
