"""The device on which this package trains and evaluates."""

from __future__ import annotations

import logging

import os

import torch


logger = logging.getLogger(__name__)


def computing_device() -> str:
    """The type of the device for training and evaluation, "cuda" or "cpu"; warns if another type of GPU is idle."""
    if torch.cuda.is_available():
        return "cuda"
    idle = {"Apple GPU (mps)": torch.backends.mps.is_available(), "Intel GPU (xpu)": torch.xpu.is_available()}
    for name in (name for name, is_available in idle.items() if is_available):
        logger.warning(
            "this machine has an %s, but training and evaluation run on the CPU, because only CUDA GPUs are supported",
            name,
        )
    return "cpu"


def memory_of_machine() -> int:
    """The bytes of memory of this machine; where the system does not say, more than any machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**60
