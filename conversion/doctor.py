"""What `doctor` finds in this installation and in a folder with a converted model."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig
from transformers.utils.versions import require_version

import hf_linear_attention
from hf_linear_attention._common.checkpoint_files import check_checkpoint
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.reading import read_json, reading
from hf_linear_attention.checkpoint_code import checkpoint_code
from hf_linear_attention.configuration_linear_attention import code_in, mechanisms_of


OK, NOTE, BROKEN = "ok", "note", "broken"
# Library: the versions that work, the tested one, and what it is for ("" if nothing works without it).
LIBRARIES = {
    "torch": (">=2.7", "2.13.0", ""),
    "transformers": (">=5.16,<6", "5.24.0", ""),
    "safetensors": (">=0.8", "0.8.0", ""),
    "jinja2": (">=3", "3.1.6", ""),
    "accelerate": (">=1.6", "1.15.0", "training"),
    "datasets": (">=3.0", "5.2.0", "training and text files"),
    "evaluate": (">=0.4", "0.4.6", "training"),
}
COMPILERS = ("cc", "gcc", "clang")


class Finding(NamedTuple):
    """One line of the answer: `ok`, `note` or `broken`, what it is about, and a sentence."""

    kind: str
    topic: str
    text: str


def environment_findings() -> Iterator[Finding]:
    """What is known of this machine and installation."""
    yield Finding(OK, "package", f"hf-linear-attention {hf_linear_attention.__version__}, Python "
                  f"{platform.python_version()}, {platform.system()} {platform.machine()}")  # fmt: skip
    yield from map(_library, LIBRARIES)
    yield _kernels()
    yield Finding(OK, "threads", f"torch computes with {torch.get_num_threads()} of {os.cpu_count()} cores"
                  f" (OMP_NUM_THREADS is {os.environ.get('OMP_NUM_THREADS', 'not set')})")  # fmt: skip
    yield from _gpu()


def _library(name: str) -> Finding:
    wanted, tested, needed_for = LIBRARIES[name]
    try:
        require_version(name + wanted)
    except importlib.metadata.PackageNotFoundError:
        if needed_for:
            text = f'not installed, but needed for {needed_for}: `pip install "hf-linear-attention[train]"`'
            return Finding(NOTE, name, text)
        return Finding(BROKEN, name, f"not installed; nothing works without it: `pip install {name}`")
    except ImportError:
        found = importlib.metadata.version(name)
        return Finding(BROKEN, name, f'{found}, but {name}{wanted} is needed: `pip install "{name}{wanted}"`')
    found = importlib.metadata.version(name)
    is_tested = found.split(".")[:2] == tested.split(".")[:2]
    return Finding(OK, name, found if is_tested else f"{found} (the tests ran with {tested})")


def _kernels() -> Finding:
    backend = hf_linear_attention.kernel_backend()
    if backend.name == "c":
        return Finding(OK, "kernels", f"C kernels ({backend.instruction_set}): {backend.reason}")
    compiler = next((name for name in COMPILERS if shutil.which(name)), None)
    text = f"torch computes in place of the C kernels, which is slower: {backend.reason}"
    if "`torch`" not in backend.reason:  # the variable, which whoever set it knows
        has = f"a C compiler ({compiler})" if compiler else "no C compiler (cc, gcc, clang)"
        text += f" This machine has {has}."
    return Finding(NOTE, "kernels", text)


def _gpu() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding(OK, "GPU", "none that torch can use; everything runs on the CPU")
        return
    yield Finding(OK, "GPU", f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    if importlib.util.find_spec("fla") is None:
        advice = '`pip install "hf-linear-attention[gpu]"` adds faster kernels for causal attention'
        yield Finding(NOTE, "GPU kernels", f"fla-core is not installed; torch computes on the GPU. {advice}")


def folder_findings(folder: Path) -> Iterator[Finding]:
    """Which model is in `folder`, and which code serves it.

    Raises:
        UsageError: if the folder has no converted model.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise UsageError(f"{str(folder)!r} is not a folder; name the folder of a converted model")
    if not path.is_file():
        raise UsageError(f"{str(folder)!r} has no config.json; name the folder of a converted model")
    try:
        content = read_json(path)
    except UsageError as error:
        yield Finding(BROKEN, "config.json", str(error))
        return
    if "linear_attention" not in content:
        raise UsageError(f"the model in {str(folder)!r} is not converted; `hf-linear-attention convert` does that")
    try:
        check_checkpoint(folder)
        with reading(path):
            config: Any = AutoConfig.from_pretrained(folder)
    except UsageError as error:
        yield Finding(BROKEN, "files", str(error))
        return
    names = ", ".join(sorted(mechanisms_of(config.linear_attention)))
    yield Finding(OK, "model", f"{config.model_type} with {names}; saved by transformers {config.transformers_version}")
    yield _code(folder, config, content)


def _code(folder: Path, config: Any, content: dict[str, Any]) -> Finding:
    """Whether the code in the folder or that of the installed package runs, and in what they differ."""
    if not content.get("auto_map"):
        text = "config.json names no code; the model loads only after `import hf_linear_attention`"
        return Finding(NOTE, "code", text)
    found = code_in(folder)
    if missing := sorted(name for name, text in found.items() if text is None):
        advice = "without them the model loads only after `import hf_linear_attention`; export it again"
        return Finding(BROKEN, "code", f"{', '.join(missing)} missing; {advice}")
    ours = checkpoint_code(config)
    runs = "the installed package runs in their place"
    changed = sorted(name for name in {*found, *ours} if found.get(name) != ours.get(name))
    if not changed:
        return Finding(OK, "code", f"both files are there, and equal to those of the installed package; {runs}")
    if broken := [name for name in changed if not _is_code(found.get(name) or "")]:
        return Finding(BROKEN, "code", f"{', '.join(broken)} empty or no Python; export the model again")
    text = f"{', '.join(changed)}: not as the installed package writes it, so of another version or edited; {runs}. "
    return Finding(NOTE, "code", f"{text}`save_pretrained` of the loaded model writes the installed ones")


def _is_code(text: str) -> bool:
    try:
        return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError):
        return False
