"""The options of `training/finetune.py` that only some tasks have (see `arguments.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hf_linear_attention._common.options import COUNT, NOT_NEGATIVE, OnResume, option
from hf_linear_attention.training.tasks import SOUND_TASKS, TASKS


EVALUATION_DATA = ("validation_file", "dataset_name")
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
