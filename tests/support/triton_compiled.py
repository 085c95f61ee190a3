"""Compiles Triton kernels for GPUs that are not there, and prints what each needs: `python triton_compiled.py step`.

The launchers run on meta tensors, with kernels that are compiled instead of launched; so what is compiled is what they
launch. Without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


ARCHITECTURES = (80, 90, 100)
TYPES = {
    **{torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"},
    **{torch.int8: "i8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1"},
}


class Compiled:
    """Stands in for a kernel: `kernel[grid](...)` compiles it for these arguments."""

    def __init__(self, kernel, found: dict):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *given, num_warps=4, num_stages=3, **constants):
        names = self.kernel.arg_names
        values = dict(zip(names, given, strict=False)) | constants
        parameters = {x.name: x for x in self.kernel.params}
        signature, fixed, aligned = {}, {}, {}
        for place, name in enumerate(names):
            value = values[name]
            if parameters[name].is_constexpr or value is None:
                signature[name], fixed[(place,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = "*" + TYPES[value.dtype]
                aligned[(place,)] = [["tt.divisibility", 16]]
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32" if abs(value) < 2**31 else "i64"
                if value % 16 == 0:
                    aligned[(place,)] = [["tt.divisibility", 16]]
        for architecture in ARCHITECTURES:
            source = ASTSource(self.kernel, signature, fixed, aligned)
            options = {"num_warps": num_warps, "num_stages": num_stages}
            compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
            usage = resources(compiled.asm["cubin"])
            usage["shared"] = compiled.metadata.shared
            before = self.found.setdefault(self.kernel.__name__, {}).get(f"sm_{architecture}", usage)
            self.found[self.kernel.__name__][f"sm_{architecture}"] = {x: max(usage[x], before[x]) for x in usage}


def resources(cubin: bytes) -> dict[str, int]:
    """Registers per thread, and bytes of the stack, which is where spilled registers go."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": numbers["REG"], "stack": numbers["STACK"], "local": numbers.get("LOCAL", 0)}


