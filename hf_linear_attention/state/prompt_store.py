# SPDX-License-Identifier: Apache-2.0
"""A folder of prompt states: what many prompts begin with is read once.

    store = PromptStore(model, "prompts", max_bytes=2 * 1024**3)
    cache = store.read(input_ids)                                # the longest stored beginning, and the rest of it
    model.generate(input_ids, past_key_values=cache)

The state after every `boundary` tokens is one file (`prompt_state.py`), named by a hash of all tokens before it, so
that a prompt finds the longest beginning that it shares with any earlier one, in this process or another. The file
holds this hash too, so that a file that was renamed or copied over another serves no other prompt.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from transformers import DynamicCache
from transformers.utils import logging

from ..attention.transformers_internals import cache_among, cache_argument
from .prompt_state import identity_of, read_prompt_state, refuse_others, with_format_version, write_prompt_state


logger = logging.get_logger(__name__)


ABOUT = "prompt_store.json"
SUFFIX = ".safetensors"


class PromptStore:
    """The states of the prompts that one model has read.

    Several processes may use a folder at once: every file appears complete, and one that another process has removed
    is read again.

    Args:
        model: a converted decoder in evaluation mode.
        folder: created if it does not exist.
        boundary: a state is stored after every multiple of this number of tokens.
        max_bytes: if the files together are larger, those that were not used for longest are removed; None: no limit.

    Raises:
        ValueError: for a folder of another model, other settings or other weights, or impossible numbers.
    """

    def __init__(
        self, model: Any, folder: str | os.PathLike, *, boundary: int = 1024, max_bytes: int | None = None
    ) -> None:
        for name, value in (("boundary", boundary), ("max_bytes", max_bytes)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"Got `{name}` = {value!r}; it must be a whole number above 0.")
        self.model, self.folder, self.boundary, self.max_bytes = model, Path(folder), boundary, max_bytes
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"Got {str(folder)!r}, which is not a folder; give the path of a folder or of a new one.")
        self.folder.mkdir(parents=True, exist_ok=True)
        about = self.folder / ABOUT
        if not about.is_file():
            written = about.with_name(f"{ABOUT}.{os.getpid()}")
            written.write_text(json.dumps(identity_of(model)), encoding="utf-8")
            os.replace(written, about)
        refuse_others(model, _read_about(about), about)

    @torch.no_grad()
    def read(self, input_ids: torch.Tensor) -> DynamicCache | None:
        """The state of a prompt up to its last boundary, which leaves at least one token for `generate` to read.

        What no file holds is read now and stored.

        Args:
            input_ids: the tokens of one prompt, int64 `[1, N]`, without padding.

        Returns:
            A cache that belongs to the caller; None if the prompt has at most `boundary` tokens.

        Raises:
            ValueError: if `input_ids` has another shape, or a single state is larger than `max_bytes`.
        """
        paths = dict(self._paths(input_ids))
        length, cache = self._longest(paths)
        for end in sorted(paths):
            if end > length:
                # The base model computes no logits, of which one would need those of the last token only.
                base = self.model.base_model
                output = base(input_ids=input_ids[:, length:end], use_cache=True, **cache_argument(base, cache))
                cache = cast(DynamicCache, cache_among(output.values()))
                self._store(cache, paths[end])
                length = end
        return cache

    def length_of(self, input_ids: torch.Tensor) -> int:
        """The number of tokens at the start of a prompt that a stored state holds; 0 without one."""
        return max((length for length, path in self._paths(input_ids) if path.is_file()), default=0)

    def _paths(self, input_ids: torch.Tensor) -> Iterator[tuple[int, Path]]:
        """(number of tokens, file) at every boundary before the last token, the shortest first."""
        if not isinstance(input_ids, torch.Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"Got `input_ids` = {input_ids!r}; pass a tensor of token ids, int64 [1, tokens].")
        if input_ids.ndim != 2 or input_ids.shape[0] != 1:
            raise ValueError(
                f"Got `input_ids` of shape {list(input_ids.shape)}; pass one prompt at a time, [1, tokens], without "
                "padding. For a batch with one prompt, call `cache.batch_repeat_interleave` afterwards."
            )
        digest, tokens = hashlib.sha256(), input_ids[0].to("cpu", torch.int64).numpy()
        size = self.model.get_input_embeddings().weight.shape[0]
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < size:
            raise ValueError(f"Got `input_ids` from {tokens.min()} to {tokens.max()}; give ids from 0 to {size - 1}.")
        for end in range(self.boundary, len(tokens), self.boundary):
            digest.update(tokens[end - self.boundary : end].tobytes())
            yield end, self.folder / f"{end}-{digest.hexdigest()}{SUFFIX}"

    def _longest(self, paths: dict[int, Path]) -> tuple[int, DynamicCache | None]:
        for length in sorted(paths, reverse=True):
            path = paths[length]
            try:
                about, cache = read_prompt_state(self.model, path)
                # Files of earlier versions do not say which tokens they hold.
                is_other = about["format_version"] > 2 and about.get("tokens") != path.stem.split("-")[1]
                if about["num_tokens"] != length or is_other:
                    raise ValueError(f"{path} holds the state of another prompt; this one is read again.")
                os.utime(path)  # the time of its last use
            except FileNotFoundError:
                continue
            except ValueError as error:  # damaged: the prompt is read again, and the file replaced
                logger.warning(str(error))
                continue
            return length, cache
        return 0, None

    def _store(self, cache: Any, path: Path) -> None:
        write_prompt_state(self.model, cache, path, tokens=path.stem.split("-")[1])
        if self.max_bytes is None:
            return
        size = path.stat().st_size
        if size > self.max_bytes:
            path.unlink()
            raise ValueError(f"`max_bytes` = {self.max_bytes:,}, but one state of this model takes {size:,}.")
        files = []
        for other in self.folder.glob(f"*{SUFFIX}"):
            try:
                files.append((other.stat().st_mtime_ns, other.stat().st_size, other))
            except FileNotFoundError:  # another process was faster
                continue
        total = sum(size for _, size, _ in files)
        for _, size, other in sorted(files):
            if total <= self.max_bytes:
                return
            if other != path:
                other.unlink(missing_ok=True)
                total -= size


def _read_about(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove its folder, and prompts are read again.") from error
    if not isinstance(about, dict):
        raise ValueError(f"{path} holds no JSON object; remove its folder, and prompts are read again.")
    return with_format_version(about, path)
