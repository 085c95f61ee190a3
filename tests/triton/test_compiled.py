"""The kernels compiled for GPUs that are not there: what they need is printed; at default sizes no register spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import triton_interpreter


# The slow path of the cosine of a large angle has 28 bytes of its own.
COSINE = 32
ONE = {"plain_backward": "sm_90", "packed_backward": "sm_90", "backward_of_128": "sm_89", "wide_backward": "sm_89"}
SHARED = 101_376  # bytes of shared memory that all GPUs have from compute capability 8.0 on
# By Triton 3.7.1, which torch 2.13 needs; other versions have others.
KNOWN = {
    **{("prefill", "_turn", "sm_80"): 88, ("prefill", "_turn", "sm_90"): 72},
    ("prompt", "_exponents", "sm_100"): 40,
    # Most of these is where queries are beyond the trained length.
    **{("backward", "_of_queries", "sm_80"): 160, ("backward", "_exponents", "sm_100"): 40},
    ("backward", "_of_far_keys", "sm_80"): 296,
    **{("backward", "_of_keys", "sm_80"): 472, ("backward", "_of_keys", "sm_90"): 152},
    ("packed_prompt", "_exponents", "sm_100"): 40,
    ("packed_prompt", "_states", "sm_100"): 48,
    **{("packed_backward", "_of_far_keys", "sm_90"): 56, ("packed_backward", "_of_keys", "sm_90"): 168},
    # Rows of 128 and 256 columns by 8 warps.
    **{("backward_of_128", "_exponents", "sm_89"): 432, ("backward_of_128", "_of_far_queries", "sm_89"): 1224},
    **{("backward_of_128", "_of_queries", "sm_89"): 488, ("backward_of_128", "_of_far_keys", "sm_89"): 896},
    ("backward_of_128", "_of_keys", "sm_89"): 568,
    **{("wide_backward", "_exponents", "sm_89"): 2144, ("wide_backward", "_of_far_queries", "sm_89"): 1296},
    **{("wide_backward", "_of_queries", "sm_89"): 448, ("wide_backward", "_of_far_keys", "sm_89"): 1496},
    ("wide_backward", "_of_keys", "sm_89"): 568,
}


# Where there is the least shared memory.
TIGHT = """
import functools
from hf_linear_attention.kernels import triton_prefill
triton_compiled.ARCHITECTURES = (89,)
triton_prefill.run = functools.partial(triton_prefill.run, has_room=False)
"""


def needs_of(what: str, case: str, before: str = "") -> dict[str, dict[str, dict[str, int]]]:
    """What each kernel needs on each architecture; `before` is run first."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.path.dirname(triton_interpreter.__file__)
    script = f"import triton_compiled\n{before}\ntriton_compiled.main()"
    command = [sys.executable, "-W", "ignore", "-c", script, what, *case.split()]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert found.returncode == 0, found.stderr[-3000:]
    needs = json.loads(found.stdout)
    print(needs)
    return needs


@pytest.mark.parametrize("case", ["bfloat16 128 4 2048 32", "bfloat16 256 4 2048 32", "float32 64 4 2048 32"])
def test_wide_rows_after_a_state_fit_into_the_least_shared_memory(case):
    needs = needs_of("prefill", case, TIGHT)
    assert {"_states", "_outputs"} <= set(needs)
    assert all(x["sm_89"]["shared"] <= SHARED for x in needs.values())


@pytest.mark.parametrize(
    ("what", "columns"),
    [("step", 80), ("step", 128), ("step", 256), ("prompt", 96), ("prompt", 128), ("backward_of_128", 40)],
)
def test_heads_of_other_sizes_fit_into_the_least_shared_memory(what, columns):
    needs = needs_of(what, f"bfloat16 {columns} 4 2048 32", "triton_compiled.ARCHITECTURES = (89,)")
    assert needs
    assert all(x["sm_89"]["shared"] <= SHARED for x in needs.values())


@pytest.mark.parametrize(
    "what",
    [
        *("prefill", "prompt", "plain_prompt", "packed_prompt", "backward", "plain_backward", "packed_backward"),
        *("backward_of_128", "wide_backward"),
        *("step", "plain_step", "scores"),
    ],
)
def test_it_compiles_without_spills(what):
    """Of Llama 1B's heads with a state of 2,048 tokens. The interpreter does not see what is wrong with a tensor that
    is None where the compiler reads on.
    """
    for kernel, by_architecture in needs_of(what, "bfloat16 64 4 2048 32").items():
        assert set(by_architecture) == ({ONE[what]} if what in ONE else {"sm_80", "sm_90", "sm_100"})
        for name, need in by_architecture.items():
            assert need["shared"] <= SHARED
            assert need["stack"] <= KNOWN.get((what, kernel, name), COSINE), (kernel, name, need)
