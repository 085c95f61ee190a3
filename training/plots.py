"""`loss.png`: the training loss and the evaluations of metrics.jsonl, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hf_linear_attention._common.model_card import PLOT
from hf_linear_attention.training.metrics_file import NAME, read_metrics


def plot_metrics(output_dir: Path, folder: Path) -> None:
    """The metrics.jsonl of `output_dir` as `loss.png` in `folder`; without matplotlib or a logged step, nothing."""
    events = read_metrics(output_dir / NAME)
    if importlib.util.find_spec("matplotlib") is None or not any("loss" in event for event in events):
        return
    from matplotlib.figure import Figure  # without pyplot there is no window and no global state

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    unit = "images" if "images" in events[0] else "tokens"
    for name, marker in (("loss", None), ("eval_nats_per_token", ".")):
        if points := [(event[unit], event[name]) for event in events if name in event]:
            axes.plot(*zip(*points, strict=True), label=name, marker=marker)
    axes.set(xlabel=unit, ylabel="loss")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(folder / PLOT, dpi=120)
