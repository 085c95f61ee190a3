"""Sources that many tests convert, and timing that is brief, because no test is about the times."""

from __future__ import annotations

import pytest
from converted import bert, linear_llama, llama  # noqa: F401  (fixtures, which pytest finds here by name)

from hf_linear_attention.conversion import layer_speed


@pytest.fixture(scope="session", autouse=True)
def brief_timing():
    """A layer is timed once at two lengths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_speed, "ROUNDS", 1)
        patch.setattr(layer_speed, "STEPS", 1)
        patch.setattr(layer_speed, "LONGEST", 256)
        yield
