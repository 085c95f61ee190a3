"""Loading of student and teacher, and the mapping from the labels of the data to the classes of a model.

The weights of a student larger than memory (`--offload_folder`) are on disk, and hooks of accelerate read those of a
layer when it runs. Only the mechanisms, which are trained, stay in memory: attention transfer needs no gradients
through the layers.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_linear_attention._common.errors import DataError, SetupError
from hf_linear_attention._common.loaded_weights import check_complete, check_finite, shown
from hf_linear_attention._common.logs import quiet_transformers
from hf_linear_attention._common.reading import reading
from hf_linear_attention.training.adapters import add_adapters
from hf_linear_attention.training.data.processors import check_direction, load_tokenizer, pad_token_id
from hf_linear_attention.training.parameters import MECHANISM
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.tasks import TASKS


logger = logging.getLogger(__name__)

# The endings of the names of classifiers, whose checkpoints have classes of their own.
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForImageClassification")


def auto_class_of(task: str) -> Any:
    """The Auto class of transformers that loads models of a task."""
    return getattr(transformers, TASKS[task].auto_class)


def load_student(recipe: Recipe, path: str, classes: dict[str, int] | None) -> PreTrainedModel:
    """The model to train, in float32, because small updates vanish in 16 bits (`--mixed_precision` casts for speed).

    Args:
        path: a folder or a name on the Hub.
        classes: class index of every label of the data; None if the data has no labels.
    """
    extra: dict[str, Any] = {}
    if classes is not None:
        with reading(_files(path)):
            config = AutoConfig.from_pretrained(path, trust_remote_code=recipe.model.trust_remote_code)
        known = known_classes(config)
        same_numbers = len(classes) == len(known) and all(name == str(index) for name, index in classes.items())
        if not same_numbers and not set(classes) <= set(known):
            extra = {"label2id": classes, "id2label": {index: name for name, index in classes.items()}}
    if recipe.model.offload_folder is not None:
        from accelerate import PartialState

        empty = empty_model(recipe.model.task, path, recipe.model.trust_remote_code)
        places = device_map(empty, PartialState().default_device, MECHANISM)
        extra |= {"device_map": places, "offload_folder": recipe.model.offload_folder}
    model = _load(recipe, path, is_trained=True, dtype=torch.float32, **extra)
    if recipe.model.task == "sequence_classification" and model.config.pad_token_id is None:
        # Decoders classify at the last token that is not padding.
        model.config.pad_token_id = pad_token_id(load_tokenizer(recipe))
    if recipe.model.use_peft:
        add_adapters(model, recipe.model)
    return model


def class_mapping(config: PreTrainedConfig, names: list[str]) -> dict[str, int]:
    """The class index of every label: that of the checkpoint if it knows all labels, otherwise a new numbering.

    Raises:
        DataError: if the checkpoint is a classifier with other classes.
    """
    unique, known = set(names), known_classes(config)
    if unique <= set(known):
        return known
    numeric = all(name.isdigit() for name in unique)
    if numeric and max(map(int, unique)) < len(known):
        return {str(index): index for index in range(len(known))}
    if any(name.endswith(CLASSIFIERS) for name in config.architectures or ()):
        raise DataError(
            f"the classes of the data, {sorted(unique)[:10]}, are not those of the checkpoint: {', '.join(known)}; "
            "rename those in the data, or choose another label column"
        )
    return {name: index for index, name in enumerate(sorted(unique, key=int if numeric else None))}


def known_classes(config: PreTrainedConfig) -> dict[str, int]:
    """The class index of every label that the config of a checkpoint names."""
    return {str(name): int(index) for name, index in (config.label2id or {}).items()}


def empty_model(task: str, path: str, trust_remote_code: bool) -> PreTrainedModel:
    """The model of a folder or of a name on the Hub, without its weights (on the device `meta`)."""
    with reading(_files(path)):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            return auto_class_of(task).from_config(config, trust_remote_code=trust_remote_code)


def load_teacher(recipe: Recipe, student: PreTrainedModel, mixed_precision: bool) -> PreTrainedModel:
    """The teacher, with mixed precision in the dtype of its checkpoint, otherwise in float32.

    Raises:
        SetupError: if the objectives in use cannot compare it with the student.
    """
    path = str(recipe.model.teacher_name_or_path)
    with reading(_files(path)):
        config = AutoConfig.from_pretrained(path, trust_remote_code=recipe.model.trust_remote_code)
    check_direction(recipe, config, path)
    teacher = _load(recipe, path, is_trained=False, dtype="auto" if mixed_precision else torch.float32)
    if recipe.model.task == "sequence_classification":
        teacher.config.pad_token_id = student.config.pad_token_id
    for name, used in _must_agree(recipe).items():
        mine, yours = getattr(student.config, name, None), getattr(teacher.config, name, None)
        if used and mine != yours:
            raise SetupError(
                f"`{name}` is {mine} in the model but {yours} in the teacher {path}, and they must agree; choose "
                "another teacher or other objectives"
            )
    return teacher


def _must_agree(recipe: Recipe) -> dict[str, bool]:
    """The settings in which student and teacher can differ, and whether the objectives in use need them to agree."""
    weights, logits = recipe.objective, recipe.task.logits
    hidden = bool(weights.hidden_state_weight or weights.embedding_weight)
    has_classes = logits == "inputs" or recipe.model.task == "token_classification"
    return {
        "vocab_size": bool(weights.logits_kl_weight) and not has_classes and logits != "spans",
        "label2id": bool(weights.logits_kl_weight) and has_classes,
        "hidden_size": hidden or logits is None,
        "num_hidden_layers": bool(weights.hidden_state_weight) and weights.hidden_state_layers == "all",
    }


def _load(recipe: Recipe, path: str, is_trained: bool, **options: Any) -> PreTrainedModel:
    """The model of a folder or hub name with all of its weights; a head for classes may be new if it `is_trained`."""
    options = {"trust_remote_code": recipe.model.trust_remote_code, "output_loading_info": True, **options}
    with reading(_files(path)), quiet_transformers():
        model, loading = auto_class_of(recipe.model.task).from_pretrained(path, **options)
    if not recipe.model.allow_missing:
        has_new_head = is_trained and recipe.task.logits is not None and not recipe.task.reads_running_text
        new = f"{model.base_model_prefix}." if has_new_head else None
        check_complete(path, model, loading["missing_keys"], loading["unexpected_keys"], new)
    if missing := sorted(loading["missing_keys"]):
        logger.info("%s has no %s, which are new and random", path, shown(missing))
    check_finite(path, model)
    return model


def _files(path: str) -> str:
    """The name of a checkpoint in an error: its files in a folder, or the name on the Hub."""
    return f"{path} (config.json and weights)" if Path(path).is_dir() else path


def device_map(empty: PreTrainedModel, device: torch.device, mechanism: str) -> dict[str, Any]:
    """The place of every module that has weights of its own: `device` for those of the mechanisms, otherwise "disk".

    Args:
        empty: the model without its weights.
        device: the device that computes.
        mechanism: the part of a module's name by which a mechanism is known.
    """
    place: Any = "cpu" if device.type == "cpu" else device.index or 0
    return {
        name: place if mechanism in f"{name}." else "disk"
        for name, module in empty.named_modules()
        if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    }