def step(dtype: torch.dtype, dim: int, groups: int, tokens: int, features: int, is_plain: bool = False) -> dict:
    """What the kernels of a decoding step need for the sizes of a state of so many tokens."""
    from hf_linear_attention.kernels import triton_step

    found: dict = {}
    for name in ("_begin", "_attend", "_finish"):
        kernel = getattr(triton_step, name)
        setattr(triton_step, name, Compiled(kernel, found))
    batch, kv_heads, window, sinks = 64, 8, tokens // 4, 4
    kept, heads = tokens - window - features, kv_heads * groups

    def of(*shape, kind=torch.float32):
        return torch.empty(*shape, dtype=kind, device="meta")

    of_kv, number = (batch, kv_heads), torch.int32
    rows = [of(*of_kv, n, dim, kind=dtype) for n in (window, window, sinks, sinks, kept, kept)]
    old = [
        *(of(*of_kv, features, dim + 2), *rows[:2], of(batch, window, kind=torch.int8), *rows[2:4]),
        *(of(batch, 1, kind=torch.int64), of(batch, window, kind=number), of(*of_kv, window, 1), *rows[4:]),
        *(of(*of_kv, kept, 1), of(*of_kv, kept, 1, kind=number), of(*of_kv, kept, 1, kind=number)),
    ]
    maps = [of(kv_heads, dim, features, kind=dtype), of(kv_heads, 1, features, kind=dtype), of(kv_heads, kind=dtype)]
    new = [of(batch, n, 1, dim, kind=dtype) for n in (heads, kv_heads, kv_heads)]
    scores = of(batch, 1, kv_heads), of(kv_heads, kind=dtype), of(batch, 1, kind=number)
    last, decay, turns, rows_of_state = old, of(kv_heads, kind=dtype), of(dim // 2), of(batch, kind=torch.int64)
    if is_plain:
        scores, decay, turns, rows_of_state = (None,) * 3, None, None, None
        old = [*old[:7], *[None] * 7]
        last = [None if x is None else torch.empty_like(x) for x in old]  # another state
    triton_step.run(
        *new, *scores, *maps, of(heads, dim, features, kind=dtype), decay, old, last, of(heads, kind=dtype),
        of(heads, kind=dtype), turns, 0 if is_plain else dim // 8, False, 16 * tokens, dim**-0.5, slope_scale=1 / 64,
        is_rate=True, rows=rows_of_state, out=of(batch, 1, heads, dim, kind=dtype),
    )  # fmt: skip
    return found


def plain_step(*case: Any) -> dict:
    """The same without exact keys, positions and decay, to a new state."""
    return step(*case, is_plain=True)


def scores(dtype: torch.dtype, dim: int, groups: int, tokens: int, features: int) -> dict:
    """What the kernel of the scores needs."""
    from hf_linear_attention.kernels import triton_scores

    found: dict = {}
    triton_scores._scores = Compiled(triton_scores._scores, found)
    hidden, weight = (torch.empty(n, 8 * groups * dim, dtype=dtype, device="meta") for n in (tokens, 8))
    triton_scores.run(hidden, weight, torch.empty(tokens, 8, device="meta"))
    return found


def prompt(*case: Any) -> dict:
    """The same of a prompt before which there is nothing, of few tokens."""
    return prefill(*case, is_first=True)


def plain_prompt(*case: Any) -> dict:
    """The same without exact keys and rotary positions."""
    return prefill(*case, is_first=True, is_plain=True)


def backward(
    dtype: torch.dtype, dim: int, groups: int, tokens: int, features: int, is_plain: bool = False,
    is_packed: bool = False, has_room: bool = True,
) -> dict:  # fmt: skip
    """What the kernels of the gradients need, for the sizes of a state of so many tokens."""
    from hf_linear_attention.kernels import triton_backward, triton_prefill

    found: dict = {}
    triton_prefill._list = Compiled(triton_prefill._list, found)
    of_forward, last = ("_exponents", "_states"), ("_of_far_keys", "_lives", "_of_keys")
    for name in (*of_forward, "_of_far_queries", "_of_queries", "_states_behind", *last):
        setattr(triton_backward, name, Compiled(getattr(triton_backward, name), found))
    batch, kv_heads, window, sinks, length = 1, 8, tokens // 4, 0 if is_packed else 4, 16 * tokens
    kept, heads = 0 if is_plain else tokens - window - features, kv_heads * groups

    def of(*shape, kind=torch.float32):
        return torch.empty(*shape, dtype=kind, device="meta")

    number, boolean, of_head = torch.int32, torch.bool, (kv_heads, 1)
    rows = [of(batch, n, length, dim, kind=dtype) for n in (heads, kv_heads, kv_heads)]
    sink_rows = [of(batch, kv_heads, sinks, dim, kind=dtype) for _ in range(2)]
    # Parameters stay in float32 in training.
    maps = of(kv_heads, dim, features), of(*of_head, features), of(*of_head, 1), of(heads, dim, features)
    triton_backward.run(
        *(of(batch, length, heads, dim, kind=dtype) for _ in range(2)), of(batch, heads, length),
        of(kv_heads, kept + length, kind=number), of(kv_heads, length, kind=number), *rows,
        of(batch, length, kind=boolean), *sink_rows, of(batch, length, sinks, kind=boolean),
        *[None if is_plain else of(batch, length, kind=number)] * 2, *maps, None if is_plain else of(kv_heads),
        of(heads), of(heads), None if is_plain else of(dim // 2),
        of(2, batch, length, kind=number) if is_packed else None, window, kept, 0 if is_plain else dim // 8, False,
        16 * tokens, dim**-0.5, True, has_room,
    )  # fmt: skip
    return found


def packed_prompt(*case: Any) -> dict:
    """The same of packed sequences."""
    return prefill(*case, is_first=True, is_packed=True)


def packed_backward(*case: Any) -> dict:
    """The same of packed sequences, for one architecture."""
    global ARCHITECTURES
    ARCHITECTURES = ARCHITECTURES[1:2]
    return backward(*case, is_packed=True)


def plain_backward(*case: Any) -> dict:
    """The same without exact keys, positions and decay, for one architecture: it compiles for a minute on each."""
    global ARCHITECTURES
    ARCHITECTURES = ARCHITECTURES[1:2]
    return backward(*case, is_plain=True)


def wide_backward(dtype: torch.dtype, dim: int, *others: Any) -> dict:
    """The same with the widest rows, in chunks of 32, where there is the least shared memory."""
    global ARCHITECTURES
    ARCHITECTURES = (89,)
    return backward(dtype, 4 * dim, *others, has_room=False)


def backward_of_128(dtype: torch.dtype, dim: int, *others: Any) -> dict:
    """The same with rows of twice the columns, in chunks of 64."""
    global ARCHITECTURES
    ARCHITECTURES = (89,)
    return backward(dtype, 2 * dim, *others, has_room=False)


def prefill(
    dtype: torch.dtype,
    dim: int,
    groups: int,
    tokens: int,
    features: int,
    is_first: bool = False,
    is_plain: bool = False,
    is_packed: bool = False,
) -> dict:
    """What the kernels of a prompt need, of which tokens came before, for the sizes of a state of so many tokens."""
    from hf_linear_attention.kernels import triton_prefill

    found: dict = {}
    for name in ("_line_up", "_bounds", "_choose", "_list", "_turn", "_exponents", "_states", "_outputs", "_keep"):
        setattr(triton_prefill, name, Compiled(getattr(triton_prefill, name), found))
    batch, kv_heads, window, sinks, length = 1, 8, tokens // 4, 0 if is_packed else 4, 16 * tokens
    kept, heads, slots = tokens - window - features, kv_heads * groups, window + length
    if is_first:
        length = slots = 300
    if is_plain:
        kept = 0

    def of(*shape, kind=torch.float32):
        return torch.empty(*shape, dtype=kind, device="meta")

    of_kv, number, boolean = (batch, kv_heads), torch.int32, torch.bool
    of_kept = [
        *(of(*of_kv, kept, dim, kind=dtype), of(*of_kv, kept, dim, kind=dtype), of(*of_kv, kept, 1)),
        *(of(*of_kv, kept, 1, kind=number), of(*of_kv, kept, 1, kind=number)),
    ]
    sums, new = of(*of_kv, features, dim + 2), [of(batch, n, slots, dim, kind=dtype) for n in (kv_heads, kv_heads)]
    maps = [of(kv_heads, dim, features, kind=dtype), of(kv_heads, 1, features, kind=dtype), of(kv_heads, kind=dtype)]
    places = [None] * 3 if is_plain else [of(*of_kv, slots, 1)]
    places = places if is_plain else [*places, of(batch, length, kind=number), of(batch, slots, kind=number)]
    triton_prefill.run(
        of(batch, heads, length, dim, kind=dtype), *new, of(batch, slots, kind=boolean),
        *(of(*of_kv, sinks, dim, kind=dtype) for _ in range(2)), of(batch, length, sinks, kind=boolean),
        *places, *maps, of(heads, dim, features, kind=dtype), of(kv_heads, kind=dtype), None if is_first else sums,
        [] if is_first else of_kept, of(heads, kind=dtype), of(heads, kind=dtype), None if is_plain else of(dim // 2),
        of(2, batch, length, kind=number) if is_packed else None, window, kept, 0 if is_plain else dim // 8, False,
        16 * tokens, dim**-0.5, True,
        out=of(batch, length, heads, dim, kind=dtype), new_sums=sums, new_kept=[] if is_plain else of_kept,
    )  # fmt: skip
    return found


def main() -> None:
    """Print the needs of all kernels for a case, as JSON: `step bfloat16 64 4 2048 32`."""
    what, dtype, *sizes = sys.argv[1:]
    print(json.dumps(globals()[what](getattr(torch, dtype), *map(int, sizes))))


if __name__ == "__main__":
    main()
