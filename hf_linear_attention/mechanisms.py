# SPDX-License-Identifier: Apache-2.0
"""The registry of mechanisms by the name in `config.linear_attention["mechanism"]`, and the code in a checkpoint.

A checkpoint contains this file with only the lines of its own mechanisms, and those other files that are then still
imported. `save_code` writes them whenever a config is saved. Lines that end in the comment `of decoders` are left out
if the model cannot generate text, and lines that end in `of softmax heads` if no head has softmax attention.
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
from .mechanism_gated_delta import GatedDeltaAttention
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
    "gated_delta": GatedDeltaAttention,
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
# The files that the `auto_map` of config.json names; the other files follow from the imports in these.
ENTRY_FILES = ("configuration_linear_attention.py", "modeling_linear_attention.py")
LICENCE_LINE = "# SPDX-License-Identifier: Apache-2.0\n"
Text = TypeVar("Text", str, str | None)


def mechanisms_of(settings: Any) -> set[str]:
    """The names of the mechanisms in these `linear_attention` settings, which are one dict or a list of dicts."""
    return {entry["mechanism"] for entry in entries_of(settings)}


def unknown_mechanism(name: object) -> str:
    """The error message for a mechanism that is not in the registry."""
    known = ", ".join(f"`{name}`" for name in sorted(MECHANISMS))
    if __package__ == "hf_linear_attention":
        return f"`mechanism` = {name!r}; it must be one of {known}"
    return (
        f"`mechanism` = {name!r}, but this checkpoint contains the code of {known} only; install hf-linear-attention, "
        "which has every mechanism, and `import hf_linear_attention` before loading"
    )


def taken_elsewhere(name: str, value: object) -> str:
    """The end of an error message about an option: a mechanism that takes this value of it, if there is one."""
    able = [key for key, kind in MECHANISMS.items() if name in kind.options and not kind.options[name].problem(value)]
    name = "linear" if "linear" in able or not able else able[0]
    return f"; for it, set `mechanism` to `{name}` (`--attention {name}`)" if able else ""


def checkpoint_code(
    mechanisms: Collection[str], is_decoder: bool = True, has_softmax_heads: bool = False
) -> dict[str, str]:
    """`{file: text}` of the code that a checkpoint of these mechanisms needs."""
    left_out = [*([] if is_decoder else ["of decoders"]), *([] if has_softmax_heads else ["of softmax heads"])]

    def read(name: str) -> str:
        text = _registry(mechanisms) if name == REGISTRY.name else REGISTRY.with_name(name).read_text(encoding="utf-8")
        return re.sub(rf"(?m)^.*  # ({'|'.join(left_out)})\n", "", text) if left_out else text

    return _closure(read)


def code_in(folder: str | os.PathLike) -> dict[str, str | None]:
    """`{file: text}` of the code of the checkpoint in `folder`, by its imports; None for a file that is not there."""

    def read(name: str) -> str | None:
        path = Path(folder, name)
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None

    return _closure(read)


def save_code(
    folder: str | os.PathLike, mechanisms: Collection[str], is_decoder: bool, has_softmax_heads: bool = False
) -> None:
    """Write the code that a checkpoint of these mechanisms needs into `folder`.

    Files of an earlier checkpoint in `folder` that this code does not import are removed if they are ours, that is, if
    they start with our licence line.
    """
    earlier, code = code_in(folder), checkpoint_code(mechanisms, is_decoder, has_softmax_heads)
    os.makedirs(folder, exist_ok=True)
    for name, text in code.items():
        Path(folder, name).write_text(text, encoding="utf-8")
    for name, old in earlier.items():
        if name not in code and old is not None and old.startswith(LICENCE_LINE):
            Path(folder, name).unlink()


def _closure(read: Callable[[str], Text]) -> dict[str, Text]:
    """The entry files and all that they import. transformers also finds imports with such a regular expression."""
    found: dict[str, Text] = {}
    waiting = list(ENTRY_FILES)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = text = read(name)
            waiting += [f"{module}.py" for module in re.findall(r"(?m)^\s*from\s+\.(\w+)\s+import", text or "")]
    return found


def _registry(mechanisms: Collection[str]) -> str:
    """This file with only the lines of these mechanisms."""
    text = REGISTRY.read_text(encoding="utf-8")
    for name, mechanism in MECHANISMS.items():
        if name not in mechanisms:
            own_lines = rf'(?m)^(from \.\w+ import {mechanism.__name__}|    "{name}": {mechanism.__name__},)\n'
            text = re.sub(own_lines, "", text)
    return text
