"""What runs read and write: lines of JSON, losses, and the weights that they change."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write a .jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def losses(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events of metrics.jsonl with a loss, without their speed."""
    return [{k: v for k, v in event.items() if k != "tokens_per_second"} for event in events if "loss" in event]


def changed(before: str | Path, after: str | Path) -> set[str]:
    """The names of the tensors that differ between the weights in two folders; none if they are the same bit by bit."""
    old, new = (load_file(Path(folder) / "model.safetensors") for folder in (before, after))
    assert old.keys() == new.keys()
    return {name for name in old if not torch.equal(old[name], new[name])}
