# SPDX-License-Identifier: Apache-2.0
"""The C kernels for CPUs (csrc/), if the package was installed with them: found, checked, and called through ctypes.

The libraries are in the folder of the installed package `hf_linear_attention`, one per instruction set. A checkpoint
carries none of them; its code finds those of the package without importing it. Nothing is compiled here. The functions
of this file pass addresses to C, so only the operators (`kernels.operators`, `window`, `hybrid`, `hybrid_step` and
`delta`), which check every size first, may call them.

If there are fewer key/value heads than cores, attention is computed in parts. In the forward pass a long sequence is
cut: each part first sums its own keys, and then attends with the merged state of the parts before it (in the
bidirectional form, of all parts). Keys are thus read twice, which pays off from two cores on. In the backward pass the
query heads of a group are divided: each part computes its own gradients of keys and values, which are then added.

Axes: B batch, H query heads, Hkv key/value heads, G query heads per key/value head, N queries, S keys, F features, W
head dimension of the values.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import logging
import mmap
import os
import struct
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_kernels.blocks import EMPTY_MAXIMUM, EXP, merge_states, needs_plain


logger = logging.getLogger(__name__)

PACKAGE = "hf_linear_attention"
BACKEND_VARIABLE = "HF_LINEAR_ATTENTION_BACKEND"
BACKENDS = ("auto", "torch")
INSTRUCTION_SETS = ("base", "avx2", "avx512")
BFLOAT16_VARIABLE = "HF_LINEAR_ATTENTION_BFLOAT16"
# How C multiplies where queries are bfloat16, by the numbers of csrc/linear_attention.h.
BFLOAT16_PRODUCTS = ("float32", "avx512_bf16", "amx")
INTEL, AVX512_BF16, AMX = (1 << number for number in range(3))  # what `bfloat16_features` says of a processor
SUFFIX = ".dll" if sys.platform == "win32" else ".so"
# The interface of csrc/linear_attention.h: its version, the bytes of its structs, and the lengths of its lists.
ABI = (9, 48, 120, 152, 33, 23, 5, 33, 48, 16)
INSTALL = "install the package from its source, with `pip install .`, on a machine with a C compiler (gcc or clang)"
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
READABLE_DTYPES = (*NATIVE_DTYPES, torch.bool, torch.int32)
# The kernels keep some rows on the stack, which has 8 MB or less per thread; torch computes wider rows.
MOST_COLUMNS = 1 << 16
# The shortest part of a sequence, in tokens; threads cost more than they save on shorter ones.
SHORTEST_PART = 4096
# Indices into the tensor lists of csrc/linear_attention.h.
QUERY, KEY, VALUE, MASK, DECAY = range(5)
QUERY_MAP, STATE, QUERY_TURN, KEY_TURN, KEY_AGE, OUTPUT, DENOMINATOR, SCALE, NEW_STATE = 8, *range(11, 19)
GRAD_OUTPUT, GRAD_DENOMINATOR, GRAD_STATE, GRAD_QUERY = range(19, 23)
GRAD_KEY, GRAD_VALUE, GRAD_DECAY, GRAD_KEY_MAP, GRAD_QUERY_MAP, GRAD_FIRST_STATE = 23, 24, 25, 26, 29, 32
# The tensors that are per query head, and the gradients to which every query head of a group adds.
OF_QUERIES = (
    *(QUERY, OUTPUT, DENOMINATOR, SCALE, GRAD_OUTPUT, GRAD_DENOMINATOR, GRAD_QUERY),
    *(place for start in (QUERY_MAP, GRAD_QUERY_MAP) for place in range(start, start + 3)),
)
SHARED = (GRAD_KEY, GRAD_VALUE, GRAD_DECAY, *range(GRAD_KEY_MAP, GRAD_QUERY_MAP), GRAD_FIRST_STATE)
# The sizes of a step, and a number for every tensor of its list.
STEP_SIZES, STEP_NUMBERS = struct.Struct("=18qd"), struct.Struct("=48q")
# The columns that rotary tables turn, in a call without tables; see `run_attention`.
NOT_TURNED = (0, 0, 0, 0)
# In bytes: glibc requests allocations of this size from the system at every call.
LARGE = 1 << 22


class KernelBackend(NamedTuple):
    """The backend on a CPU: `c` or `torch`, the instruction set of the C kernels or None, and the reason.

    `bfloat16` says how C multiplies for models in bfloat16: `float32`, `avx512_bf16`, `amx`, or None without C.
    """

    name: str
    instruction_set: str | None
    reason: str
    bfloat16: str | None = None


@functools.cache
def requested_backend() -> str:
    """The environment variable `HF_LINEAR_ATTENTION_BACKEND`: `auto` (the default) or `torch`; else ValueError."""
    backend = os.environ.get(BACKEND_VARIABLE, "auto")
    if backend not in BACKENDS:
        raise ValueError(f"`{BACKEND_VARIABLE}` = {backend!r} is not one of {', '.join(BACKENDS)}; set one of them.")
    return backend


def kernel_backend() -> KernelBackend:
    """The backend that computes attention on this CPU, and the reason.

    The C kernels support float32 and bfloat16. torch computes float16 and float64; sums and states of float16 and
    bfloat16 are float32.
    """
    return _loaded()[1]


def library() -> Any:
    """The C library, or None if torch computes."""
    return _loaded()[0]


@functools.cache
def _loaded() -> tuple[Any, KernelBackend]:
    if requested_backend() == "torch":
        return None, KernelBackend("torch", None, f"`{BACKEND_VARIABLE}` is `torch`.")
    folder = package_folder()
    if folder is None:
        return _without(f"The package {PACKAGE} is not installed; to get its C kernels, {INSTALL}.")
    path = folder / f"_kernels_base{SUFFIX}"
    if not path.exists():
        return _without(f"The package in {folder} was installed without its C kernels; {INSTALL}.")
    try:
        base = load(path)
    except OSError as error:
        return _without(f"{path} cannot be loaded ({error}); {INSTALL}.")
    except ValueError as error:
        return _without(str(error))
    name = INSTRUCTION_SETS[base.best_instruction_set()]
    try:
        best = load(folder / f"_kernels_{name}{SUFFIX}")
    except (OSError, ValueError) as error:
        logger.info("The C kernels for %s cannot be used; those for any processor are used instead: %s", name, error)
        name, best = "base", base
    reason = f"{folder / f'_kernels_{name}{SUFFIX}'} fits this processor."
    return best, KernelBackend("c", name, reason, choose_bfloat16(best))


def choose_bfloat16(library: Any) -> str:
    """Set how this library multiplies for models in bfloat16, by `HF_LINEAR_ATTENTION_BFLOAT16`; the choice."""
    chosen = bfloat16_products(library.bfloat16_features(), os.environ.get(BFLOAT16_VARIABLE, "auto"))
    library.set_bfloat16(BFLOAT16_PRODUCTS.index(chosen))
    return chosen


def bfloat16_products(features: int, requested: str) -> str:
    """The fastest way to multiply on a processor with these features, or the requested one (ValueError if it cannot).

    AVX512-BF16 has twice the rate of float32 on AMD's processors and half of it on Intel's. Nothing is timed, because
    results must not change from run to run.
    """
    usable = usable_products(features)
    if requested in usable:
        return requested
    if requested != "auto":
        raise ValueError(
            f"`{BFLOAT16_VARIABLE}` = {requested!r} is not one of auto, {', '.join(usable)}, which this processor and "
            "its C kernels allow; set one of them."
        )
    slow = ["avx512_bf16"] if features & INTEL else []
    return next(name for name in reversed(usable) if name not in slow)


def usable_products(features: int) -> list[str]:
    """Those of `BFLOAT16_PRODUCTS` that a processor with these features can compute."""
    others = zip(BFLOAT16_PRODUCTS[1:], (AVX512_BF16, AMX))
    return [BFLOAT16_PRODUCTS[0], *(name for name, feature in others if features & feature)]


def _without(reason: str) -> tuple[None, KernelBackend]:
    logger.info("Linear attention is computed by torch, not by C kernels: %s", reason)
    return None, KernelBackend("torch", None, reason)


def package_folder() -> Path | None:
    """The folder of the installed package, found without importing it; None if the package is not installed."""
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except (ImportError, ValueError):  # ValueError: in sys.modules without a spec
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def load(path: Path) -> Any:
    """Load the library at `path` and declare its functions.

    OSError if the file cannot be loaded; ValueError if it is no library of this package, or one of another version.
    """
    loaded = ctypes.CDLL(str(path))
    numbers = (ctypes.c_int64 * 256)()  # another version may write more numbers than ABI has
    try:
        loaded.abi(numbers)
    except AttributeError as error:
        raise ValueError(f"{path} is not a library of {PACKAGE}.") from error
    found = tuple(numbers[: len(ABI)])
    if found != ABI or any(numbers[len(ABI) :]):
        raise ValueError(
            f"{path} has the interface {found}, and this code needs {ABI}; install the version of {PACKAGE} "
            "that this code comes from."
        )
    loaded.best_instruction_set.restype = loaded.bfloat16_features.restype = ctypes.c_int64
    loaded.set_bfloat16.argtypes, loaded.set_bfloat16.restype = [ctypes.c_int64], None
    loaded.elu_plus_one.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64]
    loaded.elu_plus_one.restype = None
    for name in ("attention_step", "delta_step", "hybrid_step"):
        getattr(loaded, name).argtypes = [ctypes.c_void_p] * 4
    return loaded


def takes(*tensors: Tensor | None, dtypes: Sequence[torch.dtype] = NATIVE_DTYPES) -> bool:
    """Whether the C kernels support these tensors: a library is loaded, and device, dtype and row length fit."""
    for tensor in tensors:
        if tensor is None:
            continue
        is_known = tensor.device.type == "cpu" and tensor.dtype in dtypes  # in a graph, `is_cpu` would be a node
        if not is_known or (tensor.ndim and tensor.shape[-1] > MOST_COLUMNS):
            return False
    return _is_loaded()


@torch.compiler.assume_constant_result
def _is_loaded() -> bool:
    return library() is not None


def attend(function: Sequence[int], tensors: Sequence[Any], turned: Sequence[int] = NOT_TURNED) -> None:
    """`run_attention("attention_forward", ...)`, in parts if that uses more cores."""
    query, key, is_causal = tensors[QUERY], tensors[KEY], function[2]
    length, pairs = key.shape[3], query.shape[0] * query.shape[1]
    count = min(torch.get_num_threads() // max(1, pairs), length // SHORTEST_PART)
    if count < 2 or not query.shape[3]:
        run_attention("attention_forward", function, tensors, turned=turned)
        return
    keys = _ranges(length, count)
    states = _states(function, tensors, keys, turned)
    if is_causal:
        parts = [_part(tensors, part, part, before) for part, before in zip(keys, states)]
        unused = parts[:-1]
    else:
        parts = [_part(tensors, part, slice(0, 0), states[-1]) for part in _ranges(query.shape[3], count)]
        unused = parts
        tensors[NEW_STATE].squeeze(2).copy_(states[-1])
    for part in unused:
        part[NEW_STATE] = torch.empty_like(tensors[NEW_STATE])
    run_attention("attention_forward", function, *parts, turned=turned)


def differentiate(function: Sequence[int], tensors: Sequence[Any], turned: Sequence[int] = NOT_TURNED) -> None:
    """`run_attention("attention_backward", ...)`, in parts if that uses more cores."""
    pairs, groups = tensors[QUERY].shape[0] * tensors[QUERY].shape[1], tensors[QUERY].shape[2]
    count = min(torch.get_num_threads() // max(1, pairs), groups)
    if count < 2:
        run_attention("attention_backward", function, tensors, turned=turned)
        return
    parts: list[list[Any]] = []
    for heads in _ranges(groups, count):
        part = list(tensors)
        for place in OF_QUERIES:
            part[place] = None if part[place] is None else part[place][:, :, heads]
        for place in SHARED:
            shape = None if part[place] is None else part[place].shape
            part[place] = None if shape is None else torch.empty(shape, dtype=torch.float32, device="cpu")
        part[GRAD_STATE] = None if parts else part[GRAD_STATE]  # all query heads share it, so it counts once
        parts.append(part)
    run_attention("attention_backward", function, *parts, turned=turned)
    for place in SHARED:
        if tensors[place] is not None:
            tensors[place].copy_(sum(part[place] for part in parts))


def _ranges(length: int, count: int) -> list[slice]:
    size = max(1, -(-length // count))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _states(
    function: Sequence[int], tensors: Sequence[Any], keys: Sequence[slice], turned: Sequence[int]
) -> list[Tensor]:
    """The state before each part; in the bidirectional form also the state after the last part."""
    is_exp, is_causal = function[1] >= EXP, function[2]
    mask, decay, first = (tensors[place] for place in (MASK, DECAY, STATE))
    keys = keys[:-1] if is_causal else keys
    parts = [_part(tensors, slice(0, 0), part, None) for part in keys]
    for part in parts:
        part[NEW_STATE] = torch.empty_like(tensors[NEW_STATE])
        if is_causal:  # C needs as many queries as keys; an empty group axis leaves only the keys to compute
            part[QUERY] = tensors[QUERY][:, :, :0]
    run_attention("attention_forward", function, *parts, turned=turned)
    if first is None:
        first = torch.zeros_like(tensors[NEW_STATE])
        first[..., first.shape[-1] - is_exp :] = EMPTY_MAXIMUM
    states = [first.squeeze(2)]
    for tokens, own in zip(keys, parts):
        fade = None
        if decay is not None:
            real = tokens.stop - tokens.start if mask is None else mask[:, :1, 0, tokens, 0].sum(dim=2)
            fade = (decay[:, :, 0, 0, 0] * real).unsqueeze(2)
        states.append(merge_states(states[-1], own[NEW_STATE].squeeze(2), is_exp, fade))
    return states


def _part(tensors: Sequence[Any], queries: slice, keys: slice, state: Tensor | None) -> list[Any]:
    """Views of the tensors for these queries and keys."""
    part = list(tensors)
    for places, tokens in (
        ((QUERY, QUERY_TURN, OUTPUT, DENOMINATOR, SCALE), queries),
        ((KEY, KEY_TURN, KEY_AGE, VALUE, MASK), keys),
    ):
        for place in places:
            part[place] = None if part[place] is None else part[place][:, :, :, tokens]
    part[STATE] = None if state is None else state.contiguous().unsqueeze(2)
    return part


def run_attention(
    name: str, function: Sequence[int], *calls: Sequence[Tensor | None], turned: Sequence[int] = NOT_TURNED
) -> None:
    """Call `attention_forward`, `window_forward`, `slots_forward`, `exact_keys_forward`, `delta_forward` or a backward.

    All `calls`, and the heads of each, run at once in several threads. `function` holds the number of features, the
    feature map and whether attention is causal (for a window: its keys per query, sinks, True; for the delta rule: the
    numbers of a log decay, whether it erases, True). The first tensors of a call are `query [B, Hkv, G, N, D]`,
    `key [B, Hkv, 1, S, D]` and `value [B, Hkv, 1, S, W]`; the others follow in the order of csrc/linear_attention.h,
    with None for a missing tensor. `turned` describes the columns that rotary tables turn: the number of pairs, the
    first column, the step from pair to pair, and the distance within a pair. MemoryError if there is none for the
    working space.
    """
    tasks: list[Callable[[], None]] = []
    for tensors in calls:
        query, key, value, *_ = tensors
        if query is None or key is None or value is None:
            raise ValueError("Queries, keys and values are required; got None.")
        (batch, heads, groups, length, inputs), (features, *how) = query.shape, function
        shape = (heads, groups, length, key.shape[3], inputs, features, value.shape[-1], *how, *turned)
        threads = max(1, min(torch.get_num_threads() // len(calls), batch * heads))
        bounds = [batch * heads * number // threads for number in range(threads + 1)]
        call = functools.partial(_compute, name, tensors, _described(tensors), shape)
        tasks += [functools.partial(call, *pair) for pair in itertools.pairwise(bounds)]
    # This thread takes the first task: with all of them in the pool, two threads were at times no faster than one.
    first, *others = tasks
    futures = [_threads(max(1, torch.get_num_threads() - 1), os.getpid()).submit(task) for task in others]
    try:
        first()
    finally:  # after an error too: the tensors must outlive the threads that write them
        wait(futures)
    for future in futures:
        future.result()


def _compute(name: str, kept: Sequence[Any], described: ctypes.Array, shape: tuple[int, ...], *pairs: int) -> None:
    """Compute the (batch, head) pairs from the first to before the second of `pairs`."""
    # `kept` holds the memory at these addresses as long as a thread may write there, whatever its caller does.
    if getattr(library(), name)((ctypes.c_int64 * (len(shape) + 2))(*shape, *pairs), described):
        raise MemoryError(f"No memory is left for the working space of `{name}`; make the batch smaller.")


def run_step(
    name: str, shape: Sequence[int], addresses: Sequence[int], strides: bytes, rows: Tensor | None, scaling: float = 0.0
) -> None:
    """Call `attention_step`, `delta_step` or `hybrid_step`; the caller keeps the tensors at these `addresses`.

    `shape` and `addresses` (0 for a missing tensor) are in the order of csrc/linear_attention.h, `strides` as many
    numbers, packed by `STEP_NUMBERS`. `rows`, int64 `[B]` and dense, are the blocks of the states; without them
    sequence b has block b.

    Raises:
        MemoryError: if the kernel finds no memory for its working space.
        IndexError: if one of the rows is no block; then nothing has been written.
    """
    numbers = STEP_SIZES.pack(*shape, scaling), STEP_NUMBERS.pack(*addresses), strides
    problem = getattr(library(), name)(*numbers, None if rows is None else rows.data_ptr())
    if problem == 2 and rows is not None:
        raise IndexError(f"`rows` = {rows.tolist()} has a number that is none of the {shape[1]} blocks of the state.")
    if problem:
        raise MemoryError(f"No memory is left for the working space of `{name}`; make the batch smaller.")


def run_short_step(name: str, shape: Sequence[int], tensors: Sequence[Any], decays: int, rows: Tensor | None) -> None:
    """`run_step` for float32 tensors of which each sequence has its own, or a block of states, all of them dense.

    `tensors` are query, key, value, log decay, beta, output, log size, old and new state, or None. Each head of a
    sequence has so many `decays`, or 0 if all sequences share them.
    """
    query, key, value, decay, beta, output, size, old, new = (0 if x is None else x.data_ptr() for x in tensors)
    tokens = (query, key, value, 0, 0, 0, 0, 0, 0, 0, 0, decay, 0, 0, beta, 0, 0, 0, output, size)
    addresses = (*tokens, old, *[0] * 13, new, *[0] * 13)
    strides = _short_strides(*shape[2:4], *shape[7:9], decays, tensors[7].stride(0), tensors[8].stride(0))
    run_step(name, (*shape, *[0] * 5), addresses, strides, None if rows is None else rows.contiguous())


@functools.lru_cache
def _short_strides(kv_heads: int, groups: int, features: int, width: int, decays: int, old: int, new: int) -> bytes:
    heads = kv_heads * groups
    tokens = (heads * features, kv_heads * features, kv_heads * width, *[0] * 8, kv_heads * decays, 0, 0, kv_heads)
    numbers = (*tokens, 0, 0, 0, heads * width, heads, old, *[0] * 13, new, *[0] * 13)
    return STEP_NUMBERS.pack(*(4 * number for number in numbers))


def step_states(state: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """The state that a step reads, and the one that it writes: with rows the same."""
    if rows is not None:
        return state, state
    state = state.contiguous()
    return state, torch.empty_like(state)


def in_large_pages(tensor: Tensor) -> Tensor:
    """Ask Linux to back a new large `tensor` by pages of 2 MB: faults of small pages cost more than a kernel's work."""
    size = tensor.numel() * tensor.element_size()
    if size >= LARGE and tensor.device.type == "cpu" and type(tensor) is Tensor and sys.platform == "linux":
        start = tensor.data_ptr()
        skip = -start % mmap.PAGESIZE
        # The call is only advice, so its failure can be ignored.
        _libc().madvise(start + skip, (size - skip) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    return tensor


def _described(tensors: Sequence[Tensor | None]) -> ctypes.Array:
    """For each tensor, in bytes: its address, its strides except the last, which must be 1, and its element size.

    TypeError for a tensor that C cannot read, whoever made it.
    """
    numbers: list[int] = []
    for place, tensor in enumerate(tensors):
        if tensor is None:
            numbers += (0, 0, 0, 0, 0, 0)
            continue
        if tensor.dtype not in READABLE_DTYPES or tensor.device.type != "cpu" or tensor.ndim != 5:
            raise TypeError(
                f"Tensor {place} of a C kernel is {tensor.dtype} on {tensor.device} with {tensor.ndim} axes; C reads "
                "float32, bfloat16, int32 and bool in memory, with five axes."
            )
        size, (batch, head, group, row, _) = tensor.element_size(), tensor.stride()
        numbers += (tensor.data_ptr(), size * batch, size * head, size * group, size * row, size)
    return (ctypes.c_int64 * len(numbers))(*numbers)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


@functools.cache
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """A thread pool per process, because threads do not survive a fork."""
    return ThreadPoolExecutor(count, thread_name_prefix="linear_attention")


# C pads heads to 16 columns; heads narrower than this (`aft` has 1 column) are faster in torch.
NARROWEST = 4


FLOAT32 = (torch.float32,)


def without_dispatcher(registered: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The `function` of an operator without gradients, or the operator itself if a torch dispatch mode is active.

    A step of one token takes 20 to 100 us, of which the dispatcher takes 2 to 6.
    """
    is_watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    return registered if is_watched else function


def takes_attention(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, features: int) -> bool:
    """Whether C computes: on a CPU, without packed sequences, empty tensors, narrow heads or very wide rows."""
    is_packed = key_mask is not None and key_mask.dtype != torch.bool
    if is_packed or not query.ndim == key.ndim == value.ndim == 4:
        return False
    widths = query.shape[-1], value.shape[-1]
    if min(widths) < NARROWEST or max(*widths, features) > MOST_COLUMNS or not key.numel():
        return False
    return takes(query, key, value, dtypes=NATIVE_DTYPES)


def refuse_without_library(*tensors: Tensor | None, dtypes: Sequence[torch.dtype] = NATIVE_DTYPES) -> None:
    """Raise NotImplementedError if the C kernels do not support these tensors."""
    if not takes(*tensors, dtypes=dtypes):
        raise NotImplementedError(
            "There is no C kernel for these tensors on this machine; `hf_linear_attention.kernel_backend()` says why. "
            "Call the functions of hf_linear_attention.torch_kernels.attention, which fall back to torch."
        )


def takes_step(*tensors: Tensor, in_graphs: bool = False) -> bool:
    """Whether the C kernels compute a step of one token for these tensors, without gradients only.

    With `in_graphs`, they do so in the graphs of torch.compile too, as one operator.
    """
    if torch.is_grad_enabled() or needs_plain(tensors[0]) or (torch.compiler.is_compiling() and not in_graphs):
        return False
    return takes(*tensors)
