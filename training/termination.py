"""SIGTERM, which schedulers send before they kill: noted, so that the step ends and a checkpoint is written."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Termination:
    """Inside `with`, SIGTERM sets `requested`; outside it has the effect it had before."""

    requested = False

    def __enter__(self) -> Termination:
        self._is_main = threading.current_thread() is threading.main_thread()  # others cannot set handlers
        if self._is_main:
            self._previous: Any = signal.signal(signal.SIGTERM, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_main:
            signal.signal(signal.SIGTERM, self._previous)
