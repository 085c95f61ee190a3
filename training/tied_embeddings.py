"""Input and output embeddings that share one matrix, trained apart (RADLADS 2025, section 8: the output wants to
change in a way that the input does not) and, as a choice, made one again."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_linear_attention._common.errors import TrainingError


def untie(model: PreTrainedModel) -> None:
    """Give every tied parameter a copy of its own, in place.

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
    """Make them one again, in place: the mean of what they became."""
    model.config.tie_word_embeddings = True
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    for source in set(ties.values()):
        names = [source, *(name for name, other in ties.items() if other == source)]
        mean = torch.stack([model.get_parameter(name) for name in names]).mean(0)
        model.get_parameter(source).copy_(mean)
    model.all_tied_weights_keys = ties
    model.tie_weights(recompute_mapping=False)
