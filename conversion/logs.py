"""Our own few lines on stderr, and transformers' load report and progress bars out of the way."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

import huggingface_hub.utils
from transformers.utils import logging as transformers_logging


logger = logging.getLogger("hf_linear_attention.conversion")


def to_stderr() -> None:
    """Send the messages of this package to stderr, as they are."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname_prefix)s%(message)s"))
    handler.addFilter(_prefix)
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


@contextlib.contextmanager
def training_to_stderr() -> Iterator[None]:
    """Inside, the messages of `training` go where ours go."""
    root = logging.getLogger("hf_linear_attention.training")
    before = root.handlers, root.propagate, root.level
    root.handlers, root.propagate, root.level = logger.handlers, False, logging.INFO
    try:
        yield
    finally:
        root.handlers, root.propagate, root.level = before


def _prefix(record: logging.LogRecord) -> bool:
    record.levelname_prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
    return True


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No load report ("newly initialized, train your model") and no bars: what is new here is new on purpose, and said
    in our own words."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    hub_bars_off = huggingface_hub.utils.are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
        if not hub_bars_off:
            huggingface_hub.utils.enable_progress_bars()
