"""Metrics as `evaluate.Metric` classes. `evaluate.load(name)` would fetch a script from the network; these are here."""

from __future__ import annotations

import math

import datasets
import evaluate


CITATION = ""  # plain means: nothing to cite


def _info(description: str, features: dict[str, datasets.Value]) -> evaluate.MetricInfo:
    return evaluate.MetricInfo(
        description=description, citation=CITATION, inputs_description="", features=datasets.Features(features)
    )


class TokenLoss(evaluate.Metric):
    """Nats per token and perplexity. predictions: summed nats of each text; references: its scored tokens."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
        return _info(str(type(self).__doc__), features)

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        tokens = sum(references)
        nats = math.fsum(predictions) / max(tokens, 1)
        return {"nats_per_token": nats, "perplexity": math.exp(min(nats, 700.0)), "tokens": tokens}


class Accuracy(evaluate.Metric):
    """Share of right classes. predictions, references: class indices."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
        return _info(str(type(self).__doc__), features)

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        right = sum(mine == yours for mine, yours in zip(predictions, references, strict=True))
        return {"accuracy": right / max(len(references), 1), "samples": len(references)}


class TeacherCosine(evaluate.Metric):
    """Mean and minimum cosine to the teacher. predictions: cosine of each text; references: its tokens."""

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
        return _info(str(type(self).__doc__), features)

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        count = max(len(predictions), 1)
        return {
            "cosine": math.fsum(predictions) / count,
            "cosine_min": min(predictions, default=0.0),
            "samples": len(predictions),
        }
