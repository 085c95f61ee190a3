"""Memory during training: what Python has loaded is not searched again, and what the C library frees is kept.

A step makes and frees the same tensors as the step before it, and thousands of small objects. By default, glibc returns
the memory of tensors to the system and gets it back page by page, and Python's collector searches all objects of the
imported libraries again and again. On one core, both took a quarter of the time of small models.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT = 2**30  # bytes of freed memory that glibc keeps
LARGEST_KEPT = 2**25  # the size of a tensor up to which its memory is kept, and the largest that glibc allows


@contextmanager
def steady_memory() -> Iterator[None]:
    """Inside, the collector leaves out the objects that exist at the beginning; from now on, freed memory is kept."""
    _keep_freed_memory()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@functools.cache
def _keep_freed_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # musl has none
        mallopt(M_TRIM_THRESHOLD, KEPT)
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
