"""The check for GPUs: no question stops another, and the summary compares with SDPA."""

from __future__ import annotations

import json
import os
import time

import torch

from benchmarks import gpu_check, gpu_runs


def raises(run):
    raise RuntimeError("wrong")


def dies(run):
    os._exit(9)


def hangs(run):
    time.sleep(60)


def waits(run):
    time.sleep(5)
    run.note("waits", status="ok")


def answers(run, case, ms):
    run.note("forward", case=case, tokens=4096, ms=ms)


def test_questions_are_isolated_and_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_runs, "SECONDS", 4)
    run = gpu_runs.Run("cpu", gpu_check.ON_CPU, tmp_path)
    bad = [(raises, ()), (dies, ()), (hangs, ())]
    gpu_runs.together(run, [*bad, (answers, ("hybrid", 2.0))], time.time() + 30, at_once=2)
    gpu_runs.together(run, [(answers, (gpu_check.SOFTMAX, 3.0))], time.time() + 30, at_once=1)
    gpu_runs.together(run, [(answers, ("late", 1.0))], time.time(), at_once=1)
    gpu_runs.together(run, [(waits, ())], time.time() + 30, at_once=1, seconds=20)
    found = [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()]
    errors = {x["part"]: x["error"] for x in found if x.get("status") == "FAILED"}
    assert errors == {
        "raises": "RuntimeError: wrong",
        "dies": "exit code 9",
        "hangs": "took too long",
        "answers": "no time was left",
    }
    assert any(x["part"] == "waits" and x["status"] == "ok" for x in found)
    text, problems = gpu_check.summary(run)
    assert problems == 4
    (row,) = (line.split() for line in text.splitlines() if line.startswith("forward"))
    assert row[-2:] == ["1.50", "1.0"]  # 3 ms over 2 ms, and the aim at 4,096 tokens


@torch.no_grad()
def test_a_number_that_a_step_in_place_writes_wrong_is_found(tmp_path, monkeypatch):
    run = gpu_runs.Run("cpu", gpu_check.ON_CPU, tmp_path)
    mechanism = gpu_check.mechanism_of(run, "hybrid").to(torch.bfloat16)
    prompt = gpu_check.inputs_of(mechanism, 40, torch.bfloat16, "cpu", batch=2)
    blocks, rows = tuple(torch.cat((x, x)) for x in mechanism(prompt)[1]), torch.tensor([3, 1])
    blocks = tuple(x.index_copy(0, rows, x[:2]) for x in blocks)
    assert gpu_check.wrong_in_place(mechanism, blocks, rows, 40) == 0
    step = mechanism.step_in_rows

    def wrong(token, blocks, rows):
        output = step(token, blocks, rows)
        blocks[0][rows[0]].flatten()[5] += 1
        blocks[1][2].flatten()[3] += 1  # a block of nobody
        return output

    monkeypatch.setattr(mechanism, "step_in_rows", wrong)
    assert gpu_check.wrong_in_place(mechanism, blocks, rows, 40) >= 2
