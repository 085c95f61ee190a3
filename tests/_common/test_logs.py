"""Progress bars: on a terminal, and nowhere else."""

from __future__ import annotations

import io
import sys

import pytest

from hf_linear_attention._common import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "is_shown"), [(Terminal, True), (io.StringIO, True), (Terminal, False)])
def test_a_bar_is_shown_on_a_terminal_by_one_process(monkeypatch, stream, is_shown):
    monkeypatch.setattr(logs, "BAR_AFTER", 0.0)
    monkeypatch.setattr("sys.stderr", stream())
    assert list(logs.progress([1, 2, 3], "measuring", is_shown)) == [1, 2, 3]
    assert ("measuring" in sys.stderr.getvalue()) == (stream is Terminal and is_shown)
