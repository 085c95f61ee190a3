"""The parameters of a student: which are trained, at which rate, apart or tied, and their moving average."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_linear_attention._common.errors import TrainingError
from hf_linear_attention.training.adapters import ADAPTER
from hf_linear_attention.training.distributed.sharding import load_whole
from hf_linear_attention.training.recipe import Recipe


logger = logging.getLogger(__name__)

MECHANISM = ".linear_attention."  # the child that conversion puts into every converted attention module


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


def freeze(model: nn.Module, pattern: str) -> None:
    """No gradients for parameters in whose name the regular expression `pattern` is found (`--freeze_pattern`).

    Raises:
        TrainingError: if it is found in none or in all of them.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = {name for name in names if re.search(pattern, name)}
    if not found or len(found) == len(names):
        raise TrainingError(
            f"`--freeze_pattern {pattern}` is found in {len(found)} of {len(names)} names of parameters, such as "
            f"{', '.join(names[:3])}; it has to leave some and freeze some"
        )
    for name in found:
        model.get_parameter(name).requires_grad_(False)
    logger.info("frozen: %d of %d parameters", len(found), len(names))


def untie(model: PreTrainedModel) -> None:
    """Give every tied parameter a copy of its own, in place.

    The output layer wants to change in a way that the input embeddings do not (RADLADS 2025, section 8).

    Raises:
        TrainingError: if there are none.
    """
    ties = list(model.all_tied_weights_keys)
    if not ties:
        raise TrainingError(f"{type(model).__name__} has no tied embeddings; drop `--untie_embeddings`")
    for name in ties:
        owner, _, attribute = name.rpartition(".")
        value = nn.Parameter(model.get_parameter(name).detach().clone())
        setattr(model.get_submodule(owner), attribute, value)
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


@torch.no_grad()
def retie(model: PreTrainedModel) -> None:
    """Tie again, in place, what `untie` has taken apart: to the mean of what they became."""
    model.config.tie_word_embeddings = True
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    for source in set(ties.values()):
        names = [source, *(name for name, other in ties.items() if other == source)]
        mean = torch.stack([model.get_parameter(name) for name in names]).mean(0)
        model.get_parameter(source).copy_(mean)
    model.all_tied_weights_keys = ties
    model.tie_weights(recompute_mapping=False)


def checkpoint_gradients(student: PreTrainedModel) -> None:
    """Recompute the layers' activations in the backward pass (`--gradient_checkpointing`).

    Raises:
        TrainingError: if the model cannot.
    """
    if not student.supports_gradient_checkpointing:
        raise TrainingError(f"{type(student).__name__} cannot do `--gradient_checkpointing`; drop the option")
    student.gradient_checkpointing_enable({"use_reentrant": False})
    # transformers makes the embeddings' output require gradients, for the reentrant form; here it would only have
    # frozen layers recomputed, and those that are observed computed as something else
    student.disable_input_require_grads()


class WeightAverage:
    """Exponential moving average: average <- decay * average + (1 - decay) * weights, at every step.

    Polyak and Juditsky 1992; the decay is that of `torch.optim.swa_utils.get_ema_multi_avg_fn`.

    It starts at the weights of `model` that require gradients, and takes as much memory again as these.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.average = {name: value.detach().clone() for name, value in self.weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step."""
        torch._foreach_lerp_(list(self.average.values()), list(self.weights.values()), 1 - self.decay)

    @contextmanager
    @torch.no_grad()
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights."""
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
        return self.average

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        load_whole(self.average, state)
