"""`--dtype` for checkpoints of any size: the source's weights are cast into temporary files, which are then loaded.

transformers memory-maps weights that need no cast, but holds weights that do need one in memory.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from hf_linear_attention.attention.transformers_internals import loaded_dtypes
from hf_linear_attention.conversion.plan import Plan
from hf_linear_attention.conversion.source import Source


FILE_BYTES = 2**26  # the most that is held in memory, except for a single larger tensor


@contextlib.contextmanager
def cast_weights(source: Source, plan: Plan, dtype: str, beside: Path) -> Iterator[Path]:
    """A folder to load the converted model from, whose tensors have the dtypes that loading with `dtype` gives them.

    If there is little to cast, this is the source's own folder; otherwise it is a temporary folder in `beside`, which
    is deleted afterwards. A model loaded from it remains usable.
    """
    wanted = str(getattr(plan.config, "dtype", None) if dtype == "auto" else dtype).removeprefix("torch.")
    others = [info for info in source.tensors.values() if "float" in info.dtype and info.dtype != wanted]
    if wanted == "None" or sum(info.numel for info in others) * getattr(torch, wanted).itemsize <= FILE_BYTES:
        yield source.folder
        return
    with tempfile.TemporaryDirectory(dir=beside) as name:
        folder = Path(name)
        _write(source, _loaded_dtypes(source, plan, wanted), folder)
        for file in (source.folder / CONFIG_NAME, source.folder / GENERATION_CONFIG_NAME):
            if file.is_file():  # if the second is missing, the loader reads the first
                shutil.copy(file, folder)
        yield folder


def _loaded_dtypes(source: Source, plan: Plan, dtype: str) -> dict[str, torch.dtype]:
    """The dtypes by name in the source, as transformers' loader chooses them; some modules stay float32.

    Loading to the meta device would give them too, but needs accelerate.
    """
    loaded = loaded_dtypes(plan.linear_class, copy.deepcopy(plan.config), getattr(torch, dtype))
    return {str(tensor.source): loaded[str(tensor.target)] for tensor in plan.mapped}


def _write(source: Source, dtypes: dict[str, torch.dtype], folder: Path) -> None:
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(_portions(source, dtypes)):
        file = f"model-{number}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")


def _portions(source: Source, dtypes: dict[str, torch.dtype]) -> Iterator[dict[str, torch.Tensor]]:
    """All tensors in portions of about `FILE_BYTES`; each portion is cleared before the next one is made."""
    portion: dict[str, torch.Tensor] = {}
    size = 0
    for name in source.tensors:
        tensor = source.read(name)
        # Tensors in a pickle may share memory, which safetensors does not support, so they are copied.
        portion[name] = tensor.to(dtypes.get(name, tensor.dtype), copy=True, memory_format=torch.contiguous_format)
        size += portion[name].nbytes
        if size >= FILE_BYTES:
            yield portion
            portion.clear()
            size = 0
    if portion:
        yield portion
