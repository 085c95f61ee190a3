"""Which kernel runs: on a CPU C code (float32, bfloat16), compiled on first use and kept; on CUDA fla-core's.

The choice follows from the tensors; it is torch where there is no C compiler or no fla-core (extra `gpu`, imported at
the first call on CUDA), for what they do not take, and with `HF_LINEAR_ATTENTION_BACKEND=torch`.
The library is kept in `$XDG_CACHE_HOME/hf_linear_attention` under a name that holds source, flags and processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .backend_fla import causal_attention
from .backend_fla import takes
from .native_source import SOURCE


logger = logging.getLogger(__name__)

BACKEND_VARIABLE = "HF_LINEAR_ATTENTION_BACKEND"
BACKENDS = ("auto", "torch")
# No -ffast-math: linked into a library, it makes the whole process flush denormals to 0.
FLAGS = (
    *("-O3", "-march=native", "-fPIC", "-shared", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
)
# GCC splits the loops of such processors into vectors of half their width unless told so.
X86_FLAGS = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
SECONDS_TO_COMPILE = 60
# Bytes; what glibc takes from the system anew at every call.
LARGE = 1 << 22


def is_tracing() -> bool:
    """Inside a graph (torch.compile, torch.export) nothing may branch on data."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def native_library(*tensors: torch.Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Any:
    """The C kernels if they take these tensors, or None."""
    for tensor in tensors:
        if (
            type(tensor) is not torch.Tensor  # of no kind that has no memory, such as fake tensors
            or tensor.dtype not in dtypes
            or tensor.device.type != "cpu"
        ):
            return None
    return _library()


def gpu_kernel(value: torch.Tensor, length: int) -> Any:
    """`backend_fla.causal_attention` for N tokens on CUDA with these values, or None."""
    if not _is_on_cuda(value) or _backend() == "torch" or not takes(value, length):
        return None
    return causal_attention


def _is_on_cuda(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda" and type(tensor) is torch.Tensor  # of no kind that has no memory


def run_attention(name: str, function: tuple[int, ...], tensors: Sequence[torch.Tensor | None]) -> None:
    """Call the C function `name`; heads spread over threads.

    `function` is the number of features, the map and whether causal (of a window: places, sinks, True). The first
    tensors are `query [B, Hkv, G, N, D]`, `key [B, Hkv, 1, S, D]` and `value [B, Hkv, 1, S, W]`, the others as
    native_blocks (native_window) lists them, None where missing.
    """
    query, key, value, *_ = tensors
    if query is None or key is None or value is None:
        raise ValueError("queries, keys and values are needed")
    batch, heads, groups, length, inputs = query.shape
    features, *how = function
    shape = (heads, groups, length, key.shape[3], inputs, features, value.shape[-1], *how)
    described = _described(tensors)
    call, count = getattr(_library(), name), batch * heads

    def part(start: int, stop: int) -> None:
        if call((ctypes.c_int64 * (len(shape) + 2))(*shape, start, stop), described):
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


def run_log_step(query, key, value, state, log_decay) -> tuple[torch.Tensor, torch.Tensor]:
    """`run_step` for exponents: `state [B, Hkv, F, D + 2]`, `log_decay [Hkv]` or None."""
    (batch, heads, _, features), kv_heads, width = query.shape, key.shape[1], value.shape[-1]
    output, new_state = query.new_empty(batch, heads, 1, width), state.new_empty(state.shape)
    size = query.new_empty(batch, heads)
    shape = (batch, kv_heads, heads // kv_heads, 0, 0, 0, 0, features, width, 4)
    tensors = (None, None, value, query, key, log_decay, state, *[None] * 8)
    _library().log_step(*_step_arguments(shape, tensors, (new_state, *[None] * 9, output, size)))
    return output, new_state


def run_hybrid_step(
    shape: Sequence[int], tensors: Sequence[torch.Tensor | None], results: Sequence[torch.Tensor], scaling: float
) -> None:
    """`hybrid_step` of native_step, which says what `shape`, `tensors` and `results` are."""
    if _library().hybrid_step(*_step_arguments(shape, tensors, results), ctypes.c_float(scaling)):
        raise MemoryError("no memory left for the working space of `hybrid_step`")


def _step_arguments(shape, tensors, results) -> tuple[ctypes.Array, ctypes.Array]:
    dense = [tensor if tensor is None else tensor.contiguous() for tensor in tensors]
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in (*dense, *results)]
    arguments = (ctypes.c_int64 * len(shape))(*shape), (ctypes.c_void_p * len(addresses))(*addresses)
    arguments[1].keep = dense  # alive as long as their addresses
    return arguments


def run_elu_plus_one(x: torch.Tensor) -> torch.Tensor:
    """elu(x) + 1 of a dense tensor, in its memory order."""
    output = torch.empty_like(x)
    _library().elu_plus_one(x.data_ptr(), output.data_ptr(), x.numel())
    return output


def in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, of whose new memory Linux is asked for pages of 2 MB: small ones cost more than a kernel's work."""
    size = tensor.numel() * tensor.element_size()
    if size >= LARGE and tensor.device.type == "cpu" and type(tensor) is torch.Tensor and sys.platform == "linux":
        start = tensor.data_ptr()
        skip = -start % mmap.PAGESIZE
        # Advice: failure costs nothing but time.
        _libc().madvise(start + skip, (size - skip) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    return tensor


def _described(tensors: Sequence[torch.Tensor | None]) -> ctypes.Array:
    """For each its address, its strides but the last, which must be 1, and the size of a number, all in bytes."""
    numbers: list[int] = []
    for tensor in tensors:
        if tensor is None:
            numbers += (0, 0, 0, 0, 0, 0)
            continue
        size = tensor.element_size()
        numbers += (tensor.data_ptr(), *(size * stride for stride in tensor.stride()[:4]), size)
    return (ctypes.c_int64 * len(numbers))(*numbers)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


@functools.cache
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """A pool of its own for every process: threads do not survive a fork."""
    return ThreadPoolExecutor(count, thread_name_prefix="linear_attention")


@functools.cache
def _backend() -> str:
    backend = os.environ.get(BACKEND_VARIABLE, "auto")
    if backend not in BACKENDS:
        raise ValueError(f"`{BACKEND_VARIABLE}` = {backend!r} is not one of {', '.join(BACKENDS)}; set one of them.")
    return backend


@functools.cache
def _library() -> Any:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if _backend() == "torch" or compiler is None or os.name != "posix":
        return None
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("No C kernels, torch computes instead: %s", error)
        return None
    library.one_step.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_int64] * 4
    library.elu_plus_one.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64]
    library.one_step.restype = library.log_step.restype = library.elu_plus_one.restype = None
    return library


def _compiled(compiler: str) -> Path:
    """The path of the library, compiled if it is not there yet."""
    identity = "\n".join((SOURCE, *FLAGS, *X86_FLAGS, compiler, platform.machine(), _processor_flags()))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_linear_attention"
    path = folder / f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        source, library = Path(work) / "kernels.c", Path(work) / "kernels.so"
        source.write_text(SOURCE, encoding="utf-8")
        command = [compiler, *FLAGS, *X86_FLAGS, str(source), "-o", str(library), "-lm"]
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
