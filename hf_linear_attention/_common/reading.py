"""Reading of files that another program or another person wrote, so that every error names the file.

Libraries read a damaged file with errors of their own, which rarely name it, and wait for ever for a pipe. Everything
that reads such a file therefore lets libraries read it within `reading`, and reads JSON with `read_json`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_linear_attention._common.errors import RunError, UsageError, one_line


# The largest JSON file that is read; a tokenizer.json with 250,000 tokens has 20 MB.
MAX_JSON_BYTES = 2**28
AGAIN = "correct it, or get the checkpoint again"
# Errors of the machine, which no other file would avoid.
OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@contextlib.contextmanager
def reading(file: object, advice: str = AGAIN, *, names_ours: bool = True) -> Iterator[None]:
    """A context in which a library reads `file`, or builds what it describes: its errors become one that names it.

    That is a UsageError with `advice`, unless it is an error of the machine, such as a full disk. With `names_ours`,
    errors that this package raises with its own words are about this file too.
    """
    try:
        yield
    except (UsageError, RunError):
        raise
    except Exception as error:  # libraries raise whatever they meet: KeyError, RuntimeError, a bare Exception
        if isinstance(error, OSError) and error.errno in OF_THE_MACHINE:
            raise
        if _is_ours(error):
            raise UsageError(f"{file}: {one_line(error)}" if names_ours else one_line(error)) from error
        raise UsageError(f"{file} cannot be used ({type(error).__name__}: {one_line(error)}); {advice}") from error


def _is_ours(error: Exception) -> bool:
    """Whether this package raised the error itself, with a message for the user."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    module = "" if place is None else str(place.tb_frame.f_globals.get("__name__", ""))
    return isinstance(error, (ValueError, NotImplementedError)) and module.startswith("hf_linear_attention")


def read_json(path: Path, kind: type = dict) -> Any:
    """The content of a JSON file that holds a value of this kind.

    UsageError if it is not a regular file of a readable size, not UTF-8, not JSON, or holds another kind.
    """
    require_file(path)
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise UsageError(f"{path} has {size:,} bytes, and at most {MAX_JSON_BYTES:,} are read; {AGAIN}")
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 (byte {error.start:,}); {AGAIN}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON ({error}); {AGAIN}") from error
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply; {AGAIN}") from error
    if not isinstance(content, kind):
        word = "an object" if kind is dict else "a list"
        raise UsageError(f"{path} holds {short(content)}, and must hold {word}; {AGAIN}")
    return content


def require_file(path: Path) -> None:
    """Refuse (UsageError) what is there but no file to read: a folder, a pipe, a broken link, or forbidden."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        word = "a link to nothing" if path.is_symlink() else one_line(error.strerror or error)
        raise UsageError(f"{path} cannot be read: {word}; {AGAIN}") from error
    if not stat.S_ISREG(mode):
        word = "a folder" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
        raise UsageError(f"{path} is {word}, not a file; {AGAIN}")
    require_permission(path)


def require_permission(path: Path) -> None:
    """Raise UsageError for a file or folder that is there, but that this user may not read."""
    if os.path.exists(path) and not os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0)):
        raise UsageError(f"{path} cannot be read: permission denied; change its permissions, or give another one")


def short(value: Any) -> str:
    """A value as it is in a JSON file, cut to the length that fits into a message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
