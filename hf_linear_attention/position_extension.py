# SPDX-License-Identifier: Apache-2.0
"""More learned positions than the original has: which tables grow, and what their new rows start from.

Which tensors grow is not decided by their names: the stock model is built twice on the meta device, with the old and
with the new number of positions, and what differs in shape follows the positions.

The new rows repeat the old ones: row T + i is row i of the T old rows (Longformer), so inputs that the original can
read do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .positions.limit import reserved_rows


if TYPE_CHECKING:  # this file is read for `--help` too, which needs no models
    from transformers import PreTrainedConfig, PreTrainedModel


FIELD = "max_position_embeddings"


@dataclass(frozen=True)
class PositionTable:
    """One table; its `reserved` first rows are not positions."""

    rows: int
    new_rows: int
    reserved: int


@dataclass(frozen=True)
class Extension:
    """The extension of one model.

    Args:
        config: a copy of the stock config with the new number of positions.
        tables: the tables that grow, by the name of their weight.
        before, tokens: the length of the longest input in tokens, before and after.
    """

    config: PreTrainedConfig
    tables: dict[str, PositionTable]
    before: int
    tokens: int

    def weight(self, name: str, old: Tensor, fresh: Tensor | None = None) -> Tensor:
        """The rows of a table, `[new rows, D]`.

        Args:
            old: the rows of the original.
            fresh: the rows that the model initialises. If these begin with the old ones, they are a function of the
                position (sinusoids), which then gives the new rows.
        """
        table = self.tables[name]
        if fresh is not None:
            fresh = fresh.to(old)
            if torch.allclose(fresh[: table.rows].float(), old.float(), atol=1e-5):
                return torch.cat((old, fresh[table.rows :]))
        count, first = table.new_rows - table.reserved, old[table.reserved :]
        new = first[torch.arange(count, dtype=torch.long, device=old.device) % len(first)]
        return torch.cat((old[: table.reserved], new))

    def weights(self, old: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights `old` of the original, of which the tables are extended."""
        return {
            name: self.weight(name, tensor, fresh[name]) if name in self.tables else tensor
            for name, tensor in old.items()
        }

    def has_grown_from(self, name: str, new: Tensor, old: Tensor) -> bool:
        """Whether `new` is what the table `old` becomes."""
        old = old.to(new.dtype)
        return torch.equal(new, self.weight(name, old)) or torch.equal(new[: len(old)], old)

    def describe(self) -> str:
        """One line for reports."""
        return f"{self.before:,} -> {self.tokens:,} tokens, tiled: {', '.join(self.tables)}"


def plan_extension(
    config: PreTrainedConfig, model_class: type[PreTrainedModel], tokens: int | None
) -> Extension | None:
    """What grows in a stock model for inputs of this number of tokens, or None if nothing is asked for.

    Raises:
        ValueError: if the model has no table of learned positions, or already one that is as long.
    """
    if tokens is None:
        return None
    old_field = getattr(config, FIELD, None)
    if type(old_field) is not int or old_field < 1:
        raise ValueError(f"{_asked(tokens)}, but {_why_not(config)}")
    found = _tables(model_class, config, _with_field(config, old_field + 1))
    if not found:
        raise ValueError(
            f"{_asked(tokens)}, but `{config.model_type}` has no table of learned positions: its positions are rotary, "
            "a bias or none, and it reads inputs of any length as it is. Leave the option out, and train at the "
            "wanted length (`--max_length` of finetune.py)"
        )
    before = min(table.num_embeddings - reserved_rows(table, old_field) for table in found.values())
    if tokens <= before:
        raise ValueError(f"{_asked(tokens)}, but `{config.model_type}` has positions for {before:,} tokens already")
    more = tokens - before
    tables = {
        f"{name}.weight": PositionTable(
            table.num_embeddings, table.num_embeddings + more, reserved_rows(table, old_field)
        )
        for name, table in found.items()
    }
    return Extension(_with_field(config, old_field + more), tables, before, tokens)


def _asked(tokens: int) -> str:
    return f"`{FIELD}` = {tokens}"


def _why_not(config: PreTrainedConfig) -> str:
    if hasattr(config, "image_size"):
        return (
            f"the positions of `{config.model_type}` are those of the patches of an image, and follow `image_size`; "
            "leave the option out, and resize the images (or pass `interpolate_pos_encoding=True` to the model)"
        )
    return f"the config of `{config.model_type}` has no `{FIELD}`; leave the option out"


def _with_field(config: PreTrainedConfig, positions: int) -> PreTrainedConfig:
    longer = copy.deepcopy(config)
    setattr(longer, FIELD, positions)
    return longer


def _tables(model_class: Any, config: PreTrainedConfig, longer: PreTrainedConfig) -> dict[str, nn.Embedding]:
    """The embeddings that have one more row in the model of the second config.

    Raises:
        ValueError: if anything else differs in shape.
    """
    with torch.device("meta"):
        models = [model_class(copy.deepcopy(entry)) for entry in (config, longer)]
    before, after = ({name: tensor.shape for name, tensor in model.named_parameters()} for model in models)
    changed = [name for name in before if before[name] != after[name]]
    modules = {name: models[0].get_submodule(name.rpartition(".")[0]) for name in changed}
    if others := [name for name, module in modules.items() if not isinstance(module, nn.Embedding)]:
        raise ValueError(
            f"the shape of `{others[0]}` of {model_class.__name__} follows `{FIELD}`, and it is no table of learned "
            "positions, so it cannot be extended; leave the option out"
        )
    return {name.rpartition(".")[0]: module for name, module in modules.items()}
