"""Texts to token ids, kept on the disk: the second run of a command finds them, whatever it trains.

    <datasets cache>/hf_linear_attention_tokens/<key>.tokens.npy     int32, all texts one after the other
    <datasets cache>/hf_linear_attention_tokens/<key>.lengths.npy    tokens of each text; written last

The key is a SHA-256 of the texts, of all that the tokenizer does to them, and of the options of the call.
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

BATCH = 1000  # texts in one call of the tokenizer

FOLDER = "hf_linear_attention_tokens"


def document_tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase, task: str, max_length: int) -> list[Tokens]:
    """Texts as documents of a task, for data that is tokenised as it comes; those without a token are left out."""
    if task != "causal_lm":
        options: dict[str, Any] = {"truncation": True, "max_length": max_length}
        found = [np.array(ids, np.int64) for ids in _fields(tokenizer, texts, None, "input_ids", options)]
        return [ids for ids in found if len(ids)]
    ends = document_ends(tokenizer)
    ids = _fields(tokenizer, texts, None, "input_ids", {"add_special_tokens": False})
    return [joined(ends[0], np.array(tokens, np.int64), ends[1]) for tokens in ids if tokens]


def document_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int | None]:
    """What goes before and after a document: its BOS, or else its EOS."""
    bos = tokenizer.bos_token_id
    return bos, (None if bos is not None else tokenizer.eos_token_id)


def joined(first: int | None, tokens: Tokens, last: int | None = None) -> Tokens:
    before = [] if first is None else [first]
    after = [] if last is None else [last]
    return np.concatenate([np.array(before, np.int64), tokens, np.array(after, np.int64)])


def paragraphs(text: str) -> list[str]:
    """What blank lines separate; the lines, when there is no blank line."""
    found = re.split(r"\n(?:[ \t\r]*\n)+", text.strip())
    return [paragraph for paragraph in (found if len(found) > 1 else text.splitlines()) if paragraph.strip()]


def tokenize_texts(
    texts: list[str],
    tokenizer: PreTrainedTokenizerBase,
    field: str = "input_ids",
    pairs: list[str] | None = None,
    **options: Any,
) -> list[Tokens]:
    """`field` of what the tokenizer returns for every text, or for every text and the one it is paired with."""

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
    # verbose=False: a whole file is longer than the model's limit on purpose, it is cut afterwards
    options = {**options, "return_token_type_ids": field == "token_type_ids"}
    return tokenizer(texts, pairs, return_attention_mask=False, verbose=False, **options)[field]


def cached(
    tokenize: Callable[[], list[Tokens]],
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    options: dict[str, Any],
) -> list[Tokens]:
    """What `tokenize()` returns, or has returned for the same texts, tokenizer and options."""
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
    logger.info("tokens of %d texts from %s", len(texts), folder)
    tokens, lengths = np.load(paths[0]), np.load(paths[1])
    return [part.astype(np.int64) for part in np.split(tokens, np.cumsum(lengths)[:-1])] if len(lengths) else []


def _key(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> str | None:
    """None for a tokenizer in Python: what it does cannot be seen from outside."""
    if not tokenizer.is_fast:
        return None
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state |= {"truncation": None, "padding": None}  # those of the last call
    digest = hashlib.sha256(json.dumps([state, options, tokenizer.truncation_side], sort_keys=True).encode())
    for text in texts:
        content = text.encode("utf-8", errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _write(path: Path, array: Tokens) -> None:
    """Complete under its name, also when several processes write it."""
    beside = path.with_name(f".{secrets.token_hex(8)}-{path.name}")  # process numbers repeat on a shared disk
    np.save(beside, array)
    beside.replace(path)
