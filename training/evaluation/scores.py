"""Scores as subclasses of `evaluate.Metric`, because `evaluate.load(name)` would download a script.

scikit-learn, scipy, seqeval and jiwer compute them; this file computes what they lack: means, and the F1 score of the
words of texts as in SQuAD's evaluation. What needs a library that is missing is left out (`tasks.py`).
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from hf_linear_attention.training.tasks import RETRIEVAL, can_score


NUMBER, WHOLE, TEXT = datasets.Value("float64"), datasets.Value("int64"), datasets.Value("string")
GREATER_IS_BETTER = {
    **dict.fromkeys(("nats_per_token", "perplexity", "wer", "cer"), False),
    **dict.fromkeys(("accuracy", "f1", "exact_match", "same_text", "spearman", "cosine", "cosine_min"), True),
    **dict.fromkeys(RETRIEVAL, True),
}


class Score(evaluate.Metric):
    """A metric that its docstring describes; `kinds` are the types of a prediction and of a reference."""

    kinds: tuple[Any, Any] = (NUMBER, WHOLE)

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features(dict(zip(("predictions", "references"), self.kinds, strict=True)))
        return evaluate.MetricInfo(
            description=str(type(self).__doc__), citation="", inputs_description="", features=features
        )


def scored(score: type[Score], predictions: Sequence[Any], references: Sequence[Any], **options: Any) -> dict[str, Any]:
    """The figures of a score for predictions and references."""
    # By default, a metric would be in a file in the home folder.
    return score(keep_in_memory=True).compute(predictions=predictions, references=references, **options) or {}


class TokenLoss(Score):
    """Nats per token and perplexity. predictions: summed nats of each text; references: its scored tokens."""

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        tokens = sum(references)
        nats = math.fsum(predictions) / max(tokens, 1)
        return {"nats_per_token": nats, "perplexity": math.exp(min(nats, 700.0)), "tokens": tokens}


class Classification(Score):
    """Accuracy and F1 score; predictions and references are class indices.

    F1 is that of class 1 if there are two classes, otherwise the mean over the classes that occur.
    """

    kinds = (WHOLE, WHOLE)

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        found: dict[str, float] = {"accuracy": equal_share(predictions, references), "samples": len(references)}
        if can_score("sklearn"):
            from sklearn.metrics import f1_score

            average = "binary" if {*predictions, *references} <= {0, 1} else "macro"
            found["f1"] = float(f1_score(references, predictions, average=average, zero_division=0))
        return found


def equal_share(predictions: Sequence[Any], references: Sequence[Any]) -> float:
    """The share of predictions that equal their references."""
    return sum(a == b for a, b in zip(predictions, references, strict=True)) / max(len(references), 1)


class Tagging(Score):
    """Accuracy of the tags of words, and F1 score of the spans that they mark.

    predictions and references: the tags of every text. With tags such as B-PER and I-PER, a span counts only if its
    type, beginning and end are right, as in CoNLL-2000's evaluation; I-X that continues no X begins a span. A tag
    without such a beginning, but O, marks its own word.
    """

    kinds = (datasets.Sequence(TEXT), datasets.Sequence(TEXT))

    def _compute(self, predictions: list[list[str]], references: list[list[str]]) -> dict[str, float]:
        mine, yours = ([tag for row in rows for tag in row] for rows in (predictions, references))
        found: dict[str, float] = {"accuracy": equal_share(mine, yours), "words": len(yours)}
        if can_score("seqeval"):
            from seqeval.metrics import f1_score

            spans = ([[_as_span(tag) for tag in row] for row in rows] for rows in (references, predictions))
            found["f1"] = float(f1_score(*spans, zero_division=0))
        return found


def _as_span(tag: str) -> str:
    """The tag as seqeval reads it, which takes the first letter of a tag without a hyphen for its beginning."""
    return tag if tag == "O" or re.match(r"[BIES]-", tag) else f"B-{tag}"


class TextMatch(Score):
    """Share of texts that equal a reference, and mean F1 score of their words. references: one or more for each text.

    The best reference counts. With `ignores_case`, case, punctuation and the articles a, an, the do not count, as in
    SQuAD's evaluation.
    """

    kinds = (TEXT, datasets.Sequence(TEXT))

    def _compute(
        self, predictions: list[str], references: list[list[str]], ignores_case: bool = True
    ) -> dict[str, float]:
        words = counted_words if ignores_case else str.split
        pairs = [(words(mine), [words(yours) for yours in known]) for mine, known in zip(predictions, references)]
        count = max(len(pairs), 1)
        exact = sum(mine in known for mine, known in pairs)
        f1 = math.fsum(max((word_f1(mine, yours) for yours in known), default=0.0) for mine, known in pairs)
        return {"exact_match": exact / count, "f1": f1 / count, "texts": len(pairs)}


def counted_words(text: str) -> list[str]:
    """The words of a text that count."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def word_f1(mine: Sequence[str], yours: Sequence[str]) -> float:
    """The harmonic mean of precision and recall of the words `mine`; 1 if there are none in either."""
    if not mine or not yours:
        return float(mine == yours)
    return 2 * (Counter(mine) & Counter(yours)).total() / (len(mine) + len(yours))


class ErrorRates(Score):
    """Word error rate and character error rate; predictions and references are texts.

    Case and punctuation count, white space only separates words.
    """

    kinds = (TEXT, TEXT)

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        found: dict[str, float] = {"texts": len(references)}
        if references and can_score("jiwer"):
            import jiwer

            mine, yours = ([" ".join(text.split()) for text in texts] for texts in (predictions, references))
            found |= {"wer": jiwer.wer(yours, mine), "cer": jiwer.cer(yours, mine)}
        return found


class Spearman(Score):
    """Spearman's rank correlation, with mean ranks for ties; NaN if predictions or references are constant."""

    kinds = (NUMBER, NUMBER)

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        if not can_score("scipy"):
            return {}
        from scipy.stats import spearmanr

        constant = min(len({*predictions}), len({*references})) < 2  # scipy would warn
        return {"spearman": math.nan if constant else float(spearmanr(predictions, references).statistic)}
