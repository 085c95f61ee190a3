"""Shared fixtures: offline, deterministic, on the CPU."""

from __future__ import annotations

import os


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The twins are tiny: more threads only wait for each other, and pytest-xdist uses the other cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler():
    """Without the shapes that earlier tests compiled, which would make later graphs symbolic and slow to trace."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
