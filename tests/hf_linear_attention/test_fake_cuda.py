"""What a GPU would have to do, counted on fake CUDA tensors: kernels, bytes, and calls for which the host waits.

A mix-up of devices is an error on fake tensors too, also of a model that is on two of them. The table is of one layer:
what `attend` and the gates launch, with those of the backward pass and of the loss in training.
`tests/support/fake_cuda.py` runs all cases in a process whose torch takes CUDA for available.
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

# Kernels and kilobytes of each case. What a change lowers is lowered here, too. What Triton reads again from one launch
# to the next is not counted; `divided default` has two passes, of which the second begins with a state.
AMOUNTS = {
    "aft-local": {"train": [287, 7569], "padded": [143, 2419], "step": [106, 1885]},
    "aft-simple": {"train": [164, 1227], "padded": [45, 308], "step": [25, 6]},
    "aft-full-factorised": {"train": [158, 861], "padded": [63, 267]},
    "linear-elu1": {"train": [166, 812], "padded": [28, 118], "step": [17, 5]},
    "linear-decay": {"train": [227, 990], "padded": [59, 230], "step": [37, 18]},
    "linear-gated": {"train": [260, 1031], "padded": [73, 251], "step": [51, 23]},
    "performer": {"train": [187, 1103], "padded": [51, 334], "step": [31, 22]},
    "hybrid-exact-keys": {
        "train": [201, 592],
        "padded": [63, 30],
        "step": [4, 5],
        "packed": [38, 14],
        "packed train": [196, 431],
    },
    "gated_delta-channel": {"train": [296, 940], "padded": [60, 170], "step": [55, 33]},
    "gated_delta-qwen3_5": {"train": [382, 1702], "padded": [110, 441], "step": [81, 100]},
    "window": {"train": [166, 560], "padded": [59, 26], "step": [44, 4]},
    "linformer-headwise": {"train": [210, 534], "padded": [63, 84]},
    "linformer_linear-exp": {"train": [234, 1291], "padded": [72, 343]},
    "latent": {"train": [127, 596], "padded": [43, 129]},
    "nystrom-conv": {"train": [104, 519], "padded": [41, 127]},
    "default": {
        "train": [201, 4870585],
        "prefill": [30, 83762],
        "step": [4, 4553],
        "packed": [38, 63007],
        "packed train": [196, 3705554],
    },
    "long default": {"prefill": [30, 655366]},
    "divided default": {"prefill": [79, 1422806]},
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


@pytest.mark.parametrize("row", AMOUNTS)
def test_every_mechanism_runs_on_cuda_and_launches_and_moves_no_more_than_it_did(measured, row):
    cases = measured[row]
    assert not {mode: case["error"] for mode, case in cases.items() if "error" in case}
    assert {mode: [case["kernels"], case["kilobytes"]] for mode, case in cases.items()} == AMOUNTS[row]


@pytest.mark.parametrize("row", AMOUNTS)
def test_nothing_waits_for_the_device(measured, row):
    """Neither synchronisation nor a copy from the host, in a prompt with padding or without, a step or training, and
    in packed sequences. (Outside of attention, a mask is looked at once in each forward, as by transformers.)
    """
    waits = {mode: case["waits"] for mode, case in measured[row].items() if case["waits"]}
    assert bool(waits) == (row in WAITING_ROWS), waits


def test_a_step_of_requests_can_be_captured(measured):
    """One token of each request, whose states stand in blocks: no launch waits, as the vLLM plugin says of all, with
    kernels and by torch alone. The default has as few as in a cache.
    """
    requests, in_torch = measured["requests"], measured["requests in torch"]
    assert set(requests) == {row for row, modes in AMOUNTS.items() if "step" in modes} == {*in_torch, "default"}
    for each in (requests, in_torch):
        assert not {row: found["waits"] for row, found in each.items() if found["waits"]}
    assert in_torch["hybrid-exact-keys"]["kernels"] == 190  # with those that take the states from their blocks and back
    assert in_torch["hybrid-exact-keys"]["kernels"] > requests["hybrid-exact-keys"]["kernels"]
    assert requests["default"]["kernels"] == AMOUNTS["default"]["step"][0]


def test_a_compiled_model_is_one_graph_with_our_operators(measured):
    assert measured["compiled"] == {
        "prompt": ["scores_on_cuda", "hybrid"],
        "step": ["scores_on_cuda", "hybrid_step"],
        "step of a static cache": ["scores_on_cuda", "hybrid_step_"],
    }
