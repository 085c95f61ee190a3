"""Student and teacher: how they are loaded, which parameters are trained and at which rate, and adapters."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_linear_attention._common.devices import multiplies_bfloat16
from hf_linear_attention._common.errors import DataError, SetupError
from hf_linear_attention._common.loaded_weights import check_complete, check_finite, listed
from hf_linear_attention._common.logs import quiet_transformers
from hf_linear_attention._common.reading import reading
from hf_linear_attention.configuration_linear_attention import mechanisms_of
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.data.processors import check_direction, load_config, load_tokenizer, pad_token_id
from hf_linear_attention.training.recipe import MECHANISM, ModelArguments, Recipe
from hf_linear_attention.training.tasks import TASKS


logger = logging.getLogger(__name__)


def disable_dropout(model: Any) -> None:
    """Set every probability to drop an activation or a layer to 0."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or name == "layerdrop") and isinstance(value, float):
                setattr(module, name, 0.0)


def _check_mechanism(model: PreTrainedModel, recipe: Recipe) -> None:
    """Refuse options about the mechanism's parameters if it has none.

    A learning rate is allowed for a converted model, so that one recipe suits every mechanism.
    """
    if any(MECHANISM in name for name, _ in model.named_parameters()):
        return
    settings = getattr(model.config, "linear_attention", None)
    mechanisms = " and ".join(f"`{name}`" for name in sorted(mechanisms_of(settings))) if settings else None
    rate = recipe.optimization.mechanism_learning_rate
    if recipe.model.trainable == "mechanism" or (rate is not None and mechanisms is None):
        raise SetupError(
            f"{recipe.model.model_name_or_path} has no `{MECHANISM}` parameters for `--mechanism_learning_rate` and "
            "`--trainable mechanism`; convert it to a mechanism with learned parameters, or drop the option"
        )
    if rate is not None:
        logger.info("`--mechanism_learning_rate` has no effect, because %s has no learned parameters", mechanisms)


def parameter_groups(model: PreTrainedModel, recipe: Recipe) -> list[dict[str, Any]]:
    """The parameter groups for AdamW: base and mechanism, each with and without weight decay.

    Parameters that are not trained are frozen. One-dimensional ones (biases, norms) have no weight decay.

    Raises:
        SetupError: if only the mechanism is to be trained, and it has no parameters.
    """
    plan = recipe.optimization
    _check_mechanism(model, recipe)
    part = {"all": "", "mechanism": MECHANISM, "adapter": ADAPTER}[recipe.model.trainable]
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        in_mechanism = MECHANISM in name
        parameter.requires_grad_(parameter.requires_grad and part in name)
        if parameter.requires_grad:
            groups.setdefault((in_mechanism, parameter.dim() > 1), []).append(parameter)
    rates = {False: plan.learning_rate, True: plan.mechanism_learning_rate or plan.learning_rate}
    return [
        {"params": members, "lr": rates[key[0]], "weight_decay": plan.weight_decay * key[1], "mechanism": key[0]}
        for key, members in groups.items()
    ]


def checkpoint_gradients(student: PreTrainedModel) -> None:
    """Have the activations of the layers recomputed in the backward pass (`--gradient_checkpointing`).

    Raises:
        SetupError: if the model does not support it.
    """
    if not student.supports_gradient_checkpointing:
        raise SetupError(f"{type(student).__name__} does not support `--gradient_checkpointing`; drop the option")
    names = "activation_checkpointing_enable", "gradient_checkpointing_enable"  # the first from transformers 5.24 on
    getattr(student, next(name for name in names if hasattr(student, name)))({"use_reentrant": False})
    # For the reentrant form, transformers makes the outputs of the embeddings require gradients. Here, that would only
    # recompute frozen layers, and change what observed layers compute.
    student.disable_input_require_grads()


ADAPTER = ".lora_"  # part of the name of every parameter of an adapter


