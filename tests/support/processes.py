"""Functions in processes of their own, forked from one that has imported everything: a moment each, not ten seconds."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any


CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "hf_linear_attention.training.finetune",
        "hf_linear_attention.training.run",
        "hf_linear_attention.conversion.convert_checkpoint",
        "transformers.models.llama.modeling_llama",
        "sklearn.metrics",
        "matplotlib.figure",
    ]
)


def start(target: Callable[..., Any], *arguments: Any, ranks: int = 1, stderr: Path | None = None) -> list[BaseProcess]:
    """Start `target(*arguments)` in `ranks` processes that find each other as those of `torchrun` do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        CONTEXT.Process(target=_enter, args=(rank, ranks, port, stderr, target, arguments)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def _enter(rank: int, ranks: int, port: int, stderr: Path | None, target: Callable[..., Any], arguments: Any) -> None:
    if stderr is not None:
        os.dup2(os.open(f"{stderr}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
    if ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        network = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in (place | network).items()})
    sys.exit(target(*arguments))


def finish(processes: list[BaseProcess], timeout: float = 120) -> list[int | None]:
    """Wait for them; their exit codes (negative: the signal that ended it, None: still running, and killed now)."""
    codes = []
    for process in processes:
        process.join(timeout)
        codes.append(process.exitcode)
        if process.exitcode is None:
            process.kill()
    return codes


def _command(module: str, cache: Path, options: list[Any]) -> int:
    """A command line; for `start`."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = cache
    return importlib.import_module(f"hf_linear_attention.{module}").main([str(option) for option in options])


finetune = functools.partial(_command, "training.finetune")
convert = functools.partial(_command, "conversion.convert_checkpoint")


def launched(target: Callable[..., int], store: int, *arguments: Any) -> int:
    """`target(*arguments)` in a process of torchrun, whose store stays when the connection through it is closed."""
    os.environ.update(MASTER_PORT=str(store), TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1")
    return target(*arguments)
