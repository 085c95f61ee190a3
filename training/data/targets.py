"""Pairs of a source and a target text (`--task seq2seq_lm`): the encoder reads one, the decoder writes the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_linear_attention.training.data.examples import finished
from hf_linear_attention.training.data.packing import Example, Examples, Tokens
from hf_linear_attention.training.data.tokenization import tokenize_texts
from hf_linear_attention.training.recipe import Recipe


class Targets:
    """One example per pair: the tokens of the source as input_ids, and those of the target as targets."""

    def __init__(self, sources: Sequence[Tokens], targets: Sequence[Tokens]) -> None:
        self.sources, self.targets = sources, targets

    @property
    def lengths(self) -> Tokens:
        """The number of tokens of every pair."""
        pairs = zip(self.sources, self.targets, strict=True)
        return np.array([len(source) + len(target) for source, target in pairs], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Example:
        return {"input_ids": self.sources[index], "targets": self.targets[index]}


def target_examples(
    recipe: Recipe,
    rows: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    classes: dict[str, int] | None,
    split: str,
) -> Examples:
    """The pairs of the usable rows of one split; source and target are each cut to `max_length` tokens."""
    cut: dict[str, Any] = {"add_special_tokens": True, "truncation": True, "max_length": max_length}
    sources = tokenize_texts(list(rows[recipe.data.text_column_name]), tokenizer, **cut)
    targets = target_tokens(list(rows[str(recipe.data.text_pair_column_name)]), tokenizer, max_length)
    return finished(Targets(sources, targets), recipe, split)


def target_tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[Tokens]:
    """The tokens of texts that a decoder predicts; each ends, so that the decoder learns to end."""
    end = tokenizer.eos_token_id
    found = tokenizer(text_target=texts, truncation=True, max_length=max_length, return_attention_mask=False)
    rows = [list(ids) for ids in found["input_ids"]]
    return [np.array(ids if end is None or end in ids else [*ids[: max_length - 1], end], np.int64) for ids in rows]
