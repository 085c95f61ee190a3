"""Threads that wait for each other leave the processor to others."""

from __future__ import annotations

import os
import subprocess
import sys

from checkpoints import save_twin


# The command with two threads and with one; what is printed are the CPU seconds of its steps.
COMMAND = """
import os, subprocess, sys, time
from hf_linear_attention.training import finetune

run, busy = finetune._run, []

def timed(asked):
    import torch
    from hf_linear_attention.training.loop import TrainingLoop

    step = TrainingLoop._step

    def measured(loop, window):
        while len(busy) < os.cpu_count():
            busy.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        torch.set_num_threads(threads)
        start = time.process_time()
        step(loop, window)
        print(time.process_time() - start)

    TrainingLoop._step = measured
    try:
        return run(asked)
    finally:
        TrainingLoop._step = step

finetune._run = timed
try:
    for threads in (2, 1):
        assert finetune.main([*sys.argv[1:], "--overwrite_output_dir"]) == 0
finally:
    for process in busy:
        process.kill()
"""


def test_waiting_threads_do_not_spin_beside_a_busy_neighbour(tmp_path):
    """Measured: threads that sleep take 1.05 times the CPU seconds of one thread, and those that spin 4 to 13 times."""
    save_twin(tmp_path / "model", "llama", hidden_size=128, intermediate_size=256)
    (tmp_path / "texts.txt").write_text("all work and no play makes a dull day\n" * 400, encoding="utf-8")
    options = {"task": "causal_lm", "model_name_or_path": tmp_path / "model", "train_file": tmp_path / "texts.txt"}
    options |= {"output_dir": tmp_path / "out", "task_loss_weight": 1, "max_train_steps": 8, "learning_rate": 1e-4}
    options |= {"per_device_train_batch_size": 32, "recall_texts": 0}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    unset = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
    known = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", COMMAND, *words]
    found = subprocess.run(command, env=known | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    seconds = [float(line) for line in found.stdout.splitlines()]
    assert len(seconds) == 16
    two, one = sum(seconds[2:8]), sum(seconds[10:])  # the first steps ask for memory
    assert two < 2 * one, (two, one)
