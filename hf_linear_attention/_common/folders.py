"""Folders that are complete under their name or absent, even after a crash, and files that can be verified.

Write elsewhere -> (checksums.json) -> fsync of files and folders -> rename -> fsync of the parent folder.

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
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from hf_linear_attention._common.errors import RunError, UsageError


CHECKSUMS = "checksums.json"
INCOMPLETE = ".incomplete-"
RANDOM = "[0-9a-f]{16}"


@contextlib.contextmanager
def only_writer(output_dir: Path) -> Iterator[None]:
    """A context in which this process alone writes to `output_dir`; what killed ones left unfinished is removed.

    The operating system locks a file beside the folder, which says who holds the lock, until its process ends. Where
    no file can be written beside the folder, or the file system has no locks, there is none.

    Raises:
        UsageError: if another process holds the lock; it names the process.
    """
    path = output_dir.with_name(f".{output_dir.name}.lock")
    made = [parent for parent in output_dir.parents if not parent.exists()]
    lock, holder = FileLock(path, timeout=0), ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            holder = path.read_text(encoding="utf-8", errors="replace")[:200]
        lock.acquire()
    except Timeout:
        holder = holder or "another process"
        raise UsageError(
            f"`--output_dir` {output_dir} is being written by {holder}; wait for it, or choose another folder"
        ) from None
    except (OSError, NotImplementedError):
        pass
    try:
        if lock.is_locked:
            with contextlib.suppress(OSError):  # what others left behind is no reason to fail
                path.write_text(
                    f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S %Z')}",
                    encoding="utf-8",
                )
                _remove_all(output_dir.parent, rf"{re.escape(output_dir.name)}(\.unfinished)?\.tmp-{RANDOM}")
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                path.unlink()
            lock.release()
        for parent in made:  # those that the run has not used
            with contextlib.suppress(OSError):
                parent.rmdir()


@contextlib.contextmanager
def staging(output_dir: Path, *, replaces: bool = True) -> Iterator[Path]:
    """A new folder to fill, which is renamed to `output_dir` at the end; after a failure nothing of it remains.

    RunError, without `replaces`, if another process has written `output_dir` in the meantime.
    """
    temporary, made = _beside(output_dir, "tmp"), []
    try:
        for parent in reversed([parent for parent in output_dir.parents if not parent.exists()]):
            with contextlib.suppress(FileExistsError):  # another process has created it
                parent.mkdir()
                made.append(parent)
        temporary.mkdir()
        made.append(temporary)
        yield temporary
        replace(temporary, output_dir, replaces=replaces)
    except BaseException:
        if temporary in made:
            shutil.rmtree(made.pop(), ignore_errors=True)
        for parent in reversed(made):
            with contextlib.suppress(OSError):  # another process may use it now
                parent.rmdir()
        raise


def file_above(folder: Path) -> Path | None:
    """The file in whose place `folder` would need a folder, or None if it can be made."""
    return next((parent for parent in folder.parents if parent.exists() and not parent.is_dir()), None)


def incomplete(final: Path) -> Path:
    """The folder that several processes write together before `commit` renames it."""
    return final.with_name(f"{INCOMPLETE}{final.name}")


def commit(folder: Path, final: Path) -> None:
    """Write the checksums of `folder`, flush it to the disk and rename it to `final`, replacing an older folder."""
    write_checksums(folder)
    replace(folder, final)


def replace(folder: Path, final: Path, *, replaces: bool = True) -> None:
    """Flush a folder to the disk and rename it to `final`, which is removed if it exists.

    RunError, without `replaces`, if another process has written `final` in the meantime.
    """
    flush(folder)
    if final.exists() and not replaces:
        raise RunError(f"{final} was written by another process meanwhile; it is not replaced")
    if not replaces or not final.exists():
        folder.rename(final)  # which fails if another process has just written there
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
    """Remove a folder that is either complete or gone under its name, even if the process is killed meanwhile."""
    old = _beside(folder, "old")
    folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)


def clean(parent: Path, names: str) -> None:
    """Remove the folders that a killed run left unfinished in `parent`; their names match the pattern `names`."""
    _remove_all(parent, rf"{re.escape(INCOMPLETE)}({names})|({names})\.(tmp|old)-{RANDOM}")


def _remove_all(parent: Path, pattern: str) -> None:
    for path in list(parent.iterdir()) if parent.is_dir() else []:
        if re.fullmatch(pattern, path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def _beside(folder: Path, word: str) -> Path:
    """A sibling name that no other process uses, because process numbers repeat in containers and on shared disks.

    `tempfile.mkdtemp` is unsuitable: only the owner could read its folder, and hence the result.
    """
    return folder.with_name(f"{folder.name}.{word}-{secrets.token_hex(8)}")


def flush(folder: Path) -> None:
    """Flush everything in `folder` to the disk, because a rename may reach the disk before the content does."""
    for path in [*folder.rglob("*"), folder]:
        _fsync(path)


def flush_names(folder: Path) -> None:
    """Flush the renames in `folder` to the disk, so that no later rename reaches it before them."""
    _fsync(folder)


def _fsync(path: Path) -> None:
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support fsync of folders.
        if not (is_folder and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def write_checksums(folder: Path) -> None:
    """Write `checksums.json`: the size and SHA-256 of every file in `folder`, by relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    content = {str(path.relative_to(folder)): [path.stat().st_size, _sha256(path)] for path in files}
    (folder / CHECKSUMS).write_text(json.dumps(content, indent=1), encoding="utf-8")


def find_damage(folder: Path, needed: Iterable[str] = ()) -> str | None:
    """What is wrong with a folder that `commit` wrote, in which the files `needed` must be, or None."""
    try:
        content = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{CHECKSUMS} cannot be read ({error})"
    if not isinstance(content, dict) or not all(map(_is_checksum, content.values())):
        return f"{CHECKSUMS} does not hold a size and a SHA-256 for each file"
    for name, (size, digest) in content.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} of {size:,} bytes"
        if _sha256(path) != digest:
            return f"the content of {name} has changed since it was written"
    return next((f"{CHECKSUMS} does not list {name}" for name in needed if name not in content), None)


def _is_checksum(value: Any) -> bool:
    return isinstance(value, list) and [type(part) for part in value] == [int, str]


@contextlib.contextmanager
def saving(folder: Path) -> Iterator[None]:
    """A context in which safetensors writes into `folder`; its errors become OSErrors, as those of other files are."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"the weights could not be written to {folder} ({error}); free some space") from error


def save_tensors(value: Any, path: Path) -> None:
    """`torch.save` that raises OSError on a full disk, where torch's writer raises RuntimeError."""
    import torch

    try:
        torch.save(value, path)
    except RuntimeError as error:
        raise OSError(f"{path} could not be written: {str(error).splitlines()[0]}") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
