"""The fuzzer on the library with AddressSanitizer and UBSan, and on the one that is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_linear_attention.kernels import cpu as kernels_cpu


HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import sanitized  # beside this file, which pytest imports by its path


IS_REQUIRED = os.environ.get("HF_LINEAR_ATTENTION_REQUIRE_KERNELS") == "1"
# Of each library; 1,500 take little more than a minute on a free core, and a busy one gets more.
CALLS, MOST_SECONDS = 1_500 if IS_REQUIRED else 250, 500
LIBRARIES = {"of this processor": ("-march=native",)} | ({"base": ()} if IS_REQUIRED else {})


def fuzz(*options: object, **environment: str) -> int:
    """Run the fuzzer; the number of its calls."""
    command = [sys.executable, str(HERE / "fuzz.py"), *map(str, options)]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=600)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said[-6000:]
    print(result.stdout)  # pytest shows it with -rP
    return int(re.match(r"(\d+) calls", result.stdout)[1])


@pytest.fixture(scope="module", params=LIBRARIES.values(), ids=LIBRARIES)
def sanitized_library(tmp_path_factory, request) -> Path:
    try:
        return sanitized.build(tmp_path_factory.mktemp("sanitized"), *request.param)
    except RuntimeError as error:
        if IS_REQUIRED:
            raise
        pytest.skip(f"no compiler with sanitizers: {str(error)[-200:]}")


@pytest.mark.sanitizers
def test_sanitizers_find_nothing(sanitized_library):
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    given = ("--library", sanitized_library, "--calls", CALLS, "--seconds", MOST_SECONDS)
    assert fuzz(*given, LD_PRELOAD=sanitized.runtime(), **options) >= CALLS


@pytest.mark.sanitizers
def test_sanitizers_are_at_work(sanitized_library, tmp_path):
    script = tmp_path / "overflow.py"
    script.write_text(
        "import ctypes, sys\n"
        "library, libc = ctypes.CDLL(sys.argv[1]), ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "x = ctypes.c_void_p(libc.malloc(40))\n"
        "library.elu_plus_one(x, x, ctypes.c_int64(11))\n"
    )
    environment = os.environ | {"LD_PRELOAD": sanitized.runtime(), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, str(script), str(sanitized_library)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode != 0
    assert "heap-buffer-overflow" in result.stderr


def test_the_installed_library_computes_what_float64_does():
    if kernels_cpu.library() is None:
        pytest.skip(kernels_cpu.kernel_backend().reason)
    assert fuzz("--seed", 1_000_000, "--calls", 200, "--seconds", MOST_SECONDS) == 200
