"""Files and `datasets` data sets to examples of token ids (`packing.py`).

| task                    | .txt                                        | a file of rows, or --dataset_name   |
| causal_lm, training     | one document, cut into blocks               | BOS + text of a row, packed         |
| causal_lm, evaluation   | overlapping windows, each token scored once | BOS + text of a row, cut            |
| masked_lm, embedding    | a paragraph is a text, cut                  | a row is a text, cut                |
| sequence_classification | refused                                     | a row is a text with class, cut     |
| image_classification    | refused                                     | a row is an image with class        |

"Cut" is to max_length tokens; "packed" documents share a block of as many and do not see each other (`packing.py`), but
for `--join_documents`.
Paragraphs are what blank lines separate; in a .txt without blank lines every line is a text.
A tokenizer without BOS gets its EOS after each text instead. Everything is tokenised at the start, and kept for later
runs (`token_cache.py`).
"""

from __future__ import annotations

import logging
import re
from typing import Any

import datasets
import numpy as np
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

from hf_linear_attention._common.errors import TrainingError
from hf_linear_attention.training.images import Images
from hf_linear_attention.training.packing import Documents, Examples, PackedBlocks, StreamWindows, Tokens, shorten
from hf_linear_attention.training.recipe import DataArguments, Recipe
from hf_linear_attention.training.rows import path_of, usable_rows
from hf_linear_attention.training.token_cache import cached


logger = logging.getLogger(__name__)

BATCH = 1000  # texts in one call of the tokenizer


def usable_texts(recipe: Recipe, rows: datasets.Dataset, split: str) -> datasets.Dataset:
    """The rows that `build_examples` takes: a .txt as it is, of others those that are not bad (`rows.usable_rows`)."""
    if _is_running_text(recipe, split):
        return rows
    column, labelled = recipe.data.label_column_name, recipe.model.task == "sequence_classification"
    return usable_rows(rows, recipe.data, split, labelled and column in rows.column_names)


def _is_running_text(recipe: Recipe, split: str) -> bool:
    return (path_of(recipe.data, split) or "").endswith(".txt")


def build_examples(
    recipe: Recipe,
    rows: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    classes: dict[str, int] | None,
    split: str,
) -> Examples:
    """Examples of usable rows of one split; `classes` maps their labels to class indices (classification only)."""
    data, task, running_text = recipe.data, recipe.model.task, _is_running_text(recipe, split)
    texts = _texts(rows, data, running_text, data.max_eval_chars if split == "validation" else None)
    if task == "causal_lm":
        is_training = split == "train"
        examples = _causal_examples(texts, tokenizer, max_length, running_text, is_training, data.join_documents)
    else:
        texts = paragraphs(texts[0]) if running_text else texts
        pairs = list(rows[data.text_pair_column_name]) if data.text_pair_column_name else None
        scores = None
        if task == "embedding" and pairs is not None:
            texts, scores, pairs = [*_interleaved(texts, pairs)], _scores(rows, data, split), None
        cut: dict[str, Any] = {"add_special_tokens": True, "truncation": True, "max_length": max_length}
        documents = _tokenize(texts, tokenizer, pairs=pairs, **cut)
        labels = _labels(rows, recipe, classes, split) if task == "sequence_classification" else scores
        if pairs is None:
            examples = Documents(_without_empty(documents, keep=labels is not None), labels)
        else:
            has_types = "token_type_ids" in tokenizer.model_input_names
            types = _tokenize(texts, tokenizer, "token_type_ids", pairs=pairs, **cut) if has_types else None
            examples = Documents(documents, labels, types)
    if split == "validation":
        examples = shorten(examples, data.max_eval_samples, data.max_eval_tokens)
    if len(examples) == 0:
        raise TrainingError(f"the {split} data holds no text")
    logger.info("%s: %d examples, %d tokens", split, len(examples), examples.lengths.sum())
    return examples


def image_examples(
    recipe: Recipe, rows: datasets.Dataset, processor: BaseImageProcessor, classes: dict[str, int] | None, split: str
) -> Examples:
    """Images of one split, of `rows` that are usable."""
    labels = _labels(rows, recipe, classes, split)
    examples: Examples = Images(rows, recipe.data, split, processor, labels)
    if split == "validation":
        examples = shorten(examples, recipe.data.max_eval_samples, None)
    if len(examples) == 0:
        raise TrainingError(f"the {split} data holds no image")
    logger.info("%s: %d images", split, len(examples))
    return examples


def document_tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase, task: str, max_length: int) -> list[Tokens]:
    """Texts as documents of a task, for data that is tokenised as it comes; those without a token are left out."""
    if task != "causal_lm":
        options: dict[str, Any] = {"truncation": True, "max_length": max_length}
        found = [np.array(ids, np.int64) for ids in _fields(tokenizer, texts, None, "input_ids", options)]
        return [ids for ids in found if len(ids)]
    ends = _ends(tokenizer)
    ids = _fields(tokenizer, texts, None, "input_ids", {"add_special_tokens": False})
    return [_joined(ends[0], np.array(tokens, np.int64), ends[1]) for tokens in ids if tokens]


def _ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int | None]:
    """What goes before and after a document: its BOS, or else its EOS."""
    bos = tokenizer.bos_token_id
    return bos, (None if bos is not None else tokenizer.eos_token_id)


