"""The options of `training/finetune.py` that only some tasks have (see `arguments.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hf_linear_attention._common.options import COUNT, NOT_NEGATIVE, OnResume, option
from hf_linear_attention.training.tasks import SOUND_TASKS, TASKS, TEXT_TASKS


EVALUATION_DATA = ("validation_file", "dataset_name")
PADDED = tuple(name for name in TEXT_TASKS if name != "causal_lm")  # the blocks of causal_lm have one length
GENERATING = tuple(name for name, task in TASKS.items() if task.generates)


@dataclass
class TaskArguments:
    """How the rows of some tasks become examples, and what their evaluations generate."""

    loss_on: Literal["answers", "all"] = option(
        "In conversations (rows with `messages`): learn only what the assistant says, or all messages.",
        "answers",
        tasks=("causal_lm",),
        for_evaluation=True,
    )
    doc_stride: int | None = option(
        "Tokens that the parts of a long context share; default: 128, or a quarter of max_length if that is less.",
        None,
        bounds=NOT_NEGATIVE,
        tasks=("question_answering",),
        for_evaluation=True,
    )
    retrieval_file: str | None = option(
        "Queries and documents for figures of retrieval: .jsonl, .csv, .tsv or .parquet with the columns `query` and "
        "`document` (docs/healing.md).",
        None,
        needs=EVALUATION_DATA,
        tasks=("embedding",),
        for_evaluation=True,
        is_path=True,
        on_resume=OnResume.INCOMPARABLE,
    )
    prompt_name: str | None = option(
        "Prompt of a sentence-transformers model that stands before every text of the data; default: its "
        "default_prompt_name.",
        None,
        tasks=("embedding",),
        for_evaluation=True,
    )
    query_prompt_name: str | None = option(
        "Prompt before the queries of retrieval_file; default: `query`, if there is one.",
        None,
        needs=("retrieval_file",),
        tasks=("embedding",),
        for_evaluation=True,
        on_resume=OnResume.INCOMPARABLE,
    )
    document_prompt_name: str | None = option(
        "Prompt before the documents of retrieval_file; default: `document`, `passage` or `corpus`.",
        None,
        needs=("retrieval_file",),
        tasks=("embedding",),
        for_evaluation=True,
        on_resume=OnResume.INCOMPARABLE,
    )
    matryoshka_dims: str | None = option(
        "Numbers of first dimensions, such as 256,128,64, at which embeddings are evaluated too, and which "
        "embedding_weight averages with whole embeddings; default: `matryoshka_dimensions` of config.json.",
        None,
        tasks=("embedding",),
        for_evaluation=True,
        on_resume=OnResume.WARNED,
    )
    audio_column_name: str = option(
        "Column with the recording: a path relative to the folder of the data file, or its samples.",
        "audio",
        tasks=SOUND_TASKS,
        for_evaluation=True,
    )
    predict_with_generate: bool = option(
        "In evaluations, also generate texts (greedily), and compare them with the targets and the teacher's; of "
        "conversations, count the answers that end.",
        False,
        needs=EVALUATION_DATA,
        tasks=GENERATING,
        for_evaluation=True,
        on_resume=OnResume.INCOMPARABLE,
    )
    generation_max_length: int = option(
        "Tokens that are generated at most for each text.",
        128,
        bounds=COUNT,
        needs=("predict_with_generate",),
        tasks=GENERATING,
        for_evaluation=True,
        on_resume=OnResume.INCOMPARABLE,
    )
    group_by_length: bool = option(
        "Train on texts of similar length in each optimizer step, so that little is computed on padding; the order of "
        "the examples is another one.",
        False,
        tasks=PADDED,
    )
