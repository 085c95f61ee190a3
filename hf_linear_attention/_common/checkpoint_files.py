"""The files of a checkpoint, checked before any library reads them.

`check_checkpoint` looks at every file that transformers, tokenizers or sentence-transformers would read, except for the
values of the weights (`loaded_weights.py`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from safetensors import safe_open

from hf_linear_attention._common.config_fields import check_fields
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.logs import quiet_transformers
from hf_linear_attention._common.reading import AGAIN, read_json, reading, require_file, require_permission, short


# What transformers, tokenizers and sentence-transformers read besides the weights; modules.json alone holds a list.
OBJECTS = (
    "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "preprocessor_config.json", "processor_config.json",
    "video_preprocessor_config.json", "sentence_bert_config.json", "config_sentence_transformers.json",
    "adapter_config.json", "conversion_report.json", "training_report.json",
)  # fmt: skip
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
TEXT_FILES = ("vocab.txt", "merges.txt", "chat_template.jinja")
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
READ_FILES = (*OBJECTS, *INDICES, "modules.json", *TEXT_FILES, *WEIGHT_FILES)


def check_checkpoint(folder: Path) -> None:
    """Refuse (UsageError) damage in the files of a checkpoint that a library will read, except in values of weights."""
    require_permission(folder)
    for name in READ_FILES:
        path = folder / name
        if path.exists() or path.is_symlink():
            require_file(path)
    for name in OBJECTS:
        if (folder / name).is_file():
            check_fields(folder / name, read_json(folder / name))
    if (generation := folder / "generation_config.json").is_file():
        from transformers import GenerationConfig  # takes seconds, and some folders need it not

        with reading(generation), quiet_transformers():
            GenerationConfig.from_dict(read_json(generation))
    if (folder / "modules.json").is_file():
        read_modules(folder)
    for name in TEXT_FILES:
        if (folder / name).is_file():
            _require_utf8(folder / name)
    for weights in weight_files(folder):
        if weights.suffix == ".safetensors":
            check_safetensors(weights)


def read_modules(folder: Path) -> list[dict[str, Any]]:
    """The modules.json of a sentence-transformers checkpoint; UsageError if a module is outside of this folder."""
    path = folder / "modules.json"
    modules = read_json(path, list)
    for number, module in enumerate(modules):
        place = module.get("path") if isinstance(module, dict) else None
        if not (isinstance(place, str) and len(place) < 200 and "\0" not in place) or not (
            (folder / place).resolve().is_relative_to(folder.resolve())
        ):
            raise UsageError(
                f"{path}: entry {number} is {short(module)}; it must be an object whose `path` is a folder inside of "
                f"{folder}; {AGAIN}"
            )
        if not isinstance(module.get("type", ""), str):
            raise UsageError(f"{path}: `type` = {short(module['type'])} of entry {number} must be a text; {AGAIN}")
    return modules


def weight_files(folder: Path) -> list[Path]:
    """The files of the weights: a single one, or those that an index lists; empty if there are none.

    UsageError for a damaged index, or one that names a file that is missing or outside of the folder.
    """
    for name, index in zip(WEIGHT_FILES[:2], INDICES):
        if (folder / name).is_file():
            return [folder / name]
        if (folder / index).is_file():
            return _shards(folder / index)
    return []


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{index}: `weight_map` = {short(weight_map)} must map tensors to files; {AGAIN}")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not re.fullmatch(r"[^/\\\0]{1,200}\.(safetensors|bin)", shard):
            raise UsageError(
                f"{index}: `{tensor}` is in {short(shard)}, which is no weight file of the same folder; {AGAIN}"
            )
    shards = [index.parent / shard for shard in sorted(set(weight_map.values()))]
    if missing := [shard.name for shard in shards if not shard.exists()]:
        raise UsageError(f"{index} lists {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} missing")
    for shard in shards:
        require_file(shard)
    return shards


def check_safetensors(path: Path) -> None:
    """Raise UsageError unless the header of a weight file describes all of its bytes."""
    with reading(path, "get it again"), safe_open(path, framework="numpy"):
        pass


def _require_utf8(path: Path) -> None:
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 (byte {error.start:,}); {AGAIN}") from error
