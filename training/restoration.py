"""Restoration of the query and key projections of softmax layers (`--restore_projections`, arXiv 2606.11052).

Where layers with softmax attention stand between linear ones, they do the recall over long distances. Fine-tuning on
short texts, which need none, changes what their queries and keys find; with the old projections, they find it again.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from hf_linear_attention._common.errors import SetupError
from hf_linear_attention.attention.architectures import stock_class_of
from hf_linear_attention.attention.calls import query_and_key_units
from hf_linear_attention.modeling_linear_attention import self_attention_modules
from hf_linear_attention.training.distributed import load_whole, whole


logger = logging.getLogger(__name__)


class QueryKeyProjections:
    """The query and key projections of `source` for the layers with softmax attention of `student`, before training.

    Raises:
        SetupError: if the student has no such layer, if in one of them keys and values have weights in common, or if
            the source has other weights.
    """

    def __init__(self, student: nn.Module, source: nn.Module, path: str) -> None:
        self.units = _units(student)
        theirs = dict(source.named_parameters())
        own = dict(student.named_parameters())
        if other := [name for name in self.units if name not in theirs or theirs[name].shape != own[name].shape]:
            raise SetupError(
                f"`--restore_projections {path}` has no {other[0]} of the same shape; give the model that the training "
                "started from"
            )
        self.values = {name: theirs[name].detach().cpu().clone() for name in self.units}

    @torch.no_grad()
    def restore(self, student: nn.Module) -> None:
        """Put them back. All processes call this together, because the parameters may be in shards."""
        parameters: dict[str, Tensor] = {name: student.get_parameter(name) for name in self.units}
        present = {name: value.cpu() for name, value in whole(parameters, keep=True).items()}
        load_whole(
            parameters,
            {name: torch.where(self.units[name], self.values[name], value) for name, value in present.items()},
        )
        logger.info("restored the queries and keys of %s", ", ".join(parameters))


def _units(model: nn.Module) -> dict[str, Tensor]:
    """Which output units of the parameters of softmax layers make queries and keys, by the parameter's name."""
    found: dict[str, Tensor] = {}
    try:
        modules = self_attention_modules(model)
    except ValueError as error:
        raise SetupError(f"`--restore_projections`: {error}") from error
    for prefix, module in modules.items():
        if not hasattr(module, "linear_attention_enabled"):
            try:
                units = query_and_key_units(module, stock_class_of(module))
            except ValueError as error:
                raise SetupError(f"`--restore_projections`: {error} Leave the option out.") from error
            found |= {f"{prefix}.{name}": value for name, value in units.items()}
    if not found:
        raise SetupError(
            "`--restore_projections`: the model has no layer with softmax attention (heads of `--softmax_heads` share "
            "their layer's projections); convert it with `--softmax_layers`, or leave the option out"
        )
    return found
