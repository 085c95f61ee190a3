"""The device on which this package trains and evaluates."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import sys
from collections.abc import Iterator

import torch


logger = logging.getLogger(__name__)

SHORTEST_ROW = 64  # tokens of a row that is divided for lack of memory
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


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


@contextlib.contextmanager
def ready_to_compute(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model is on the device for computing, and in float32 where the CPU only emulates its dtype.

    Afterwards it is where it was, in the dtypes that it had.
    """
    device, tensors = computing_device(), [*model.parameters(), *model.buffers()]
    before = [(tensor.device, tensor.dtype) for tensor in tensors]
    for tensor in tensors:
        is_emulated = device == "cpu" and (
            tensor.dtype == torch.float16 or (tensor.dtype == torch.bfloat16 and not multiplies_bfloat16(device))
        )
        tensor.data = tensor.data.to(device, torch.float32 if is_emulated else tensor.dtype)
    try:
        yield
    finally:
        for tensor, place in zip(tensors, before):
            tensor.data = tensor.data.to(*place)


def multiplies_bfloat16(device: str) -> bool:
    """Whether the device multiplies numbers in bfloat16 and does not emulate it; torch says so for CUDA and x86."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return device == "cpu" and any(getattr(torch.cpu, name, bool)() for name in names)


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors for the next ones, instead of returning it to the system.

    A training step makes and frees the same tensors as the step before it. Getting their memory back page by page took
    a tenth of the CPU time of a small model.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # musl has none
        mallopt(M_TRIM_THRESHOLD, 2**30)  # bytes that are kept at most
        mallopt(M_MMAP_THRESHOLD, 2**25)  # of larger tensors nothing is; glibc documents no larger value


def memory_of_machine() -> int:
    """The bytes of memory of this machine; where the system does not say, more than any machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**60
