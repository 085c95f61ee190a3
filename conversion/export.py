"""What is written: where it may go, the code that travels with it, and who can read it."""

from __future__ import annotations

import re
from pathlib import Path

from hf_linear_attention import modeling_linear_attention
from hf_linear_attention._common.errors import ConversionError, UsageError


# The files that config.json's `auto_map` names; the others follow from their imports.
ENTRY_FILES = ("configuration_linear_attention.py", "modeling_linear_attention.py")
CODE_FOLDER = Path(modeling_linear_attention.__file__).parent


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


def shipped_files() -> list[str]:
    """The code that every converted checkpoint carries: the entry files and what they import, in turn."""
    found: list[str] = []
    waiting = list(ENTRY_FILES)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.append(name)
            text = (CODE_FOLDER / name).read_text(encoding="utf-8")
            waiting += [f"{module}.py" for module in re.findall(r"^\s*from \.(\w+) import", text, re.MULTILINE)]
    return sorted(found)


def check_shipped(folder: Path) -> None:
    """Raises `ConversionError` if a file of the code that the checkpoint needs did not come along."""
    if missing := [name for name in shipped_files() if not (folder / name).is_file()]:
        raise ConversionError(
            f"{', '.join(missing)} did not come along into {folder}; without it nobody can load the model"
        )


def share_permissions(folder: Path) -> None:
    """Weight files are written for their owner alone; give them the permissions of every other file."""
    mode = (folder / "config.json").stat().st_mode
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)
