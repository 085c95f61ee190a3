"""The parameters of a student: which are trained and at which rate, tied embeddings, and the moving average."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import PreTrainedModel

from hf_linear_attention._common.errors import SetupError
from hf_linear_attention.mechanisms import mechanisms_of
from hf_linear_attention.training.adapters import ADAPTER
from hf_linear_attention.training.distributed.sharding import load_whole
from hf_linear_attention.training.recipe import Recipe


logger = logging.getLogger(__name__)

# What models of speech read from their config while they are trained, so that no module holds it.
IN_CONFIG = ("layerdrop", "apply_spec_augment")
MECHANISM = ".linear_attention."  # the child module that a conversion adds to every converted attention module


def disable_dropout(model: Any) -> None:
    """Set every probability to drop an activation or a layer to 0, and mask no part of recordings (SpecAugment).

    What is saved keeps the values of its config (`with_dropout`).
    """
    off = {name: type(value)(0) for name, value in vars(model.config).items() if name in IN_CONFIG and value}
    if off:
        model.values_without_training = {name: getattr(model.config, name) for name in off}
        model.config.update(off)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or name == "layerdrop") and isinstance(value, float):
                setattr(module, name, 0.0)


@contextmanager
def with_dropout(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the config has again what `disable_dropout` set to 0 in it."""
    values = getattr(model, "values_without_training", {})
    off = {name: getattr(model.config, name) for name in values}
    model.config.update(values)
    try:
        yield
    finally:
        model.config.update(off)


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
            f"{recipe.model.model_name_or_path} has no `{MECHANISM}` parameters, which `--mechanism_learning_rate` and "
            "`--trainable mechanism` need; convert it (conversion/convert_checkpoint.py) to a mechanism with learned "
            "parameters, or drop the option"
        )
    if rate is not None:
        logger.info("`--mechanism_learning_rate` has no effect, because %s has no learned parameters", mechanisms)


def _is_trained(name: str, trainable: str) -> bool:
    return trainable == "all" or (MECHANISM if trainable == "mechanism" else ADAPTER) in name


def parameter_groups(model: PreTrainedModel, recipe: Recipe) -> list[dict[str, Any]]:
    """The parameter groups for AdamW: base and mechanism, each with and without weight decay.

    Parameters that are not trained are frozen. One-dimensional ones (biases, norms) have no weight decay.

    Raises:
        SetupError: if only the mechanism is to be trained, and it has no parameters.
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


def freeze(model: nn.Module, pattern: str) -> None:
    """Freeze the trainable parameters whose names contain a match of `pattern` (`--freeze_pattern`).

    Raises:
        SetupError: if no name or every name contains a match.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = {name for name in names if re.search(pattern, name)}
    if not found or len(found) == len(names):
        raise SetupError(
            f"`--freeze_pattern {pattern}` matches {len(found)} of the {len(names)} names of parameters, such as "
            f"{', '.join(names[:3])}; it must match some of them, but not all"
        )
    for name in found:
        model.get_parameter(name).requires_grad_(False)
    logger.info("%d of %d parameters are frozen", len(found), len(names))


def untie(model: PreTrainedModel) -> None:
    """Give every tied parameter of `model` a separate copy of the value, in place.

    Training changes the output layer in other ways than the input embeddings (RADLADS 2025, section 8).

    Raises:
        SetupError: if the model has no tied parameters.
    """
    ties = list(model.all_tied_weights_keys)
    if not ties:
        raise SetupError(f"{type(model).__name__} has no tied embeddings; drop `--untie_embeddings`")
    for name in ties:
        owner, _, attribute = name.rpartition(".")
        value = nn.Parameter(model.get_parameter(name).detach().clone())
        setattr(model.get_submodule(owner), attribute, value)
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


@torch.no_grad()
def retie(model: PreTrainedModel) -> None:
    """Tie the parameters that `untie` has separated again, in place, at the mean of their values."""
    model.config.tie_word_embeddings = True
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    for source in set(ties.values()):
        names = [source, *(name for name, other in ties.items() if other == source)]
        mean = torch.stack([model.get_parameter(name) for name in names]).mean(0)
        model.get_parameter(source).copy_(mean)
    model.all_tied_weights_keys = ties
    model.tie_weights(recompute_mapping=False)


def checkpoint_gradients(student: PreTrainedModel) -> None:
    """Have the activations of the layers recomputed in the backward pass (`--gradient_checkpointing`).

    Raises:
        SetupError: if the model does not support it.
    """
    if not student.supports_gradient_checkpointing:
        raise SetupError(f"{type(student).__name__} does not support `--gradient_checkpointing`; drop the option")
    student.gradient_checkpointing_enable({"use_reentrant": False})
    # For the reentrant form, transformers makes the outputs of the embeddings require gradients. Here, that would only
    # recompute frozen layers, and change what observed layers compute.
    student.disable_input_require_grads()


class WeightAverage:
    """An exponential moving average of the weights: average <- decay * average + (1 - decay) * weights at every step.

    Polyak and Juditsky 1992. `torch.optim.swa_utils.AveragedModel` would copy frozen parameters too, and FSDP2 refuses
    the copy. This covers the parameters of `model` that require gradients, starts at their values, and needs as much
    memory.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.move = get_ema_multi_avg_fn(decay)
        self.weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.average = {name: value.detach().clone() for name, value in self.weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights; called after every optimizer step."""
        self.move(list(self.average.values()), list(self.weights.values()), None)

    @contextmanager
    @torch.no_grad()
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; afterwards, it has its own again."""
        trained = {name: value.clone() for name, value in self.weights.items()}
        self._set(self.average)
        try:
            yield
        finally:
            with torch.no_grad():
                self._set(trained)

    def _set(self, values: dict[str, Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(values[name])

    def state_dict(self) -> dict[str, Tensor]:
        """The average of every parameter, by name."""
        return self.average

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load whole tensors, as `state_dict` names them, also if the parameters are in shards."""
        load_whole(self.average, state)
