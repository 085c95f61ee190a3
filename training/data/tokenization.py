"""Tokenization of texts, with a cache on the disk: a second run on the same texts finds the tokens of the first.

    <datasets cache>/hf_linear_attention_tokens/<key>.tokens.npy     int32, all texts one after the other
    <datasets cache>/hf_linear_attention_tokens/<key>.lengths.npy    tokens of each text; written last

The key is a SHA-256 of the texts, the state of the tokenizer, and the options of the call.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_linear_attention.training.data.packing import Tokens


logger = logging.getLogger(__name__)

BATCH = 1000  # the number of texts in one call of the tokenizer

FOLDER = "hf_linear_attention_tokens"


def document_tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase, task: str, max_length: int) -> list[Tokens]:
    """The tokens of texts for a task, without those of empty texts; for data that is tokenised as it is read."""
    if task != "causal_lm":
        options: dict[str, Any] = {"truncation": True, "max_length": max_length}
        found = [np.array(ids, np.int64) for ids in _fields(tokenizer, texts, None, "input_ids", options)]
        return [ids for ids in found if len(ids)]
    ends = document_ends(tokenizer)
    ids = _fields(tokenizer, texts, None, "input_ids", {"add_special_tokens": False})
    return [joined(ends[0], np.array(tokens, np.int64), ends[1]) for tokens in ids if tokens]


def document_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int | None]:
    """The ids of the tokens before and after a document: a BOS token before it, or otherwise an EOS token after it."""
    bos = tokenizer.bos_token_id
    return bos, (None if bos is not None else tokenizer.eos_token_id)


def joined(first: int | None, tokens: Tokens, last: int | None = None) -> Tokens:
    """`tokens` with the ids `first` before and `last` after them; None adds nothing."""
    before = [] if first is None else [first]
    after = [] if last is None else [last]
    return np.concatenate([np.array(before, np.int64), tokens, np.array(after, np.int64)])


def paragraphs(text: str) -> list[str]:
    """The parts of `text` that blank lines separate, or its lines if there is no blank line."""
    found = re.split(r"\n(?:[ \t\r]*\n)+", text.strip())
    return [paragraph for paragraph in (found if len(found) > 1 else text.splitlines()) if paragraph.strip()]


def tokenize_texts(
    texts: list[str],
    tokenizer: PreTrainedTokenizerBase,
    field: str = "input_ids",
    pairs: list[str] | None = None,
    **options: Any,
) -> list[Tokens]:
    """One field of the tokenizer's output for every text, or for every pair of a text with that in `pairs`.

    Args:
        field: the field, such as `input_ids` or `token_type_ids`.
        **options: keywords for the tokenizer.
    """

    def tokenize() -> list[Tokens]:
        return [
            np.array(ids, dtype=np.int64)
            for start in range(0, len(texts), BATCH)
            for ids in _fields(
                tokenizer, texts[start : start + BATCH], pairs and pairs[start : start + BATCH], field, options
            )
        ]

    return cached(
        tokenize, [*texts, *(pairs or [])], tokenizer, {**options, "field": field, "pairs": pairs is not None}
    )


def _fields(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], pairs: list[str] | None, field: str, options: dict[str, Any]
) -> list[list[int]]:
    # verbose=False suppresses a warning: a whole file is longer than the model's limit on purpose, and is cut later.
    options = {**options, "return_token_type_ids": field == "token_type_ids"}
    return tokenizer(texts, pairs, return_attention_mask=False, verbose=False, **options)[field]


def cached(
    tokenize: Callable[[], list[Tokens]],
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    options: dict[str, Any],
) -> list[Tokens]:
    """The result of `tokenize()`, or that of an earlier call for the same texts, tokenizer and options."""
    key = _key(texts, tokenizer, options)
    if key is None:
        return tokenize()
    folder = Path(datasets.config.HF_DATASETS_CACHE) / FOLDER
    paths = folder / f"{key}.tokens.npy", folder / f"{key}.lengths.npy"
    if not paths[1].is_file():
        found = tokenize()
        folder.mkdir(parents=True, exist_ok=True)
        _write(paths[0], np.concatenate([np.empty(0, np.int32), *found]).astype(np.int32))
        _write(paths[1], np.array([len(tokens) for tokens in found], np.int64))
        return found
    logger.info("the tokens of %d texts were read from %s", len(texts), folder)
    tokens, lengths = np.load(paths[0]), np.load(paths[1])
    return [part.astype(np.int64) for part in np.split(tokens, np.cumsum(lengths)[:-1])] if len(lengths) else []


def _key(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> str | None:
    """The key of a result in the cache; None for a tokenizer written in Python, whose state cannot be hashed."""
    if not tokenizer.is_fast:
        return None
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state |= {"truncation": None, "padding": None}  # these are left over from the last call
    digest = hashlib.sha256(json.dumps([state, options, tokenizer.truncation_side], sort_keys=True).encode())
    for text in texts:
        content = text.encode("utf-8", errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _write(path: Path, array: Tokens) -> None:
    """Write `array` so that the file is complete as soon as it exists, even if several processes write it."""
    # The name is random, because processes on a shared disk can have the same number.
    beside = path.with_name(f".{secrets.token_hex(8)}-{path.name}")
    np.save(beside, array)
    beside.replace(path)
