# SPDX-License-Identifier: Apache-2.0
"""The registry: every mechanism by the name that `config.linear_attention["mechanism"]` uses; a checkpoint's own code.

A checkpoint carries this file with the lines of its own mechanisms alone, and of the other files those that are then
still imported. `save_code` writes them, whenever a config is saved. Lines that end in the comment `of decoders` are
left out where a model cannot generate.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from .configuration_linear_attention import entries_of
from .mechanism import AttentionMechanism
from .mechanism_aft import AftAttention
from .mechanism_hybrid import HybridAttention
from .mechanism_latent import LatentAttention
from .mechanism_linear import LinearAttention
from .mechanism_linformer import LinformerAttention
from .mechanism_linformer_linear import LinformerLinearAttention
from .mechanism_nystrom import NystromAttention
from .mechanism_performer import PerformerAttention
from .mechanism_window import WindowAttention


MECHANISMS: dict[str, type[AttentionMechanism]] = {
    "aft": AftAttention,
    "hybrid": HybridAttention,
    "latent": LatentAttention,
    "linear": LinearAttention,
    "linformer": LinformerAttention,
    "linformer_linear": LinformerLinearAttention,
    "nystrom": NystromAttention,
    "performer": PerformerAttention,
    "window": WindowAttention,
}

REGISTRY = Path(__file__)
# The files that the `auto_map` of config.json names; the others follow from their imports.
ENTRY_FILES = ("configuration_linear_attention.py", "modeling_linear_attention.py")
LICENCE_LINE = "# SPDX-License-Identifier: Apache-2.0\n"
Text = TypeVar("Text", str, str | None)


def mechanisms_of(settings: Any) -> set[str]:
    """The names of the mechanisms that a model with these `linear_attention` settings has: one, or those of a list."""
    return {entry["mechanism"] for entry in entries_of(settings)}


def unknown_mechanism(name: object) -> str:
    """What to tell who asks for a mechanism that is not in the registry."""
    known = ", ".join(f"`{name}`" for name in sorted(MECHANISMS))
    if __package__ == "hf_linear_attention":
        return f"`mechanism` = {name!r}; it must be one of {known}"
    return (
        f"`mechanism` = {name!r}, but this checkpoint carries the code of {known} alone; install hf-linear-attention, "
        "which has every mechanism, and `import hf_linear_attention` before loading"
    )


def checkpoint_code(mechanisms: Collection[str], is_decoder: bool = True) -> dict[str, str]:
    """`{file: text}` of the code that a checkpoint of these mechanisms needs."""

    def read(name: str) -> str:
        text = _registry(mechanisms) if name == REGISTRY.name else REGISTRY.with_name(name).read_text(encoding="utf-8")
        return text if is_decoder else re.sub(r"(?m)^.*  # of decoders\n", "", text)

    return _closure(read)


def code_in(folder: str | os.PathLike) -> dict[str, str | None]:
    """`{file: text}` of the code of the checkpoint in `folder`, by its imports; None for a file that is not there."""

    def read(name: str) -> str | None:
        path = Path(folder, name)
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None

    return _closure(read)


def save_code(folder: str | os.PathLike, mechanisms: Collection[str], is_decoder: bool) -> None:
    """Write the code that a checkpoint of these mechanisms needs into `folder`.

    What the code of an earlier checkpoint in `folder` imported, and this code does not, is removed if it is ours: if it
    starts with our licence line.
    """
    earlier, code = code_in(folder), checkpoint_code(mechanisms, is_decoder)
    os.makedirs(folder, exist_ok=True)
    for name, text in code.items():
        Path(folder, name).write_text(text, encoding="utf-8")
    for name, old in earlier.items():
        if name not in code and old is not None and old.startswith(LICENCE_LINE):
            Path(folder, name).unlink()


def _closure(read: Callable[[str], Text]) -> dict[str, Text]:
    """The entry files and what they import, in turn. transformers looks for imports with such an expression too."""
    found: dict[str, Text] = {}
    waiting = list(ENTRY_FILES)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = text = read(name)
            waiting += [f"{module}.py" for module in re.findall(r"(?m)^\s*from\s+\.(\w+)\s+import", text or "")]
    return found


def _registry(mechanisms: Collection[str]) -> str:
    """This file with the lines of these mechanisms alone."""
    text = REGISTRY.read_text(encoding="utf-8")
    for name, mechanism in MECHANISMS.items():
        if name not in mechanisms:
            own_lines = rf'(?m)^(from \.\w+ import {mechanism.__name__}|    "{name}": {mechanism.__name__},)\n'
            text = re.sub(own_lines, "", text)
    return text