def add_adapters(model: PreTrainedModel, arguments: ModelArguments) -> None:
    """Add adapters to `model`, in place, in float32, and make the mechanisms' parameters float32, which stay trainable.

    All other weights are frozen and keep their dtype.

    Raises:
        SetupError: if peft finds no module to adapt.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets: Any = arguments.lora_target_modules
    if targets == "attention":
        targets = attention_projections(model)
    elif targets is not None and targets != "all-linear":
        targets = targets.split(",")
    config = LoraConfig(r=arguments.lora_r, lora_alpha=arguments.lora_alpha, target_modules=targets)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise SetupError(f"peft: {error}; choose modules with `--lora_target_modules`") from error
    for name, parameter in model.named_parameters():
        if name in trained and ".linear_attention." in name:
            parameter.requires_grad_(True)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def attention_projections(model: PreTrainedModel) -> list[str]:
    """The names of the query, key, value and output projections of every converted attention module."""
    return [
        f"{name}.{child}"
        for name, attention in linear_attention_modules(model).items()
        for child, layer in attention.named_modules()
        if isinstance(layer, (nn.Linear, Conv1D)) and not child.startswith("linear_attention")
    ]


@torch.no_grad()
def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of `model` with its adapters merged into the base weights in float32; the model is unchanged."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    state = model.state_dict()
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer):
            merged: Any = copy.deepcopy(layer).float()  # one layer at a time, so that memory use does not double
            merged.merge()
            state = {key: value for key, value in state.items() if not key.startswith(f"{name}.")}
            state |= {f"{name}.{key}": value for key, value in merged.get_base_layer().state_dict().items()}
    return state


# The endings of the names of classifiers, whose checkpoints have classes of their own.
CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification")


def auto_class_of(task: str) -> Any:
    """The Auto class of transformers that loads models of a task."""
    return getattr(transformers, TASKS[task].auto_class)


def frozen_dtype(recipe: Recipe, device: str, is_fsdp2: bool) -> torch.dtype:
    """The dtype for weights that adapters freeze: bfloat16 if the checkpoint has it and the device multiplies it.

    Not under FSDP2, which puts weights of one dtype into a shard.
    """
    model = recipe.model
    if is_fsdp2 or not (model.use_peft and multiplies_bfloat16(device)):
        return torch.float32
    name = checkpoint_dtype(model.task, model.model_name_or_path, model.trust_remote_code)
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def load_student(
    recipe: Recipe, path: str, classes: dict[str, int] | None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model to train, in float32, because small updates vanish in 16 bits (mixed precision casts for speed).

    Args:
        path: a folder or a name on the Hub.
        classes: class index of every label of the data; None if the data has no labels.
        dtype: of the weights that adapters freeze (`frozen_dtype`).
    """
    extra: dict[str, Any] = {}
    if classes is not None:
        known = known_classes(load_config(recipe, path))
        same_numbers = len(classes) == len(known) and all(name == str(index) for name, index in classes.items())
        if not same_numbers and not set(classes) <= set(known):
            extra = {"label2id": classes, "id2label": {index: name for name, index in classes.items()}}
    model = _load(recipe, path, is_trained=True, dtype=dtype, **extra)
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
        wanted, own = sorted(unique)[:10], ", ".join(known)
        raise DataError(f"the classes of the data, {wanted}, are not those of the checkpoint, {own}; rename them")
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


@torch.no_grad()
def share_frozen_weights(student: nn.Module, teacher: nn.Module) -> None:
    """Let the teacher have the tensors of the student that are equal to its own and not trained, in place of copies."""
    frozen = {n.replace(".base_layer.", "."): p for n, p in student.named_parameters() if not p.requires_grad}
    for name, own in teacher.named_parameters():
        other = frozen.get(name)
        if other is not None and (own.dtype, own.device) == (other.dtype, other.device) and torch.equal(own, other):
            own.data = other.data


def load_teacher(
    recipe: Recipe, student: PreTrainedModel, dtype: torch.dtype | Literal["auto"] = torch.float32
) -> PreTrainedModel:
    """The teacher; with "auto" in the dtype of its checkpoint.

    Raises:
        SetupError: if the objectives in use cannot compare it with the student.
    """
    path = str(recipe.model.teacher_name_or_path)
    check_direction(recipe, load_config(recipe, path), path)
    teacher = _load(recipe, path, is_trained=False, dtype=dtype)
    if recipe.model.task == "sequence_classification":
        teacher.config.pad_token_id = student.config.pad_token_id
    for name, used in _must_agree(recipe).items():
        mine, yours = getattr(student.config, name, None), getattr(teacher.config, name, None)
        if used and mine != yours:
            raise SetupError(
                f"`{name}` is {mine}, but {yours} in the teacher {path}; choose another teacher or objective"
            )
    return teacher


def checkpoint_dtype(task: str, path: str, trust_remote_code: bool) -> str:
    """The name of the dtype of a checkpoint: that of its config, or else that of its first weights."""
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    with reading(_files(path)), quiet_transformers():
        dtype = AutoConfig.from_pretrained(path, **options).dtype
        if dtype is None:
            dtype = auto_class_of(task).from_pretrained(path, dtype="auto", device_map="meta", **options).dtype
    return str(dtype).removeprefix("torch.")


def cast(recipe: Recipe, folder: Path, dtype: torch.dtype) -> None:
    """Cast the weights in a folder, but for those that the model keeps in float32."""
    model = _load(recipe, str(folder), is_trained=False, dtype=dtype)
    for path in folder.glob("*.safetensors*"):  # there may be more files in float32
        path.unlink()
    model.save_pretrained(folder)


def _must_agree(recipe: Recipe) -> dict[str, bool]:
    """The settings in which student and teacher can differ, and whether the objectives in use need them to agree."""
    weights, logits = recipe.objective, recipe.task.logits
    hidden = bool(weights.hidden_state_weight or weights.embedding_weight)
    return {
        "vocab_size": bool(weights.logits_kl_weight) and logits != "inputs",
        "label2id": bool(weights.logits_kl_weight) and logits == "inputs",
        "hidden_size": hidden or logits is None,
        "num_hidden_layers": bool(weights.hidden_state_weight) and recipe.task.inputs == "images",
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
        logger.info("%s has no %s, which are new and random", path, listed(missing))
    check_finite(path, model)
    return model


def _files(path: str) -> str:
    """The name of a checkpoint in an error: its files in a folder, or the name on the Hub."""
    return f"{path} (config.json and weights)" if Path(path).is_dir() else path
