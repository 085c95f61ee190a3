"""The options of `convert_checkpoint.py` that only embedding models have."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hf_linear_attention._common.options import option


@dataclass(kw_only=True)
class EmbeddingArguments:
    """What their figures are measured on, and the prompts before their texts."""

    pairs_file: str | None = option(
        "for an embedding model, pairs of texts with a similarity score, for Spearman's correlation in the figures: "
        ".jsonl, .csv, .tsv or .parquet with the columns sentence1, sentence2 and score, as in STS-B",
        None,
        needs=("validation_file",),
        for_evaluation=True,
        is_path=True,
        group="measuring",
    )
    retrieval_file: str | None = option(
        "for an embedding model, queries and documents for figures of retrieval: .jsonl, .csv, .tsv or .parquet with "
        "the columns query and document, where every row has a document that its query should find",
        None,
        needs=("validation_file",),
        tasks=("embedding",),
        for_evaluation=True,
        is_path=True,
        group="measuring",
    )
    query_prompt_name: str | None = option(
        "the prompt of a sentence-transformers model before the queries of --retrieval_file (default: query, if there "
        "is one)",
        None,
        needs=("retrieval_file",),
        tasks=("embedding",),
        for_evaluation=True,
        group="measuring",
    )
    document_prompt_name: str | None = option(
        "the prompt before the documents of --retrieval_file (default: document, passage or corpus)",
        None,
        needs=("retrieval_file",),
        tasks=("embedding",),
        for_evaluation=True,
        group="measuring",
    )
    prompt_name: str | None = option(
        "the prompt before all other texts of an embedding model (default: its default_prompt_name)",
        None,
        needs=("preset", "evaluate"),
        tasks=("embedding",),
        for_evaluation=True,
        group="training",
    )
    matryoshka_dims: str | None = option(
        "numbers of first dimensions, such as 256,128,64, at which embeddings are measured too, and which the training "
        "of --preset averages with whole embeddings (default: matryoshka_dimensions of the model's config.json)",
        None,
        needs=("preset", "evaluate"),
        tasks=("embedding",),
        for_evaluation=True,
        group="training",
    )

    @property
    def of_embeddings(self) -> dict[str, Any]:
        """Those that `training/finetune.py` has too and that are given."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(EmbeddingArguments)}
        return {name: value for name, value in values.items() if name != "pairs_file" and value is not None}
