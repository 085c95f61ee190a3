"""Which kernel runs: C code for float32 on a CPU, compiled on first use (about a second) and kept, else torch.

The choice follows from the tensors; it is torch wherever no C compiler is, or with `HF_LINEAR_ATTENTION_BACKEND=torch`.
The library is kept in `$XDG_CACHE_HOME/hf_linear_attention` under a name that holds source, flags and processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .native_source import SOURCE


logger = logging.getLogger(__name__)

BACKEND_VARIABLE = "HF_LINEAR_ATTENTION_BACKEND"
BACKENDS = ("auto", "torch")
# No -ffast-math: linked into a library, it makes the whole process flush denormals to 0.
FLAGS = (
    *("-O3", "-march=native", "-fPIC", "-shared", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)
SECONDS_TO_COMPILE = 60


def native_library(*tensors: torch.Tensor) -> Any:
    """The C kernels if they take these tensors (the last axis of each is features or head dimension), or None."""
    for tensor in tensors:
        if (
            type(tensor) is not torch.Tensor  # of no kind that has no memory, such as fake tensors
            or tensor.dtype != torch.float32
            or tensor.device.type != "cpu"
            or tensor.shape[-1] % 16
        ):
            return None
    return _library()


def run(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Call the C function `name` on `query [B, Hkv, G, N, F]`, `key`, `value` and others; heads spread over threads."""
    batch, heads, groups, length, features = query.shape
    shape = (batch, heads, groups, length, features, value.shape[-1])
    tensors = _described(query, key, value, *others)
    function, count = getattr(_library(), name), batch * heads

    def part(start: int, stop: int) -> None:
        if function((ctypes.c_int64 * 8)(*shape, start, stop), tensors):
            raise MemoryError(f"no memory left for the working space of `{name}`")

    threads = min(torch.get_num_threads(), count)
    if threads == 1:
        part(0, count)
        return
    bounds = [count * number // threads for number in range(threads + 1)]
    list(_threads(threads, os.getpid()).map(part, bounds[:-1], bounds[1:]))


def run_step(query, key, value, state) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[B, H, 1, D]` and new state of one token: `query [B, H, 1, F]`, `state [B, Hkv, F, D + 1]`."""
    (batch, heads, _, features), kv_heads, width = query.shape, key.shape[1], value.shape[-1]
    output, new_state = query.new_empty(batch, heads, 1, width), state.new_empty(state.shape)
    dense = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in (query, key, value, state)]
    addresses = [tensor.data_ptr() for tensor in (*dense, output, new_state)]
    _library().one_step(*addresses, batch * kv_heads, heads // kv_heads, features, width)
    return output, new_state


def run_elu_plus_one(x: torch.Tensor) -> torch.Tensor:
    """elu(x) + 1 of a dense tensor, in its memory order."""
    output = torch.empty_like(x)
    _library().elu_plus_one(x.data_ptr(), output.data_ptr(), x.numel())
    return output


def _described(*tensors: torch.Tensor | None) -> ctypes.Array:
    """For each its address, and its strides of batch, head, group and token; the last stride must be 1."""
    numbers: list[int] = []
    for tensor in tensors:
        if tensor is None:
            numbers += (0, 0, 0, 0, 0)
            continue
        strides = tensor.stride()
        group = strides[2] if len(strides) == 5 else 0
        numbers += (tensor.data_ptr(), strides[0], strides[1], group, strides[-2])
    return (ctypes.c_int64 * len(numbers))(*numbers)


@functools.cache
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """A pool of its own for every process: threads do not survive a fork."""
    return ThreadPoolExecutor(count, thread_name_prefix="linear_attention")


@functools.cache
def _library() -> Any:
    backend = os.environ.get(BACKEND_VARIABLE, "auto")
    if backend not in BACKENDS:
        raise ValueError(f"`{BACKEND_VARIABLE}` = {backend!r} is not one of {', '.join(BACKENDS)}; set one of them.")
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if backend == "torch" or compiler is None or os.name != "posix":
        return None
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("No C kernels, torch computes instead: %s", error)
        return None
    library.one_step.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 4
    library.elu_plus_one.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64]
    library.one_step.restype = library.elu_plus_one.restype = None
    return library


def _compiled(compiler: str) -> Path:
    """The path of the library, compiled if it is not there yet."""
    identity = "\n".join((SOURCE, *FLAGS, compiler, platform.machine(), _processor_flags()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_linear_attention"
    path = folder / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        source, library = Path(work) / "kernels.c", Path(work) / "kernels.so"
        source.write_text(SOURCE, encoding="utf-8")
        command = [compiler, *FLAGS, str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS_TO_COMPILE)
        os.replace(library, path)  # at once, for the other processes that may look for it
    return path


def _processor_flags() -> str:
    """What `-march=native` depends on: a cache may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