def _causal_examples(
    texts: list[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    running_text: bool,
    training: bool,
    join: bool,
) -> Examples:
    bos, end = _ends(tokenizer)
    if running_text:
        stream = _tokenize(["".join(texts)], tokenizer, add_special_tokens=False)[0]
        return PackedBlocks([_joined(bos, stream)], max_length) if training else StreamWindows(stream, max_length, bos)
    documents = [_joined(bos, tokens, end) for tokens in _tokenize(texts, tokenizer, add_special_tokens=False)]
    if training:
        return PackedBlocks([np.concatenate(documents)] if join else documents, max_length)
    return Documents([document[:max_length] for document in documents], "tokens")


def _joined(first: int | None, tokens: Tokens, last: int | None = None) -> Tokens:
    before = [] if first is None else [first]
    after = [] if last is None else [last]
    return np.concatenate([np.array(before, np.int64), tokens, np.array(after, np.int64)])


def _texts(rows: datasets.Dataset, data: DataArguments, running_text: bool, max_chars: int | None) -> list[str]:
    """The texts of `rows`; a running text is one string."""
    if running_text:
        return ["".join(rows["text"])[:max_chars]]
    return list(rows[data.text_column_name])


def paragraphs(text: str) -> list[str]:
    """What blank lines separate; the lines, when there is no blank line."""
    pieces = re.split(r"\n(?:[ \t\r]*\n)+", text.strip())
    return [piece for piece in (pieces if len(pieces) > 1 else text.splitlines()) if piece.strip()]


def _tokenize(
    texts: list[str],
    tokenizer: PreTrainedTokenizerBase,
    field: str = "input_ids",
    pairs: list[str] | None = None,
    **options: Any,
) -> list[Tokens]:
    """`field` of what the tokenizer returns for every text, or for every text and the one it is paired with."""

    def now() -> list[Tokens]:
        return [
            np.array(ids, dtype=np.int64)
            for start in range(0, len(texts), BATCH)
            for ids in _fields(
                tokenizer, texts[start : start + BATCH], pairs and pairs[start : start + BATCH], field, options
            )
        ]

    return cached(now, [*texts, *(pairs or [])], tokenizer, {**options, "field": field, "pairs": pairs is not None})


def _fields(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], pairs: list[str] | None, field: str, options: dict[str, Any]
) -> list[list[int]]:
    # verbose=False: a whole file is longer than the model's limit on purpose, it is cut afterwards
    options = {**options, "return_token_type_ids": field == "token_type_ids"}
    return tokenizer(texts, pairs, return_attention_mask=False, verbose=False, **options)[field]


def _without_empty(documents: list[Tokens], keep: bool) -> list[Tokens]:
    """Texts without a token teach nothing; a labelled one must not vanish silently from the accuracy."""
    empty = [number for number, document in enumerate(documents) if len(document) == 0]
    if empty and keep:
        raise TrainingError(f"row {empty[0]} has a label but no text ({len(empty)} such rows); remove them")
    return [document for document in documents if len(document)]


def _interleaved(texts: list[str], pairs: list[str]) -> list[str]:
    """Both texts of every pair, one after the other: each is embedded by itself."""
    return [text for pair in zip(texts, pairs, strict=True) for text in pair]


def _scores(rows: datasets.Dataset, data: DataArguments, split: str) -> list[float] | None:
    """The score of every pair, for both of its texts; None in training, which imitates a teacher."""
    name = data.label_column_name
    if split == "train":
        return None
    if name not in rows.column_names:
        raise TrainingError(
            f"`--label_column_name {name}`, the score of each pair, is not a column of the {split} data"
        )
    wrong = [value for value in rows[name] if isinstance(value, bool) or not isinstance(value, (int, float))]
    if wrong:
        raise TrainingError(f"column `{name}` holds {wrong[0]!r}; allowed are scores: numbers")
    return [float(value) for value in rows[name] for _ in range(2)]


def _labels(rows: datasets.Dataset, recipe: Recipe, classes: dict[str, int] | None, split: str) -> list[int] | None:
    """Class index of every row; None when training only imitates a teacher and the data is unlabelled."""
    name = recipe.data.label_column_name
    if name not in rows.column_names:
        if split == "train" and not recipe.objective.task_loss_weight:
            return None
        columns = ", ".join(rows.column_names)
        raise TrainingError(f"`--label_column_name {name}` is not a column of the {split} data; it has {columns}")
    values = label_names(rows, name)
    unknown = sorted({value for value in values if value not in (classes or {})})
    if unknown:
        raise TrainingError(f"unknown classes in the {split} data: {unknown[:10]}; known are {sorted(classes or {})}")
    return [classes[value] for value in values] if classes else None


def label_names(rows: datasets.Dataset, name: str) -> list[str]:
    """The label of every row as text: its name for a `ClassLabel` column, otherwise the value itself."""
    feature = rows.features[name]
    if isinstance(feature, datasets.ClassLabel):
        return [feature.int2str(value) for value in rows[name]]
    values = list(rows[name])
    wrong = [value for value in values if not isinstance(value, (str, int))]
    if wrong:
        raise TrainingError(f"column `{name}` holds {wrong[0]!r}; allowed are classes: whole numbers or names")
    return [str(value) for value in values]
