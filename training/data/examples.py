"""Conversion of files and of `datasets` data sets to examples of token ids (`packing.py`).

| task                    | .txt                                        | a file of rows, or --dataset_name   |
| causal_lm, training     | one document, cut into blocks               | BOS + text of a row, packed         |
| causal_lm, evaluation   | overlapping windows, each token scored once | BOS + text of a row, cut            |
| masked_lm, embedding    | a paragraph is a text, cut                  | a row is a text, cut                |
| sequence_classification | refused                                     | a row is a text with class, cut     |
| seq2seq_lm              | refused                                     | a row is two texts, each cut        |
| question_answering      | refused                                     | a part of a context, and a question |
| token_classification    | refused                                     | a row is words with classes, cut    |
| image_classification    | refused                                     | a row is an image with class        |
| image_embedding         | refused                                     | a row is an image                   |
| speech_seq2seq, ctc     | refused                                     | a row is a recording with text      |

"Cut" texts are truncated to max_length tokens. "Packed" documents share blocks of max_length tokens, and do not attend
to each other (`packing.py`) unless `--join_documents` is given. Paragraphs are separated by blank lines; in a .txt
without blank lines, every line is a text. If the tokenizer has no BOS token, its EOS token follows each text instead.
Everything is tokenised at the start, and the tokens are kept for later runs (`tokenization.py`).
"""

from __future__ import annotations

import logging
from typing import Any

import datasets
import numpy as np
from transformers import BaseImageProcessor, PreTrainedTokenizerBase

from hf_linear_attention._common.errors import DataError
from hf_linear_attention.training.data.images import Images
from hf_linear_attention.training.data.labels import class_labels, pair_scores
from hf_linear_attention.training.data.packing import Documents, Examples, PackedBlocks, StreamWindows, Tokens, shorten
from hf_linear_attention.training.data.rows import path_of, usable_rows
from hf_linear_attention.training.data.tokenization import document_ends, joined, paragraphs, tokenize_texts
from hf_linear_attention.training.recipe import DataArguments, Recipe


logger = logging.getLogger(__name__)


def usable_texts(recipe: Recipe, rows: datasets.Dataset, split: str) -> datasets.Dataset:
    """The rows that `build_examples` accepts: a .txt as it is, otherwise the rows that are not bad (`usable_rows`)."""
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
    """The examples of the usable rows of one split.

    Args:
        max_length: the largest number of tokens in an example.
        classes: class index of every label (sequence_classification only).
        split: "train" or "validation".

    Raises:
        DataError: if the rows hold no text, or labels that cannot be used.
    """
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
            texts, scores, pairs = [*_interleaved(texts, pairs)], pair_scores(rows, data, split), None
        texts = [recipe.text_prompt + text for text in texts] if task == "embedding" else texts
        cut: dict[str, Any] = {"add_special_tokens": True, "truncation": True, "max_length": max_length}
        documents = tokenize_texts(texts, tokenizer, pairs=pairs, **cut)
        labels = class_labels(rows, recipe, classes, split) if task == "sequence_classification" else scores
        if pairs is None:
            examples = Documents(_without_empty(documents, keep=labels is not None), labels)
        else:
            has_types = "token_type_ids" in tokenizer.model_input_names
            types = tokenize_texts(texts, tokenizer, "token_type_ids", pairs=pairs, **cut) if has_types else None
            examples = Documents(documents, labels, types)
    return finished(examples, recipe, split)


def finished(examples: Examples, recipe: Recipe, split: str) -> Examples:
    """The examples of a split, of which an evaluation uses only the first (`--max_eval_samples`, `--max_eval_tokens`).

    Raises:
        DataError: if there are none.
    """
    if split == "validation":
        examples = shorten(examples, recipe.data.max_eval_samples, recipe.data.max_eval_tokens)
    if len(examples) == 0:
        what = {"text": "text", "images": "image", "sound": "recording"}[recipe.task.inputs]
        raise DataError(f"the {split} data holds no {what}; check the file or folder and its columns")
    logger.info("%s: %d examples, %d %s", split, len(examples), examples.lengths.sum(), recipe.unit)
    return examples


def image_examples(
    recipe: Recipe,
    rows: datasets.Dataset,
    processor: BaseImageProcessor,
    max_length: int,
    classes: dict[str, int] | None,
    split: str,
) -> Examples:
    """The images of the usable rows of one split, as examples.

    Raises:
        DataError: if there are none, or their labels cannot be used.
    """
    labels = class_labels(rows, recipe, classes, split) if recipe.task.logits is not None else None
    images: Examples = Images(rows, recipe.data, split, processor, labels)
    return finished(images, recipe, split)


def _causal_examples(
    texts: list[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    running_text: bool,
    training: bool,
    join: bool,
) -> Examples:
    bos, end = document_ends(tokenizer)
    if running_text:
        stream = tokenize_texts(["".join(texts)], tokenizer, add_special_tokens=False)[0]
        return PackedBlocks([joined(bos, stream)], max_length) if training else StreamWindows(stream, max_length, bos)
    documents = [joined(bos, tokens, end) for tokens in tokenize_texts(texts, tokenizer, add_special_tokens=False)]
    if training:
        return PackedBlocks([np.concatenate(documents)] if join else documents, max_length)
    return Documents([document[:max_length] for document in documents], "tokens")


def _texts(rows: datasets.Dataset, data: DataArguments, running_text: bool, max_chars: int | None) -> list[str]:
    """The texts of `rows`; those of a running text are joined into one."""
    if running_text:
        return ["".join(rows["text"])[:max_chars]]
    return list(rows[data.text_column_name])


def _without_empty(documents: list[Tokens], keep: bool) -> list[Tokens]:
    """The documents that have tokens.

    Raises:
        DataError: if a document is empty and `keep` is set, because accuracy must count every labelled text.
    """
    empty = [number for number, document in enumerate(documents) if len(document) == 0]
    if empty and keep:
        raise DataError(
            f"row {empty[0]} has a label, but its text has no tokens (as in {len(empty)} row(s)); remove such rows"
        )
    return [document for document in documents if len(document)]


def _interleaved(texts: list[str], pairs: list[str]) -> list[str]:
    """The texts of all pairs, those of a pair one after the other; every text is embedded separately."""
    return [text for pair in zip(texts, pairs, strict=True) for text in pair]
