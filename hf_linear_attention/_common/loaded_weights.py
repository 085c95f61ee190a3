"""What a loader found in the weights of a checkpoint: whether the model has all of them, and all are finite."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import torch
from torch import nn

from hf_linear_attention._common.errors import UsageError


OF_MECHANISMS = ".linear_attention."
NAMES_SHOWN = 4  # the number of names in a message


def check_complete(
    name: object, model: nn.Module, missing: Iterable[str], unexpected: Iterable[str], new: str | None = None
) -> None:
    """Refuse (UsageError) a model of which some weights are random, or that leaves out layers of its checkpoint.

    Poolers may be missing, because most checkpoints are saved without one and most uses ignore it. `new` begins the
    names of the part that may be random, because it will be trained.
    """
    lacking = sorted(key for key in missing if "pooler" not in key and (new is None or key.startswith(new)))
    if lacking:
        raise UsageError(
            f"{name} does not contain {listed(lacking)}, which its config.json describes; these weights would be "
            "random. Give the checkpoint that has them, or `--allow_missing`"
        )
    places = {re.sub(r"\.\d+\.", ".*.", key) for key in model.state_dict()}
    beyond = sorted(key for key in unexpected if OF_MECHANISMS in key or re.sub(r"\.\d+\.", ".*.", key) in places)
    if beyond:
        raise UsageError(
            f"{name} contains {listed(beyond)}, for which its config.json has no place; correct the layers or the "
            "settings there, or give `--allow_missing` to leave these weights out"
        )


def check_finite(name: object, model: nn.Module) -> None:
    """Refuse weights that are NaN or infinite (UsageError): everything that they touch would be, too."""
    wrong = [
        key
        for key, value in model.named_parameters()
        if value.is_floating_point() and not value.is_meta and value.numel()
        if not all(torch.isfinite(end) for end in torch.aminmax(value.detach()))
    ]
    if wrong:
        raise UsageError(f"{name}: {listed(wrong)} holds NaN or infinite values; get the checkpoint again")


def listed(names: Collection[str]) -> str:
    """The first of these names, and the number of the others."""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(f"`{name}`" for name in list(names)[:NAMES_SHOWN]) + more
