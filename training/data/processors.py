"""What makes a model's inputs of the data: tokenizer or image processor, and how long a text may be."""

from __future__ import annotations

import logging

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from hf_linear_attention._common.errors import TrainingError
from hf_linear_attention.training.recipe import Recipe


logger = logging.getLogger(__name__)

Processor = PreTrainedTokenizerBase | BaseImageProcessor
DEFAULT_MAX_LENGTH = 512


def load_processor(recipe: Recipe) -> Processor:
    """What makes a model's inputs of the data, and belongs into its folder."""
    if recipe.model.task != "image_classification":
        return load_tokenizer(recipe)
    path = recipe.model.model_name_or_path
    return AutoImageProcessor.from_pretrained(path, trust_remote_code=recipe.model.trust_remote_code)


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    name = recipe.model.tokenizer_name or recipe.model.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=recipe.model.trust_remote_code)
    if recipe.model.task == "masked_lm" and tokenizer.mask_token_id is None:
        raise TrainingError(f"the tokenizer of {name} has no mask token; `--task masked_lm` needs one")
    return tokenizer


def pad_token_id(processor: Processor) -> int:
    """Padding is masked everywhere, so any id will do where the tokenizer has none; images are not padded."""
    candidates = (getattr(processor, "pad_token_id", None), getattr(processor, "eos_token_id", None), 0)
    return int(next(token for token in candidates if token is not None))


def load_config(recipe: Recipe) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(recipe.model.model_name_or_path, trust_remote_code=recipe.model.trust_remote_code)


def sequence_length(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> int:
    """`--max_length`, or 512, or less when tokenizer or positions do not reach that far."""
    positions = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_LENGTH
    if recipe.data.max_length is None:
        return int(min(DEFAULT_MAX_LENGTH, tokenizer.model_max_length, positions))
    if recipe.data.max_length > positions:
        logger.warning("--max_length %d is beyond the model's %d positions", recipe.data.max_length, positions)
    return recipe.data.max_length
