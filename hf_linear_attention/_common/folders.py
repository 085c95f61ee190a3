"""Folders that are complete under their name or not there, also after a crash, and files that can be checked.

write somewhere else -> (checksums.json) -> fsync of files and folders -> rename -> fsync of the parent folder

    NAME.tmp-<random>      being written, by one process that alone knows the name
    .incomplete-NAME       being written, by several processes that all know it
    NAME.old-<random>      being removed
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


CHECKSUMS = "checksums.json"
INCOMPLETE = ".incomplete-"
# Earlier versions removed `.incomplete-old-NAME`.
LEFT_BEHIND = r"\.incomplete-(old-)?({names})|({names})\.(tmp|old)-[0-9a-f]{{16}}"


@contextlib.contextmanager
def staging(output_dir: Path) -> Iterator[Path]:
    """A folder to fill, renamed to `output_dir` at the end; after a failure nothing is left of it."""
    temporary, made = _beside(output_dir, "tmp"), []
    try:
        for parent in reversed([parent for parent in output_dir.parents if not parent.exists()]):
            with contextlib.suppress(FileExistsError):  # somebody else made it meanwhile
                parent.mkdir()
                made.append(parent)
        temporary.mkdir()
        made.append(temporary)
        yield temporary
        replace(temporary, output_dir)
    except BaseException:
        if temporary in made:
            shutil.rmtree(made.pop(), ignore_errors=True)
        for parent in reversed(made):
            with contextlib.suppress(OSError):  # used by someone else by now
                parent.rmdir()
        raise


def incomplete(final: Path) -> Path:
    """Where several processes together write what `commit` then gives its name."""
    return final.with_name(f"{INCOMPLETE}{final.name}")


def commit(folder: Path, final: Path) -> None:
    """Write the checksums of `folder`, force it to the disk and rename it to `final`, which it replaces."""
    write_checksums(folder)
    replace(folder, final)


def replace(folder: Path, final: Path) -> None:
    """Force a folder to the disk and rename it to `final`, which is removed if it exists."""
    flush(folder)
    if not final.exists():
        folder.rename(final)
    else:
        old = _beside(final, "old")
        final.rename(old)
        try:
            folder.rename(final)
        except OSError:
            old.rename(final)
            raise
        shutil.rmtree(old, ignore_errors=True)
    flush_names(final.parent)


def discard(folder: Path) -> None:
    """Remove a folder; under its name it is whole or gone, even if this is killed on the way."""
    old = _beside(folder, "old")
    folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def clean(parent: Path, names: str) -> None:
    """Remove what a killed run was writing or removing in `parent` under names that match the pattern `names`."""
    pattern = re.compile(LEFT_BEHIND.format(names=names))
    for path in list(parent.iterdir()) if parent.is_dir() else []:
        if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def _beside(folder: Path, word: str) -> Path:
    """A name beside it that nobody else uses: process numbers repeat, in containers and on shared disks.

    Not `tempfile.mkdtemp`, whose folders, and so the result, only their owner can read.
    """
    return folder.with_name(f"{folder.name}.{word}-{secrets.token_hex(8)}")


def flush(folder: Path) -> None:
    """Force everything in `folder` to the disk: a rename may get there before the content does."""
    for path in [*folder.rglob("*"), folder]:
        _fsync(path)


def flush_names(folder: Path) -> None:
    """Force the renames into `folder` to the disk: later ones cannot get there before them."""
    _fsync(folder)


def _fsync(path: Path) -> None:
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":  # where folders cannot be opened
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # network file systems that have no such thing for a folder do what they can
        if not (is_folder and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


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
