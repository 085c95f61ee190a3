"""What a GPU would have to do, counted on fake CUDA tensors: kernels, bytes, and calls for which the host waits.

A mix-up of devices is an error on fake tensors too. The table is of one layer: what `attend` and the gates launch, with
those of the backward pass and of the loss in training. `tests/support/fake_cuda.py` runs all cases in a process whose
torch takes CUDA for available.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import fake_cuda
import pytest


pytestmark = [pytest.mark.long, pytest.mark.xdist_group("measured once")]

# Kernels and kilobytes of each case. What a change lowers is lowered here, too.
KERNELS = {
    "aft-local": {"train": 287, "padded": 143, "step": 106},
    "aft-simple": {"train": 164, "padded": 45, "step": 25},
    "aft-full-factorised": {"train": 158, "padded": 63},
    "linear-elu1": {"train": 166, "padded": 28, "step": 17},
    "linear-decay": {"train": 227, "padded": 59, "step": 37},
    "linear-gated": {"train": 260, "padded": 73, "step": 51},
    "performer": {"train": 187, "padded": 51, "step": 31},
    "hybrid-exact-keys": {"train": 201, "padded": 63, "step": 4, "packed": 38, "packed train": 196},
    "gated_delta-channel": {"train": 296, "padded": 60, "step": 55},
    "gated_delta-qwen3_5": {"train": 382, "padded": 110, "step": 81},
    "window": {"train": 166, "padded": 59, "step": 44},
    "linformer-headwise": {"train": 210, "padded": 63},
    "linformer_linear-exp": {"train": 234, "padded": 72},
    "latent": {"train": 127, "padded": 43},
    "nystrom-conv": {"train": 104, "padded": 41},
    "default": {"train": 201, "prefill": 30, "step": 4, "packed": 38, "packed train": 196},
    "long default": {"prefill": 30},
    "divided default": {"prefill": 79},  # 65,536 tokens in two passes, of which the second begins with a state
}
# What Triton reads again from one launch to the next is not counted.
KILOBYTES = {
    "aft-local": {"train": 7569, "padded": 2419, "step": 1885},
    "aft-simple": {"train": 1227, "padded": 308, "step": 6},
    "aft-full-factorised": {"train": 861, "padded": 267},
    "linear-elu1": {"train": 812, "padded": 118, "step": 5},
    "linear-decay": {"train": 990, "padded": 230, "step": 18},
    "linear-gated": {"train": 1031, "padded": 251, "step": 23},
    "performer": {"train": 1103, "padded": 334, "step": 22},
    "hybrid-exact-keys": {"train": 592, "padded": 29, "step": 5, "packed": 13, "packed train": 431},
    "gated_delta-channel": {"train": 940, "padded": 170, "step": 33},
    "gated_delta-qwen3_5": {"train": 1702, "padded": 441, "step": 100},
    "window": {"train": 560, "padded": 25, "step": 4},
    "linformer-headwise": {"train": 534, "padded": 84},
    "linformer_linear-exp": {"train": 1291, "padded": 343},
    "latent": {"train": 596, "padded": 129},
    "nystrom-conv": {"train": 519, "padded": 127},
    "default": {"prefill": 82952, "packed": 62197, "train": 4870585, "packed train": 3705554, "step": 4553},
    "long default": {"prefill": 649027},
    "divided default": {"prefill": 1410129},
}
# The variant `full` of an encoder looks at its weights to choose the form that does not overflow.
WAITING_ROWS = ("aft-full-factorised",)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler to build the device guard with")
    guard = fake_cuda.build_guard(compiler, tmp_path_factory.mktemp("fake_cuda"))
    command = [sys.executable, fake_cuda.__file__, str(guard)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


@pytest.mark.parametrize("row", KERNELS)
def test_every_mechanism_runs_on_cuda_and_launches_and_moves_no_more_than_it_did(measured, row):
    cases = measured[row]
    assert not {mode: case["error"] for mode, case in cases.items() if "error" in case}
    assert {mode: case["kernels"] for mode, case in cases.items()} == KERNELS[row]
    assert {mode: case["kilobytes"] for mode, case in cases.items()} == KILOBYTES[row]


@pytest.mark.parametrize("row", KERNELS)
def test_nothing_waits_for_the_device(measured, row):
    """Neither synchronisation nor a copy from the host, in a prompt with padding or without, a step or training, and
    in packed sequences. (Outside of attention, a mask is looked at once in each forward, as by transformers.)
    """
    waits = {mode: case["waits"] for mode, case in measured[row].items() if case["waits"]}
    assert bool(waits) == (row in WAITING_ROWS), waits


def test_a_step_of_requests_can_be_captured(measured):
    """One token of each request, whose states stand in blocks: no launch waits, as the vLLM plugin says of all. The
    default has as few as in a cache.
    """
    requests = measured["requests"]
    assert set(requests) == {row for row, modes in KERNELS.items() if "step" in modes}
    assert not {row: found["waits"] for row, found in requests.items() if found["waits"]}
    assert requests["default"]["kernels"] == KERNELS["default"]["step"]


def test_a_compiled_model_is_one_graph_with_our_operators(measured):
    assert measured["compiled"] == {
        "prompt": ["scores_on_cuda", "hybrid_on_cuda"],
        "step": ["scores_on_cuda", "hybrid_step_on_cuda"],
        "step of a static cache": ["scores_on_cuda", "hybrid_step_on_cuda_"],
    }
