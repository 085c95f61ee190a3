"""The conversion of a sharded checkpoint in time and memory.

    python -m benchmarks.speed_conversion

A Llama of `--gigabytes` with random bfloat16 weights, in shards of 0.5 GB, through `conversion/convert_checkpoint.py`,
with its verification and without; for comparison what `from_pretrained` alone takes. Memory is what a process has
taken for itself at its peak: pages of the files that it maps count as the system's cache. About two minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.common import ROOT, Table, parse, save, table


SHARD_SIZE = "500MB"
LOAD = "import sys, transformers as t; t.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype='auto')"
IMPORT, UNVERIFIED = "import alone", "conversion, no verification"
IMPORTS = "import torch, transformers; from transformers import AutoModelForCausalLM; import hf_linear_attention"


def write_checkpoint(folder: Path, num_bytes: float, hidden: int) -> None:
    """A Llama of about this size with random weights, in shards."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "hidden_size": hidden, "intermediate_size": 11 * hidden // 4}
    layer_bytes = 2 * (4 * hidden**2 + 3 * hidden * sizes["intermediate_size"])
    layers = max(1, round(num_bytes / layer_bytes))
    config = LlamaConfig(**sizes, num_hidden_layers=layers, num_attention_heads=hidden // 64, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size=SHARD_SIZE)


def measure_process(command: list[str]) -> dict[str, float]:
    """CPU and wall seconds of a Python process, and the peak of the memory that is its own, in bytes."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while True:
        pid, code, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        peak = max(peak, own_bytes(status.read_text(encoding="utf-8")))
        time.sleep(0.005)
    process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode:
        raise RuntimeError(f"{command} failed: {process.stderr.read().decode() if process.stderr else ''}")
    seconds = {"CPU": usage.ru_utime + usage.ru_stime, "wall": time.perf_counter() - start}
    return {**seconds, "own bytes": peak, "resident bytes": 1024 * usage.ru_maxrss}


def own_bytes(status: str) -> int:
    """Anonymous memory in the text of /proc/<pid>/status; 0 of a process that has just ended."""
    return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:")), 0)


def conversions(gigabytes: float, hidden: int, names: tuple[str, ...]) -> Table:
    """Time and own memory of every process that loads or converts the checkpoint."""
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "source"
        source.mkdir()
        write_checkpoint(source, gigabytes * 1e9, hidden)
        sizes = [path.stat().st_size for path in source.glob("*.safetensors")]
        convert = ["conversion/convert_checkpoint.py", "--model_name_or_path", str(source), "--overwrite"]
        convert += ["--output_dir", f"{temporary}/converted", "--attention", "linear"]
        processes = {
            IMPORT: ["-c", IMPORTS],
            "from_pretrained": ["-c", LOAD, str(source)],
            UNVERIFIED: [*convert, "--no_verify"],
            "to float32, no verification": [*convert, "--no_verify", "--dtype", "float32"],
            "conversion": convert,
        }
        measured = {name: measure_process(processes[name]) for name in names or processes}
    base = measured[IMPORT]["own bytes"]
    rows = [
        [name, run["CPU"], run["wall"], run["own bytes"] / 1e6, (run["own bytes"] - base) / max(sizes)]
        for name, run in measured.items()
    ]
    title = f"{sum(sizes) / 1e9:.2f} GB, largest shard {max(sizes) / 1e6:,.0f} MB"
    return table([title, "CPU s", "wall s", "own MB at the peak", "over the import, in largest shards"], rows)


def main(argv: list[str] | None = None) -> None:
    """Measure every process."""
    arguments = parse(__doc__, argv, {"gigabytes": 0.01}, gigabytes=1.5)
    hidden, names = (256, (IMPORT, UNVERIFIED)) if arguments.quick else (2048, ())
    save(arguments, "speed_conversion", [conversions(arguments.gigabytes, hidden, names)])


if __name__ == "__main__":
    main()
