# SPDX-License-Identifier: Apache-2.0
"""Positions of left-padded inputs without `position_ids`, where the original's outputs do not depend on them.

Stock models then number the columns of the input. With rotary positions alone, only distances count, so that softmax
attention gives what it gives without the padding. Mechanisms see rotated keys one by one (features), or count tokens
(sinks), so their positions have to be those that a row has without its padding.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..attention.transformers_internals import INPUTS, ROTARY_ARGUMENTS, cache_among
from ..torch_kernels.blocks import is_tracing
from .limit import position_tables


logger = logging.get_logger(__name__)


def number_padded_rows(model: nn.Module) -> None:
    """Have the modules of a converted model that make rotary positions count from the first real token of each row."""
    tables = {name.rpartition(".")[0] for name in position_tables(model)}
    for name, module in model.named_modules():
        of_children = (set(inspect.signature(child.forward).parameters) for child in module.children())
        if name not in tables and any(arguments >= ROTARY_ARGUMENTS for arguments in of_children):
            names = list(inspect.signature(module.forward).parameters)
            if "attention_mask" in names and set(names) & set(INPUTS):
                module.register_forward_pre_hook(PaddedPositions(names), with_kwargs=True)


class PaddedPositions:
    """A forward pre-hook that adds `position_ids` to a call with a mask `[B, columns]` and none; it can be pickled."""

    def __init__(self, names: list[str]) -> None:
        self.names = names  # those of the arguments of forward

    def __call__(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of one call with positions, or None if they stay as they are."""
        given = {**dict(zip(self.names, arguments)), **keywords}
        mask = given.get("attention_mask")
        tokens = next((given[name] for name in INPUTS if given.get(name) is not None), None)
        if not isinstance(mask, Tensor) or tokens is None or given.get("position_ids") is not None:
            return None
        cache, length = cache_among(given.values()), tokens.shape[1]
        seen = 0 if cache is None else cache.get_seq_length()
        is_whole = mask.ndim == 2 and (isinstance(seen, Tensor) or mask.shape[1] == seen + length)
        if "position_ids" not in self.names or not is_whole:
            _warn_of_padding(mask)
            return None
        first = (mask > 0).long().argmax(dim=1, keepdim=True)  # the original is the same for any shift of a row
        columns = torch.arange(length, dtype=torch.long, device=mask.device) + seen
        return arguments, {**keywords, "position_ids": (columns - first).clamp(min=0)}


def _warn_of_padding(mask: Tensor) -> None:
    """Warn once of padding on the left whose positions are not known."""
    if is_tracing() or mask.ndim not in (2, 4) or not mask.numel():
        return
    corner = mask.flatten(1)[:, 0]
    if bool((corner < 0 if mask.is_floating_point() else corner == 0).any()):
        logger.warning_once(
            "Got an attention mask with padding on the left, no `position_ids`, and a model or mask that does not tell "
            "positions. Converted layers then do not compute what they compute without the padding; pass "
            "`position_ids`, or pad on the right."
        )
