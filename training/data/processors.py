"""Loading of tokenizers, image processors and configs, and the length to which texts are cut."""

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
    """The image processor or tokenizer that prepares the inputs of the model, and is saved with it."""
    if recipe.task.inputs != "images":
        return load_tokenizer(recipe)
    path = recipe.model.model_name_or_path
    return AutoImageProcessor.from_pretrained(path, trust_remote_code=recipe.model.trust_remote_code)


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer of the model, or that of `--tokenizer_name`.

    Raises:
        TrainingError: if the task is masked_lm and the tokenizer has no mask token.
    """
    name = recipe.model.tokenizer_name or recipe.model.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=recipe.model.trust_remote_code)
    if recipe.model.task == "token_classification" and getattr(tokenizer, "add_prefix_space", None) is False:
        # GPT-2's and RoBERTa's tokenizers take words only with a space before each.
        tokenizer = AutoTokenizer.from_pretrained(
            name, trust_remote_code=recipe.model.trust_remote_code, add_prefix_space=True
        )
    if recipe.model.task == "masked_lm" and tokenizer.mask_token_id is None:
        raise TrainingError(
            f"the tokenizer of {name} has no mask token, which `--task masked_lm` needs; choose another task or "
            "`--tokenizer_name`"
        )
    return tokenizer


def pad_token_id(processor: Processor) -> int:
    """The token id for padding. Padding is always masked, so any id will do if the tokenizer has none for it."""
    candidates = (getattr(processor, "pad_token_id", None), getattr(processor, "eos_token_id", None), 0)
    return int(next(token for token in candidates if token is not None))


def load_config(recipe: Recipe) -> PreTrainedConfig:
    """The config of the model that is trained."""
    return AutoConfig.from_pretrained(recipe.model.model_name_or_path, trust_remote_code=recipe.model.trust_remote_code)


def sequence_length(recipe: Recipe, processor: Processor, config: PreTrainedConfig) -> int:
    """The length to which texts are cut: `--max_length`, by default 512, or fewer tokens if the model accepts fewer."""
    positions = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_LENGTH
    if recipe.data.max_length is None:
        return int(min(DEFAULT_MAX_LENGTH, getattr(processor, "model_max_length", DEFAULT_MAX_LENGTH), positions))
    if recipe.data.max_length > positions:
        logger.warning("`--max_length %d` is more than the model's %d positions", recipe.data.max_length, positions)
    return recipe.data.max_length
