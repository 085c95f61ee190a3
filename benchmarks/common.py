"""What the benchmarks share: command line, tables, interleaved times, results with versions and a plot."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hf_linear_attention import kernel_backend


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """With what every benchmark takes: `--output_dir` and `--quick`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "benchmarks")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, the figures mean little")
    return parser


def write(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table of Markdown, its first column to the left and the others to the right; None is a dash."""
    cells = [[_cell(value) for value in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells)]
    rules = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        for row in (cells[0], rules, *cells[1:])
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"
    return str(value)


def environment() -> dict[str, Any]:
    """Date, versions, machine and its load, for the figures that depend on them."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": _processor(),
        "kernels": kernel_backend()[:2],  # which compute on the CPU, and their instruction set
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg(),  # over 1, 5 and 15 minutes: above `cores`, others were at work
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def save_results(
    arguments: argparse.Namespace, name: str, figures: Mapping[str, Any], plot: Callable[..., Any]
) -> None:
    """Write `<name>.json` (the figures with versions and arguments) and, with matplotlib, `<name>.png`."""
    folder = arguments.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    given = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    result = {"benchmark": name, "environment": environment(), "arguments": given, **figures}
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        write(f"\nWritten: {folder / name}.json; for a plot, `pip install matplotlib`")
        return
    draw(plot, figures, folder / f"{name}.png")
    write(f"\nWritten: {folder / name}.json and .png")


def draw(plot: Callable[..., Any], figures: Mapping[str, Any], path: Path) -> None:
    """Write `plot(plt, figures)` as an image."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(
        {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    ):
        figure = plot(plt, figures)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def interleaved_times(
    functions: Mapping[str, Callable[[], Any]], rounds: int = 5, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds, by `clock`, of each function in `rounds` interleaved rounds (A B A B ...), after one unmeasured round.

    A shared machine's speed drifts; calls of the same round see about the same of it.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            start = clock()
            function()
            if number:
                times[name].append(clock() - start)
    return times


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of `times / others`."""
    return statistics.median(mine / other for mine, other in zip(times, others))
