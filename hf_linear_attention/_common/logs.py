"""Our messages and progress bars on stderr, without transformers' load report and progress bars."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm.auto import tqdm


T = TypeVar("T")
# A bar appears after so many seconds: most work on small models is over by then.
BAR_AFTER = 2.0


def progress(parts: Iterable[T], what: str, is_shown: bool = True) -> Iterable[T]:
    """The same parts, with a bar on stderr if that is a terminal and `is_shown`; the bar disappears at the end."""
    bar: Iterable[T] = tqdm(parts, desc=what, disable=None if is_shown else True, leave=False, delay=BAR_AFTER)
    return bar


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
    import huggingface_hub.utils
    from transformers.utils import logging as transformers_logging

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
