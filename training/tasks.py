"""The tasks of `training/finetune.py`: one row for each. Everything that depends on the task alone is looked up here.

How the rows of a task become examples is in `data/splits.py`, and how its predictions are scored in
`evaluation/evaluator.py`.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from dataclasses import dataclass
from typing import Literal

from hf_linear_attention._common.heads import Inputs


logger = logging.getLogger(__name__)


# What one row of the logits stands for: a token of the input, an input, or a token of the target.
LogitsOf = Literal["tokens", "inputs", "targets"]


@dataclass(frozen=True)
class Task:
    """What distinguishes a task.

    Args:
        auto_class: the Auto class of transformers that loads its models.
        inputs: what the models read.
        logits: what one row of the logits stands for; None for models without logits.
        figure: the one of an evaluation that chooses the best model.
        text_column: the column with the text, unless `--text_column_name` is given.
        pair_column: the column with a second text, unless `--text_pair_column_name` is given.
        reads_running_text: whether a .txt file can be used.
        compares: whether an evaluation compares the predictions with those of the teacher.
    """

    auto_class: str
    inputs: Inputs
    logits: LogitsOf | None
    figure: str
    text_column: str = "text"
    pair_column: str | None = None
    reads_running_text: bool = False
    compares: bool = True


LANGUAGE, CLASSES, EMBEDDINGS = "nats_per_token", "accuracy", "cosine"

TASKS: dict[str, Task] = {
    "causal_lm": Task("AutoModelForCausalLM", "text", "tokens", LANGUAGE, reads_running_text=True, compares=False),
    "masked_lm": Task("AutoModelForMaskedLM", "text", "tokens", LANGUAGE, reads_running_text=True, compares=False),
    "sequence_classification": Task("AutoModelForSequenceClassification", "text", "inputs", CLASSES),
    "embedding": Task("AutoModel", "text", None, EMBEDDINGS, reads_running_text=True),
    "image_classification": Task("AutoModelForImageClassification", "images", "inputs", CLASSES),
    "image_embedding": Task("AutoModel", "images", None, EMBEDDINGS),
    "seq2seq_lm": Task(
        "AutoModelForSeq2SeqLM", "text", "targets", LANGUAGE, text_column="source", pair_column="target"
    ),
}
TEXT_TASKS = tuple(name for name, task in TASKS.items() if task.inputs == "text")
IMAGE_TASKS = tuple(name for name, task in TASKS.items() if task.inputs == "images")
CLASSIFICATION = tuple(name for name, task in TASKS.items() if task.logits == "inputs")
UNITS = {"text": "tokens", "images": "images"}  # what is counted of each kind of inputs
MESSAGES = "messages"  # the column of conversations, for causal_lm


def unit_of(task: str) -> str:
    """The unit in which the amount of training for a task is counted."""
    return UNITS[TASKS[task].inputs]


# The libraries of the extra `eval`, which compute some of the figures; without them, those figures are left out.
INSTALL = 'install it with `pip install "hf-linear-attention[eval]"`'
# By the names under which Python imports them.
PACKAGES = {"scipy": "scipy", "sklearn": "scikit-learn"}


@functools.cache
def can_score(library: str) -> bool:
    """Whether `library` is installed; if it is not, one warning says that its figures are left out."""
    found = is_installed(library)
    if not found:
        logger.warning("the figures of %s are left out of evaluations; %s", PACKAGES[library], INSTALL)
    return found


def is_installed(library: str) -> bool:
    """Whether Python finds `library`."""
    try:
        return importlib.util.find_spec(library) is not None
    except ValueError:  # something stands in its place in `sys.modules`
        return False
