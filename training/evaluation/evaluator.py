"""Evaluation of a model on a data set, the same on any number of processes, and selection of the best evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import evaluate
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention.training.checkpoints.checkpointing import TrainingState
from hf_linear_attention.training.data.batches import Batch, aligned_labels
from hf_linear_attention.training.data.packing import IGNORED
from hf_linear_attention.training.evaluation.metrics import (
    GREATER_IS_BETTER,
    Classification,
    TeacherCosine,
    TokenLoss,
    pair_similarity,
)
from hf_linear_attention.training.losses.outputs import embedding_cosine, hidden_states_of, mean_pooled, run_model
from hf_linear_attention.training.losses.teacher import Teacher
from hf_linear_attention.training.recipe import CLASSIFICATION, SELECTING, Recipe


Figures = tuple[Tensor, Tensor]
"""Prediction and reference of every example in a batch, in the form that the metric expects: [B] and [B]."""


def token_nats(batch: Batch, outputs: Any, task: str) -> Figures:
    """The summed cross-entropy [B] and the number of scored tokens [B] of every text."""
    labels = aligned_labels(batch, task)
    nats = F.cross_entropy(outputs.logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return nats.double().sum(-1), (labels != IGNORED).sum(-1)


def _classes(batch: Batch, outputs: Any) -> Figures:
    return outputs.logits.argmax(-1), batch["labels"]


class Evaluator:
    """Runs the model on the examples of this process, and computes the metric of the task over all processes."""

    def __init__(self, accelerator: Accelerator, task: str, teacher: Teacher | None) -> None:
        self.accelerator, self.task, self.teacher = accelerator, task, teacher
        self.layers = "last" if task == "embedding" else None

    def metric(self) -> evaluate.Metric:
        """A new metric for the task."""
        metrics: dict[str, Callable[..., evaluate.Metric]] = {
            "causal_lm": TokenLoss,
            "masked_lm": TokenLoss,
            "sequence_classification": Classification,
            "embedding": TeacherCosine,
            "image_classification": Classification,
        }
        return metrics[self.task](keep_in_memory=True)  # by default, it would be in a file in the home folder

    def figures(self, batch: Batch, outputs: Any) -> Figures:
        """Prediction and reference of every example in `batch`, given the outputs of the model for it."""
        if self.task in CLASSIFICATION:
            return _classes(batch, outputs)
        if self.task != "embedding":
            return token_nats(batch, outputs, self.task)
        if self.teacher is None:
            raise RuntimeError("an embedding model is compared with its teacher, but there is no teacher")
        mine = hidden_states_of(outputs, self.layers)[-1]
        yours = self.teacher(batch).hidden_states[-1]
        return embedding_cosine(mine, yours, batch["attention_mask"]), batch["attention_mask"].sum(-1)

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel, batches: Iterable[Batch]) -> dict[str, float]:
        """The figures of the metric, named `eval_<figure>`. The model stays in the mode that it had."""
        was_training = model.training
        model.eval()
        rows: list[tuple[int, float, int]] = []
        scored: list[tuple[int, float, list[float]]] = []
        for batch in batches:
            batch = {name: value.to(self.accelerator.device) for name, value in batch.items()}
            with self.accelerator.autocast():
                outputs = run_model(model, batch, self.layers)
                predictions, references = self.figures(batch, outputs)
            index = batch["index"].tolist()
            rows += zip(index, predictions.tolist(), references.tolist(), strict=True)
            if self.task == "embedding" and "labels" in batch:
                pooled = mean_pooled(hidden_states_of(outputs, self.layers)[-1], batch["attention_mask"])
                scored += zip(index, batch["labels"].tolist(), pooled.tolist(), strict=True)
        model.train(was_training)
        rows = _each_once(gather_object(rows))
        result = self.metric().compute(predictions=[row[1] for row in rows], references=[row[2] for row in rows])
        result = {**(result or {}), **_similarity(_each_once(gather_object(scored)))}
        return {f"eval_{name}": value for name, value in result.items()}


def _each_once(rows: list[Any]) -> list[Any]:
    """One row per example, sorted by the number of the example, so that sums do not depend on the number of processes.

    If several processes have an example (`batches.EvaluationBatches`), the row of the first process is used.
    """
    found = {row[0]: row for row in reversed(rows)}
    return [found[number] for number in sorted(found)]


def _similarity(scored: list[tuple[int, float, list[float]]]) -> dict[str, float]:
    """Spearman's correlation between the scores of pairs and the cosine similarities of their embeddings.

    Args:
        scored: number, score of the pair and embedding of every text, sorted by number; texts 2 i and 2 i + 1 are a
            pair.
    """
    if not scored:
        return {}
    whole = scored[: len(scored) // 2 * 2]
    embeddings = torch.tensor([row[2] for row in whole])
    return {"spearman": pair_similarity(embeddings, [row[1] for row in whole[::2]])}


class Selection:
    """Compares evaluations by `--metric_for_best_model`, or by default by the main figure of the task."""

    def __init__(self, recipe: Recipe) -> None:
        name = (recipe.run.metric_for_best_model or SELECTING[recipe.model.task][0]).removeprefix("eval_")
        self.name, self.sign = f"eval_{name}", 1 if GREATER_IS_BETTER[name] else -1
        self.patience = recipe.run.early_stopping_patience

    def note(self, state: TrainingState, figures: dict[str, float]) -> bool:
        """Record the evaluation of this step in `state`, and return whether it is the best so far."""
        best = state.best.get("figures")
        if best is not None and not self.sign * figures[self.name] > self.sign * best[self.name]:
            state.evaluations_since_best += 1
            return False
        state.best, state.evaluations_since_best = {"step": state.step, "figures": figures}, 0
        return True

    def is_over(self, state: TrainingState) -> bool:
        """Whether the last `--early_stopping_patience` evaluations were no better than the best one before them."""
        return self.patience is not None and state.evaluations_since_best >= self.patience
