"""The figures of embedding models: likeness to the original, pairs with scores, retrieval, and the first dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_linear_attention.conversion.shown_samples import shown_neighbours
from hf_linear_attention.training.data.batches import Batch, EvaluationBatches, Stream, loader
from hf_linear_attention.training.data.processors import DEFAULT_MAX_LENGTH, load_tokenizer, pad_token_id
from hf_linear_attention.training.data.splits import load_data
from hf_linear_attention.training.evaluation.embeddings import (
    at_dimensions,
    compare_embeddings,
    compare_pairs,
    embed,
    retrieval_test,
    with_teacher,
)
from hf_linear_attention.training.losses.teacher import learned_positions, windows_for
from hf_linear_attention.training.recipe import Recipe, parse_dims


@torch.no_grad()
def embedding_figures(
    student: PreTrainedModel, teacher: PreTrainedModel, texts: Recipe, pairs: Recipe | None = None
) -> dict[str, Any]:
    """The figures of `training/evaluation/embeddings.py`, for whole embeddings and as `<name>_dim_<d>` for the first
    `d` dimensions, and examples of nearest neighbours.

    If the student has more positions than its teacher, texts are as long as these, and the teacher reads windows.

    Args:
        texts: a recipe that reads the held-out texts, and names the retrieval file.
        pairs: a recipe that reads pairs with scores.
    """
    tokenizer = load_tokenizer(texts)
    for recipe in (texts, pairs):
        if recipe is not None:
            recipe.data.max_length = _extended_length(student, teacher)
    batches = _batches(texts)  # which also completes the recipe
    dims, length = parse_dims(texts.task_options.matryoshka_dims), texts.data.max_length or DEFAULT_MAX_LENGTH
    windows = windows_for(teacher, tokenizer, length)

    def embedded(part: Any) -> tuple[Tensor, Tensor]:
        return embed(student, part, texts.pooling), embed(teacher, part, texts.pooling, windows)

    mine, yours = embedded(batches)
    figures: dict[str, Any] = at_dimensions(lambda d: compare_embeddings(mine[:, :d], yours[:, :d]), dims)
    figures["neighbours"] = shown_neighbours(mine, yours, batches, tokenizer)
    if pairs is not None:
        batches = _batches(pairs)
        both, scores = embedded(batches), torch.cat([batch["labels"] for batch in batches]).tolist()[::2]
        figures |= at_dimensions(lambda d: compare_pairs(both[0][:, :d], both[1][:, :d], scores), dims)
    if (test := retrieval_test(texts, tokenizer)) is not None:
        found = [test.figures(part) for part in embedded(test.batches(_batch_size(texts)))]
        figures |= with_teacher(*found)
        figures["retrieval"] = {
            "file": Path(str(texts.task_options.retrieval_file)).name,
            "queries": len(test.retrieval.queries),
            "documents": len(test.retrieval.documents),
        }
    return {**figures, "dims": list(dims), "max_length": length}


def _extended_length(student: PreTrainedModel, teacher: PreTrainedModel) -> int | None:
    """The number of learned positions of the student if it has more than its teacher, otherwise None."""
    mine, yours = (learned_positions(model) for model in (student, teacher))
    return mine if mine is not None and yours is not None and mine > yours else None


def _batch_size(recipe: Recipe) -> int:
    return recipe.optimization.per_device_eval_batch_size


def _batches(recipe: Recipe) -> Sequence[Batch]:
    tokenizer = load_tokenizer(recipe)
    examples: Any = load_data(recipe, tokenizer).validation
    plan = EvaluationBatches(len(examples), _batch_size(recipe), 0, 1)
    batches: Any = loader(Stream(examples, recipe.run.seed, shuffle=False), plan, pad_token_id(tokenizer))
    return batches
