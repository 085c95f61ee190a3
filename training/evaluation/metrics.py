"""Metrics as subclasses of `evaluate.Metric`, because `evaluate.load(name)` would download a script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

from hf_linear_attention.training.tasks import RETRIEVAL


CITATION = ""  # these metrics are plain means, so there is nothing to cite
GREATER_IS_BETTER = {
    "nats_per_token": False,
    "perplexity": False,
    "accuracy": True,
    "f1": True,
    "spearman": True,
    "cosine": True,
    "cosine_min": True,
    "exact_match": True,
    "same_text": True,
    **dict.fromkeys(RETRIEVAL, True),
    "wer": False,
    "cer": False,
}


def metric_info(metric: evaluate.Metric, features: dict[str, Any]) -> evaluate.MetricInfo:
    """What `evaluate` wants to know about a metric, which its docstring describes."""
    description = str(type(metric).__doc__)
    return evaluate.MetricInfo(
        description=description, citation=CITATION, inputs_description="", features=datasets.Features(features)
    )


class TokenLoss(evaluate.Metric):
    """Nats per token and perplexity. predictions: summed nats of each text; references: its scored tokens."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
        return metric_info(self, features)

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        tokens = sum(references)
        nats = math.fsum(predictions) / max(tokens, 1)
        return {"nats_per_token": nats, "perplexity": math.exp(min(nats, 700.0)), "tokens": tokens}


class Classification(evaluate.Metric):
    """Accuracy and F1 score; predictions and references are class indices.

    F1 is that of class 1 if there are two classes, otherwise the mean over the classes that occur. Both figures equal
    those of scikit-learn (`average` "binary" or "macro").
    """

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
        return metric_info(self, features)

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        pairs = list(zip(predictions, references, strict=True))
        right = sum(mine == yours for mine, yours in pairs)
        classes = sorted({*predictions, *references})
        scores = [_f1(pairs, chosen) for chosen in ([1] if set(classes) <= {0, 1} else classes)]
        f1 = math.fsum(scores) / max(len(scores), 1)
        return {"accuracy": right / max(len(pairs), 1), "f1": f1, "samples": len(pairs)}


def _f1(pairs: list[tuple[int, int]], chosen: int) -> float:
    """The harmonic mean of precision and recall of one class, or 0 if it was never predicted correctly."""
    hits = sum(mine == yours == chosen for mine, yours in pairs)
    return 2 * hits / max(sum((mine == chosen) + (yours == chosen) for mine, yours in pairs), 1)


class Spearman(evaluate.Metric):
    """Spearman's rank correlation, with mean ranks for ties; NaN if predictions or references are constant."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
        return metric_info(self, features)

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        mine, yours = (_ranks(np.asarray(values)) for values in (predictions, references))
        mine, yours = mine - mine.mean(), yours - yours.mean()
        scale = math.sqrt(float(mine @ mine) * float(yours @ yours))
        return {"spearman": float(mine @ yours) / scale if scale else math.nan, "samples": len(mine)}


def pair_similarity(embeddings: Tensor, scores: Sequence[float]) -> float:
    """Spearman's correlation between the cosine similarities of pairs of embeddings and the scores of the pairs.

    Args:
        embeddings: [texts, D]; rows 2 i and 2 i + 1 are a pair.
        scores: one score per pair.
    """
    cosines = F.cosine_similarity(embeddings[0::2], embeddings[1::2], dim=-1).tolist()
    found = Spearman(keep_in_memory=True).compute(predictions=cosines, references=scores) or {}
    return found["spearman"]


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


class TeacherCosine(evaluate.Metric):
    """Mean and minimum cosine similarity to the teacher. predictions: that of each text; references: its tokens."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
        return metric_info(self, features)

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        count = max(len(predictions), 1)
        return {
            "cosine": math.fsum(predictions) / count,
            "cosine_min": min(predictions, default=0.0),
            "samples": len(predictions),
        }
