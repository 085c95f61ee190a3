"""Folders that survive a crash: complete under their name or not there, on the disk before they get it, and checked.

write somewhere else -> checksums.json -> fsync of files and folders -> rename -> fsync of the parent folder
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch


CHECKSUMS = "checksums.json"
TEMPORARY = ".incomplete-"


def commit(folder: Path, final: Path) -> None:
    """Write the checksums of `folder`, force it to the disk and rename it to `final`, which it replaces."""
    write_checksums(folder)
    flush(folder)
    if final.exists():
        discard(final)
    folder.rename(final)
    _fsync(final.parent)


def flush(folder: Path) -> None:
    """Force everything in `folder` to the disk: a rename may get there before the content does."""
    for path in [*folder.rglob("*"), folder]:
        _fsync(path)


def flush_names(folder: Path) -> None:
    """Force the renames into `folder` to the disk: later ones cannot get there before them."""
    _fsync(folder)


def discard(folder: Path) -> None:
    """Remove a folder; killed on the way, it is gone under its own name."""
    doomed = folder.with_name(f"{TEMPORARY}old-{folder.name}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def clean(parent: Path) -> None:
    """Remove what a killed run was writing or removing."""
    for path in parent.glob(f"{TEMPORARY}*"):
        shutil.rmtree(path)


def write_checksums(folder: Path) -> None:
    """`checksums.json`: size and SHA-256 of every file in `folder`, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    content = {str(path.relative_to(folder)): [path.stat().st_size, _sha256(path)] for path in files}
    (folder / CHECKSUMS).write_text(json.dumps(content, indent=1), encoding="utf-8")


def find_damage(folder: Path) -> str | None:
    """What is wrong with a folder that `commit` wrote, or None."""
    try:
        content = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{CHECKSUMS} cannot be read ({error})"
    for name, (size, digest) in content.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} of {size:,} bytes"
        if _sha256(path) != digest:
            return f"{name} has other content than was written"
    return None


def save_tensors(value: Any, path: Path) -> None:
    """`torch.save`, with the OSError that a full disk should be (torch's writer raises a RuntimeError)."""
    try:
        torch.save(value, path)
    except RuntimeError as error:
        raise OSError(f"{path} could not be written: {str(error).splitlines()[0]}") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
