"""One process at a time writes to an output folder: a lock of the operating system on a file beside the folder.

The system releases the lock when its process ends, however it ends. The file says who holds the lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from hf_linear_attention._common.errors import UsageError


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

TAKEN = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
LOCKED_BYTE = 1 << 20  # Windows locks bytes, which others then cannot read


@contextlib.contextmanager
def only_writer(output_dir: Path) -> Iterator[None]:
    """A context in which this process alone writes to `output_dir` and to what stands beside it for its runs.

    Where no file can be written beside the folder, or the file system has no locks, there is none.

    Raises:
        UsageError: if another process holds the lock; it names the process.
    """
    path = output_dir.with_name(f".{output_dir.name}.lock")
    made = [parent for parent in output_dir.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _opened(path)
    except OSError:
        descriptor = None
    try:
        if descriptor is not None:
            since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode())
        yield
    finally:
        if descriptor is not None:
            if fcntl is None:  # Windows removes no open files
                os.close(descriptor)
            with contextlib.suppress(OSError):
                path.unlink()
            if fcntl is not None:
                os.close(descriptor)
        for parent in made:  # those that the run has not used
            with contextlib.suppress(OSError):
                parent.rmdir()


def _opened(path: Path) -> int:
    """The file, opened and locked.

    Raises:
        UsageError: if another process holds the lock.
        OSError: if it cannot be written.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _lock(descriptor):
            holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise UsageError(
                f"`--output_dir` {path.parent / path.name[1:-5]} is being written by {holder}; wait for it, or choose "
                "another folder"
            )
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
        os.close(descriptor)  # its holder has just removed it


def _lock(descriptor: int) -> bool:
    """Lock an open file; False if another process holds the lock."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            os.lseek(descriptor, 0, os.SEEK_SET)
    except OSError as error:
        os.lseek(descriptor, 0, os.SEEK_SET)
        return error.errno not in TAKEN  # some network file systems have no locks
    return True
