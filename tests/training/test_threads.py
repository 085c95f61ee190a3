"""Threads that wait for each other leave the processor to others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


# The command, with work of two threads and of one in the place of its training; it prints the CPU seconds of both.
COMMAND = """
import os, subprocess, sys, time
from hf_linear_attention.training import finetune

def measured(asked):
    import torch

    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())]
    states, weights = torch.randn(512, 128), torch.randn(128, 128)
    for threads in (2, 1):
        torch.set_num_threads(threads)
        for is_measured in (False, True):  # at first it asks for memory
            start = time.process_time()
            for _ in range(400):
                (states @ weights).relu().softmax(-1)
        print(time.process_time() - start)
    for process in busy:
        process.kill()

finetune._run = measured
assert finetune.main(sys.argv[1:]) == 0
"""


@pytest.mark.long
def test_waiting_threads_do_not_spin_beside_a_busy_neighbour(tmp_path):
    """Measured: threads that sleep take 1.0 times the CPU seconds of one thread, and those that spin 18 to 22 times."""
    unset = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    known = {name: value for name, value in os.environ.items() if name not in unset}
    (tmp_path / "texts.txt").write_text("A text.", encoding="utf-8")
    words = ["--task", "causal_lm", "--model_name_or_path", "m", "--train_file", tmp_path / "texts.txt"]
    command = [sys.executable, "-c", COMMAND, *map(str, words), "--output_dir", str(tmp_path / "out")]
    found = subprocess.run(command, env=known | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    two, one = map(float, found.stdout.split())
    assert two < 2 * one, (two, one)
