"""Shared fixtures: offline, deterministic, on the CPU."""

from __future__ import annotations

import os
import signal


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The twins are tiny: more threads only wait for each other, and pytest-xdist uses the other cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


# A shell starts background jobs with SIGINT ignored, and Python keeps that; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """transformers calls fla, which `make test-clients` installs, without a GPU too, and Triton fails."""
    if config.getoption("dist", "no") != "no":
        return  # this process only hands tests out, and starts some seconds earlier without torch
    import torch
    from transformers.integrations import hub_kernels

    if hasattr(hub_kernels, "use_kernel_func_from_hub_with_fallback") and not torch.cuda.is_available():
        with_fallback = hub_kernels.use_kernel_func_from_hub_with_fallback
        hub_kernels.use_kernel_func_from_hub_with_fallback = lambda name, *_, **__: with_fallback(name, "no package")


def pytest_sessionstart(session):
    """With HF_LINEAR_ATTENTION_REQUIRE_KERNELS=1 nothing passes because it was skipped."""
    if os.environ.get("HF_LINEAR_ATTENTION_REQUIRE_KERNELS") != "1":
        return
    from hf_linear_attention.kernels.cpu import kernel_backend

    if kernel_backend().name != "c":
        pytest.exit(f"The C kernels are required: {kernel_backend().reason}", returncode=1)


def pytest_collection_modifyitems(items):
    """The files that take longest come first, so that no process of `make test` waits for another at the end."""
    longest = (
        "hf_linear_attention/test_mechanisms.py",
        "architectures/test_architectures.py",
        "docs/test_commands.py",
        "conversion/test_one_command.py",
        "hf_linear_attention/test_generation.py",
        "faults/test_places.py",
        "faults/test_damaged_input.py",
    )
    items.sort(key=lambda item: not item.path.as_posix().endswith(longest))


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler():
    """Without the shapes that earlier tests compiled, which would make later graphs symbolic and slow to trace."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
