"""Evaluation of models whose output is an embedding, the same on any number of processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention._common.logs import progress
from hf_linear_attention.training.data.batches import Batch, token_weights
from hf_linear_attention.training.data.sentence_files import Pooling
from hf_linear_attention.training.evaluation.evaluator import each_once
from hf_linear_attention.training.evaluation.metrics import TeacherCosine, pair_similarity
from hf_linear_attention.training.evaluation.retrieval_figures import RetrievalTest, at_dimensions, with_teacher
from hf_linear_attention.training.losses.outputs import cosines_at, hidden_states_of, pooled, run_model
from hf_linear_attention.training.losses.teacher import Teacher


class EmbeddingEvaluator:
    """Compares embeddings with those of the teacher, similarities of pairs with their scores, and searches."""

    def __init__(
        self,
        accelerator: Accelerator,
        teacher: Teacher,
        pooling: Pooling = "mean",
        dims: Sequence[int] = (),
        retrieval: RetrievalTest | None = None,
        batch_size: int = 8,
    ) -> None:
        """Prepare evaluations.

        Args:
            accelerator: the processes that evaluate together.
            teacher: the model to compare with.
            pooling: how hidden states become an embedding.
            dims: numbers of first dimensions at which embeddings are evaluated besides whole ones.
            retrieval: queries and documents; None for none.
            batch_size: texts of `retrieval` in one forward pass.
        """
        self.accelerator, self.teacher, self.pooling, self.dims = accelerator, teacher, pooling, tuple(dims)
        self.retrieval, self.batch_size = retrieval, batch_size

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel, batches: Iterable[Batch]) -> dict[str, float]:
        """The figures, named `eval_<figure>`. The model stays in the mode that it had."""
        was_training = model.training
        model.eval()
        rows: list[tuple[int, list[float], int]] = []
        scored: list[tuple[int, float, list[float]]] = []
        for batch in progress(batches, "evaluating", self.accelerator.is_main_process):
            batch = {name: value.to(self.accelerator.device) for name, value in batch.items()}
            mine, index = self._embed(model, batch), batch["index"].tolist()
            cosines = cosines_at(mine, self._embed(None, batch), self.dims)
            tokens = token_weights(batch, 1).sum(-1).int().tolist()
            rows += zip(index, cosines.T.tolist(), tokens, strict=True)
            if "labels" in batch:
                scored += zip(index, batch["labels"].tolist(), mine.tolist(), strict=True)
        result = self._cosines(each_once(gather_object(rows)))
        result |= self._similarity(each_once(gather_object(scored)))
        result |= self._retrieval(model)
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

    def _cosines(self, rows: list[tuple[int, list[float], int]]) -> dict[str, float]:
        def figures(count: int | None) -> dict[str, float]:
            place = 0 if count is None else 1 + self.dims.index(count)
            metric = TeacherCosine(keep_in_memory=True)  # by default, it would be in a file in the home folder
            found = metric.compute(predictions=[row[1][place] for row in rows], references=[row[2] for row in rows])
            return {name: value for name, value in (found or {}).items() if count is None or name != "samples"}

        return at_dimensions(figures, self.dims)

    def _similarity(self, scored: list[tuple[int, float, list[float]]]) -> dict[str, float]:
        """Spearman's correlation between the scores of pairs and the cosine similarities of their embeddings.

        Args:
            scored: number, score of the pair and embedding of every text, sorted by number; texts 2 i and 2 i + 1 are a
                pair.
        """
        whole = scored[: len(scored) // 2 * 2]
        if not whole:
            return {}
        embeddings, scores = torch.tensor([row[2] for row in whole]), [row[1] for row in whole[::2]]
        return at_dimensions(lambda count: {"spearman": pair_similarity(embeddings[:, :count], scores)}, self.dims)

    def _retrieval(self, model: PreTrainedModel) -> dict[str, float]:
        """The figures of the model and of the teacher."""
        if (test := self.retrieval) is None:
            return {}
        mine = test(self.accelerator, lambda batch: self._embed(model, batch), self.batch_size)
        if test.of_teacher is None:  # it does not change
            test.of_teacher = test(self.accelerator, lambda batch: self._embed(None, batch), self.batch_size)
        return with_teacher(mine, test.of_teacher)
