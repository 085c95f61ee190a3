"""Restoration of the query and key projections of softmax layers (`--restore_projections`, arXiv 2606.11052).

Where layers with softmax attention stand between linear ones, they do the recall over long distances. Fine-tuning on
texts that need none changes what their queries find.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from hf_linear_attention._common.errors import SetupError
from hf_linear_attention._common.loaded_weights import shown
from hf_linear_attention.attention.architectures import stock_class_of
from hf_linear_attention.attention_calls import query_and_key_units
from hf_linear_attention.modeling_linear_attention import self_attention_modules
from hf_linear_attention.training.distributed import load_whole, whole


logger = logging.getLogger(__name__)


class QueryKeyProjections:
    """The query and key projections of `source`, for those layers that have softmax attention in `student`.

    Raises:
        SetupError: if there is no such layer, if its queries and keys cannot be told from other things, or if the
            source has other weights.
    """

    def __init__(self, student: nn.Module, source: nn.Module, path: str) -> None:
        self.units = _units(student)
        theirs = dict(source.named_parameters())
        for name in self.units:
            if name not in theirs or theirs[name].shape != student.get_parameter(name).shape:
                raise SetupError(
                    f"`--restore_projections {path}` has no {name} of the same shape; give the model that the training "
                    "started from"
                )
        self.values = {name: theirs[name].detach().cpu().clone() for name in self.units}

    @torch.no_grad()
    def restore(self, student: nn.Module) -> None:
        """Put them back. All processes call this together, because the parameters may be in shards."""
        parameters: dict[str, Tensor] = {name: student.get_parameter(name) for name in self.units}
        trained = whole(parameters, keep=True)
        load_whole(
            parameters,
            {name: torch.where(units, self.values[name], trained[name].cpu()) for name, units in self.units.items()},
        )
        logger.info("restored the queries and keys of %s", shown(list(parameters)))


def _units(model: nn.Module) -> dict[str, Tensor]:
    """Which output units of the parameters of softmax layers make queries and keys, by the parameter's name."""
    found: dict[str, Tensor] = {}
    try:
        for prefix, module in self_attention_modules(model).items():
            if not hasattr(module, "linear_attention_enabled"):
                units = query_and_key_units(module, stock_class_of(module))
                found |= {f"{prefix}.{name}": value for name, value in units.items()}
    except ValueError as error:
        raise SetupError(f"`--restore_projections`: {error} Leave the option out.") from error
    if not found:
        raise SetupError(
            "`--restore_projections`: the model has no layer with softmax attention; convert it with "
            "`--softmax_layers`, or leave the option out"
        )
    return found
