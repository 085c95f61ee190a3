"""Tokenization of texts. `datasets` keeps the tokens on disk: a second run on the same texts finds those of the first.

The key is a hash of the texts, the state of the tokenizer, and the options of the call.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from hf_linear_attention.training.data.packing import Tokens


FOLDER = "hf_linear_attention_tokens"


def tokenize_texts(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, pairs: list[str] | None = None, **options: Any
) -> dict[str, list[Tokens]]:
    """The fields of the tokenizer's output, such as `input_ids`, for every text or pair of a text with that in `pairs`.

    Args:
        **options: keywords for the tokenizer.
    """

    def tokenize(places: list[int]) -> dict[str, Any]:
        chosen = slice(places[0], places[-1] + 1)
        return fields(texts[chosen], tokenizer, pairs and pairs[chosen], **options)

    if not texts:
        return {"input_ids": []}
    key = _key(texts, tokenizer, pairs, options)
    found = datasets.Dataset.from_dict({"place": list(range(len(texts)))}).map(
        tokenize,
        input_columns="place",
        remove_columns="place",
        batched=True,
        desc="tokenizing",
        new_fingerprint=key or "not_kept",
        cache_file_name=key and str(Path(datasets.config.HF_DATASETS_CACHE) / FOLDER / f"{key}.arrow"),
    )
    return {name: _rows(found.data.column(name)) for name in found.column_names}


def fields(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, pairs: list[str] | None = None, **options: Any
) -> dict[str, list[list[int]]]:
    """The fields of the tokenizer's output, as lists."""
    # verbose=False suppresses a warning: a whole file is longer than the model's limit on purpose, and is cut later.
    options = {"return_token_type_ids": False, **options}
    return dict(tokenizer(texts, pairs, return_attention_mask=False, verbose=False, **options))


def _key(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, pairs: list[str] | None, options: dict[str, Any]
) -> str | None:
    """The key of a result; None for a tokenizer written in Python, whose state cannot be hashed."""
    if not tokenizer.is_fast:
        return None
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state |= {"truncation": None, "padding": None}  # these are left over from the last call
    return Hasher.hash(
        [json.dumps(state, sort_keys=True), tokenizer.truncation_side, texts, pairs, sorted(options.items())]
    )


def _rows(column: Any) -> list[Tokens]:
    """The rows of a column of `datasets`."""
    rows: list[Tokens] = []
    for chunk in column.chunks:
        ends = np.cumsum(chunk.value_lengths().to_numpy())
        rows += np.split(chunk.flatten().to_numpy().astype(np.int64), ends[:-1])
    return rows


def document_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int | None]:
    """The ids of the tokens before and after a document: a BOS token before it, or otherwise an EOS token after it."""
    bos = tokenizer.bos_token_id
    return bos, (None if bos is not None else tokenizer.eos_token_id)


def joined(first: int | None, tokens: Tokens, last: int | None = None) -> Tokens:
    """`tokens` with the ids `first` before and `last` after them; None adds nothing."""
    before = [] if first is None else [first]
    after = [] if last is None else [last]
    return np.concatenate([before, tokens, after]).astype(np.int64)


def paragraphs(text: str) -> list[str]:
    """The parts of `text` that blank lines separate, or its lines if there is no blank line."""
    found = re.split(r"\n(?:[ \t\r]*\n)+", text.strip())
    return [paragraph for paragraph in (found if len(found) > 1 else text.splitlines()) if paragraph.strip()]
