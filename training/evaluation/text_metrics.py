"""Metrics of tags and of texts, as subclasses of `evaluate.Metric` (see `metrics.py`)."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence

import datasets
import evaluate

from hf_linear_attention.training.evaluation.metrics import metric_info


OUTSIDE = "O"
Span = tuple[str, int, int]


class Tagging(evaluate.Metric):
    """Accuracy of the tags of words, and F1 score of the spans that they mark.

    predictions and references: the tags of every text. With tags such as B-PER and I-PER, a span counts only if its
    type, beginning and end are right, as in CoNLL-2000's evaluation; I-X that continues no X begins a span. A tag
    without such a beginning, but O, marks its own word.
    """

    def _info(self) -> evaluate.MetricInfo:
        tags = datasets.Sequence(datasets.Value("string"))
        return metric_info(self, {"predictions": tags, "references": tags})

    def _compute(self, predictions: list[list[str]], references: list[list[str]]) -> dict[str, float]:
        pairs = [pair for mine, yours in zip(predictions, references, strict=True) for pair in zip(mine, yours)]
        found = [(spans_of(mine), spans_of(yours)) for mine, yours in zip(predictions, references, strict=True)]
        hits = sum(len(mine & yours) for mine, yours in found)
        marked = sum(len(mine) + len(yours) for mine, yours in found)
        return {
            "f1": 2 * hits / max(marked, 1),
            "accuracy": sum(mine == yours for mine, yours in pairs) / max(len(pairs), 1),
            "words": len(pairs),
        }


def spans_of(tags: Sequence[str]) -> set[Span]:
    """The type, the first word and the word after the last of every span that the tags mark."""
    spans, start, kind = set(), 0, ""
    for place, tag in enumerate([*tags, OUTSIDE]):
        is_tagged = re.match(r"[BI]-", tag) is not None
        name = tag[2:] if is_tagged else ""
        if kind and not (tag.startswith("I-") and name == kind):
            spans.add((kind, start, place))
            kind = ""
        if is_tagged and not kind:
            start, kind = place, name
        if not is_tagged and tag != OUTSIDE:
            spans.add((tag, place, place + 1))
    return spans


class TextMatch(evaluate.Metric):
    """Share of texts that equal a reference, and mean F1 score of their words. references: one or more for each text.

    The best reference counts. With `ignores_case`, case, punctuation and the articles a, an, the do not count, as in
    SQuAD's evaluation.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return metric_info(self, {"predictions": text, "references": datasets.Sequence(text)})

    def _compute(
        self, predictions: list[str], references: list[list[str]], ignores_case: bool = True
    ) -> dict[str, float]:
        words = counted_words if ignores_case else str.split
        pairs = [(words(mine), [words(yours) for yours in known]) for mine, known in zip(predictions, references)]
        count = max(len(pairs), 1)
        exact = sum(mine in known for mine, known in pairs)
        f1 = math.fsum(max((word_f1(mine, yours) for yours in known), default=0.0) for mine, known in pairs)
        return {"exact_match": exact / count, "f1": f1 / count, "texts": len(pairs)}


class ErrorRates(evaluate.Metric):
    """Word error rate and character error rate. predictions and references: the texts.

    An error is a word (a character) that is replaced, inserted or left out, of which the fewest are counted that make
    the reference of the prediction (Levenshtein's distance); a rate is their number by that of the reference's words
    (characters). Case and punctuation count, white space separates words.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return metric_info(self, {"predictions": text, "references": text})

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        words = [(mine.split(), yours.split()) for mine, yours in zip(predictions, references, strict=True)]
        letters = [(" ".join(mine), " ".join(yours)) for mine, yours in words]
        return {"wer": _error_rate(words), "cer": _error_rate(letters), "texts": len(words)}


def _error_rate(pairs: Sequence[tuple[Sequence[str], Sequence[str]]]) -> float:
    return sum(edits(mine, yours) for mine, yours in pairs) / max(sum(len(yours) for _, yours in pairs), 1)


def edits(mine: Sequence[str], yours: Sequence[str]) -> int:
    """Levenshtein's distance: the fewest replacements, insertions and deletions that make `yours` of `mine`."""
    row = list(range(len(yours) + 1))
    for number, part in enumerate(mine, 1):
        before, row = row, [number]
        for place, other in enumerate(yours):
            row.append(min(before[place] + (part != other), before[place + 1] + 1, row[place] + 1))
    return row[-1]


def counted_words(text: str) -> list[str]:
    """The words of a text that count."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def word_f1(mine: Sequence[str], yours: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of the words `mine`; 1 if there are none in either."""
    if not mine or not yours:
        return float(mine == yours)
    return 2 * (Counter(mine) & Counter(yours)).total() / (len(mine) + len(yours))
