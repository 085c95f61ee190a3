"""Words with classes (`--task token_classification`): a row is a list of words and, with labels, a class for each.

The first token of a word carries its class; the other tokens of the word, and special tokens, carry none (IGNORED).
"""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_linear_attention._common.errors import DataError, SetupError
from hf_linear_attention.training.data.examples import finished
from hf_linear_attention.training.data.labels import label_names
from hf_linear_attention.training.data.packing import IGNORED, Documents, Examples, Tokens
from hf_linear_attention.training.data.rows import path_of, require_column, without_bad
from hf_linear_attention.training.recipe import Recipe


def usable_words(recipe: Recipe, rows: datasets.Dataset, split: str) -> datasets.Dataset:
    """`rows` without the bad ones, which have no list of words or, where there are labels, not one for each word.

    Raises:
        DataError: if there are bad rows that may not be skipped, or no column with the words.
    """
    data = recipe.data
    require_column(rows, "text_column_name", data.text_column_name)
    labels = list(rows[data.label_column_name]) if data.label_column_name in rows.column_names else None
    bad: dict[int, str] = {}
    for number, words in enumerate(rows[data.text_column_name]):
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            bad[number] = f"`{data.text_column_name}` is {words!r}, not a list of words"
        elif labels is not None and (not isinstance(labels[number], list) or len(labels[number]) != len(words)):
            bad[number] = f"`{data.label_column_name}` has not one class for each of the {len(words)} words"
    return without_bad(rows, bad, data, split)


def word_examples(
    recipe: Recipe,
    rows: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    classes: dict[str, int] | None,
    split: str,
) -> Examples:
    """One example per row, cut to `max_length` tokens.

    Raises:
        SetupError: if the tokenizer cannot tell which word a token belongs to.
        DataError: if labels are needed and missing, or a class is unknown.
    """
    if not tokenizer.is_fast:
        raise SetupError(
            f"{type(tokenizer).__name__} does not tell which word a token belongs to; convert it to a fast tokenizer "
            "(tokenizer.json), or give one with `--tokenizer_name`"
        )
    name = recipe.data.label_column_name
    has_labels = name in rows.column_names
    if not has_labels and (split == "validation" or recipe.objective.task_loss_weight):
        columns = ", ".join(rows.column_names)
        raise DataError(f"`--label_column_name {name}` is not a column of the {split} data; it has {columns}")
    options: dict[str, Any] = {"truncation": True, "max_length": max_length, "is_split_into_words": True}
    found = tokenizer(list(rows[recipe.data.text_column_name]), return_attention_mask=False, verbose=False, **options)
    documents = [np.array(ids, np.int64) for ids in found["input_ids"]]
    if not has_labels:
        return finished(Documents(documents, None), recipe, split)
    known = classes or {}
    names = label_names(rows, name, path_of(recipe.data, split), of_words=True)
    if unknown := sorted({entry for row in names for entry in row} - set(known)):
        raise DataError(
            f"there are unknown classes in the {split} data: {unknown[:10]}; the known classes are {sorted(known)}"
        )
    labels = [_aligned(found.word_ids(number), [known[entry] for entry in row]) for number, row in enumerate(names)]
    return finished(Documents(documents, labels), recipe, split)


def _aligned(words: list[int | None], labels: list[int]) -> Tokens:
    """The label of every token: that of its word if it is the first token of the word, otherwise IGNORED."""
    before = [None, *words[:-1]]
    chosen = [
        labels[word] if word is not None and word != last else IGNORED for word, last in zip(words, before, strict=True)
    ]
    return np.array(chosen, np.int64)
