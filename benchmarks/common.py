"""What the benchmarks share: options, times in turns, tables, and results with versions and machine.

A benchmark ends with `save`, which prints its tables and writes `NAME.json` into `--output_dir`. A page (.md) in that
folder shows the tables of a result between `<!-- NAME -->` and `<!-- end -->`; `save` renews them.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils.logging import disable_progress_bar

from hf_linear_attention import kernel_backend
from hf_linear_attention.kernels.cpu import BACKEND_VARIABLE


ROOT = Path(__file__).resolve().parents[1]
Times = dict[str, list[float]]
Table = dict[str, list[Any]]
"""`header` and `rows`; the numbers in the rows are not rounded."""


def parse(doc: str | None, argv: Sequence[str] | None, quick: Mapping[str, Any], **defaults: Any) -> argparse.Namespace:
    """The options of a benchmark, which computes on one thread: `--output_dir`, `--quick`, and one for each default.

    Args:
        quick: the defaults of a run with `--quick`, which shows that the benchmark runs.
        defaults: by their type follows what an option takes; None and strings take a string, False is a switch.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "benchmarks")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, the figures mean little")
    for name, default in defaults.items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true")
            continue
        many = isinstance(default, list)
        one = (default or [None])[0] if many else default
        parser.add_argument(f"--{name}", type=str if one is None else type(one), nargs="+" if many else None)
        parser.set_defaults(**{name: default})
    if "--quick" in (sys.argv[1:] if argv is None else argv):
        parser.set_defaults(**quick)
    torch.set_num_threads(1)
    disable_progress_bar()
    return parser.parse_args(argv)


def write(text: str = "") -> None:
    """Print a text at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def times_in_turns(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int = 5,
    clock: Callable[[], float] = time.process_time,
    seconds: float = math.inf,
) -> Times:
    """Seconds, by `clock`, of each function in `rounds` interleaved rounds (A B A B ...), after one unmeasured round.

    A shared machine's speed drifts; calls of the same round see about the same of it. CPU seconds, because a shared
    machine's other work does not count then.

    Args:
        seconds: after so many, three rounds are enough.
    """
    times: Times = {name: [] for name in functions}
    begin = time.perf_counter()
    for number in range(rounds + 1):
        if number > 3 and time.perf_counter() - begin > seconds:
            break
        for name, function in functions.items():
            start = clock()
            function()
            if number:
                times[name].append(clock() - start)
    return times


def medians(times: Times, unit: float = 1.0) -> dict[str, float]:
    """The median of each function, in units of so many seconds."""
    return {name: statistics.median(values) / unit for name, values in times.items()}


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of `times / others`."""
    return statistics.median(mine / other for mine, other in zip(times, others))


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table of a result."""
    return {"header": list(header), "rows": [list(row) for row in rows]}


def as_markdown(found: Table) -> str:
    """Its first column to the left and the others to the right; three digits of a number; None is a dash."""
    lines = [[_cell(value) for value in row] for row in (found["header"], *found["rows"])]
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


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


def tables_of(result: Mapping[str, Any]) -> str:
    """The tables of a result below how they were measured."""
    at = result["environment"]
    measured = (
        f"`{result['command']}`, {at['date'][:10]}: {at['processor']}, "
        f"kernels {' '.join(filter(None, at['kernels']))}, load {at['load'][0]:.1f}"
    )
    return "\n\n".join([measured, *map(as_markdown, result["tables"])])


def with_tables(page: str, name: str, result: Mapping[str, Any]) -> str:
    """A page with the tables of this result."""
    block = re.compile(rf"(?s)(<!-- {name} -->\n).*?(\n<!-- end -->)")
    return block.sub(lambda match: f"{match[1]}\n{tables_of(result)}\n{match[2]}", page)


def save(arguments: argparse.Namespace, name: str, tables: Sequence[Table], **figures: Any) -> None:
    """Print the tables, and write them with all other figures into `NAME.json` and the pages beside it."""
    given = {key: str(value) if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    options = " ".join(f"--{key}" for key, value in given.items() if value is True)
    package = "papers." if (Path(__file__).parent / "papers" / f"{name}.py").exists() else ""
    command = f"python -m benchmarks.{package}{name} {options}".strip()
    result = {"benchmark": name, "command": command, "environment": environment(), "arguments": given}
    result |= {"tables": list(tables), **figures}
    name += "_torch" * (os.environ.get(BACKEND_VARIABLE) == "torch")
    folder = arguments.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for page in folder.glob("*.md"):
        page.write_text(with_tables(page.read_text(encoding="utf-8"), name, result), encoding="utf-8")
    write(f"\n{tables_of(result)}\n\nWritten: {folder / name}.json")
