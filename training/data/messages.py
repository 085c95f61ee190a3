"""Conversations (`--task causal_lm` with a column `messages`), in the form of chat templates: who says what.

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning."}]}

The tokenizer's chat template makes one text of a conversation. With `--loss_on answers`, only what the assistant says
is learned, with the token that ends it. Conversations are not packed, and are cut to `--max_length` tokens.
"""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_linear_attention._common.errors import DataError, SetupError
from hf_linear_attention.training.data.examples import build_examples, finished, usable_texts
from hf_linear_attention.training.data.packing import IGNORED, Example, Examples, Tokens
from hf_linear_attention.training.data.rows import without_bad
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.tasks import MESSAGES


ASSISTANT = "assistant"


class Conversations:
    """One example per conversation: its tokens, and whether each belongs to an answer of the assistant."""

    def __init__(self, documents: list[Tokens], answers: list[Tokens], only_answers: bool) -> None:
        self.documents, self.answers, self.only_answers = documents, answers, only_answers

    @property
    def lengths(self) -> Tokens:
        """The number of tokens of every conversation."""
        return np.array([len(document) for document in self.documents], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Example:
        ids, is_answer = self.documents[index], self.answers[index].astype(bool)
        last = np.flatnonzero(is_answer & ~np.concatenate([[False], is_answer[:-1]]))  # where answers begin
        example: Example = {"input_ids": ids, "labels": ids, "prompt_length": int(last[-1]) if len(last) else len(ids)}
        if not self.only_answers:
            return example
        # A logit predicts the next token.
        mask = np.concatenate([is_answer[1:], [False]]).astype(np.int64)
        return {**example, "labels": np.where(is_answer, ids, IGNORED), "loss_mask": mask}


def is_conversation(recipe: Recipe, rows: datasets.Dataset) -> bool:
    """Whether the rows hold conversations."""
    return "text_column_name" not in recipe.given and MESSAGES in rows.column_names


def usable_language(recipe: Recipe, rows: datasets.Dataset, split: str) -> datasets.Dataset:
    """`rows` without the bad ones: those without a text or, for conversations, without an answer.

    Raises:
        DataError: if there are bad rows that may not be skipped, or an option is for conversations and there are
            none.
    """
    if not is_conversation(recipe, rows):
        if unused := sorted({"loss_on", "predict_with_generate"} & recipe.given):
            raise DataError(
                f"`--{unused[0]}` is for conversations, but the {split} data has no column `{MESSAGES}`; it has "
                f"{', '.join(rows.column_names)}"
            )
        return usable_texts(recipe, rows, split)
    bad = {number: text for number, row in enumerate(rows[MESSAGES]) if (text := _problem(row)) is not None}
    return without_bad(rows, bad, recipe.data, split)


def _problem(messages: Any) -> str | None:
    """The problem of a conversation, as a clause."""
    is_list = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    if not is_list or not all(isinstance(m.get(name), str) for m in messages for name in ("role", "content")):
        return f"`{MESSAGES}` is not a list of messages with `role` and `content`"
    return None if any(m["role"] == ASSISTANT for m in messages) else f"no message has the role `{ASSISTANT}`"


def language_examples(
    recipe: Recipe,
    rows: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    classes: dict[str, int] | None,
    split: str,
) -> Examples:
    """The conversations, or otherwise the texts, of the usable rows of one split.

    Raises:
        SetupError: if the tokenizer has no chat template or does not tell characters, or the template changes
            earlier messages.
    """
    if not is_conversation(recipe, rows):
        return build_examples(recipe, rows, tokenizer, max_length, classes, split)
    if tokenizer.chat_template is None or not tokenizer.is_fast:
        raise SetupError(
            f"the column `{MESSAGES}` needs a fast tokenizer (tokenizer.json) with a chat template; give one with "
            "`--tokenizer_name`, or train on texts"
        )
    documents, answers = [], []
    for messages in rows[MESSAGES]:
        text, spans = _rendered(messages, tokenizer)
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
        inside = [any(a <= start and end <= b and start < end for a, b in spans) for start, end in found.offset_mapping]
        if any(inside[:max_length]):
            documents.append(np.array(found["input_ids"][:max_length], np.int64))
            answers.append(np.array(inside[:max_length], np.int64))
    return finished(Conversations(documents, answers, recipe.task_options.loss_on == "answers"), recipe, split)


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
                "the chat template changes earlier messages when a conversation goes on, so the answers cannot be "
                "found in it; give each answer as the last message of a row of its own, with `--loss_on all`, or "
                "another template"
            )
        spans.append((len(before), len(after)))
    return text, spans
