"""Sends the messages of our packages to stderr, and silences transformers' load report and progress bars."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

import huggingface_hub.utils
from transformers.utils import logging as transformers_logging


@contextlib.contextmanager
def to_stderr(*packages: str) -> Iterator[None]:
    """Within this context, send the unformatted messages of these packages to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname_prefix)s%(message)s"))
    handler.addFilter(_prefix)
    loggers = [logging.getLogger(package) for package in packages]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate, logger.level = [handler], False, logging.INFO
    try:
        yield
    finally:
        for logger, state in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate, logger.level = state


def _prefix(record: logging.LogRecord) -> bool:
    record.levelname_prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
    return True


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' load report and progress bars within this context.

    The report says "newly initialized, train your model"; our own messages explain new parameters better.
    """
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
