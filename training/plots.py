"""`loss.png`: the training loss and the evaluations of metrics.jsonl, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from training.logs import NAME, read_metrics


PLOT = "loss.png"


def plot_metrics(output_dir: Path) -> None:
    """Draw `loss.png`; without matplotlib or without a logged step, nothing."""
    events = read_metrics(output_dir / NAME)
    if importlib.util.find_spec("matplotlib") is None or not any("loss" in event for event in events):
        return
    from matplotlib.figure import Figure  # without pyplot there is no window and no global state

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    names = ["loss", *sorted({name for event in events for name in event if name in ("eval_nats_per_token",)})]
    for name in names:
        points = [(event["tokens"], event[name]) for event in events if name in event]
        axes.plot(*zip(*points, strict=True), label=name, marker="." if name != "loss" else None)
    axes.set(xlabel="tokens", ylabel="loss")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(output_dir / PLOT, dpi=120)
