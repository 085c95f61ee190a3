"""Which code computes attention on a CPU. (A placeholder with the interface of the module of that name to come.)"""

from __future__ import annotations

from typing import NamedTuple

from .backends import _library
from .backends import _processor_flags


class KernelBackend(NamedTuple):
    """`name` is `c` or `torch`, `instruction_set` `avx512`, `avx2` or `base`, None for torch; `reason`: a sentence."""

    name: str
    instruction_set: str | None
    reason: str


def kernel_backend() -> KernelBackend:
    """What computes attention in this process on a CPU."""
    if _library() is None:
        return KernelBackend("torch", None, "There is no C compiler, or the environment chooses torch.")
    flags = _processor_flags().split()
    found = next((name for name, flag in (("avx512", "avx512f"), ("avx2", "avx2")) if flag in flags), "base")
    return KernelBackend("c", found, "The C kernels were compiled for this processor.")
