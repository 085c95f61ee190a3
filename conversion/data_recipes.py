"""Recipes of `training` that only read data, for what a conversion measures and calibrates on."""

from __future__ import annotations

from typing import Any

from hf_linear_attention.training.recipe import (
    DataArguments,
    ModelArguments,
    ObjectiveArguments,
    OptimizationArguments,
    Recipe,
    RunArguments,
    TaskArguments,
)


def data_recipe(
    model: str, task: str, teacher: str | None = None, trust_remote_code: bool = False, **data: Any
) -> Recipe:
    """A recipe of `training` for this model, which is not trained.

    Args:
        **data: options of `DataArguments` and `TaskArguments`.
    """
    import datasets  # most conversions do without this library

    datasets.disable_progress_bars()
    own = {name: data[name] for name in data if name in TaskArguments.__dataclass_fields__}
    return Recipe(
        ModelArguments(model, task, teacher, trust_remote_code=trust_remote_code),  # type: ignore[arg-type]
        DataArguments(**{name: value for name, value in data.items() if name not in own}),
        ObjectiveArguments(),
        OptimizationArguments(),
        RunArguments(""),
        TaskArguments(**own),
        given=frozenset(data),
    )
