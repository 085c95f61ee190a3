"""Recipes without a command line and its checks and defaults."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linear_attention.training.recipe import GROUPS, Recipe


def recipe_of(task: str = "causal_lm", **options: Any) -> Recipe:
    """A recipe with these options; what an option is left at by default, and an objective's weight None, stays so."""
    values = {"model_name_or_path": "model", "task": task, "output_dir": "out", **options}
    parts = [
        group(**{name: values.pop(name) for name in group.__dataclass_fields__ if name in values}) for group in GROUPS
    ]
    assert not values, f"no options: {sorted(values)}"
    return Recipe(*parts)


def padded_batch(lengths: list[int]) -> dict[str, Tensor]:
    """Texts with padding after them, before them and inside them in turn."""
    longest = max(lengths)
    mask = torch.zeros(len(lengths), longest, dtype=torch.long)
    for number, (row, length) in enumerate(zip(mask, lengths)):
        places = [range(length), range(longest - length, longest), torch.randperm(longest)[:length].tolist()]
        row[list(places[number % 3])] = 1
    return {"input_ids": torch.randint(3, 60, mask.shape), "attention_mask": mask}
