"""`metrics.jsonl`: one JSON object a line for every log line and every evaluation, written by the main process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


NAME = "metrics.jsonl"


class MetricsFile:
    """Appends to the file; on other processes than the main one, does nothing."""

    def __init__(self, output_dir: Path, is_main_process: bool, resumed_step: int | None) -> None:
        self.path = output_dir / NAME if is_main_process else None
        if self.path is not None and resumed_step is not None and self.path.is_file():
            self._forget_after(resumed_step)

    def _forget_after(self, step: int) -> None:
        """Drop the lines of steps that a resumed run repeats."""
        if self.path is not None:
            events = read_metrics(self.path)
            kept = [json.dumps(event) for event in events if event["step"] <= step]
            beside = self.path.with_suffix(".new")  # a kill must not leave half of the old lines
            beside.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            beside.replace(self.path)

    def write(self, event: dict[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The events of a metrics.jsonl. A line that a crash cut short is left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
