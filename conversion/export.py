"""Checks of the output folder, of the code written into it, and the permissions of its files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hf_linear_attention._common.errors import ConversionError, UsageError
from hf_linear_attention._common.folders import file_above
from hf_linear_attention.configuration_linear_attention import code_in


def check_output(output_dir: str, overwrite: bool, source: Path | None) -> Path:
    """The absolute path of the folder to write.

    Raises:
        UsageError: if something exists there that must not be replaced.
    """
    path = Path(output_dir).expanduser().resolve()
    if source is not None and (path == source or path in source.parents):
        raise UsageError(f"`--output_dir` = {output_dir!r} contains the checkpoint to convert; choose another folder")
    if source is not None and source in path.parents:
        raise UsageError(
            f"`--output_dir` = {output_dir!r} is inside of the checkpoint to convert; choose another folder"
        )
    if (file := file_above(path)) is not None:
        raise UsageError(f"`--output_dir` = {output_dir!r}: {file} is a file; choose another folder")
    if not path.exists():
        return path
    if not path.is_dir():
        raise UsageError(f"`--output_dir` = {output_dir!r} is a file; choose the name of a folder")
    if not overwrite:
        raise UsageError(f"`--output_dir` = {output_dir!r} exists; give `--overwrite` to replace it, or another name")
    if (folder := next(_kept_by_others(path), None)) is not None:
        raise UsageError(
            f"`--output_dir` = {output_dir!r}: this user may not remove what is in {folder}, so it cannot be replaced; "
            "choose another name"
        )
    if any(path.iterdir()) and not (path / "config.json").is_file():
        raise UsageError(
            f"`--output_dir` = {output_dir!r} has no config.json, so it is not a model folder and is not overwritten; "
            "choose another name"
        )
    return path


def _kept_by_others(path: Path) -> Iterator[Path]:
    """The folders in `path`, or itself, in which this user may not remove everything."""
    folders = (os.path.join(parent, name) for parent, names, _ in os.walk(path) for name in names)
    for folder in map(Path, [str(path), *folders]):
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            yield folder


def check_shipped(folder: Path) -> None:
    """Check that the checkpoint has all the code that it needs.

    Raises:
        ConversionError: if a file is missing.
    """
    if missing := sorted(name for name, text in code_in(folder).items() if text is None):
        raise ConversionError(
            f"{', '.join(missing)} of the model's code was not written to {folder}, and the model cannot be loaded "
            "without it; install the package again"
        )


def share_permissions(folder: Path) -> None:
    """Give the weight files, which only their owner can read at first, the permissions of the other files."""
    mode = (folder / "config.json").stat().st_mode
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)
