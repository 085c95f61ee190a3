"""Files and `datasets` data sets to examples of token ids (`packing.py`).

| task                    | .txt                                        | .jsonl, .csv, .tsv, --dataset_name  |
| causal_lm, training     | one stream, cut into blocks                 | BOS + text of a row, joined, blocks |
| causal_lm, evaluation   | overlapping windows, each token scored once | BOS + text of a row, cut            |
| masked_lm, embedding    | a paragraph is a text, cut                  | a row is a text, cut                |
| sequence_classification | refused                                     | a row is a text with class, cut     |

"Cut" is to max_length tokens. Paragraphs are what blank lines separate; in a .txt without blank lines every line is
a text.
A tokenizer without BOS gets its EOS after each text instead. Everything is tokenised at the start, in memory.
"""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from training.arguments import DataArguments, Recipe
from training.errors import TrainingError
from training.packing import Documents, Examples, PackedBlocks, StreamWindows, Tokens, shorten


logger = logging.getLogger(__name__)

# pandas would read a text "null" as missing and join lines at quotes; neither is meant here.
READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {"sample_by": "document"}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {"keep_default_na": False}),
    ".tsv": ("csv", {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "keep_default_na": False}),
}


def load_rows(data: DataArguments, split: str) -> datasets.Dataset | None:
    """The raw rows of `split` ("train" or "validation"), or None when there are none."""
    path = data.train_file if split == "train" else data.validation_file
    if path is not None:
        builder, options = READERS[Path(path).suffix]
        return datasets.load_dataset(builder, data_files=[path], split="train", **options)
    if data.dataset_name is None:
        return None
    splits = datasets.load_dataset(data.dataset_name, data.dataset_config_name)
    if split == "train" and split not in splits:
        raise TrainingError(f"`--dataset_name {data.dataset_name}` has no split `train`, only {', '.join(splits)}")
    return splits.get(split)


def build_examples(
    recipe: Recipe,
    rows: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    classes: dict[str, int] | None,
    split: str,
) -> Examples:
    """Examples of one split; `classes` maps the labels of the data to class indices (classification only)."""
    data, task = recipe.data, recipe.model.task
    path = data.train_file if split == "train" else data.validation_file
    running_text = path is not None and path.endswith(".txt")
    texts = _texts(rows, data, running_text, data.max_eval_chars if split == "validation" else None)
    if task == "causal_lm":
        examples = _causal_examples(texts, tokenizer, max_length, running_text, split == "train")
    else:
        texts = paragraphs(texts[0]) if running_text else texts
        documents = _tokenize(texts, tokenizer, add_special_tokens=True, truncation=True, max_length=max_length)
        labels = _labels(rows, recipe, classes, split) if task == "sequence_classification" else None
        examples = Documents(_without_empty(documents, keep=labels is not None), labels)
    if split == "validation":
        examples = shorten(examples, data.max_eval_samples, data.max_eval_tokens)
    if len(examples) == 0:
        raise TrainingError(f"the {split} data holds no text")
    logger.info("%s: %d examples, %d tokens", split, len(examples), examples.lengths.sum())
    return examples


def _causal_examples(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, max_length: int, running_text: bool, training: bool
) -> Examples:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if running_text:
        stream = _tokenize(["".join(texts)], tokenizer, add_special_tokens=False)[0]
        return PackedBlocks(_joined(bos, stream), max_length) if training else StreamWindows(stream, max_length, bos)
    end = None if bos is not None else eos
    documents = [_joined(bos, tokens, end) for tokens in _tokenize(texts, tokenizer, add_special_tokens=False)]
    if training:
        return PackedBlocks(np.concatenate(documents), max_length)
    return Documents([document[:max_length] for document in documents], "tokens")


def _joined(first: int | None, tokens: Tokens, last: int | None = None) -> Tokens:
    before = [] if first is None else [first]
    after = [] if last is None else [last]
    return np.concatenate([np.array(before, np.int64), tokens, np.array(after, np.int64)])


def _texts(rows: datasets.Dataset, data: DataArguments, running_text: bool, max_chars: int | None) -> list[str]:
    """The texts of `rows`; a running text is one string."""
    if running_text:
        return ["".join(rows["text"])[:max_chars]]
    name = data.text_column_name
    if name not in rows.column_names:
        raise TrainingError(f"`--text_column_name {name}` is not a column; the data has {', '.join(rows.column_names)}")
    texts = list(rows[name])
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise TrainingError(f"row {number} of column `{name}` is {text!r}; allowed is a text")
    return texts


def paragraphs(text: str) -> list[str]:
    """What blank lines separate; the lines, when there is no blank line."""
    pieces = re.split(r"\n(?:[ \t\r]*\n)+", text.strip())
    return [piece for piece in (pieces if len(pieces) > 1 else text.splitlines()) if piece.strip()]


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase, **options: Any) -> list[Tokens]:
    return [np.array(ids, dtype=np.int64) for batch in _batches(texts) for ids in _ids(tokenizer, batch, options)]


def _ids(tokenizer: PreTrainedTokenizerBase, texts: list[str], options: dict[str, Any]) -> list[list[int]]:
    # verbose=False: a whole file is longer than the model's limit on purpose, it is cut afterwards
    return tokenizer(texts, return_attention_mask=False, verbose=False, **options)["input_ids"]


def _batches(texts: list[str], size: int = 1000) -> Iterator[list[str]]:
    for start in range(0, len(texts), size):
        yield texts[start : start + size]


def _without_empty(documents: list[Tokens], keep: bool) -> list[Tokens]:
    """Texts without a token teach nothing; a labelled one must not vanish silently from the accuracy."""
    empty = [number for number, document in enumerate(documents) if len(document) == 0]
    if empty and keep:
        raise TrainingError(f"row {empty[0]} has a label but no text ({len(empty)} such rows); remove them")
    return [document for document in documents if len(document)]


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
