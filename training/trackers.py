"""`--report_to`: the experiment trackers of accelerate. Without this check, it leaves out a missing one silently."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from hf_linear_attention.training.recipe import Recipe


def wanted_trackers(recipe: Recipe) -> list[str]:
    return [name.strip() for name in (recipe.run.report_to or "").split(",") if name.strip()]


def tracker_problems(recipe: Recipe) -> list[str]:
    """Names that accelerate does not know, and packages that are not installed."""
    known, installed = [str(name) for name in LOGGER_TYPE_TO_CLASS], [str(name) for name in get_available_trackers()]
    problems = []
    for name in wanted_trackers(recipe):
        if name not in known:
            problems.append(f"`--report_to {name}`: allowed are {', '.join(known)}, with commas between")
        elif name not in installed:
            problems.append(f"`--report_to {name}` needs a package that is not installed: `pip install {name}`")
    return problems


def start_trackers(recipe: Recipe, accelerator: Accelerator) -> None:
    """Open the trackers with the recipe as their configuration; `run.ending` closes them."""
    if wanted_trackers(recipe):
        options = {name: value for name, value in recipe.flat().items() if value is not None}
        accelerator.init_trackers(recipe.output_dir.name, options)
