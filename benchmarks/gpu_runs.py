"""One process per question of `gpu_check`, the files with its answers, and times on a device."""

from __future__ import annotations

import collections
import functools
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


START = time.time()
SECONDS = 60  # for one question, if not more are given
Job = tuple[Callable[..., None], tuple[Any, ...]]


@dataclass
class Run:
    """What every process needs to know."""

    device: str
    sizes: Any
    folder: Path

    def note(self, part: str, **answer: Any) -> None:
        """Write one answer."""
        answer = {key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in answer.items()}
        text = f"{part:10s} " + "  ".join(f"{key}={value}" for key, value in answer.items() if value is not None)
        for name, line in (("jsonl", json.dumps({"part": part, **answer}, default=str)), ("txt", text)):
            with open(self.folder / f"gpu_check.{name}", "a", encoding="utf-8") as file:
                file.write(line + "\n")
        sys.stdout.write(f"[{time.time() - START:4.0f} s] {text[:400]}\n")
        sys.stdout.flush()

    def failed(self, part: str, about: str, error: BaseException) -> None:
        """Write an error; its traceback goes to a file of its own."""
        with open(self.folder / "gpu_check.errors.txt", "a", encoding="utf-8") as file:
            file.write(f"--- {part} {about}\n{''.join(traceback.format_exception(error))[-8000:]}\n")
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self.note(part, case=about, status="FAILED", error=text)

    def milliseconds(self, call: Callable[[], Any], rounds: int = 10) -> float:
        """The median time of a call on the device, of fewer rounds if they take long."""
        on_gpu, found = self.device == "cuda", []
        for number in range(rounds + 3):
            begin = time.perf_counter()
            if on_gpu:
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                call()
                last.record()
                last.synchronize()
            else:
                call()
            took = 1000 * (time.perf_counter() - begin)
            if number > 1:  # the first ones compile
                found.append(first.elapsed_time(last) if on_gpu else took)
            if len(found) * took > (4000 if on_gpu else 100) and len(found) > 1:
                break
        return statistics.median(found)

    def measured(self, call: Callable[[], Any], top: int = 0) -> dict[str, Any]:
        """Milliseconds of a call, its kernels, how long they take, and the most memory that it adds."""
        answer: dict[str, Any] = {"ms": self.milliseconds(call)}
        if self.device != "cuda":
            return answer
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        answer["peak_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
        times: collections.Counter[str] = collections.Counter()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            call()
            torch.cuda.synchronize()
        events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        for event in events:
            times[event.name[:60]] += event.device_time
        answer |= {"kernels": len(events), "busy_ms": sum(times.values()) / 1000}
        return answer | ({"longest_us": times.most_common(top)} if top else {})

    @functools.cached_property
    def rates(self) -> tuple[float, float]:
        """Bytes per millisecond of a copy, read and written, and operations of a product of bfloat16 matrices."""
        size = 8192 if self.device == "cuda" else 256
        x = torch.ones(size, 4 * size, dtype=torch.bfloat16, device=self.device)
        square = x[:, :size].contiguous()
        return 4 * x.numel() / self.milliseconds(x.clone), 2 * size**3 / self.milliseconds(lambda: square @ square)

    def roofline(self, read: float, operations: float = 0) -> float:
        """The milliseconds that so many bytes and operations take at least."""
        return max(read / self.rates[0], operations / self.rates[1])


def answered(run: Run, job: Job) -> None:
    """One question, in its own process."""
    torch.set_num_threads(4 if run.device == "cuda" else 1)
    try:
        job[0](run, *job[1])
    except Exception as error:
        run.failed(job[0].__name__, str(job[1]), error)


def together(run: Run, group: Sequence[Job], end: float, at_once: int, seconds: float | None = None) -> None:
    """Every job of a group in a process of its own, which may take so many seconds; a few of them at a time."""
    # A forked process does not import everything again, but must be forked before CUDA starts.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    waiting, running = list(group), []
    while waiting or running:
        while waiting and len(running) < at_once:
            job, limit = waiting.pop(0), min(time.time() + (seconds or SECONDS), end)
            if limit < time.time() + 3:
                run.note(job[0].__name__, case=str(job[1]), status="FAILED", error="no time was left")
                continue
            process = context.Process(target=answered, args=(run, job))
            process.start()
            running.append((process, job, limit))
        for entry in list(running):
            process, job, limit = entry
            is_late = process.is_alive() and time.time() > limit
            if is_late:
                process.kill()
                process.join()
            if not process.is_alive():
                running.remove(entry)
                if process.exitcode:
                    error = "took too long" if is_late else f"exit code {process.exitcode}"
                    run.note(job[0].__name__, case=str(job[1]), status="FAILED", error=error)
        time.sleep(0.05)
