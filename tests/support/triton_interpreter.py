"""Runs Triton kernels on CPU tensors: Triton's interpreter, put right where it differs from a GPU (triton 3.7.1).

Import this before any module that defines kernels, because `@triton.jit` decides when it decorates:

    from triton_interpreter import with_scalars_in_loops
    from fla.ops.simple_gla import chunk_simple_gla
    with_scalars_in_loops("fla.ops")

1. Autotuners ask a driver how long each configuration takes; here all take equally long, and the first one is used.
2. The interpreter keeps bfloat16 as the integers of its bits, and multiplies and adds these as integers.
3. `for i in range(n)` gives Python's integers, and some kernels call `i.to(tl.int64)`; see `with_scalars_in_loops`.

Programs of a grid run one after the other and each operation runs for all threads at once, so races and missing
barriers are not found here. Products of float32 are exact; a GPU may use TF32 (`input_precision="ieee"`).
"""

from __future__ import annotations

import builtins
import os
import sys
from types import SimpleNamespace


os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle


def with_scalars_in_loops(prefix: str) -> None:
    """In all imported modules whose names begin with `prefix`, `range` counts in Triton's scalars, as in a kernel.

    Not for kernels that use the index of a loop as a Python integer, as in `tl.static_range`.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(prefix) and module is not None:
            module.range = _range  # type: ignore[attr-defined]


def _range(*bounds):
    return (interpreter._implicit_cvt(i) for i in builtins.range(*map(int, bounds)))


def _is_bfloat16(x):
    return x.dtype.scalar == tl.bfloat16


def _widened(handle):
    """A handle of the same numbers in float32, if they are bfloat16."""
    if not _is_bfloat16(handle):
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrowed(data):
    """A handle of these numbers in bfloat16, rounded to the nearest, ties to even."""
    numbers = torch.from_numpy(np.array(data, dtype=np.float32, order="C", ndmin=1))
    bits = numbers.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return TensorHandle(bits.reshape(np.shape(data)), tl.bfloat16)


_binary_op, _unary_op, _cast_impl = (getattr(InterpreterBuilder, n) for n in ("binary_op", "unary_op", "cast_impl"))


def binary_op(self, lhs, rhs, op):
    """Computes in float32 and rounds; comparisons stay bool."""
    if not _is_bfloat16(lhs):
        return _binary_op(self, lhs, rhs, op)
    found = _binary_op(self, _widened(lhs), _widened(rhs), op)
    return _narrowed(found.data) if found.data.dtype == np.float32 else found


def unary_op(self, arg, op):
    """Computes in float32 and rounds."""
    return _narrowed(_unary_op(self, _widened(arg), op).data) if _is_bfloat16(arg) else _unary_op(self, arg, op)


def cast_impl(self, src, dst_type):
    """To and from bfloat16 by the value, not by its bits."""
    if dst_type.scalar == tl.bfloat16:
        return src if _is_bfloat16(src) else _narrowed(src.data)
    return _cast_impl(self, _widened(src), dst_type)


def create_dot(self, a, b, d, *precision):
    """Accumulates in float32, as tensor cores do."""
    product = np.matmul(_widened(a).data.astype(np.float32), _widened(b).data.astype(np.float32))
    return TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


def _in_float32(operations):
    """Sums, maxima and scans of bfloat16 are computed in float32."""
    apply_impl = operations.apply_impl

    def widened(x):
        return tl.tensor(_widened(x.handle), tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    operations.apply_impl = lambda self, given: apply_impl(self, tuple(map(widened, given)))


def get_bf16(self, value):
    """A constant, which Triton 3.7 does not know."""
    return _narrowed(np.array([value]))


for _method in (get_bf16, binary_op, unary_op, cast_impl, create_dot):
    setattr(InterpreterBuilder, _method.__name__, _method)
for _name in ("create_fp_ext", "create_fp_trunc", "create_si_to_fp", "create_fp_to_si"):
    setattr(InterpreterBuilder, _name, lambda self, src, dst_type: self.cast_impl(src, dst_type))
InterpreterBuilder.create_fp_to_fp = lambda self, src, dst_type, rounding_mode: self.cast_impl(src, dst_type)
_in_float32(ReduceOps)
_in_float32(ScanOps)
triton.runtime.driver.set_active(
    SimpleNamespace(
        get_benchmarker=lambda: lambda call, quantiles: [0.0] * len(quantiles),
        get_current_target=lambda: SimpleNamespace(backend="cpu", arch=""),
    )
)
