"""Memory during training: what the collector leaves out, and for how long."""

from __future__ import annotations

import gc

import pytest

from hf_linear_attention.training.steady_memory import steady_memory


def fail_inside(found: list[int]) -> None:
    with steady_memory():
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        found += gc.get_freeze_count(), gc.collect()
        raise KeyError


def test_the_collector_is_restored_after_an_error() -> None:
    """Inside, what existed before is left out, and what a step leaves behind is found."""
    gc.unfreeze()
    found: list[int] = []
    with pytest.raises(KeyError):
        fail_inside(found)
    frozen, collected = found
    assert frozen > 10_000
    assert collected >= 1
    assert gc.get_freeze_count() == 0
