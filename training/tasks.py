"""The tasks of `training/finetune.py`: one row for each. Everything that depends on the task alone is looked up here.

How the rows of a task become examples is in `data/splits.py`, and how its predictions are scored in
`evaluation/evaluator.py`; both have one entry for each task, too.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from dataclasses import dataclass
from typing import Literal

from hf_linear_attention._common.heads import Inputs


logger = logging.getLogger(__name__)


# What one row of the logits stands for: a token of the input, an input, the start or the end of an answer in an input,
# a token of the target, or a frame of sound.
LogitsOf = Literal["tokens", "inputs", "spans", "targets", "frames"]


@dataclass(frozen=True)
class Task:
    """What distinguishes a task.

    Args:
        auto_class: the Auto class of transformers that loads its models.
        inputs: what the models read.
        logits: what one row of the logits stands for; None for models without logits.
        figures: the figures by which the best model can be chosen; the first is the default.
        text_column: the column with the text, unless `--text_column_name` is given.
        pair_column: the column with a second text, unless `--text_pair_column_name` is given.
        label_columns: the names that the column of labels may have, unless `--label_column_name` is given.
        reads_running_text: whether a .txt file can be used.
        generates: whether an evaluation can generate text (`--predict_with_generate`).
        compares: whether an evaluation compares the predictions with those of the teacher.
    """

    auto_class: str
    inputs: Inputs
    logits: LogitsOf | None
    figures: tuple[str, ...]
    text_column: str = "text"
    pair_column: str | None = None
    label_columns: tuple[str, ...] = ("label",)
    reads_running_text: bool = False
    generates: bool = False
    compares: bool = True


LANGUAGE = ("nats_per_token", "perplexity")
CLASSES = ("accuracy", "f1")
EMBEDDINGS = ("cosine", "cosine_min")
RETRIEVAL = ("recall_at_1", "recall_at_10", "ndcg_at_10")
GENERATED_TEXTS = ("exact_match", "f1")
ERROR_RATES = ("wer", "cer")

TASKS: dict[str, Task] = {
    "causal_lm": Task(
        "AutoModelForCausalLM", "text", "tokens", LANGUAGE, reads_running_text=True, compares=False, generates=True
    ),
    "masked_lm": Task("AutoModelForMaskedLM", "text", "tokens", LANGUAGE, reads_running_text=True, compares=False),
    "sequence_classification": Task("AutoModelForSequenceClassification", "text", "inputs", CLASSES),
    "embedding": Task("AutoModel", "text", None, (*EMBEDDINGS, "spearman", *RETRIEVAL), reads_running_text=True),
    "image_classification": Task("AutoModelForImageClassification", "images", "inputs", CLASSES),
    "image_embedding": Task("AutoModel", "images", None, EMBEDDINGS),
    "seq2seq_lm": Task(
        "AutoModelForSeq2SeqLM",
        "text",
        "targets",
        (*LANGUAGE, *GENERATED_TEXTS, "same_text"),
        text_column="source",
        pair_column="target",
        generates=True,
    ),
    "question_answering": Task("AutoModelForQuestionAnswering", "text", "spans", ("f1", "exact_match")),
    "token_classification": Task(
        "AutoModelForTokenClassification",
        "text",
        "tokens",
        ("f1", "accuracy"),
        text_column="tokens",
        label_columns=("tags", "ner_tags", "pos_tags", "label"),
    ),
    "speech_seq2seq": Task(
        "AutoModelForSpeechSeq2Seq",
        "sound",
        "targets",
        (*LANGUAGE, *ERROR_RATES, "same_text"),
        generates=True,
    ),
    "ctc": Task("AutoModelForCTC", "sound", "frames", ERROR_RATES),
}
TEXT_TASKS = tuple(name for name, task in TASKS.items() if task.inputs == "text")
# The columns of question_answering, whose names are fixed.
QUESTION_COLUMNS = ("question", "context", "answers")
MESSAGES = "messages"  # the column of conversations, for causal_lm
# Every row of these has the same inputs whenever it is read, and the same length for student and teacher.
CACHED = ("causal_lm", "embedding")
COLUMN_TASKS = tuple(name for name in TEXT_TASKS if name != "question_answering")
IMAGE_TASKS = tuple(name for name, task in TASKS.items() if task.inputs == "images")
SOUND_TASKS = tuple(name for name, task in TASKS.items() if task.inputs == "sound")
# What is counted of each kind of inputs.
UNITS = {"text": "tokens", "images": "images", "sound": "recordings"}
CLASSIFICATION = tuple(name for name, task in TASKS.items() if task.logits == "inputs")


def unit_of(task: str) -> str:
    """The unit in which the amount of training for a task is counted."""
    return UNITS[TASKS[task].inputs]


# The libraries of the extra `eval`, which compute some of the figures; without them, those figures are left out.
INSTALL = 'install it with `pip install "hf-linear-attention[eval]"`'
# By the names under which Python imports them.
PACKAGES = {
    "jiwer": "jiwer",
    "scipy": "scipy",
    "sentence_transformers": "sentence-transformers",
    "seqeval": "seqeval",
    "sklearn": "scikit-learn",
}
_OF_F1 = {"sequence_classification": "sklearn", "image_classification": "sklearn", "token_classification": "seqeval"}
_OF_FIGURES = {"wer": "jiwer", "cer": "jiwer", "spearman": "scipy", **dict.fromkeys(RETRIEVAL, "sentence_transformers")}


def missing_library(task: str, figure: str) -> str | None:
    """The library that a figure of a task needs and that is not installed, or None."""
    library = _OF_F1.get(task) if figure == "f1" else _OF_FIGURES.get(figure)
    return None if library is None or _is_installed(library) else library


def needs(library: str) -> str:
    """That something needs `library`, and how to install it, as the end of an error."""
    return f"needs {PACKAGES[library]}; {INSTALL}"


@functools.cache
def can_score(library: str) -> bool:
    """Whether `library` is installed; if it is not, one warning says that its figures are left out."""
    found = _is_installed(library)
    if not found:
        logger.warning("the figures of %s are left out of evaluations; %s", PACKAGES[library], INSTALL)
    return found


def _is_installed(library: str) -> bool:
    try:
        return importlib.util.find_spec(library) is not None
    except ValueError:  # something stands in its place in `sys.modules`
        return False
