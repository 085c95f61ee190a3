"""Questions about texts (`--task question_answering`), in the columns of SQuAD: question, context and answers.

    answers: {"text": ["Paris", "in Paris"], "answer_start": [120, 117]}       (both empty: the context has no answer)

A context that is too long becomes several examples, which share `--doc_stride` tokens. The labels are the places of the
first and the last token of the first answer, or 0 and 0 in an example that does not hold all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_linear_attention._common.errors import DataError, SetupError
from hf_linear_attention.training.data.examples import finished
from hf_linear_attention.training.data.packing import Example, Examples, Tokens
from hf_linear_attention.training.data.rows import bad_text, require_column, without_bad
from hf_linear_attention.training.recipe import Recipe
from hf_linear_attention.training.tasks import QUESTION_COLUMNS


DEFAULT_STRIDE = 128


@dataclass(frozen=True)
class Part:
    """A part of a context, with its question: its row, and the characters of the context that its tokens stand for."""

    row: int
    input_ids: Tokens
    token_type_ids: Tokens | None
    context_mask: Tokens
    offsets: Sequence[tuple[int, int]]


class Questions:
    """One example per part of a context."""

    def __init__(self, parts: list[Part], contexts: list[str], answers: list[dict[str, Any]] | None) -> None:
        self.parts, self.contexts, self.answers = parts, contexts, answers

    @property
    def lengths(self) -> Tokens:
        """The number of tokens of every part, with its question."""
        return np.array([len(part.input_ids) for part in self.parts], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> Example:
        part = self.parts[index]
        example: Example = {"input_ids": part.input_ids, "context_mask": part.context_mask}
        if part.token_type_ids is not None:
            example["token_type_ids"] = part.token_type_ids
        return example if self.answers is None else {**example, "labels": _ends(part, self.answers[part.row])}

    def texts(self, spans: list[tuple[int, list[float]]]) -> tuple[list[str], list[list[str]]]:
        """The best answer to every question, and its references.

        Args:
            spans: for the number of every part, its best span: score, first and last token, and the score of no answer.
        """
        best: dict[int, tuple[float, str]] = {}
        nothing: dict[int, float] = {}
        for number, (score, first, last, none) in spans:
            part = self.parts[number]
            start, end = part.offsets[int(first)][0], part.offsets[int(last)][1]
            text = self.contexts[part.row][start:end]
            best[part.row] = max(best.get(part.row, (-np.inf, "")), (score, text))
            nothing[part.row] = min(nothing.get(part.row, np.inf), none)
        known = {row: list((self.answers or [])[row]["text"]) or [""] for row in best}
        # Without any such question in the data, a model was not trained to answer nothing.
        may_be_none = any(texts == [""] for texts in known.values())
        found = ["" if may_be_none and nothing[row] > best[row][0] else best[row][1] for row in sorted(best)]
        return found, [known[row] for row in sorted(best)]


def _ends(part: Part, answers: dict[str, Any]) -> Tokens:
    """The places of the first and the last token of the first answer; 0 and 0 if the part does not hold all of it."""
    if not answers["text"]:
        return np.zeros(2, np.int64)
    start = answers["answer_start"][0]
    end = start + len(answers["text"][0])
    places = np.flatnonzero(part.context_mask).tolist()
    first, last = part.offsets[places[0]][0], part.offsets[places[-1]][1]
    if start < first or end > last:
        return np.zeros(2, np.int64)
    begun = [place for place in places if part.offsets[place][0] <= start]
    ended = [place for place in places if part.offsets[place][1] >= end]
    return np.array([begun[-1], ended[0]], np.int64)


def usable_questions(recipe: Recipe, rows: datasets.Dataset, split: str) -> datasets.Dataset:
    """`rows` without the bad ones, which lack a text or have an answer that is not in its context.

    Raises:
        DataError: if there are bad rows that may not be skipped, or columns are missing.
    """
    needs_answers = split == "validation" or bool(recipe.objective.task_loss_weight)
    if missing := [name for name in QUESTION_COLUMNS[: 2 + needs_answers] if name not in rows.column_names]:
        raise DataError(
            f"the {split} data has no column {' and '.join(missing)}, but {', '.join(rows.column_names)}; rename them "
            "as in SQuAD: question, context, answers"
        )
    bad: dict[int, str] = {}
    for name in QUESTION_COLUMNS[:2]:
        for number, text in enumerate(rows[name]):
            if not isinstance(text, str) or not text.strip():
                bad.setdefault(number, bad_text(name, text))
    if "answers" in rows.column_names:
        for number, (context, answers) in enumerate(zip(rows["context"], rows["answers"], strict=True)):
            if number not in bad and (problem := _answer_problem(context, answers)) is not None:
                bad[number] = problem
    return without_bad(rows, bad, recipe.data, split)


def _answer_problem(context: str, answers: Any) -> str | None:
    """The problem of the answers of a row, as a clause."""
    if not isinstance(answers, dict) or any(not isinstance(answers.get(n), list) for n in ("text", "answer_start")):
        return f"`answers` is {answers!r}, not lists `text` and `answer_start`"
    for text, start in zip(answers["text"], answers["answer_start"]):
        if context[start : start + len(text)] != text:
            return f"the context has not {text!r} at its character {start}"
    return None


def question_examples(
    recipe: Recipe,
    rows: datasets.Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    classes: dict[str, int] | None,
    split: str,
) -> Examples:
    """The parts of the contexts of one split, each with its question, of at most `max_length` tokens.

    Raises:
        SetupError: if the tokenizer does not tell characters.
        DataError: if a question leaves no room for its context.
    """
    if not tokenizer.is_fast:
        raise SetupError(
            f"{type(tokenizer).__name__} does not tell the characters of a token; convert it to a fast tokenizer "
            "(tokenizer.json), or give one with `--tokenizer_name`"
        )
    for name in QUESTION_COLUMNS[:2]:
        require_column(rows, name, name)
    stride = recipe.task_options.doc_stride
    stride = min(DEFAULT_STRIDE, max_length // 4) if stride is None else stride
    contexts, questions = list(rows["context"]), [text.strip() for text in rows["question"]]
    room = max_length - stride - tokenizer.num_special_tokens_to_add(pair=True)
    lengths = tokenizer(questions, add_special_tokens=False, return_attention_mask=False, return_length=True)["length"]
    if (longest := max(lengths, default=0)) >= room:
        raise DataError(
            f"a question in the {split} data has {longest} tokens, but with `--max_length` {max_length} and "
            f"`--doc_stride` {stride} only {room - 1} fit; change them, or shorten the question"
        )
    found = tokenizer(
        questions,
        contexts,
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids="token_type_ids" in tokenizer.model_input_names,
    )
    parts = []
    for number, row in enumerate(found["overflow_to_sample_mapping"]):
        mask = np.array([part == 1 for part in found.sequence_ids(number)], np.int64)
        types = np.array(found["token_type_ids"][number], np.int64) if "token_type_ids" in found else None
        ids = np.array(found["input_ids"][number], np.int64)
        if mask.any():
            parts.append(Part(row, ids, types, mask, found["offset_mapping"][number]))
    answers = list(rows["answers"]) if "answers" in rows.column_names else None
    return finished(Questions(parts, contexts, answers), recipe, split)
