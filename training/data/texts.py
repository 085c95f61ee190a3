"""Conversion of texts, from files and `datasets` data sets, to examples of token ids (`packing.py`).

| task                    | .txt                                        | a file of rows, or --dataset_name   |
| causal_lm, training     | one document, cut into blocks               | BOS + text of a row, packed         |
| causal_lm, evaluation   | overlapping windows, each token scored once | BOS + text of a row, cut            |
| masked_lm, embedding    | a paragraph is a text, cut                  | a row is a text, cut                |
| sequence_classification | refused                                     | a row is a text with class, cut     |
| seq2seq_lm              | refused                                     | a row is two texts, each cut        |

"Cut" texts are truncated to max_length tokens. "Packed" documents are joined to one text, which is cut into blocks of
max_length tokens. Paragraphs are separated by blank lines; in a .txt without blank lines, every line is a text. If the
tokenizer has no BOS token, its EOS token follows each text instead.
Everything is tokenised at the start. `datasets` keeps the tokens on disk, so that a second run on the same texts finds
those of the first: their key is a hash of the texts, the state of the tokenizer, and the options of the call.

Rows of causal_lm may hold conversations instead, in the form of chat templates: who says what.

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning."}]}

The tokenizer's chat template makes one text of a conversation. Only what the assistant says is learned, with the
token that ends it. Conversations are not packed, and are cut to `--max_length` tokens.
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

from hf_linear_attention._common.errors import DataError, SetupError
from hf_linear_attention.training.data.packing import (
    IGNORED,
    Blocks,
    Documents,
    Examples,
    Part,
    StreamWindows,
    Tokens,
    finished,
)
from hf_linear_attention.training.data.processors import bos_of
from hf_linear_attention.training.data.rows import (
    bad_texts,
    class_labels,
    missing_labels,
    pair_scores,
    path_of,
    refuse_bad,
    require_column,
)
from hf_linear_attention.training.tasks import MESSAGES


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


def joined(first: int | None, tokens: Tokens, last: int | None = None) -> Tokens:
    """`tokens` with the ids `first` before and `last` after them; None adds nothing."""
    before = [] if first is None else [first]
    after = [] if last is None else [last]
    return np.concatenate([before, tokens, after]).astype(np.int64)


def paragraphs(text: str) -> list[str]:
    """The parts of `text` that blank lines separate, or its lines if there is no blank line."""
    found = re.split(r"\n(?:[ \t\r]*\n)+", text.strip())
    return [paragraph for paragraph in (found if len(found) > 1 else text.splitlines()) if paragraph.strip()]


ASSISTANT = "assistant"


def check_texts(part: Part) -> None:
    """Refuse rows that lack a text or, for a classifier, a label, where there are labels; a .txt is accepted as it is.

    Raises:
        DataError: if there are any, or no column with the texts.
    """
    data, rows = part.recipe.data, part.rows
    if _is_running_text(part):
        return
    named = {"text_column_name": data.text_column_name, "text_pair_column_name": data.text_pair_column_name}
    columns = {option: name for option, name in named.items() if name is not None}
    for option, name in columns.items():
        require_column(rows, option, name)
    labelled = part.recipe.model.task == "sequence_classification"
    missing = missing_labels(rows, data.label_column_name) if labelled else {}
    refuse_bad(missing | bad_texts(rows, columns.values()), data, part.split)


def _is_running_text(part: Part) -> bool:
    return (path_of(part.recipe.data, part.split) or "").endswith(".txt")


def build_examples(part: Part) -> Examples:
    """The examples of the rows of one split.

    Raises:
        DataError: if the rows hold no text, or labels that cannot be used.
    """
    recipe, rows, tokenizer, max_length = part.recipe, part.rows, part.processor, part.max_length
    data, task, running_text = recipe.data, recipe.model.task, _is_running_text(part)
    texts = ["".join(rows["text"])] if running_text else list(rows[data.text_column_name])
    if task == "causal_lm":
        return finished(_causal_examples(part, texts, running_text), part)
    texts = paragraphs(texts[0]) if running_text else texts
    pairs = list(rows[data.text_pair_column_name]) if data.text_pair_column_name else None
    labels: list[Any] | None = None
    if task == "sequence_classification":
        labels = class_labels(part)
    elif task == "embedding" and pairs is not None:  # every text of a pair is embedded separately
        labels = pair_scores(part)
        texts, pairs = [text for pair in zip(texts, pairs, strict=True) for text in pair], None
    types = pairs is not None and "token_type_ids" in tokenizer.model_input_names
    columns = tokenize_texts(
        texts, tokenizer, pairs, return_token_type_ids=types, truncation=True, max_length=max_length
    )
    documents = columns.pop("input_ids")
    if pairs is None:
        empty = [number for number, document in enumerate(documents) if len(document) == 0]
        if empty and labels is not None:  # accuracy must count every labelled text
            raise DataError(f"row {empty[0]} has a label, but no tokens (as {len(empty)} row(s)); remove such rows")
        documents = [document for document in documents if len(document)]
    return finished(Documents(documents, labels, **columns), part)


def _causal_examples(part: Part, texts: list[str], running_text: bool) -> Examples:
    tokenizer, max_length, training = part.processor, part.max_length, part.split == "train"
    bos = bos_of(tokenizer)  # before a document, or otherwise an EOS token after it
    end = None if bos is not None else tokenizer.eos_token_id
    found = tokenize_texts(texts, tokenizer, add_special_tokens=False)["input_ids"]
    if running_text and not training:
        return StreamWindows(found[0], max_length, bos)
    documents = [joined(bos, tokens, None if running_text else end) for tokens in found]
    if training:
        return Blocks(np.concatenate(documents), max_length)
    return Documents([document[:max_length] for document in documents], "tokens")


def target_examples(part: Part) -> Examples:
    """The sources and targets of the rows of one split, each cut to `max_length` tokens."""
    rows, data, tokenizer, max_length = part.rows, part.recipe.data, part.processor, part.max_length
    sources = tokenize_texts(list(rows[data.text_column_name]), tokenizer, truncation=True, max_length=max_length)
    texts, end = list(rows[str(data.text_pair_column_name)]), tokenizer.eos_token_id
    found = tokenizer(text_target=texts, truncation=True, max_length=max_length, return_attention_mask=False)
    # Each ends, so that the decoder learns to end.
    targets = [
        np.array(ids if end is None or end in ids else [*ids[: max_length - 1], end], np.int64)
        for ids in found["input_ids"]
    ]
    return finished(Documents(sources["input_ids"], None, targets=targets), part)


def _is_conversation(part: Part) -> bool:
    return "text_column_name" not in part.recipe.given and MESSAGES in part.rows.column_names


def check_language(part: Part) -> None:
    """Refuse rows without a text or, for conversations, without an answer.

    Raises:
        DataError: if there are any.
    """
    recipe, rows, split = part.recipe, part.rows, part.split
    if not _is_conversation(part):
        check_texts(part)
        return
    bad = {number: text for number, row in enumerate(rows[MESSAGES]) if (text := _problem(row)) is not None}
    refuse_bad(bad, recipe.data, split)


def _problem(messages: Any) -> str | None:
    """The problem of a conversation, as a clause."""
    is_list = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    if not is_list or not all(isinstance(m.get(name), str) for m in messages for name in ("role", "content")):
        return f"`{MESSAGES}` is not a list of messages with `role` and `content`"
    return None if any(m["role"] == ASSISTANT for m in messages) else f"no message has the role `{ASSISTANT}`"


def language_examples(part: Part) -> Examples:
    """The conversations, or otherwise the texts, of the rows of one split.

    Raises:
        SetupError: if the tokenizer has no chat template or does not tell characters, or the template changes
            earlier messages.
    """
    if not _is_conversation(part):
        return build_examples(part)
    tokenizer, max_length = part.processor, part.max_length
    if tokenizer.chat_template is None or not tokenizer.is_fast:
        raise SetupError(f"`{MESSAGES}` needs a fast tokenizer with a chat template; save one with the model")
    documents: list[Tokens] = []
    columns: dict[str, list[Any]] = {"labels": [], "loss_mask": []}
    for messages in part.rows[MESSAGES]:
        text, spans = _rendered(messages, tokenizer)
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
        inside = [any(a <= start and end <= b and start < end for a, b in spans) for start, end in found.offset_mapping]
        ids, is_answer = np.array(found["input_ids"][:max_length], np.int64), np.array(inside[:max_length], bool)
        if not is_answer.any():
            continue
        documents.append(ids)
        columns["labels"].append(np.where(is_answer, ids, IGNORED))
        columns["loss_mask"].append(np.append(is_answer[1:], False).astype(np.int64))  # a logit predicts the next token
    return finished(Documents(documents, **columns), part)


def _rendered(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation, and the characters of its answers, each with what ends it."""

    def render(count: int, asks: bool) -> str:
        return str(tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=asks))

    text, spans = render(len(messages), False), []
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before, after = render(number, True), render(number + 1, False)
        if not (text.startswith(after) and after.startswith(before)):
            raise SetupError(
                "the chat template changes earlier messages; give one answer in each row, or another template"
            )
        spans.append((len(before), len(after)))
    return text, spans
