"""Figures of embeddings: likeness to the teacher, and of pairs the correlation with their scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention._common.logs import progress
from hf_linear_attention.training.data.batches import Batch, token_weights
from hf_linear_attention.training.data.pooling import Pooling
from hf_linear_attention.training.evaluation.evaluator import each_once
from hf_linear_attention.training.evaluation.scores import Spearman, scored
from hf_linear_attention.training.losses.outputs import hidden_states_of, pooled, run_model
from hf_linear_attention.training.losses.teacher import Teacher


class EmbeddingEvaluator:
    """Compares embeddings with those of the teacher, and similarities of pairs with their scores."""

    def __init__(self, accelerator: Accelerator, teacher: Teacher, pooling: Pooling = "mean") -> None:
        """Prepare evaluations by the processes of `accelerator`, in which models are compared with `teacher`."""
        self.accelerator, self.teacher, self.pooling = accelerator, teacher, pooling

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel, batches: Iterable[Batch]) -> dict[str, float]:
        """The figures, named `eval_<figure>`. The model stays in the mode that it had."""
        was_training = model.training
        model.eval()
        rows: list[tuple[int, float]] = []
        labelled: list[tuple[int, float, list[float]]] = []
        for batch in progress(batches, "evaluating", self.accelerator.is_main_process):
            batch = {name: value.to(self.accelerator.device) for name, value in batch.items()}
            mine, index = self._embed(model, batch), batch["index"].tolist()
            cosines = F.cosine_similarity(mine, self._embed(None, batch), dim=-1)
            rows += zip(index, cosines.tolist(), strict=True)
            if "labels" in batch:
                labelled += zip(index, batch["labels"].tolist(), mine.tolist(), strict=True)
        found = [cosine for _, cosine in each_once(gather_object(rows))]
        mean = math.fsum(found) / max(len(found), 1)
        result = {"samples": len(found), "cosine": mean, "cosine_min": min(found, default=0.0)}
        texts = each_once(gather_object(labelled))
        texts = texts[: len(texts) // 2 * 2]
        if texts:
            result |= pair_similarity(torch.tensor([row[2] for row in texts]), [row[1] for row in texts[::2]])
        model.train(was_training)
        return {f"eval_{name}": value for name, value in result.items()}

    def _embed(self, model: PreTrainedModel | None, batch: Batch) -> Tensor:
        """The embeddings [B, D] of a batch by the model, or by the teacher for None."""
        if model is None:
            hidden = self.teacher(batch).hidden_states[-1]
        else:
            with self.accelerator.autocast():
                hidden = hidden_states_of(run_model(model, batch, "last"), "last")[-1]
        return pooled(hidden, token_weights(batch, hidden.shape[1]) > 0, self.pooling)


@torch.no_grad()
def embed(model: PreTrainedModel, batches: Iterable[Batch], pooling: Pooling = "mean") -> Tensor:
    """The normalised embeddings `[texts, D]` of all texts, in the order of the batches."""
    rows = []
    for batch in progress(batches, "measuring"):
        batch = {name: value.to(model.device) for name, value in batch.items()}
        hidden = run_model(model, batch, None).last_hidden_state
        rows.append(pooled(hidden, batch["attention_mask"], pooling))
    return F.normalize(torch.cat(rows), dim=-1)


def pair_similarity(embeddings: Tensor, scores: Sequence[float]) -> dict[str, float]:
    """Spearman's correlation between the cosine similarities of pairs of embeddings and the scores of the pairs.

    Args:
        embeddings: [texts, D]; rows 2 i and 2 i + 1 are a pair.
        scores: one score per pair.
    """
    return scored(Spearman, F.cosine_similarity(embeddings[0::2], embeddings[1::2], dim=-1).tolist(), scores)


def compare_pairs(mine: Tensor, yours: Tensor, scores: Sequence[float]) -> dict[str, float]:
    """The figures of pairs (`pair_similarity`), for the embeddings `[texts, D]` of the student and of the teacher."""
    of_teacher = {f"{name}_teacher": value for name, value in pair_similarity(yours, scores).items()}
    return pair_similarity(mine, scores) | of_teacher


def compare_embeddings(mine: Tensor, yours: Tensor) -> dict[str, float]:
    """The cosines of the embeddings `[texts, D]` of student and teacher for the same texts."""
    cosine = F.cosine_similarity(mine, yours, dim=-1)
    return {"cosine": cosine.mean().item(), "cosine_min": cosine.min().item()}
