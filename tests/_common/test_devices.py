"""What training asks of the C library."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest


FAULTS = """
import resource, torch
from hf_linear_attention._common.devices import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(2**21)  # 8 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
by_default = faults()
keep_freed_memory()
torch.ones(2**21)
print(by_default, faults())
"""


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc returns freed memory that soon")
def test_freed_memory_is_not_fetched_again() -> None:
    """Eight tensors of 2,048 pages, one after the other; a page of 2 MB, where Linux gives those, is one fault."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    by_default, kept = map(int, done.stdout.split())
    assert kept < by_default / 4
