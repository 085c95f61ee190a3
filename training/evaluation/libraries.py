"""The libraries of the extra `eval`, which compute some of the figures; without them, those figures are left out."""

from __future__ import annotations

import functools
import importlib.util
import logging

from hf_linear_attention.training.tasks import RETRIEVAL


logger = logging.getLogger(__name__)

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
