"""The check for GPUs: no question stops another, and the summary compares with SDPA."""

from __future__ import annotations

import json
import os
import time

from benchmarks import gpu_check, gpu_runs


def raises(run):
    raise RuntimeError("wrong")


def dies(run):
    os._exit(9)


def hangs(run):
    time.sleep(60)


def answers(run, case, ms):
    run.note("forward", case=case, tokens=4096, ms=ms)


def test_questions_are_isolated_and_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_runs, "SECONDS", 4)
    run = gpu_runs.Run("cpu", gpu_check.ON_CPU, tmp_path)
    bad = [(raises, ()), (dies, ()), (hangs, ())]
    gpu_runs.together(run, [*bad, (answers, ("hybrid", 2.0))], time.time() + 30, at_once=2)
    gpu_runs.together(run, [(answers, (gpu_check.SOFTMAX, 3.0))], time.time() + 30, at_once=1)
    gpu_runs.together(run, [(answers, ("late", 1.0))], time.time(), at_once=1)
    found = [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()]
    errors = {x["part"]: x["error"] for x in found if x.get("status") == "FAILED"}
    assert errors == {
        "raises": "RuntimeError: wrong",
        "dies": "exit code 9",
        "hangs": "took too long",
        "answers": "no time was left",
    }
    text, problems = gpu_check.summary(run)
    assert problems == 4
    (row,) = (line.split() for line in text.splitlines() if line.startswith("forward"))
    assert row[-2:] == ["1.50", "1.0"]  # 3 ms over 2 ms, and the aim at 4,096 tokens
