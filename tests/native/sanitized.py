"""Builds the library of csrc/ with sanitizers, with setup.py's own flags."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-O1"]


def flags() -> list[str]:
    """`FLAGS` of setup.py, which cannot be imported without building."""
    found: list[str] = []
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == "FLAGS":
                found += ast.literal_eval(node.value)
    return found


def compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc"))


def build(folder: Path, *options: str) -> Path:
    """The library with AddressSanitizer and UBSan: the base one, or by further options of the compiler another.

    Raises:
        RuntimeError: with what the compiler said, if it cannot.
    """
    library, sources = folder / "_kernels_base.so", sorted(str(path) for path in (ROOT / "csrc").glob("*.c"))
    given = [*flags(), *SANITIZERS, *options, "-fPIC", "-shared"]
    command = [compiler() or "cc", *given, *sources, "-o", str(library), "-lm"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr}")
    return library


def runtime() -> str:
    """What has to be loaded before Python, which has neither sanitizers nor the exceptions of C++ that they watch."""
    command = [compiler() or "cc", "-print-file-name=libasan.so"], [compiler() or "cc", "-print-file-name=libstdc++.so"]
    return " ".join(subprocess.run(x, capture_output=True, text=True, check=True).stdout.strip() for x in command)
