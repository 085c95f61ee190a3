"""Scores as subclasses of `evaluate.Metric`, because `evaluate.load(name)` would download a script.

scikit-learn and scipy compute some; this file computes means. What needs a library that is missing is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from hf_linear_attention.training.tasks import can_score


NUMBER, WHOLE = datasets.Value("float64"), datasets.Value("int64")
GREATER_IS_BETTER = {"nats_per_token": False, "accuracy": True, "cosine": True}


class Score(evaluate.Metric):
    """A metric that its docstring describes; `kinds` are the types of a prediction and of a reference."""

    kinds: tuple[Any, Any] = (NUMBER, WHOLE)

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features(dict(zip(("predictions", "references"), self.kinds, strict=True)))
        return evaluate.MetricInfo(
            description=str(type(self).__doc__), citation="", inputs_description="", features=features
        )


def scored(score: type[Score], predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, Any]:
    """The figures of a score for predictions and references."""
    # By default, a metric would be in a file in the home folder.
    return score(keep_in_memory=True).compute(predictions=predictions, references=references) or {}


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
        equal = sum(a == b for a, b in zip(predictions, references, strict=True))
        found: dict[str, float] = {"accuracy": equal / max(len(references), 1), "samples": len(references)}
        if can_score("sklearn"):
            from sklearn.metrics import f1_score

            average = "binary" if {*predictions, *references} <= {0, 1} else "macro"
            found["f1"] = float(f1_score(references, predictions, average=average, zero_division=0))
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
