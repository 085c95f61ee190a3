"""`hf-linear-attention serve` in a process of its own, and whether it listens."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path


def listens(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@contextlib.contextmanager
def server_of(
    folder: Path, log: Path, *options: str, patience: float, environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen, str]]:
    """A server: its process, and its address. Afterwards it is terminated.

    Args:
        patience: seconds until it listens; it imports torch and loads the model before.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["serve", str(folder), "--port", str(port), *options]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "hf_linear_attention", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=dict(environment),
        )
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + patience
    try:
        while not listens(address):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.5)
        yield process, address
    finally:
        process.terminate()
        process.wait(120)
