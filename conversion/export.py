"""What is written: where it may go, the code that travels with it, and who can read it."""

from __future__ import annotations

from pathlib import Path

from hf_linear_attention._common.errors import ConversionError, UsageError
from hf_linear_attention.mechanisms import code_in


def check_output(output_dir: str, overwrite: bool, source: Path | None) -> Path:
    """The folder to write, made absolute.

    Raises:
        UsageError: if something is there that may not be replaced.
    """
    path = Path(output_dir).expanduser().resolve()
    if source is not None and (path == source or path in source.parents):
        raise UsageError(f"`--output_dir` = {output_dir!r} holds the checkpoint to convert; choose another folder")
    if not path.exists():
        return path
    if not path.is_dir():
        raise UsageError(f"`--output_dir` = {output_dir!r} is a file; choose the name of a folder")
    if not overwrite:
        raise UsageError(f"`--output_dir` = {output_dir!r} exists; give `--overwrite` to replace it, or another name")
    if any(path.iterdir()) and not (path / "config.json").is_file():
        raise UsageError(
            f"`--output_dir` = {output_dir!r} is no model folder (no config.json), so it is not overwritten"
        )
    return path


def check_shipped(folder: Path) -> None:
    """Raises `ConversionError` if a file of the code that the checkpoint needs did not come along."""
    if missing := sorted(name for name, text in code_in(folder).items() if text is None):
        raise ConversionError(
            f"{', '.join(missing)} did not come along into {folder}; without it nobody can load the model"
        )


def share_permissions(folder: Path) -> None:
    """Weight files are written for their owner alone; give them the permissions of every other file."""
    mode = (folder / "config.json").stat().st_mode
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)
