"""recipe.yaml: one file beside the weights, from which `--config recipe.yaml` makes the same weights again.

It holds every option that decides the weights: what was given, and the settings of the attention that follow from the
model and the preset. Consent (`--trust_remote_code`), the place of the result and what only measures are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

from hf_linear_attention import __version__
from hf_linear_attention._common.command_line import PROGRAM
from hf_linear_attention._common.options import OnResume
from hf_linear_attention.configuration_linear_attention import COMMON_SETTINGS
from hf_linear_attention.conversion.arguments import CONVERSION_FACTS, RECIPE, Request
from hf_linear_attention.conversion.plan import Plan
from hf_linear_attention.conversion.preset_plan import Training


NOT_OF_A_RECIPE = ("output_dir", "no_verify", "state_tokens")


def write_recipe(folder: Path, request: Request, plan: Plan, training: Training | None) -> None:
    """Write recipe.yaml into a folder.

    Args:
        plan: the plan before layers with softmax are chosen automatically, which the recipe does again.
        training: the preset; None without one.
    """
    versions = f"{PROGRAM} {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    lines = [f"# Made with {versions}."]
    lines.append(f"# The same weights again: {PROGRAM} convert --config {RECIPE} --output_dir OUT")
    text = yaml.safe_dump(recipe_options(request, plan, training), sort_keys=False, allow_unicode=True)
    (folder / RECIPE).write_text("\n".join([*lines, text]), encoding="utf-8")


def recipe_options(request: Request, plan: Plan, training: Training | None) -> dict[str, Any]:
    """The options of `convert` that make the same weights."""
    values = {
        name: value for name, value in vars(request.arguments).items() if _decides(name) and value not in (None, False)
    }
    if training is not None and "max_train_tokens" in training.given:
        values["tokens"] = training.given["max_train_tokens"]
    settings = plan.settings
    if isinstance(settings, Mapping):
        values["attention"] = settings["mechanism"]
    else:  # layers differ: their options as they were given; the rest follows from these
        settings = request.given
    known = {"mechanism", *COMMON_SETTINGS, *CONVERSION_FACTS}
    options = {name: _text(value) for name, value in settings.items() if name not in known and value is not None}
    return {**values, **options}


def _decides(name: str) -> bool:
    fact = CONVERSION_FACTS[name]
    return fact.on_resume is not OnResume.FREE and fact.group != "measuring" and name not in NOT_OF_A_RECIPE


def _text(value: Any) -> Any:
    """A value by layer as one types it, `0-3:64,4-:16`; others unchanged."""
    if isinstance(value, Mapping):
        return ",".join(f"{layers}:{part}" for layers, part in value.items())
    return list(value) if isinstance(value, (list, tuple)) else value
