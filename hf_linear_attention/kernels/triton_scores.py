# SPDX-License-Identifier: Apache-2.0
"""The scores of keys on CUDA in one launch: their hidden states times the weights of each head, summed in float32.

A row is summed in the same order whatever rows there are beside it, so that any split of an input gives the same
scores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_step import TYPES, wide


ROWS, COLUMNS = 16, 256  # of a block


@triton.jit
def _scores(
    hidden, weight, out, count, row, scale, E,
    H: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    n, h = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HP)
    found = tl.zeros([ROWS, HP], tl.float32)
    for start in range(0, E, COLUMNS):
        e = start + tl.arange(0, COLUMNS)
        rows = hidden + n.to(tl.int64)[:, None] * row + e[None, :]
        x = tl.load(rows, mask=(n < count)[:, None] & (e < E)[None, :], other=0.0)
        w = tl.load(weight + h[None, :] * E + e[:, None], mask=(e < E)[:, None] & (h < H)[None, :], other=0.0)
        found += tl.dot(x.to(T), w.to(T), input_precision="ieee")
    mask = (n < count)[:, None] & (h < H)[None, :]
    tl.store(out + n.to(tl.int64)[:, None] * H + h[None, :], found * scale, mask=mask)


def run(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write `out [B, N, Hkv]`, float32, for `hidden [B, N, E]` and `weight [Hkv, E]`, divided by sqrt(E)."""
    heads, size = weight.shape
    rows = hidden.reshape(-1, size)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    kind = TYPES[hidden.dtype if hidden.dtype == weight.dtype else torch.float32]
    _scores[(-(-rows.shape[0] // ROWS),)](
        rows, weight.contiguous(), out, rows.shape[0], rows.stride(0), size**-0.5, size,
        H=heads, HP=wide(heads), ROWS=ROWS, COLUMNS=COLUMNS, T=kind, num_warps=4,
    )  # fmt: skip
