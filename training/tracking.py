"""The reports of a run while it trains: `metrics.jsonl`, `loss.png` and the experiment trackers of accelerate."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_linear_attention._common.model_card import PLOT
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.tasks import UNITS


if TYPE_CHECKING:
    from accelerate import Accelerator


METRICS = "metrics.jsonl"


class MetricsFile:
    """The file `metrics.jsonl` of a run, to which only the main process writes."""

    def __init__(self, output_dir: Path, is_main_process: bool, resumed_step: int | None) -> None:
        self.path = output_dir / METRICS if is_main_process else None
        if self.path is not None and resumed_step is not None and self.path.is_file():
            # The lines of the steps that the run will repeat go.
            kept = [json.dumps(event) for event in read_metrics(self.path) if event["step"] <= resumed_step]
            beside = self.path.with_suffix(".new")  # a run that is killed here must not lose the old lines
            beside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            beside.replace(self.path)

    def write(self, event: dict[str, Any]) -> None:
        """Append `event` as a line."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The events in a `metrics.jsonl`, without a line that a crash has cut short."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def units_per_second(path: Path) -> float | None:
    """The median speed in a `metrics.jsonl`, in what the run counted; None if none was logged."""
    events = read_metrics(path) if path.is_file() else []
    name = f"{_unit(events)}_per_second"
    speeds = sorted(event[name] for event in events if name in event)
    return speeds[len(speeds) // 2] if speeds else None


def figures_before(path: Path, names: Iterable[str]) -> dict[str, float]:
    """The figures of these names with which a run began, by its metrics.jsonl, without counts, which stay the same."""
    events = read_metrics(path) if path.is_file() else []
    begin = next((event for event in events if event["step"] == 0), {})
    return {name: begin[name] for name in names if isinstance(begin.get(name), float)}


def _unit(events: list[dict[str, Any]]) -> str:
    """What these runs counted."""
    return next((unit for unit in UNITS.values() if any(unit in event for event in events)), UNITS["text"])


def plot_metrics(output_dir: Path, folder: Path) -> None:
    """Plot the losses in the metrics.jsonl of `output_dir` as `loss.png` in `folder`.

    Nothing is written if matplotlib is not installed or no loss was logged.
    """
    events = read_metrics(output_dir / METRICS)
    if importlib.util.find_spec("matplotlib") is None or not any("loss" in event for event in events):
        return
    from matplotlib.figure import Figure  # without pyplot there is no window and no global state

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    unit = _unit(events)
    for name, marker in (("loss", None), ("eval_nats_per_token", ".")):
        if points := [(event[unit], event[name]) for event in events if name in event]:
            axes.plot(*zip(*points, strict=True), label=name, marker=marker)
    axes.set(xlabel=unit, ylabel="loss")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(folder / PLOT, dpi=120)


def wanted_trackers(recipe: Recipe) -> list[str]:
    """The names in `--report_to`."""
    return [name.strip() for name in (recipe.run.report_to or "").split(",") if name.strip()]


def tracker_problems(recipe: Recipe) -> list[str]:
    """One sentence for every tracker that accelerate does not know or that is not installed, which it would ignore."""
    if not (wanted := wanted_trackers(recipe)):
        return []
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known, installed = [str(name) for name in LOGGER_TYPE_TO_CLASS], [str(name) for name in get_available_trackers()]
    problems = []
    for name in wanted:
        if name not in known:
            problems.append(f"`--report_to {name}`: give one or more of {', '.join(known)}, separated by commas")
        elif name not in installed:
            problems.append(f"`--report_to {name}` needs a package that is not installed: `pip install {name}`")
    return problems


def start_trackers(recipe: Recipe, accelerator: Accelerator) -> None:
    """Open the trackers with the recipe as their configuration; `run.run` closes them."""
    if wanted_trackers(recipe):
        options = {name: value for name, value in recipe.flat().items() if value is not None}
        accelerator.init_trackers(recipe.output_dir.name, options)
