# SPDX-License-Identifier: Apache-2.0
"""Tables of learned positions, and a readable error for an input that is longer than such a table.

Stock code fails there with the sizes of two tensors, or with an index that is out of range.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..attention.transformers_internals import INPUTS, LENGTH_NAMES, cache_among


MOST_RESERVED = 2  # the rows in front of the positions in OPT and BART


def position_tables(model: Any) -> dict[str, nn.Embedding]:
    """`{name: module}` of the embeddings with a row for each position that the config counts, or a few rows more.

    A table with many more rows has a length of its own, as in Whisper, where `max_position_embeddings` means nothing.
    """
    positions = getattr(model.config, "max_position_embeddings", None)
    if type(positions) is not int or positions < 1:  # XLNet says -1: it has no limit
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and re.search("pos|wpe", name.rpartition(".")[2])
        and 0 <= module.num_embeddings - positions <= max(MOST_RESERVED, (module.padding_idx or 0) + 1)
    }


def reserved_rows(table: nn.Embedding, positions: int) -> int:
    """The number of first rows that are not positions of tokens.

    Models that come from fairseq start behind the row of padding, which the config counts (RoBERTa) or not (OPT, BART).
    """
    if table.num_embeddings > positions:
        return table.num_embeddings - positions
    return 0 if table.padding_idx is None else table.padding_idx + 1


def limit_positions(model: Any) -> None:
    """Have the modules that use a table of learned positions check the length of their inputs first."""
    for name, table in position_tables(model).items():
        parent = model.get_submodule(name.rpartition(".")[0])
        names = list(inspect.signature(parent.forward).parameters)
        if set(names) & set(INPUTS):
            limit = PositionLimit(table, model.config.max_position_embeddings, names)
            parent.register_forward_pre_hook(limit, with_kwargs=True)


class PositionLimit:
    """A forward pre-hook that refuses inputs with more tokens than there are positions; it can be pickled."""

    def __init__(self, table: nn.Embedding, positions: int, names: list[str]) -> None:
        self.positions, self.names = positions, names  # those of the arguments of forward
        self.limit = table.num_embeddings - reserved_rows(table, positions)
        self.padding_id, self.is_offset = table.padding_idx, table.num_embeddings > positions

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Raise ValueError if a token of this call would have no position."""
        if torch.compiler.is_compiling():  # a graph for any length must not depend on this one
            return
        given = {**dict(zip(self.names, arguments)), **keywords}
        tokens = next((given[name] for name in INPUTS if given.get(name) is not None), None)
        if tokens is None:
            return
        length = tokens.shape[1] + _past_length(given)
        # The values of tensors are looked at only for inputs that are long enough to fail.
        if length > self.limit and (length := self._positions_used(given, length)) > self.limit:
            raise ValueError(
                f"Got an input of {length:,} tokens, but {type(module).__name__} has learned positions for "
                f"{self.limit:,}. Cut the input (`truncation=True, max_length={self.limit}` of the tokenizer), or "
                "read it in chunks."
            )

    def _positions_used(self, given: Mapping[str, Any], length: int) -> int:
        """The number of positions that an input of this length uses; padding uses none in some models."""
        if given.get("position_ids") is not None:
            return int(given["position_ids"].max()) + 1 - (self.positions - self.limit)
        if self.padding_id is not None and given.get("input_ids") is not None:
            return int((given["input_ids"] != self.padding_id).sum(1).max()) + _past_length(given)
        mask = given.get("attention_mask")
        return int(mask.sum(1).max()) if self.is_offset and mask is not None and mask.dim() == 2 else length


def _past_length(given: Mapping[str, Any]) -> int:
    """The number of tokens before this input."""
    if (cache := cache_among(given.values())) is not None:
        return int(cache.get_seq_length())
    return int(next((given[name] for name in LENGTH_NAMES if given.get(name)), 0))
