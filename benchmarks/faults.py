"""Kills, full disks, threads, long decoding and a shared cache, on tiny models: what docs/reliability.md quotes.

    python benchmarks/faults.py --kills 50 --limits 30 --generations 1000 --steps 1000000

Every run is a forked process, so that a trial costs about a second. The end of a run that was killed again and again is
compared with that of a run that was not, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing.connection
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")

import datasets
import torch
from checkpoints import save_twin
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_linear_attention.conversion import (
    convert_checkpoint,
    pipeline,  # noqa: F401  (imported before the forks)
)
from hf_linear_attention.training import (
    finetune,
    run,  # noqa: F401
)


FORK = multiprocessing.get_context("fork")


class Command(NamedTuple):
    main: Callable[[list[str]], int]
    words: list[Any]
    resume: tuple[str, ...] = ()
    ranks: int = 1


def started(command: Command, *words: Any, limit: int | None = None, cache: Path | None = None) -> list[Any]:
    """The command's processes, which find each other as those of torchrun do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        FORK.Process(target=enter, args=(command, words, rank, port, limit, cache)) for rank in range(command.ranks)
    ]
    for process in processes:
        process.start()
    return processes


def enter(command: Command, words, rank: int, port: int, limit: int | None, cache: Path | None) -> None:
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    if command.ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": command.ranks, "LOCAL_WORLD_SIZE": command.ranks}
        network = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in (place | network).items()})
    if cache is not None:
        datasets.config.HF_DATASETS_CACHE = cache
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.exit(command.main([str(word) for word in (*command.words, *words)]))


def ended(processes: list[Any]) -> list[int]:
    """The exit codes, negative for a signal. Where one process fails, the others get SIGTERM, as torchrun does it, and
    SIGKILL (-9) half a minute later."""
    running = list(processes)
    while running:
        multiprocessing.connection.wait([process.sentinel for process in running])
        running = [process for process in running if process.is_alive()]
        if any(process.exitcode for process in processes):
            for process in running:
                process.terminate()
            for process in running:
                process.join(30)
                process.kill()
    return [process.exitcode for process in processes]


def equal(one: Path, other: Path) -> bool:
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def kills(commands: dict[str, Command], work: Path, wanted: int) -> Iterator[tuple[str, str]]:
    """Kill a process of each command at random moments, `wanted` times in all, and let the command end."""
    draw = random.Random(0)
    for name, command in commands.items():
        begin = time.monotonic()
        if any(codes := ended(started(command, "--output_dir", work / name))):
            raise SystemExit(f"{name}: exit codes {codes}")
        seconds, done, ends, damaged, hung = time.monotonic() - begin, 0, 0, 0, 0
        while done < wanted:
            out = work / f"{name}-killed"
            for attempt in range(1, 10**6):
                processes = started(command, *(command.resume if attempt > 1 else ()), "--output_dir", out)
                if done < wanted and attempt % 4:  # every fourth attempt may end
                    time.sleep(draw.uniform(0, seconds))
                    draw.choice(processes).kill()
                    done += 1
                codes = ended(processes)
                hung += codes.count(-signal.SIGKILL) > 1
                if not any(codes):
                    break
            ends, damaged = ends + 1, damaged + (not equal(work / name, out))
            for path in work.glob(f"{name}-killed*"):
                shutil.rmtree(path)
        others = f", the other process had to be killed {hung} times" if command.ranks > 1 else ""
        yield name, f"{done} kills{others}, {ends} runs ended, {damaged} differ from the run without kills"


def full_disk(commands: dict[str, Command], work: Path, limits: int) -> Iterator[tuple[str, str]]:
    """Let writing fail beyond a size of any file, for sizes from nothing to the largest file."""
    for name, command in commands.items():
        out, codes = work / f"{name}-full", []
        largest = max(path.stat().st_size for path in (work / name).rglob("*") if path.is_file())
        left = 0
        for step in range(limits):
            codes += ended(started(command, "--output_dir", out, limit=largest * step // limits))
            left += (out / "model.safetensors").is_file() and not equal(work / name, out)
            for path in work.glob(f"{name}-full*"):
                shutil.rmtree(path)
        counts = {code: codes.count(code) for code in sorted(set(codes))}
        yield name, f"{limits} limits, exit codes {counts}, {left} half-written models"


def threads(model, generations: int) -> str:
    """Generations in 8 threads, compared with the same ones after each other."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 64, (1, 3 + number % 9), generator=draw) for number in range(generations)]

    def answer(prompt):
        return model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)

    alone = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(answer, prompts))
    same = sum(torch.equal(one, other) for one, other in zip(alone, together))
    return f"{same} of {generations} generations in 8 threads equal those after each other"


@torch.no_grad()
def decoding(model, steps: int) -> str:
    """Memory while decoding token after token from the state."""
    cache, token, seen = None, torch.tensor([[5]]), []
    for step in range(steps):
        output = model(input_ids=token, past_key_values=cache, use_cache=True)
        cache, token = output.past_key_values, output.logits[:, -1:].argmax(-1)
        if step % max(steps // 20, 1) == 0:
            seen.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
    growth = (seen[-1] - seen[1]) / 2**20
    return f"{steps:,} steps: memory at the end {growth:+.1f} MiB from that after {steps // 20:,} steps"


def one_cache(command: Command, work: Path, count: int = 4) -> str:
    """Processes that start at once with one empty cache."""
    cache = work / "cache"
    runs = [started(command, "--output_dir", work / f"p{n}", cache=cache) for n in range(count)]
    codes = [code for processes in runs for code in ended(processes)]
    same = all(equal(work / "p0", work / f"p{n}") for n in range(count)) if not any(codes) else False
    return f"{count} processes: exit codes {codes}, equal results: {same}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"kills": 50, "limits": 30, "generations": 1000, "steps": 1_000_000}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        save_twin(work / "source", "llama")
        datasets.config.HF_DATASETS_CACHE = work / "datasets"
        rows = [json.dumps({"text": f"row {n} of some quick words that are long enough " * 3}) for n in range(60)]
        (work / "rows.jsonl").write_text("\n".join(rows))
        convert = Command(convert_checkpoint.main, ["--model_name_or_path", work / "source", "--num_features", 8])
        if any(ended(started(convert, "--output_dir", work / "linear"))):
            raise SystemExit("the conversion failed")
        data = ["--train_file", work / "rows.jsonl", "--max_length", 32]
        train = ["--task", "causal_lm", "--model_name_or_path", work / "linear", *data]
        train += ["--max_train_steps", 30, "--checkpointing_steps", 5]
        preset = ["--model_name_or_path", work / "source", "--preset", "default", "--train_file", work / "rows.jsonl"]
        preset += ["--tokens", "3k", "--checkpointing_steps", 2]
        latest = ("--resume_from_checkpoint", "latest")
        commands = {
            "convert": convert,
            "train": Command(finetune.main, train, latest),
            "train on two processes": Command(finetune.main, train, latest, ranks=2),
            "preset": Command(convert_checkpoint.main, preset),
        }
        for key, text in kills(commands, work, given.kills):
            print(f"SIGKILL, {key}: {text}", flush=True)
        alone = {key: command for key, command in commands.items() if command.ranks == 1}
        for key, text in full_disk(alone, work, given.limits):
            print(f"full disk, {key}: {text}", flush=True)
        print(f"cache: {one_cache(commands['train'], work)}", flush=True)
        model = AutoModelForCausalLM.from_pretrained(work / "linear").eval()
        print(f"threads: {threads(model, given.generations)}", flush=True)
        print(f"decoding: {decoding(model, given.steps)}", flush=True)


if __name__ == "__main__":
    main()
