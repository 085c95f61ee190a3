"""Loading of tokenizers, processors of images, and configs, and the length to which texts are cut."""

from __future__ import annotations

import logging
from typing import Any

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from hf_linear_attention._common.errors import SetupError, UsageError
from hf_linear_attention._common.reading import reading
from hf_linear_attention.attention.transformers_internals import is_masked_lm
from hf_linear_attention.configuration_linear_attention import entries_of, exact_tokens, is_causal_config
from hf_linear_attention.training.recipe import Recipe


logger = logging.getLogger(__name__)

Processor = PreTrainedTokenizerBase | BaseImageProcessor
DEFAULT_MAX_LENGTH = 512
# Rows in which heads choose keys: in twice what stays exact of 512 tokens, Qwen2.5-Coder-0.5B has lost little yet (a
# divergence of .008, .05 in 4,096 tokens), and scores are fitted to nothing older.
CHOOSING_LENGTH = 4096


def load_processor(recipe: Recipe) -> Processor:
    """What prepares the inputs of the model, and is saved with it: its tokenizer or image processor."""
    config = load_config(recipe)  # both classes below read it too, and their errors would not say that it is wrong
    check_direction(recipe, config, recipe.model.model_name_or_path)
    if recipe.task.inputs == "text":
        tokenizer = load_tokenizer(recipe)
        _check_vocabulary(tokenizer, config)
        return tokenizer
    path = recipe.model.model_name_or_path
    with reading(f"the image processor of {path} (preprocessor_config.json)"):
        return AutoImageProcessor.from_pretrained(path, trust_remote_code=recipe.model.trust_remote_code)


def check_direction(recipe: Recipe, config: PreTrainedConfig, path: str) -> None:
    """Refuse a model or teacher that would see the tokens that it has to predict.

    Raises:
        UsageError: for `--task causal_lm` with an encoder.
    """
    kind = getattr(config, "stock_model_type", config.model_type)
    if recipe.model.task == "causal_lm" and is_masked_lm(kind) and not is_causal_config(config, kind):
        raise UsageError(f"`--task causal_lm`: {path} ({kind}) attends to both sides; use `--task masked_lm`")


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The tokenizer of the model.

    Raises:
        SetupError: if the task is masked_lm and the tokenizer has no mask token.
    """
    name = recipe.model.model_name_or_path
    with reading(f"the tokenizer of {name} (tokenizer.json)", "repair it, or save another one there"):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=recipe.model.trust_remote_code)
    if recipe.model.task == "masked_lm" and tokenizer.mask_token_id is None:
        raise SetupError(f"the tokenizer of {name} has no mask token; choose another task")
    return tokenizer


def _check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    size = getattr(config.get_text_config(), "vocab_size", None)
    needed = 1 + max(tokenizer.get_vocab().values(), default=-1)
    if size is not None and needed > size:
        raise UsageError(
            f"the tokenizer of {tokenizer.name_or_path} has {needed:,} tokens, but the model has embeddings for "
            f"{size:,} (`vocab_size`); give its own tokenizer, or resize the model (`resize_token_embeddings`) first"
        )


def bos_of(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The BOS token, if the tokenizer puts it before a text by itself, as it will for the prompts of a user.

    A tokenizer may have one that its model never begins with: Qwen2.5-Coder-0.5B, whose tokenizer made from a GGUF file
    has `<|endoftext|>`, loses .32 nats a token by it (positions 4,096 to 8,191).
    """
    bos = tokenizer.bos_token_id
    return bos if bos in tokenizer("a")["input_ids"][:1] else None


def pad_token_id(processor: Processor) -> int:
    """The token id for padding. Padding is always masked, so any id will do if the tokenizer has none for it."""
    candidates = (getattr(processor, "pad_token_id", None), getattr(processor, "eos_token_id", None), 0)
    return int(next(token for token in candidates if token is not None))


def load_config(recipe: Recipe, path: str | None = None) -> PreTrainedConfig:
    """The config of the model in `path`, by default of the one that is trained."""
    path = path or recipe.model.model_name_or_path
    with reading(f"config.json of {path}"):
        return AutoConfig.from_pretrained(path, trust_remote_code=recipe.model.trust_remote_code)


def default_length(config: PreTrainedConfig) -> int:
    """The largest of 512, twice the keys that stay exact, and if heads choose keys eight times these up to 4,096.

    Or what the model accepts, if that is less.

    In shorter sequences there would be few far keys, or none, to learn from. Where layers differ, their mean counts.
    """
    positions = getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_LENGTH
    exact = mean_exact_tokens(config)
    longer = min(8 * exact, CHOOSING_LENGTH) if chooses_keys(getattr(config, "linear_attention", ())) else 0
    return int(min(max(DEFAULT_MAX_LENGTH, 2 * exact, longer), positions))


def chooses_keys(settings: Any) -> bool:
    """Whether heads of a layer choose exact keys by scores, with these settings of `config.linear_attention`."""
    return any((entry or {}).get("num_exact_keys") for entry in entries_of(settings))


def mean_exact_tokens(config: PreTrainedConfig) -> int:
    """How many tokens a converted layer keeps exactly, on average."""
    numbers = exact_tokens(getattr(config, "linear_attention", ()))
    return round(sum(numbers) / len(numbers)) if numbers else 0


def sequence_length(recipe: Recipe, processor: Processor, config: PreTrainedConfig) -> int:
    """The length to which texts are cut: `--max_length`, by default `default_length`."""
    default = default_length(config)
    return recipe.data.max_length or int(min(default, getattr(processor, "model_max_length", default)))


def warn_of_length(length: int, config: PreTrainedConfig) -> None:
    """Warn of rows of more tokens than the model has positions, or too few to learn of far keys."""
    positions, kind = getattr(config, "max_position_embeddings", None), config.model_type
    if positions and length > positions:
        logger.warning("`--max_length %d` is more than the model's %d positions", length, positions)
    is_causal = is_causal_config(config, getattr(config, "stock_model_type", kind))
    if length <= (exact := mean_exact_tokens(config)) and is_causal:
        logger.warning(
            "rows have %d tokens, not more than the %d that stay exact, so nothing is learnt of far keys; give "
            "`--max_length %d` or more",
            length,
            exact,
            2 * exact,
        )
