"""Token ids of a list of texts, kept on the disk: the second run of a command finds them, whatever it trains.

    <datasets cache>/hf_linear_attention_tokens/<key>.tokens.npy     int32, all texts one after the other
    <datasets cache>/hf_linear_attention_tokens/<key>.lengths.npy    tokens of each text; written last

The key is a SHA-256 of the texts, of all that the tokenizer does to them, and of the options of the call.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_linear_attention.training.packing import Tokens


logger = logging.getLogger(__name__)

FOLDER = "hf_linear_attention_tokens"


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
