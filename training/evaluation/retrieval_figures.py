"""Figures of embeddings: retrieval of documents by queries, and what the first dimensions alone keep (Matryoshka)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_linear_attention._common.logs import progress
from hf_linear_attention.training.data.batches import Batch, EvaluationBatches, Stream, loader
from hf_linear_attention.training.data.packing import Examples
from hf_linear_attention.training.data.processors import Processor, load_config, pad_token_id, sequence_length
from hf_linear_attention.training.data.retrieval import Retrieval, read_retrieval
from hf_linear_attention.training.evaluation.evaluator import each_once
from hf_linear_attention.training.recipe import Recipe, parse_dims
from hf_linear_attention.training.tasks import RETRIEVAL


DEPTH = 10  # documents of each query that nDCG looks at
RECALL_AT = (1, DEPTH)
AT_ONCE = 256  # queries


def retrieval_figures(queries: Tensor, documents: Tensor, relevant: Sequence[set[int]]) -> dict[str, float]:
    """Recall and nDCG of a search by cosine similarity, each the mean over the queries.

    `recall_at_k` is the share of a query's relevant documents that are among its k nearest, and `ndcg_at_10` their
    discounted gain (1 / log2(1 + rank) for a relevant document) as a share of the largest possible (Järvelin and
    Kekäläinen, 2002). Of equally near documents, that which comes first in the file counts as nearer.

    Args:
        queries: their embeddings, [Q, D].
        documents: those of all documents, [N, D].
        relevant: for every query, the numbers of the documents that it should find, one at least.
    """
    documents = F.normalize(documents.float(), dim=-1)
    found: dict[str, list[float]] = {name: [] for name in RETRIEVAL}
    for start in range(0, len(queries), AT_ONCE):
        scores = F.normalize(queries[start : start + AT_ONCE].float(), dim=-1) @ documents.T
        nearest = scores.argsort(dim=-1, descending=True, stable=True)[:, :DEPTH].tolist()
        for row, wanted in zip(nearest, relevant[start : start + AT_ONCE], strict=True):
            hits = [place in wanted for place in row]
            for count in RECALL_AT:
                found[f"recall_at_{count}"].append(sum(hits[:count]) / len(wanted))
            found[f"ndcg_at_{DEPTH}"].append(_gain(hits) / _gain([True] * min(len(wanted), DEPTH)))
    return {name: math.fsum(values) / max(len(values), 1) for name, values in found.items()}


def _gain(hits: Sequence[bool]) -> float:
    return math.fsum(1 / math.log2(1 + rank) for rank, hit in enumerate(hits, 1) if hit)


def at_dimensions(figures: Callable[[int | None], dict[str, float]], dims: Sequence[int]) -> dict[str, float]:
    """The figures of whole embeddings under their names, and those of the first `d` dimensions as `<name>_dim_<d>`.

    Args:
        figures: the figures of embeddings that are cut to this number of dimensions; None for whole ones.
    """
    found = figures(None)
    for count in dims:
        found |= {f"{name}_dim_{count}": value for name, value in figures(count).items()}
    return found


def retrieval_test(recipe: Recipe, processor: Processor) -> RetrievalTest | None:
    """The test that a recipe names, or None."""
    options = recipe.task_options
    if options.retrieval_file is None or not isinstance(processor, PreTrainedTokenizerBase):
        return None
    retrieval = read_retrieval(options.retrieval_file)
    length = sequence_length(recipe, processor, load_config(recipe))
    examples = retrieval.examples(processor, recipe.sentence_files, options, length)
    return RetrievalTest(retrieval, examples, parse_dims(options.matryoshka_dims), pad_token_id(processor))


def with_teacher(mine: dict[str, float], yours: dict[str, float]) -> dict[str, float]:
    """The figures of a model, and those of its teacher as `<figure>_teacher` and `<figure>_teacher_dim_<d>`."""
    parts = {name: name.partition("_dim_") for name in yours}
    return mine | {f"{figure}_teacher{dim}{count}": yours[name] for name, (figure, dim, count) in parts.items()}


class RetrievalTest:
    """The texts of a retrieval file as examples, and the figures of their embeddings at several numbers of dimensions.

    With several processes, each embeds a part of the texts.
    """

    def __init__(self, retrieval: Retrieval, examples: Examples, dims: Sequence[int], pad_token_id: int) -> None:
        self.retrieval, self.examples, self.dims, self.pad_token_id = retrieval, examples, dims, pad_token_id
        self.of_teacher: dict[str, float] | None = None

    def batches(self, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterable[Batch]:
        """The padded batches of process `rank`."""
        plan = EvaluationBatches(len(self.examples), batch_size, rank, world_size)
        return loader(Stream(self.examples, 0, shuffle=False), plan, self.pad_token_id)

    def figures(self, embeddings: Tensor) -> dict[str, float]:
        """The figures of the embeddings [Q + N, D] of all texts, in their order."""
        queries, documents = embeddings.split([len(self.retrieval.queries), len(self.retrieval.documents)])
        return at_dimensions(
            lambda count: retrieval_figures(queries[:, :count], documents[:, :count], self.retrieval.relevant),
            self.dims,
        )

    @torch.no_grad()
    def __call__(self, accelerator: Accelerator, embed: Callable[[Batch], Tensor], batch_size: int) -> dict[str, float]:
        """The figures on all processes, each of which calls `embed` for its batches.

        Args:
            embed: what returns the embeddings [B, D] of a batch.
        """
        rows: list[Any] = []
        batches = self.batches(batch_size, accelerator.process_index, accelerator.num_processes)
        for batch in progress(batches, "evaluating", accelerator.is_main_process):
            batch = {name: value.to(accelerator.device) for name, value in batch.items()}
            rows += zip(batch["index"].tolist(), embed(batch).float().tolist(), strict=True)
        return self.figures(torch.tensor([row[1] for row in each_once(gather_object(rows))]))
