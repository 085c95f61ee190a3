"""Loading tokenizer or image processor, student and teacher; which parameters are trained at which rate."""

from __future__ import annotations

import logging
from typing import Any

import torch
from accelerate import PartialState, init_empty_weights
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BaseImageProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_linear_attention._common.errors import TrainingError
from hf_linear_attention.training.adapters import ADAPTER, add_adapters
from hf_linear_attention.training.offloading import device_map
from hf_linear_attention.training.recipe import Recipe


logger = logging.getLogger(__name__)

AUTO_CLASSES: dict[str, Any] = {
    "causal_lm": AutoModelForCausalLM,
    "masked_lm": AutoModelForMaskedLM,
    "sequence_classification": AutoModelForSequenceClassification,
    "embedding": AutoModel,
    "image_classification": AutoModelForImageClassification,
}
Processor = PreTrainedTokenizerBase | BaseImageProcessor
MECHANISM = ".linear_attention."  # the child that conversion puts into every converted attention module
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


def class_mapping(config: PreTrainedConfig, names: list[str]) -> dict[str, int]:
    """Class index of every label name: the checkpoint's own where it knows them, otherwise a new numbering."""
    unique, known = set(names), _known_classes(config)
    if unique <= set(known):
        return known
    numeric = all(name.isdigit() for name in unique)
    if numeric and max(map(int, unique)) < len(known):
        return {str(index): index for index in range(len(known))}
    if any(
        name.endswith(("ForSequenceClassification", "ForImageClassification")) for name in config.architectures or ()
    ):
        raise TrainingError(
            f"the classes of the data, {sorted(unique)[:10]}, are not those of the checkpoint: {', '.join(known)}"
        )
    return {name: index for index, name in enumerate(sorted(unique, key=int if numeric else None))}


def _known_classes(config: PreTrainedConfig) -> dict[str, int]:
    return {str(name): int(index) for name, index in (config.label2id or {}).items()}


def load_student(recipe: Recipe, path: str, classes: dict[str, int] | None) -> PreTrainedModel:
    """The model to train, in float32: small updates vanish in 16 bit; `--mixed_precision` speeds up the rest."""
    extra: dict[str, Any] = {}
    if classes is not None:
        known = _known_classes(AutoConfig.from_pretrained(path, trust_remote_code=recipe.model.trust_remote_code))
        same_numbers = len(classes) == len(known) and all(name == str(index) for name, index in classes.items())
        if not same_numbers and not set(classes) <= set(known):
            extra = {"label2id": classes, "id2label": {index: name for name, index in classes.items()}}
    if recipe.model.offload_folder is not None:
        empty = empty_model(recipe.model.task, path, recipe.model.trust_remote_code)
        places = device_map(empty, PartialState().default_device, MECHANISM)
        extra |= {"device_map": places, "offload_folder": recipe.model.offload_folder}
    model = _load(recipe, path, dtype=torch.float32, **extra)
    if recipe.model.task == "sequence_classification" and model.config.pad_token_id is None:
        model.config.pad_token_id = pad_token_id(load_tokenizer(recipe))  # decoders classify at the last real token
    if recipe.model.use_peft:
        add_adapters(model, recipe.model)
    return model


def empty_model(task: str, path: str, trust_remote_code: bool) -> PreTrainedModel:
    """The model of a folder or hub name without its weights (on the device `meta`)."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with init_empty_weights():
        return AUTO_CLASSES[task].from_config(config, trust_remote_code=trust_remote_code)


def load_teacher(recipe: Recipe, student: PreTrainedModel, mixed_precision: bool) -> PreTrainedModel:
    """The teacher; with mixed precision in the dtype of its checkpoint, otherwise in float32."""
    path = str(recipe.model.teacher_name_or_path)
    teacher = _load(recipe, path, dtype="auto" if mixed_precision else torch.float32)
    if recipe.model.task == "sequence_classification":
        teacher.config.pad_token_id = student.config.pad_token_id
    for name, used in _must_agree(recipe).items():
        mine, yours = getattr(student.config, name, None), getattr(teacher.config, name, None)
        if used and mine != yours:
            raise TrainingError(f"`{name}` is {mine} in the model and {yours} in the teacher {path}; they must agree")
    return teacher


def _must_agree(recipe: Recipe) -> dict[str, bool]:
    """Settings that student and teacher must share for the objectives in use."""
    weights, task = recipe.objective, recipe.model.task
    hidden = bool(weights.hidden_state_weight or weights.embedding_weight)
    return {
        "vocab_size": bool(weights.logits_kl_weight) and not recipe.is_classification,
        "label2id": bool(weights.logits_kl_weight) and recipe.is_classification,
        "hidden_size": hidden or task == "embedding",
        "num_hidden_layers": bool(weights.hidden_state_weight) and weights.hidden_state_layers == "all",
    }


def _load(recipe: Recipe, path: str, **options: Any) -> PreTrainedModel:
    auto_class = AUTO_CLASSES[recipe.model.task]
    return auto_class.from_pretrained(path, trust_remote_code=recipe.model.trust_remote_code, **options)


def disable_dropout(model: PreTrainedModel) -> None:
    """Dropout modules and probabilities of this model to 0; what its config says, and so what is saved, stays."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _check_mechanism(model: PreTrainedModel, recipe: Recipe) -> None:
    """Options about the mechanism's parameters need some; a recipe that suits every mechanism may name their rate."""
    if any(MECHANISM in name for name, _ in model.named_parameters()):
        return
    mechanism = (getattr(model.config, "linear_attention", None) or {}).get("mechanism")
    rate = recipe.optimization.mechanism_learning_rate
    if recipe.model.trainable == "mechanism" or (rate is not None and mechanism is None):
        raise TrainingError(
            f"{recipe.model.model_name_or_path} has no `{MECHANISM}` parameters, which --mechanism_learning_rate and "
            "--trainable mechanism are about; convert it (conversion/convert_checkpoint.py) to a mechanism that learns "
            "its features, or drop the option"
        )
    if rate is not None:
        logger.info("`%s` learns no parameters of its own: --mechanism_learning_rate has none", mechanism)


def _is_trained(name: str, trainable: str) -> bool:
    return trainable == "all" or (MECHANISM if trainable == "mechanism" else ADAPTER) in name


def parameter_groups(model: PreTrainedModel, recipe: Recipe) -> list[dict[str, Any]]:
    """AdamW groups: base and mechanism at their rates, each with and without weight decay; freezes what is not trained.

    One-dimensional parameters (biases, norms) are never decayed.
    """
    plan = recipe.optimization
    _check_mechanism(model, recipe)
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        in_mechanism = MECHANISM in name
        parameter.requires_grad_(parameter.requires_grad and _is_trained(name, recipe.model.trainable))
        if parameter.requires_grad:
            groups.setdefault((in_mechanism, parameter.dim() > 1), []).append(parameter)
    rates = {False: plan.learning_rate, True: plan.mechanism_learning_rate or plan.learning_rate}
    return [
        {"params": members, "lr": rates[key[0]], "weight_decay": plan.weight_decay * key[1], "mechanism": key[0]}
        for key, members in groups.items()
    ]
