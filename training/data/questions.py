"""Questions about texts (`--task question_answering`), in the columns of SQuAD: question, context and answers.

    answers: {"text": ["Paris", "in Paris"], "answer_start": [120, 117]}       (both empty: the context has no answer)

A context that is too long becomes several examples, which overlap. The labels are the places of the first and the last
token of the first answer, or 0 and 0 in an example that does not hold all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_linear_attention._common.errors import DataError
from hf_linear_attention.training.data.packing import Documents, Examples, Part, Tokens, finished
from hf_linear_attention.training.data.rows import bad_texts, refuse_bad, require_column
from hf_linear_attention.training.data.texts import require_fast
from hf_linear_attention.training.tasks import QUESTION_COLUMNS


STRIDE = 128  # tokens that the parts of a context share, or a quarter of `--max_length` if that is less


class Questions(Documents):
    """One example per part of a context: its question and its tokens, and which tokens an answer can be made of.

    Args:
        columns: the fields of the examples.
        rows: the row of every part.
        offsets: the characters of the context that the tokens of every part stand for.
        contexts: the context of every row.
        answers: the answers of every row, if there are any.
    """

    def __init__(
        self,
        columns: dict[str, list[Tokens]],
        rows: list[int],
        offsets: list[Sequence[tuple[int, int]]],
        contexts: list[str],
        answers: list[dict[str, Any]] | None,
    ) -> None:
        self.rows, self.offsets, self.contexts, self.answers = rows, offsets, contexts, answers
        labels = None
        if answers is not None:
            parts = zip(rows, offsets, columns["context_mask"], strict=True)
            labels = [_ends(places, mask, answers[row]) for row, places, mask in parts]
        super().__init__(columns.pop("input_ids"), labels, **columns)

    def texts(self, spans: list[tuple[int, list[float]]]) -> tuple[list[str], list[list[str]]]:
        """The best answer to every question, and its references.

        Args:
            spans: for the number of every part, its best span: score, first and last token, and the score of no answer.
        """
        best: dict[int, tuple[float, str]] = {}
        nothing: dict[int, float] = {}
        for number, (score, first, last, none) in spans:
            row, offsets = self.rows[number], self.offsets[number]
            text = self.contexts[row][offsets[int(first)][0] : offsets[int(last)][1]]
            best[row] = max(best.get(row, (-np.inf, "")), (score, text))
            nothing[row] = min(nothing.get(row, np.inf), none)
        known = {row: list((self.answers or [])[row]["text"]) or [""] for row in best}
        # Without any such question in the data, a model was not trained to answer nothing.
        may_be_none = any(texts == [""] for texts in known.values())
        found = ["" if may_be_none and nothing[row] > best[row][0] else best[row][1] for row in sorted(best)]
        return found, [known[row] for row in sorted(best)]


def _ends(offsets: Sequence[tuple[int, int]], context_mask: Tokens, answers: dict[str, Any]) -> Tokens:
    """The places of the first and the last token of the first answer; 0 and 0 if the part does not hold all of it."""
    if not answers["text"]:
        return np.zeros(2, np.int64)
    start = answers["answer_start"][0]
    end = start + len(answers["text"][0])
    places = np.flatnonzero(context_mask).tolist()
    if start < offsets[places[0]][0] or end > offsets[places[-1]][1]:
        return np.zeros(2, np.int64)
    begun = [place for place in places if offsets[place][0] <= start]
    ended = [place for place in places if offsets[place][1] >= end]
    return np.array([begun[-1], ended[0]], np.int64)


def check_questions(part: Part) -> None:
    """Refuse rows that lack a text or have an answer that is not in its context.

    Raises:
        DataError: if there are any, or columns are missing.
    """
    recipe, rows, split = part.recipe, part.rows, part.split
    needs_answers = split == "validation" or bool(recipe.objective.task_loss_weight)
    if missing := [name for name in QUESTION_COLUMNS[: 2 + needs_answers] if name not in rows.column_names]:
        found = ", ".join(rows.column_names)
        raise DataError(f"the {split} data has no column {' and '.join(missing)} as in SQuAD, but {found}; rename them")
    bad = bad_texts(rows, QUESTION_COLUMNS[:2])
    if "answers" in rows.column_names:
        for number, (context, answers) in enumerate(zip(rows["context"], rows["answers"], strict=True)):
            if number not in bad and (problem := _answer_problem(context, answers)) is not None:
                bad[number] = problem
    refuse_bad(bad, recipe.data, split)


def _answer_problem(context: str, answers: Any) -> str | None:
    """The problem of the answers of a row, as a clause."""
    if not isinstance(answers, dict) or any(not isinstance(answers.get(n), list) for n in ("text", "answer_start")):
        return f"`answers` is {answers!r}, not lists `text` and `answer_start`"
    for text, start in zip(answers["text"], answers["answer_start"]):
        if context[start : start + len(text)] != text:
            return f"the context has not {text!r} at its character {start}"
    return None


def question_examples(part: Part) -> Examples:
    """The parts of the contexts of one split, each with its question, of at most `max_length` tokens.

    Raises:
        SetupError: if the tokenizer does not tell characters.
        DataError: if a question leaves no room for its context.
    """
    rows, tokenizer, max_length = part.rows, part.processor, part.max_length
    require_fast(tokenizer, "the characters of a token")
    for name in QUESTION_COLUMNS[:2]:
        require_column(rows, name, name)
    stride = min(STRIDE, max_length // 4)
    contexts, questions = list(rows["context"]), [text.strip() for text in rows["question"]]
    room = max_length - stride - tokenizer.num_special_tokens_to_add(pair=True)
    lengths = tokenizer(questions, add_special_tokens=False, return_attention_mask=False, return_length=True)["length"]
    if (longest := max(lengths, default=0)) >= room:
        raise DataError(
            f"a question in the {part.split} data has {longest} tokens, but with `--max_length` {max_length} "
            f"only {room - 1} fit; raise it, or shorten the question"
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
    kept = [number for number in range(len(found["input_ids"])) if 1 in found.sequence_ids(number)]
    names = [name for name in ("input_ids", "token_type_ids") if name in found]
    columns = {name: [np.array(found[name][number], np.int64) for number in kept] for name in names}
    columns["context_mask"] = [
        np.array([part == 1 for part in found.sequence_ids(number)], np.int64) for number in kept
    ]
    parts, offsets = ([found[name][n] for n in kept] for name in ("overflow_to_sample_mapping", "offset_mapping"))
    answers = list(rows["answers"]) if "answers" in rows.column_names else None
    return finished(Questions(columns, parts, offsets, contexts, answers), part)
