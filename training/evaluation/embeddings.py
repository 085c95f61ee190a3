r"""Figures of embeddings: likeness to the teacher, pairs with scores, retrieval, and what the first dimensions keep.

A retrieval file (`--retrieval_file`) has queries and the documents that they should find:

    {"query": "How tall is the tower?", "document": "The tower is 330 metres tall."}
    {"query": "How tall is the tower?", "document": "With its antennas, it is 330 metres high."}
    {"query": null, "document": "The bridge has four arches."}

Every row has a document that its query should find. Rows with the same query name several such documents; a row without
a query adds a document that no query should find. Every query is compared with every different document of the file.

sentence-transformers searches and scores (`InformationRetrievalEvaluator`). What it lacks, and this file does: to embed
the texts on all processes of a run, with a model that is being trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linear_attention._common.errors import DataError
from hf_linear_attention._common.logs import progress
from hf_linear_attention.training.data.batches import Batch, EvaluationBatches, Stream, loader, token_weights
from hf_linear_attention.training.data.file_checks import DOCUMENT, QUERY
from hf_linear_attention.training.data.packing import Documents, Examples
from hf_linear_attention.training.data.processors import Processor, load_config, pad_token_id, sequence_length
from hf_linear_attention.training.data.rows import bad_texts, load_rows, refuse_bad, require_column
from hf_linear_attention.training.data.sentence_files import DOCUMENT_PROMPTS, QUERY_PROMPTS, Pooling
from hf_linear_attention.training.data.texts import tokenize_texts
from hf_linear_attention.training.evaluation.evaluator import each_once
from hf_linear_attention.training.evaluation.scores import Spearman, scored
from hf_linear_attention.training.losses.outputs import cosines_at, hidden_states_of, pooled, run_model
from hf_linear_attention.training.losses.teacher import Teacher, TeacherWindows
from hf_linear_attention.training.recipe import DataArguments, Recipe, parse_dims


DEPTH = 10  # documents of each query that nDCG looks at


@dataclass(frozen=True)
class Retrieval:
    """The different queries and documents of a file, and the numbers of the documents that each query should find."""

    queries: list[str]
    documents: list[str]
    relevant: list[set[int]]


def read_retrieval(path: str) -> Retrieval:
    """The queries and documents of a file, in its order.

    Raises:
        DataError: if a row has no document, or no row has a query.
    """
    data = DataArguments(validation_file=path)
    rows = load_rows(data, "validation", (QUERY, DOCUMENT))
    if rows is None:
        raise RuntimeError("the file is named above")
    for name in (QUERY, DOCUMENT):
        require_column(rows, "retrieval_file", name)
    others = {n: query for n, query in enumerate(rows[QUERY]) if query is not None and not isinstance(query, str)}
    bad = {number: f"`{QUERY}` is {query!r}, not a text" for number, query in others.items()}
    refuse_bad(bad | bad_texts(rows, [DOCUMENT]), data, "validation")
    documents: dict[str, int] = {}
    relevant: dict[str, set[int]] = {}
    for query, document in zip(rows[QUERY], rows[DOCUMENT], strict=True):
        place = documents.setdefault(document, len(documents))
        if query is not None and query.strip():
            relevant.setdefault(query, set()).add(place)
    if not relevant:
        raise DataError(f"`--retrieval_file {path}` has no query; fill the column `{QUERY}`")
    return Retrieval(list(relevant), list(documents), list(relevant.values()))


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
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.util import cos_sim

    names = [f"{number:012}" for number in range(max(len(queries), len(documents)))]  # equally near: the least name
    depths: Any = {f"{kind}_at_k": [1, DEPTH] for kind in ("mrr", "ndcg", "accuracy", "precision_recall", "map")}
    evaluator = InformationRetrievalEvaluator(
        dict.fromkeys(names[: len(queries)], ""),
        dict.fromkeys(names[: len(documents)], ""),
        {name: {names[number] for number in found} for name, found in zip(names, relevant)},
        score_functions={"cosine": cos_sim},
        **depths,
    )
    model: Any = SimpleNamespace(encode_query=lambda *_, **__: queries.float())  # they are embedded already
    scores: Any = evaluator.compute_all_metrics(model, corpus_embeddings=documents.float())
    found = scores["cosine"]
    recall = {f"recall_at_{count}": float(found["recall@k"][count]) for count in (1, DEPTH)}
    return {**recall, f"ndcg_at_{DEPTH}": float(found["ndcg@k"][DEPTH])}


def at_dimensions(figures: Callable[[int | None], dict[str, float]], dims: Sequence[int]) -> dict[str, float]:
    """The figures of whole embeddings under their names, and those of the first `d` dimensions as `<name>_dim_<d>`.

    Args:
        figures: the figures of embeddings that are cut to this number of dimensions; None for whole ones.
    """
    found = figures(None)
    for count in dims:
        found |= {f"{name}_dim_{count}": value for name, value in figures(count).items()}
    return found


def with_teacher(mine: dict[str, float], yours: dict[str, float]) -> dict[str, float]:
    """The figures of a model, and those of its teacher as `<figure>_teacher` and `<figure>_teacher_dim_<d>`."""
    parts = {name: name.partition("_dim_") for name in yours}
    return mine | {f"{figure}_teacher{dim}{count}": yours[name] for name, (figure, dim, count) in parts.items()}


def retrieval_test(recipe: Recipe, processor: Processor) -> RetrievalTest | None:
    """The test that a recipe names, or None."""
    options, files = recipe.task_options, recipe.sentence_files
    if options.retrieval_file is None or not isinstance(processor, PreTrainedTokenizerBase):
        return None
    retrieval = read_retrieval(options.retrieval_file)
    length = sequence_length(recipe, processor, load_config(recipe))
    query = files.prompt("query_prompt_name", options.query_prompt_name, QUERY_PROMPTS)
    document = files.prompt("document_prompt_name", options.document_prompt_name, DOCUMENT_PROMPTS)
    texts = [query + text for text in retrieval.queries] + [document + text for text in retrieval.documents]
    tokens = tokenize_texts(texts, processor, truncation=True, max_length=length)["input_ids"]
    # A tokenizer without special tokens makes nothing of some texts, and their embedding is that of padding.
    padding = pad_token_id(processor)
    examples = Documents([ids if len(ids) else np.array([padding]) for ids in tokens], None)
    return RetrievalTest(retrieval, examples, parse_dims(options.matryoshka_dims), padding)


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
        rows: list[tuple[int, list[float]]] = []
        labelled: list[tuple[int, float, list[float]]] = []
        for batch in progress(batches, "evaluating", self.accelerator.is_main_process):
            batch = {name: value.to(self.accelerator.device) for name, value in batch.items()}
            mine, index = self._embed(model, batch), batch["index"].tolist()
            cosines = cosines_at(mine, self._embed(None, batch), self.dims)
            rows += zip(index, cosines.T.tolist(), strict=True)
            if "labels" in batch:
                labelled += zip(index, batch["labels"].tolist(), mine.tolist(), strict=True)
        result = self._cosines(each_once(gather_object(rows)))
        result |= self._similarity(each_once(gather_object(labelled)))
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

    def _cosines(self, rows: list[tuple[int, list[float]]]) -> dict[str, float]:
        def figures(count: int | None) -> dict[str, float]:
            cosines = [row[1][0 if count is None else 1 + self.dims.index(count)] for row in rows]
            mean = math.fsum(cosines) / max(len(cosines), 1)
            return {"cosine": mean, "cosine_min": min(cosines, default=0.0)}

        return {"samples": len(rows), **at_dimensions(figures, self.dims)}

    def _similarity(self, labelled: list[tuple[int, float, list[float]]]) -> dict[str, float]:
        """The figures of pairs (`pair_similarity`), given number, score and embedding of every text, by number."""
        whole = labelled[: len(labelled) // 2 * 2]
        if not whole:
            return {}
        embeddings, scores = torch.tensor([row[2] for row in whole]), [row[1] for row in whole[::2]]
        return at_dimensions(lambda count: pair_similarity(embeddings[:, :count], scores), self.dims)

    def _retrieval(self, model: PreTrainedModel) -> dict[str, float]:
        """The figures of the model and of the teacher."""
        if (test := self.retrieval) is None:
            return {}
        mine = test(self.accelerator, lambda batch: self._embed(model, batch), self.batch_size)
        if test.of_teacher is None:  # it does not change
            test.of_teacher = test(self.accelerator, lambda batch: self._embed(None, batch), self.batch_size)
        return with_teacher(mine, test.of_teacher)


@torch.no_grad()
def embed(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    pooling: Pooling = "mean",
    windows: TeacherWindows | None = None,
) -> Tensor:
    """The normalised embeddings `[texts, D]` of all texts, in the order of the batches.

    Args:
        windows: the windows in which the model reads texts that are longer than its positions.
    """

    def states(batch: Batch) -> tuple[Tensor]:
        return (run_model(model, batch, None).last_hidden_state,)

    rows = []
    for batch in progress(batches, "measuring"):
        batch = {name: value.to(model.device) for name, value in batch.items()}
        is_long = windows is not None and batch["input_ids"].shape[1] > windows.size
        hidden = windows.hidden_states(states, batch) if windows is not None and is_long else states(batch)
        rows.append(pooled(hidden[0], batch["attention_mask"], pooling))
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
    return with_teacher(pair_similarity(mine, scores), pair_similarity(yours, scores))


def compare_embeddings(mine: Tensor, yours: Tensor) -> dict[str, float]:
    """Figures that compare the embeddings `[texts, D]` of student and teacher for the same texts.

    `same_neighbour` is the share of texts whose nearest other text is the same for both.
    """
    mine, yours = (F.normalize(embeddings, dim=-1) for embeddings in (mine, yours))
    cosine = (mine * yours).sum(-1)
    nearest = [(x @ x.T).fill_diagonal_(-math.inf).argmax(-1) for x in (mine, yours)]
    return {
        "cosine": cosine.mean().item(),
        "cosine_min": cosine.min().item(),
        "same_neighbour": (nearest[0] == nearest[1]).double().mean().item(),
    }
