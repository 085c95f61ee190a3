"""The files of the checkpoint to convert: where they are and which tensors they contain, without loading them."""

from __future__ import annotations

import functools
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import safe_open

from hf_linear_attention._common.checkpoint_files import check_checkpoint, read_modules, weight_files
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.reading import reading, require_permission


# The files of a hub repository that a conversion may need; other formats of the same weights are not downloaded.
HUB_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "*.safetensors", "README.md")
HUB_IGNORED = ("onnx/*", "openvino/*", "coreml/*", "original/*", "consolidated*", "*.fp16.safetensors")
DTYPE_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Shape, dtype and file of one tensor; `dtype` is spelled as in torch, without `torch.`."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


@dataclass(frozen=True)
class Source:
    """A checkpoint folder.

    Args:
        name: the hub name or folder that was given.
        root: the folder of the checkpoint.
        folder: the folder with config.json and weights; a sentence-transformers model may have it inside of `root`.
        weights: the weight files.
        modules: the list in modules.json; None if the checkpoint is not a sentence-transformers model.
    """

    name: str
    root: Path
    folder: Path
    weights: tuple[Path, ...]
    modules: tuple[Mapping[str, Any], ...] | None

    @property
    def is_pickled(self) -> bool:
        """Whether the weights are pickles."""
        return any(path.suffix == ".bin" for path in self.weights)

    @property
    def config_file(self) -> Path:
        """The file that describes the model."""
        return self.folder / "config.json"

    @property
    def loadable(self) -> str:
        """The argument for `from_pretrained`: the hub name or the folder."""
        is_hub_model = self.folder == self.root and not Path(self.name).expanduser().is_dir()
        return self.name if is_hub_model else str(self.folder)

    @functools.cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor of the weight files, from their headers only.

        Raises:
            UsageError: if a file is damaged.
        """
        found: dict[str, TensorInfo] = {}
        for path in self.weights:
            found.update(_pickled_tensors(path) if self.is_pickled else _safetensors_header(path))
        return found

    def read(self, name: str) -> torch.Tensor:
        """One tensor; from safetensors, only its own bytes are read."""
        path = self.tensors[name].file
        if path.suffix == ".bin":
            return _load_pickle(path)[name]
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)


def open_source(name: str, allow_pickle: bool = False, option: str = "model_name_or_path") -> Source:
    """Find the files of a checkpoint in a folder or on the hub; `option` has named it.

    Raises:
        UsageError: if there is no such checkpoint, or it does not have a form that can be converted.
    """
    root = _root(name, allow_pickle, option)
    modules = _first_module(root)
    folder = root / modules[0]["path"] if modules else root
    for part in {root, folder}:
        check_checkpoint(part)
    if (folder / "adapter_config.json").is_file():
        raise UsageError(f"{name} contains an adapter; merge it into its base model (PEFT `merge_and_unload`) first")
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{name} contains no config.json, so it is not a transformers checkpoint; give the folder that has one"
        )
    return Source(name, root, folder, _weight_files(name, folder, allow_pickle), modules)


def _root(name: str, allow_pickle: bool, option: str) -> Path:
    path = Path(name).expanduser()
    if os.path.isdir(path):  # unlike `Path.is_dir`, it is False below a folder that this user may not read
        require_permission(path)
        return path.resolve()
    if os.path.exists(path):
        raise UsageError(f"`--{option}` = {name!r} is a file; give the folder that contains config.json")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UsageError(f"`--{option}` = {name!r}: there is no such folder")
    patterns = [*HUB_PATTERNS, "*.bin"] if allow_pickle else list(HUB_PATTERNS)
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=list(HUB_IGNORED)))
    except (OSError, ValueError) as error:
        raise UsageError(f"`--{option}` = {name!r} is not a folder, and {_hub_problem(error)}") from error


def _hub_problem(error: Exception) -> str:
    """The problem that `snapshot_download` met, as the end of a sentence."""
    what = "could not be fetched from the hub"
    if isinstance(error, (RepositoryNotFoundError, HFValidationError)) and not isinstance(error, GatedRepoError):
        what = "no model on the hub"
    # Where the hub cannot be reached, the error is about the cache, and its cause says why.
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
    reason = " ".join(str(cause or error).rpartition("\n\n")[2].split())
    return f"{what}: {reason.split('. ')[0]}"


def _first_module(root: Path) -> tuple[Mapping[str, Any], ...] | None:
    """The modules of a sentence-transformers checkpoint, if its first one is a transformer with a config of its own."""
    path = root / "modules.json"
    if not path.is_file():
        return None
    modules = read_modules(root)
    if not modules or not (root / modules[0]["path"] / "config.json").is_file():
        raise UsageError(f"{path} does not begin with a transformer in this folder; give the transformer's own folder")
    return tuple(modules)


def _weight_files(name: str, folder: Path, allow_pickle: bool) -> tuple[Path, ...]:
    found = tuple(weight_files(folder))
    if not found:
        raise UsageError(f"{name} contains no weights: neither model.safetensors nor model.safetensors.index.json")
    if found[0].suffix != ".safetensors" and not allow_pickle:
        raise UsageError(
            f"{name} has its weights only as pickles ({found[0].name}); give `--allow_pickle` if you trust their "
            "origin, or save the model with `save_pretrained`, which writes safetensors"
        )
    return found


def _safetensors_header(path: Path) -> dict[str, TensorInfo]:
    with reading(path, "get the file again"), safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (a handle, not a dict)
        return {
            name: TensorInfo(tuple(part.get_shape()), DTYPE_NAMES.get(part.get_dtype(), part.get_dtype()), path)
            for name, part in slices.items()
        }


def _pickled_tensors(path: Path) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), path)
        for name, tensor in _load_pickle(path).items()
    }


@functools.lru_cache(maxsize=1)
def _load_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickle; with `weights_only` the unpickler refuses everything but tensors and containers."""
    with reading(path, "get the file again, or save the model as safetensors"):
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if not isinstance(tensors, dict) or not all(isinstance(entry, torch.Tensor) for entry in tensors.values()):
        raise UsageError(f"{path} holds other things than tensors by name; save the model with `save_pretrained`")
    return tensors
